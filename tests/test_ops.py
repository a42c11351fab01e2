"""The ops as torch sees them: opcheck, fakes, autograd, compile, export, autocast, functorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tree_attn_op  # noqa: F401 - registers the ops
from tree_attn_op import blocks, implementations, ops
from tree_attn_op.predicate import Predicate

from .attention_cases import Case, ids_case, operands, tree_case

OPS = torch.ops.tree_attn_op
SCALE = 0.25


def block_list_arguments(made: Case, given: bool, new: tuple[int, int]) -> tuple:
    lists = made.lists
    key_side = lists.key_side if given else (None,) * 4
    old = (lists.q_block_size, lists.kv_block_size) if given else new
    values = (made.q_vals, made.k_vals, made.predicate, lists.q_len, lists.kv_len)
    return (*values, *key_side, *old, *new)


def backward_arguments(made: Case, inputs: tuple[Tensor, ...], with_lse: bool) -> tuple:
    plain = [tensor.detach() for tensor in inputs]
    out, lse = made.call(*plain, SCALE)
    grad_lse = torch.randn_like(lse) if with_lse else None
    return (torch.randn_like(out), grad_lse, *plain, out, lse, *made.mask_arguments, SCALE)


@pytest.mark.parametrize("absent", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_opcheck_forward(dtype: torch.dtype, absent: bool) -> None:
    made = tree_case(70)
    if absent:
        names = ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")
        made = made.with_lists(**dict.fromkeys(names))
    inputs = operands(2, (4, 2), (70, 70), (16, 8), dtype=dtype, requires_grad=True)
    torch.library.opcheck(OPS.tree_attention, (*inputs, *made.mask_arguments, SCALE))


@pytest.mark.parametrize("with_lse", [False, True])
def test_opcheck_backward(with_lse: bool) -> None:
    made = tree_case(70)
    inputs = operands(2, (4, 2), (70, 70), (16, 8), dtype=torch.float32)
    arguments = backward_arguments(made, inputs, with_lse)
    torch.library.opcheck(OPS.tree_attention_backward, arguments)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
def test_opcheck_block_lists(given: bool, batch: int) -> None:
    made = ids_case(70, 100, batch)
    torch.library.opcheck(OPS.block_lists, block_list_arguments(made, given, (16, 32)))


@pytest.mark.parametrize("name", ["forward", "backward"])
@pytest.mark.parametrize("bshd", [False, True])
@pytest.mark.parametrize("sizes", [(2, 4, 70), (1, 1, 70), (2, 4, 1), (0, 2, 5), (2, 2, 0)])
def test_fake_strides_are_the_real_ones(
    name: str, bshd: bool, sizes: tuple[int, int, int]
) -> None:
    batch, heads, length = sizes
    made = tree_case(max(length, 4))
    if length not in (made.lists.q_len,):
        empty = torch.zeros(1, 0, length, dtype=torch.int32)
        values = torch.full((1, 1, length), length, dtype=torch.int32)
        lists = blocks.build(
            Predicate.parse("q >= k & q < k0"), empty, values, length, length, 32, 32
        )
        made = Case("q >= k & q < k0", empty, values, lists)
    inputs = operands(batch, (heads, heads), (length, length), (16, 8), torch.float32)
    if bshd:
        inputs = tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs)
    if name == "forward":
        op, arguments = OPS.tree_attention, (*inputs, *made.mask_arguments, SCALE)
    else:
        op, arguments = OPS.tree_attention_backward, backward_arguments(made, inputs, True)
    real = op(*arguments)
    with FakeTensorMode() as mode:
        fake = op(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments))
    for one, other in zip(real, fake, strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


@pytest.mark.parametrize("sizes", [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0)])
def test_empty_tensors(sizes: tuple[int, int, int]) -> None:
    batch, q_len, kv_len = sizes
    q_vals = torch.zeros(1, 1, q_len, dtype=torch.int32)
    k_vals = torch.zeros(1, 1, kv_len, dtype=torch.int32)
    arguments = (q_vals, k_vals, "q0 == k0", q_len, kv_len, *(None,) * 4, 32, 32, 32, 32)
    lists = OPS.block_lists(*arguments)
    inputs = operands(batch, (2, 1), (q_len, kv_len), requires_grad=True)
    out, lse = OPS.tree_attention(*inputs, q_vals, k_vals, "q0 == k0", *lists, 32, 32, SCALE)
    assert out.shape == (batch, 2, q_len, 16)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -torch.inf))
    for gradient, tensor in zip(torch.autograd.grad(out.sum(), inputs), inputs, strict=True):
        assert torch.equal(gradient, torch.zeros_like(tensor))


def _loss(out: Tensor, lse: Tensor, which: str) -> Tensor:
    terms = {"out": out.square().sum(), "lse": lse.square().sum()}
    return sum((terms[name] for name in which.split("+")), start=torch.zeros(()))


@pytest.mark.parametrize("which", ["out", "lse", "out+lse"])
def test_gradients_through_either_output(which: str) -> None:
    made = tree_case(50)
    inputs = operands(1, (2, 1), (50, 50), requires_grad=True)
    got = torch.autograd.grad(_loss(*made.call(*inputs, SCALE), which), inputs, allow_unused=True)
    want = torch.autograd.grad(
        _loss(*made.oracle(*inputs, SCALE), which), inputs, allow_unused=True
    )
    for gradient, expected in zip(got, want, strict=True):
        expected = torch.zeros_like(gradient) if expected is None else expected
        torch.testing.assert_close(gradient, expected)


def test_attention_sink_through_lse() -> None:
    """q = k = 1, v = 2 and a sink of logit 0: out is 2 sigmoid(1), with its gradients."""
    made = tree_case(3)
    query, key, value = (
        torch.full((1, 1, 3, 1), number, dtype=torch.float64, requires_grad=True)
        for number in (1.0, 1.0, 2.0)
    )
    sink = torch.zeros((), dtype=torch.float64, requires_grad=True)
    out, lse = made.call(query, key, value, 1.0)
    first = (out * torch.sigmoid(lse - sink).unsqueeze(-1))[0, 0, 0, 0]
    weight = torch.sigmoid(torch.tensor(1.0, dtype=torch.float64))
    slope = 2 * weight * (1 - weight)
    torch.testing.assert_close(first, 2 * weight)
    grads = torch.autograd.grad(first, (query, key, value, sink))
    for gradient, expected in zip(grads, (slope, slope, weight, -slope), strict=True):
        torch.testing.assert_close(gradient.flatten()[0], expected)
        assert gradient.flatten()[1:].abs().sum() == 0


def test_no_second_derivative() -> None:
    made = tree_case(20)
    inputs = operands(1, (1, 1), (20, 20), requires_grad=True)
    out, _ = made.call(*inputs, SCALE)
    (gradient,) = torch.autograd.grad(out.sum(), inputs[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        gradient.sum().backward()


def _attention(made: Case) -> Callable[..., tuple[Tensor, Tensor]]:
    def attention(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return made.call(query, key, value, SCALE)

    return attention


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(backend: str) -> None:
    made = tree_case(70)
    inputs = operands(2, (4, 2), (70, 70), dtype=torch.float32, requires_grad=True)

    def model(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out, lse = made.call(query * 2, key, value, SCALE)
        return (out * torch.sigmoid(lse).unsqueeze(-1)).transpose(1, 2).flatten(2)

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    got, want = compiled(*inputs), model(*inputs)
    torch.testing.assert_close(got, want)
    grad = torch.randn_like(want)
    both = (torch.autograd.grad(result, inputs, grad) for result in (got, want))
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other)


def test_compile_with_dynamic_lengths_compiles_twice() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def model(query: Tensor, key: Tensor, value: Tensor, end: Tensor) -> Tensor:
        empty = end.new_empty(1, 0, end.shape[2])
        length = end.shape[2]
        text = "q >= k & q < k0"
        lists = OPS.block_lists(empty, end, text, length, length, *(None,) * 4, 32, 32, 32, 32)
        return OPS.tree_attention(query, key, value, empty, end, text, *lists, 32, 32, SCALE)[0]

    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for length in (40, 75, 33, 130):
        made = tree_case(length)
        inputs = operands(1, (2, 1), (length, length), dtype=torch.float32, requires_grad=True)
        out = compiled(*inputs, made.k_vals)
        want, _ = made.oracle(*inputs, SCALE)
        torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-5)
        out.sum().backward()
    assert counter.frame_count == 2


class _Module(torch.nn.Module):
    def __init__(self, made: Case):
        super().__init__()
        self.attention = _attention(made)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.attention(query, key, value)[0]


def test_export() -> None:
    made = tree_case(50)
    inputs = operands(1, (2, 1), (50, 50), dtype=torch.float32)
    exported = torch.export.export(_Module(made), inputs)
    targets = [node.target for node in exported.graph.nodes]
    assert OPS.tree_attention.default in targets
    torch.testing.assert_close(exported.module()(*inputs), made.call(*inputs, SCALE)[0])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant: bool) -> None:
    made = tree_case(50)
    inputs = operands(1, (2, 1), (50, 50), requires_grad=True)

    def attention(*tensors: Tensor) -> Tensor:
        return made.call(*tensors, SCALE)[0]

    got = checkpoint(attention, *inputs, use_reentrant=reentrant)
    weight = torch.randn_like(got)
    got.backward(weight)
    grads = [tensor.grad for tensor in inputs]
    for gradient, expected in zip(
        grads, torch.autograd.grad(attention(*inputs), inputs, weight), strict=True
    ):
        torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
def test_functorch_is_refused_clearly(transform: Callable) -> None:
    made = tree_case(30)
    query, key, value = operands(1, (2, 1), (30, 30))

    def loss(query: Tensor) -> Tensor:
        return made.call(query, key, value, SCALE)[0].square().sum()

    with pytest.raises(RuntimeError, match=r"torch\.func .*torch\.autograd\.grad"):
        transform(loss)(query.unsqueeze(0) if transform is torch.func.vmap else query)
    want, _ = made.oracle(query, key, value, SCALE)
    torch.testing.assert_close(loss(query), want.square().sum())


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast(compiled: bool) -> None:
    made = tree_case(40)
    query, key, value = operands(1, (2, 1), (40, 40), dtype=torch.float32, requires_grad=True)

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return made.call(query, key.bfloat16(), value.bfloat16(), SCALE)[0]

    call = torch.compile(attention, backend="aot_eager", fullgraph=True) if compiled else attention
    out = call(query, key, value)
    assert out.dtype == torch.bfloat16
    cast = [tensor.bfloat16() for tensor in (query, key, value)]
    torch.testing.assert_close(out, made.call(*cast, SCALE)[0])
    out.sum().backward()
    assert query.grad is not None
    assert query.grad.dtype == torch.float32


def test_autocast_leaves_float64() -> None:
    made = tree_case(40)
    inputs = operands(1, (2, 1), (40, 40))
    with torch.autocast("cpu", torch.bfloat16):
        assert made.call(*inputs, SCALE)[0].dtype == torch.float64


def test_backward_under_autocast() -> None:
    made = tree_case(40)
    inputs = operands(1, (2, 1), (40, 40), dtype=torch.float32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = made.call(*inputs, SCALE)[0]
        grads = torch.autograd.grad(out.square().sum(), inputs, retain_graph=True)
    torch.testing.assert_close(grads, torch.autograd.grad(out.square().sum(), inputs))


class _Seen(TorchDispatchMode):
    """Which ops reach a mode."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


