"""The op, masks and trees among other parts of PyTorch: transforms, export, inference, copies."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.autograd import forward_ad
from torch.nn.attention.flex_attention import AuxRequest

from tree_attn_op import PrefixTree, TreeMask, tree_attention
from tree_attn_op.integrations.dispatch import as_block_mask, as_tree_mask, attention
from tree_attn_op.integrations.windows import PositionedMask, windowed
from tree_attn_op.reference import reference_attention

from .attention_cases import operands, tree_case

OPS = torch.ops.tree_attn_op
SEQUENCES = [[1, 2, 3, 4], [1, 2, 5], [1, 2, 3, 6, 7], [8, 9]]


def small_tree() -> PrefixTree:
    return PrefixTree.from_sequences(SEQUENCES)


class Layer(nn.Module):
    """Attention of a tree that the module holds."""

    def __init__(self, tree: PrefixTree) -> None:
        super().__init__()
        self.tree = tree
        self.mask = tree.mask
        self.project = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).unflatten(-1, (2, 12)).transpose(1, 2).chunk(3, -1)
        return tree_attention(query, key, value, self.mask)


class TestAutocast:
    """query, key and value in autocast's dtype, gradients in their own."""

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("compiled", [False, True])
    def test_a_layer_trains(self, dtype: torch.dtype, compiled: bool) -> None:
        layer = Layer(small_tree())
        x = torch.randn(1, layer.mask.q_len, 8)
        run = torch.compile(layer, backend="aot_eager") if compiled else layer
        with torch.autocast("cpu", dtype):
            out = run(x)
        assert out.dtype == dtype
        out.float().sum().backward()
        weight = layer.project.weight
        assert weight.grad.dtype == torch.float32
        got, weight.grad = weight.grad, None
        layer(x).sum().backward()
        torch.testing.assert_close(got, weight.grad, atol=5e-2, rtol=5e-2)

    def test_what_autocast_leaves_alone(self) -> None:
        """A region where it is off, and one for another device."""
        made = tree_case(30)
        inputs = operands(1, (2, 1), (30, 30), dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
            assert made.call(*inputs, 0.3)[0].dtype == torch.float32
        with torch.autocast("cpu", torch.bfloat16, enabled=False):
            assert made.call(*inputs, 0.3)[0].dtype == torch.float32

    def test_lse_is_not_rounded(self) -> None:
        mask, inputs = small_tree().mask, operands(1, (2, 2), (9, 9), dtype=torch.float32)
        assert mask.q_len == 9
        with torch.autocast("cpu", torch.bfloat16):
            out, aux = tree_attention(*inputs, mask, return_aux=AuxRequest(lse=True))
            assert attention(*inputs, mask, sink=torch.zeros(2)).dtype == torch.bfloat16
        assert (out.dtype, aux.lse.dtype) == (torch.bfloat16, torch.float32)


def _jvp(loss: Callable[[Tensor], Tensor], query: Tensor) -> Any:
    return torch.func.jvp(loss, (query,), (torch.ones_like(query),))


def _forward_mode(loss: Callable[[Tensor], Tensor], query: Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(loss(forward_ad.make_dual(query, query))).tangent.sum()


def _batched_gradients(loss: Callable[[Tensor], Tensor], query: Tensor) -> Any:
    query = query.detach().requires_grad_()
    return torch.autograd.grad(loss(query).expand(3), query, torch.eye(3), is_grads_batched=True)


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "grad": lambda loss, query: torch.func.grad(loss)(query),
    "vjp": lambda loss, query: torch.func.vjp(loss, query),
    "jvp": _jvp,
    "jacrev": lambda loss, query: torch.func.jacrev(loss)(query),
    "jacfwd": lambda loss, query: torch.func.jacfwd(loss)(query),
    "hessian": lambda loss, query: torch.func.hessian(loss)(query),
    "vmap": lambda loss, query: torch.func.vmap(loss)(query.expand(2, -1, -1, -1, -1)),
    "linearize": lambda loss, query: torch.func.linearize(loss, query),
    "forward mode": _forward_mode,
    "batched gradients": _batched_gradients,
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_are_right_or_refused(name: str) -> None:
    """Each gives what the oracle gives, or says that it is not supported: nothing in between."""
    made = tree_case(20)
    query, key, value = operands(1, (2, 1), (20, 20), (4, 4))

    def loss(query: Tensor) -> Tensor:
        return made.call(query, key, value, 0.3)[0].square().sum()

    def exact(query: Tensor) -> Tensor:
        return made.oracle(query, key, value, 0.3)[0].square().sum()

    refusal = ""
    try:
        got = TRANSFORMS[name](loss, query)
    except (RuntimeError, NotImplementedError) as error:
        refusal = str(error)
    else:
        torch.testing.assert_close(got, TRANSFORMS[name](exact, query))
    # PyTorch's own words where it refuses, those of the op where it would not.
    words = ("torch.func", "forward mode AD", "forward-mode", "vmap")
    assert not refusal or any(word in refusal for word in words), refusal


def test_block_lists_under_vmap_are_refused_or_right() -> None:
    made = tree_case(20)

    def count(values: Tensor) -> Tensor:
        sizes = (made.predicate, 20, 20, *(None,) * 4, 16, 16, 16, 16)
        return OPS.block_lists(made.q_vals, values, *sizes)[0]

    stacked = torch.stack([made.k_vals, made.k_vals * 0])
    try:
        got = torch.func.vmap(count)(stacked)
    except RuntimeError as error:
        refusal = str(error)
        got = [count(values) for values in stacked]
    else:
        refusal = "vmap"
    assert "vmap" in refusal
    for one, values in zip(got, stacked, strict=True):
        assert torch.equal(one, count(values))


def test_compiled_autograd() -> None:
    made = tree_case(40)
    inputs = operands(1, (2, 1), (40, 40), dtype=torch.float32, requires_grad=True)

    def model(*tensors: Tensor) -> Tensor:
        out, lse = made.call(*tensors, 0.3)
        return out.sin().sum() + lse.sum()

    want = torch.autograd.grad(model(*inputs), inputs)
    with torch._dynamo.config.patch(compiled_autograd=True):
        compiled = torch.compile(lambda *t: model(*t).backward(), backend="aot_eager")
        compiled(*inputs)
    for tensor, expected in zip(inputs, want, strict=True):
        torch.testing.assert_close(tensor.grad, expected)


class Attention(nn.Module):
    """The public call, on the ends of subtrees that come as an input."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, end: Tensor) -> Tensor:
        length = end.shape[2]
        mask = TreeMask.from_predicate("q >= k & q < k0", end[:, :0], end, length, length)
        return tree_attention(query, key, value, mask, enable_gqa=True)


def test_compiled_with_dynamic_shapes_from_the_start() -> None:
    counter = CompileCounter()
    attend = torch.compile(tree_attention, dynamic=True, backend=counter)
    for prompt in (150, 210, 290, 333, 500):
        tree = PrefixTree.from_sequences([[*range(prompt), end] for end in (500, 501, 502)])
        query, key, value = torch.randn(3, 1, 2, tree.num_tokens, 16)
        out = attend(query, key, value, tree.mask)
        torch.testing.assert_close(out, tree_attention(query, key, value, tree.mask))
    # Perhaps not the first one: Dynamo takes sizes that happen to be equal for one and the same.
    assert counter.frame_count <= 2


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_dynamic_lengths_and_a_file(strict: bool) -> None:
    """The program, written and read, serves trees of other lengths with the op in it."""
    # Lists of one block have a size of 1, which export, like torch.compile, takes for constant.
    dynamic = torch.export.Dim("length", min=129, max=4096)
    at_2 = {2: dynamic}
    shapes = {"query": at_2, "key": at_2, "value": at_2, "end": at_2}

    def arguments(length: int) -> tuple[Tensor, ...]:
        inputs = operands(1, (2, 1), (length, length), dtype=torch.float32)
        return (*inputs, tree_case(length).k_vals)

    program = torch.export.export(
        Attention(), arguments(200), dynamic_shapes=shapes, strict=strict
    )
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    again = torch.export.load(file).run_decompositions()
    targets = {node.target for node in again.graph.nodes}
    assert {OPS.tree_attention.default, OPS.block_lists.default} <= targets
    for length in (200, 131, 700):
        given = arguments(length)
        torch.testing.assert_close(again.module()(*given), Attention()(*given))


def _train(mask: TreeMask) -> None:
    inputs = operands(1, (2, 2), (mask.q_len, mask.kv_len), requires_grad=True)
    out = tree_attention(*inputs, mask)
    want, _ = reference_attention(*inputs, mask.to_dense())
    torch.testing.assert_close(out, want)
    for gradient in torch.autograd.grad(out.sum(), inputs):
        assert torch.isfinite(gradient).all()


class TestInferenceThenTraining:
    """What was first made or used under torch.inference_mode can be trained on afterwards."""

    def test_a_tree_and_what_it_computes_on_demand(self) -> None:
        with torch.inference_mode():
            tree = small_tree()
            tree.gather_logprobs(torch.randn(tree.num_tokens, 10))
            tree.unpack(torch.randn(tree.num_tokens))
            tree_attention(*operands(1, (2, 2), (9, 9)), tree.mask)
        _train(tree.mask)
        logits = torch.randn(tree.num_tokens, 10, requires_grad=True)
        loss = torch.cat(tree.gather_logprobs(logits)).sum() + tree.token_entropy(logits).sum()
        (loss + torch.cat(tree.unpack(logits, dim=0)).sum()).backward()
        assert logits.grad is not None

    def test_masks_of_every_origin(self) -> None:
        ids = torch.arange(300) // 40
        made = tree_case(300)
        plain = small_tree()
        with torch.inference_mode():
            masks = [
                TreeMask.from_mask_mod(
                    lambda b, h, q, k: (q >= k) & (ids[q] == ids[k]), 1, 300, 300
                ),
                TreeMask.from_predicate(
                    made.predicate, made.q_vals.clone(), made.k_vals.clone(), 300, 300
                ),
                as_tree_mask(plain.mask.block_mask),
                windowed(plain.mask, plain.position_ids, 2),
                PositionedMask(plain.mask, plain.position_ids).windowed(3),
                plain.mask.to("cpu"),
                pickle.loads(pickle.dumps(plain.mask)),
            ]
            for mask in masks:
                # The lists of this device's block size are made here, and kept.
                inputs = operands(1, (2, 2), (mask.q_len, mask.kv_len))
                tree_attention(*inputs, mask)
            block_mask = as_block_mask(plain.mask)
        for mask in masks:
            _train(mask)
        assert not block_mask.kv_indices.is_inference()

    def test_compiled_for_both(self) -> None:
        tree = small_tree()
        layer = Layer(tree)
        compiled = torch.compile(layer, backend="aot_eager")
        x = torch.randn(1, tree.num_tokens, 8)
        with torch.inference_mode():
            first = compiled(x)
        out = compiled(x)
        torch.testing.assert_close(out, first.clone())
        out.sum().backward()
        assert layer.project.weight.grad is not None


class TestCopies:
    """deepcopy, pickle and torch.save of what holds a mask or a tree."""

    @pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
    def test_a_module(self, way: str) -> None:
        layer = Layer(small_tree())
        x = torch.randn(1, layer.mask.q_len, 8)
        want = layer(x)  # Lists of another block size are kept with the mask by now.
        if way == "deepcopy":
            again = copy.deepcopy(layer)
        elif way == "pickle":
            again = pickle.loads(pickle.dumps(layer))
        else:
            file = io.BytesIO()
            torch.save(layer, file)
            file.seek(0)
            again = torch.load(file, weights_only=False)
        assert again.mask is not layer.mask
        torch.testing.assert_close(again(x), want)
        again(x).sum().backward()
        assert again.tree.trajectory_lengths == layer.tree.trajectory_lengths
        assert list(again.state_dict()) == ["project.weight", "project.bias"]

    def test_a_copy_is_one_of_its_own(self) -> None:
        """Writing to a copy's values does not change the mask that it was made of."""
        mask = small_tree().mask
        before = mask.to_dense()
        for again in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
            again.k_vals.zero_()
            assert torch.equal(mask.to_dense(), before)

    def test_loss_terms_and_positioned_masks(self) -> None:
        tree = small_tree()
        terms = copy.deepcopy(tree.loss_terms)
        assert torch.equal(terms.label, tree.loss_terms.label)
        again = pickle.loads(pickle.dumps(PositionedMask(tree.mask, tree.position_ids)))
        want = windowed(tree.mask, tree.position_ids, 2).to_dense()
        assert torch.equal(again.windowed(2).to_dense(), want)
