"""What users have reported that only a GPU can show, on one."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

import passes
from tests.attention_cases import tree_case
from tests.passes.test_gpu import expect_as_flex
from tree_attn_op import TreeMask, tree_attention
from tree_attn_op.reference import reference_attention

pytestmark = pytest.mark.gpu


def tree_mask(length: int) -> TreeMask:
    made = tree_case(length)
    return TreeMask.from_predicate(
        made.predicate, made.q_vals.cuda(), made.k_vals.cuda(), length, length
    )


def tensors(
    length: int, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype
) -> list[Tensor]:
    """Query, key and value as a model stores them, ``[B, S, H, D]``, that require gradients."""
    shapes = ((heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1]))
    return [
        torch.randn(1, length, count, dim, device="cuda", dtype=dtype)
        .transpose(1, 2)
        .requires_grad_()
        for count, dim in shapes
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dims", [(256, 256), (192, 128), (128, 256)])
def test_largest_head_dims_fit_the_shared_memory(
    dims: tuple[int, int], dtype: torch.dtype
) -> None:
    inputs = tensors(500, (4, 2), dims, dtype)
    mask = tree_mask(500)
    out = tree_attention(*inputs, mask, enable_gqa=True)
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    want, _ = reference_attention(*exact, mask.to_dense())
    grad = torch.randn_like(out)
    tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-4
    pairs = [(out, want)]
    grads = (
        torch.autograd.grad(out, inputs, grad),
        torch.autograd.grad(want, exact, grad.double()),
    )
    pairs += list(zip(*grads, strict=True))
    for got, expected in pairs:
        size = expected.square().mean().sqrt()
        assert (got.double() - expected).square().mean().sqrt() < tolerance * size


def test_more_than_2_to_the_31_elements_in_a_batch() -> None:
    """Many rows of a batch, the last one checked: through the call, with lists of the op."""
    if torch.cuda.get_device_properties(0).total_memory < 60 * 2**30:
        pytest.skip("needs 60 GiB of device memory")
    batch, heads, length, dim = 65, 64, 4096, 128
    assert batch * heads * length * dim > 2**31
    mask = tree_mask(length)

    def random() -> Tensor:
        data = torch.empty(batch, length, heads, dim, device="cuda", dtype=torch.bfloat16)
        return data.normal_().transpose(1, 2).requires_grad_()

    inputs = [random() for _ in range(3)]
    out = tree_attention(*inputs, mask)
    grad = torch.randn_like(out)
    grads = torch.autograd.grad(out, inputs, grad)
    last = [t[-1:, -1:].detach().double().requires_grad_() for t in inputs]
    want, _ = reference_attention(*last, mask.to_dense())
    wanted = torch.autograd.grad(want, last, grad[-1:, -1:].double())
    for got, expected in zip((out, *grads), (want, *wanted), strict=True):
        error = (got[-1:, -1:].double() - expected).square().mean().sqrt()
        assert error < 2e-2 * expected.square().mean().sqrt()


def test_a_captured_tensor_on_the_cpu_is_kept_with_that_reason() -> None:
    """flex itself may refuse such a call; the pass must not have rewritten it before."""
    ids = torch.zeros(256, dtype=torch.int64)
    inputs = tensors(256, (2, 2), (64, 64), torch.bfloat16)
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256, device="cuda")
    mask.mask_mod = lambda b, h, q, k: (q >= k) & (ids[q] == ids[k])
    graph_pass = passes.TreeAttentionPass()

    def keep(gm: Any, example_inputs: Any) -> Any:
        graph_pass(gm.graph)
        return lambda *given: (inputs[0],)

    with contextlib.suppress(Exception):
        torch.compile(flex_attention, backend=keep)(*inputs, block_mask=mask)
    assert not graph_pass.report.rewritten
    for call in graph_pass.report:
        assert "on cpu, the query is on cuda" in call.reason


def test_a_mask_on_the_cpu_is_a_clear_error() -> None:
    made = tree_case(128)
    mask = TreeMask.from_predicate(made.predicate, made.q_vals, made.k_vals, 128, 128)
    inputs = tensors(128, (2, 2), (64, 64), torch.bfloat16)
    with pytest.raises(ValueError, match=r"on cpu and query on cuda:0: use mask\.to"):
        tree_attention(*inputs, mask)
    with pytest.raises(ValueError, match="one device"):
        tree_attention(inputs[0], inputs[1].cpu(), inputs[2], tree_mask(128))


def test_forward_and_backward_do_not_wait_for_the_device() -> None:
    """Nor does making the mask, once the kernels are compiled."""
    made, inputs = tree_case(500), tensors(500, (4, 2), (64, 64), torch.bfloat16)
    values = made.q_vals.cuda(), made.k_vals.cuda()
    for setting in ("default", "error"):
        torch.cuda.set_sync_debug_mode(setting)
        try:
            mask = TreeMask.from_predicate(made.predicate, *values, 500, 500)
            out, aux = tree_attention(
                *inputs, mask, enable_gqa=True, return_aux=AuxRequest(lse=True)
            )
            (out.float().sum() + aux.lse.sum()).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_forward_and_backward_in_a_cuda_graph() -> None:
    """Captured by hand, replayed on other numbers and another tree of the same size."""
    length = 500
    end = torch.empty(1, 1, length, dtype=torch.int32, device="cuda")
    inputs = tensors(length, (4, 2), (64, 64), torch.bfloat16)

    def fill(leaves: int) -> Tensor:
        made = tree_case(length, leaves=leaves)
        end.copy_(made.k_vals)
        with torch.no_grad():
            for tensor in inputs:
                tensor.normal_()
        return made.allowed.cuda()

    def step() -> tuple[Tensor, ...]:
        mask = TreeMask.from_predicate("q >= k & q < k0", end[:, :0], end, length, length)
        out = tree_attention(*inputs, mask, enable_gqa=True)
        return (out, *torch.autograd.grad(out.float().cos().sum(), inputs))

    fill(3)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for leaves in (2, 5):
        allowed = fill(leaves)
        graph.replay()
        exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
        want, _ = reference_attention(*exact, allowed)
        wanted = (want, *torch.autograd.grad(want.cos().sum(), exact))
        for got, expected in zip(captured, wanted, strict=True):
            torch.testing.assert_close(got.double(), expected, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("regions", ["documents with a window", "only some keys"])
def test_compiled_gradients_of_sparse_masks_equal_flex(regions: str) -> None:
    from .test_masks import REGIONS

    ids = torch.arange(700, device="cuda") // 37
    formula = REGIONS[regions]
    mask = create_block_mask(
        lambda b, h, q, k: formula(q, k, ids), None, None, 700, 700, device="cuda"
    )
    inputs = [t.expand(2, -1, -1, -1) for t in tensors(700, (4, 2), (64, 64), torch.bfloat16)]
    expect_as_flex(mask, inputs)


@pytest.mark.parametrize("layout", ["padded", "transposed"])
def test_inputs_that_inductor_lays_out_anew(layout: str) -> None:
    """Inductor pads strides of what it computes on a GPU; kernels go by what they are given."""
    mask = tree_mask(333)
    x = torch.randn(1, 333, 4 * 72, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def model(x: Tensor) -> Tensor:
        heads = (x * 2).unflatten(-1, (4, 72)).transpose(1, 2)
        if layout == "transposed":
            heads = heads.mT.contiguous().sin().mT
        out = tree_attention(heads, heads.roll(1, 2), heads.cos(), mask)
        return out.transpose(1, 2).flatten(2).float().sin()

    results = []
    for run in (torch.compile(model, fullgraph=True), model):
        out = run(x)
        results.append((out, *torch.autograd.grad(out.sum(), x)))
    # Inductor rounds fewer intermediates to bfloat16, so that single elements differ by more.
    for got, want in zip(*results, strict=True):
        assert (got - want).float().norm() < 1e-2 * want.float().norm()