def test_modes_see_the_ops() -> None:
    made = tree_case(40)
    inputs = operands(1, (2, 1), (40, 40), requires_grad=True)
    with _Seen() as seen:
        made.call(*inputs, SCALE)[0].sum().backward()
    assert OPS.tree_attention.default in seen.ops
    assert OPS.tree_attention_backward.default in seen.ops
    with _Seen() as seen, torch.no_grad():
        made.call(*inputs, SCALE)
    assert OPS.tree_attention.default in seen.ops


def test_plain_tensors_are_not_dispatched_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    made = tree_case(40)
    inputs = operands(1, (2, 1), (40, 40), requires_grad=True)
    want = torch.autograd.grad(made.call(*inputs, SCALE)[0].sum(), inputs)

    def redispatch(*arguments: Any) -> None:
        raise AssertionError("dispatched again")

    monkeypatch.setattr(torch._ops.OpOverload, "redispatch", redispatch)
    got = torch.autograd.grad(made.call(*inputs, SCALE)[0].sum(), inputs)
    torch.testing.assert_close(got, want)
    with torch.no_grad():
        made.call(*inputs, SCALE)
    with pytest.raises(AssertionError, match="dispatched again"), _Seen():
        made.call(*inputs, SCALE)


def test_lazy_negation_is_seen() -> None:
    made = tree_case(40)
    query, key, value = operands(1, (2, 1), (40, 40))
    for requires_grad in (False, True):
        value.requires_grad_(requires_grad)
        out, _ = made.call(torch._neg_view(query), key, value, SCALE)
        torch.testing.assert_close(out, made.call(-query, key, value, SCALE)[0])


def test_frozen_inputs_get_no_gradient() -> None:
    made = tree_case(40)
    query, key, value = operands(1, (2, 1), (40, 40))
    key.requires_grad_()
    out, lse = made.call(query, key, value, SCALE)
    (out.sum() + lse.sum()).backward()
    assert query.grad is None
    assert key.grad is not None


def test_query_side_lists_are_derived() -> None:
    made = ids_case(70, 100)
    names = ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices")
    without = made.with_lists(**dict.fromkeys(names)).lists.tensors
    columns = made.lists.kv_indices.shape[3]
    derived = ops._query_side(without, columns)
    for got, want in zip(derived, made.lists.tensors[4:], strict=True):
        assert torch.equal(got, want)
    assert ops._query_side(made.lists.tensors, columns) == made.lists.tensors[4:]


def test_missing_triton_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def import_module(name: str, package: str) -> None:
        raise ModuleNotFoundError("No module named 'triton'", name="triton.language")

    monkeypatch.setattr(implementations.importlib, "import_module", import_module)
    implementations.gpu_kernels.cache_clear()
    with pytest.raises(RuntimeError, match="install triton"):
        implementations.gpu_kernels("portable")


def test_arguments_are_not_changed() -> None:
    made = ids_case(70, 100)
    inputs = operands(1, (2, 1), (70, 100))
    arguments = backward_arguments(made, inputs, True)
    before = copy.deepcopy(arguments)
    OPS.tree_attention_backward(*arguments)
    for one, other in zip(arguments, before, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other
