"""The shared attention call: layouts, sinks, masks of both kinds, the backend switch."""

from __future__ import annotations

import gc
import os
import weakref
from typing import Any

import pytest
import torch
import torch._inductor.utils
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import passes
from tree_attn_op import PrefixTree, TreeMask, UnsupportedMask
from tree_attn_op.integrations import dispatch
from tree_attn_op.integrations.dispatch import as_block_mask, as_tree_mask, attention
from tree_attn_op.reference import reference_attention

from ..attention_cases import operands
from .trajectories import multi_turn

ORDER = {"BHSD": (0, 1, 2, 3), "BSHD": (0, 2, 1, 3), "SBHD": (2, 0, 1, 3)}


@pytest.fixture
def tree() -> PrefixTree:
    return PrefixTree.from_sequences(multi_turn(1))


def softmax_with_sink(
    query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, sink: Tensor
) -> Tensor:
    """By the definition: the sink is one more logit, dropped after the softmax."""
    group = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(group, 1) for tensor in (key, value))
    scores = query @ key.mT * query.shape[-1] ** -0.5
    scores = scores.masked_fill(~allowed, float("-inf"))
    column = sink.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ value


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("layout", ["BHSD", "BSHD", "SBHD", "SHD"])
def test_layouts(layout: Any, batch: int, tree: PrefixTree) -> None:
    length = tree.num_tokens
    inputs = operands(batch, (4, 2), (length, length), (16, 8))
    want, _ = reference_attention(*inputs, tree.mask.to_dense())
    if layout == "SHD":
        inputs = tuple(tensor[:1].transpose(1, 2)[0].contiguous() for tensor in inputs)
        want = want[0].transpose(0, 1)
    else:
        inputs = tuple(tensor.permute(ORDER[layout]).contiguous() for tensor in inputs)
        want = want.permute(ORDER[layout])
    torch.testing.assert_close(attention(*inputs, tree.mask, layout=layout), want)


def test_a_layout_is_checked(tree: PrefixTree) -> None:
    inputs = operands(1, (2, 2), (tree.num_tokens, tree.num_tokens))
    with pytest.raises(
        ValueError, match="layout must be one of BHSD, BSHD, SBHD, SHD, got 'DSHB'"
    ):
        attention(*inputs, tree.mask, layout="DSHB")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"layout SHD is of 3 dimensions, got shape \(1, 2,"):
        attention(*inputs, tree.mask, layout="SHD")


@pytest.mark.parametrize("backend", ["tree", "flex"])
def test_sink(backend: str, tree: PrefixTree) -> None:
    length = tree.num_tokens
    inputs = operands(1, (4, 2), (length, length), requires_grad=backend == "tree")
    sink = torch.tensor([-2.0, 0.0, 1.0, 30.0], dtype=torch.float64, requires_grad=True)
    arguments = [*inputs, sink] if backend == "tree" else [sink]
    out = attention(*inputs, tree.mask, sink=sink, backend=backend)
    want = softmax_with_sink(*inputs, tree.mask.to_dense(), sink)
    # flex sums in float32 on a CPU.
    tolerance = {"atol": 1e-9, "rtol": 1e-7} if backend == "tree" else {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(out, want, **tolerance)
    weight = torch.randn_like(want)
    for got, exact in zip(
        torch.autograd.grad(out, arguments, weight),
        torch.autograd.grad(want, arguments, weight),
        strict=True,
    ):
        torch.testing.assert_close(got, exact, **tolerance)


def test_a_sink_for_rows_that_see_nothing() -> None:
    none = TreeMask.from_predicate(
        "q >= 2 & q >= k", *torch.empty(2, 1, 0, 20, dtype=torch.int32), 20, 20
    )
    inputs = operands(1, (2, 2), (20, 20), requires_grad=True)
    sink = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    out = attention(*inputs, none, sink=sink)
    assert not out[:, :, :2].any()
    gradients = torch.autograd.grad(out.sum(), [*inputs, sink])
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert not gradients[0][:, :, :2].any()


def test_a_sink_of_another_number_of_heads(tree: PrefixTree) -> None:
    inputs = operands(1, (4, 2), (tree.num_tokens, tree.num_tokens))
    with pytest.raises(ValueError, match=r"each of 4 query heads, got shape \(2,\)"):
        attention(*inputs, tree.mask, sink=torch.zeros(2))


def test_a_sink_keeps_the_dtype_and_its_precision(tree: PrefixTree) -> None:
    exact = operands(1, (2, 2), (tree.num_tokens, tree.num_tokens))
    half = [tensor.bfloat16() for tensor in exact]
    sink = torch.tensor([0.5, -0.5])
    out = attention(*half, tree.mask, sink=sink)
    assert out.dtype == torch.bfloat16
    want = softmax_with_sink(*(t.double() for t in half), tree.mask.to_dense(), sink.double())
    assert (out.double() - want).abs().max() < 2e-2


class TestBackend:
    def test_argument_before_variable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert dispatch.choose_backend() == "tree"
        monkeypatch.setenv("TREE_ATTN_BACKEND", "flex")
        assert dispatch.choose_backend() == "flex"
        assert dispatch.choose_backend("tree") == "tree"
        monkeypatch.setenv("TREE_ATTN_BACKEND", "")
        assert dispatch.choose_backend() == "tree"
        monkeypatch.setenv("TREE_ATTN_BACKEND", "triton")
        with pytest.raises(ValueError, match="TREE_ATTN_BACKEND must be one of tree, flex, got"):
            dispatch.choose_backend()
        with pytest.raises(ValueError, match="backend must be one of tree, flex, got 'Flex'"):
            dispatch.choose_backend("Flex")

    def test_it_is_read_at_each_call(
        self, tree: PrefixTree, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        called = []
        for name in ("_tree", "_flex"):
            original = getattr(dispatch, name)

            def spy(*arguments: Any, name: str = name, original: Any = original) -> Any:
                called.append(name)
                return original(*arguments)

            monkeypatch.setattr(dispatch, name, spy)
        inputs = operands(1, (4, 2), (tree.num_tokens, tree.num_tokens), dtype=torch.float32)
        results = []
        for chosen in ("flex", "tree"):
            monkeypatch.setenv("TREE_ATTN_BACKEND", chosen)
            results.append(attention(*inputs, tree.mask, scale=0.3))
        assert called == ["_flex", "_tree"]
        torch.testing.assert_close(*results)

    @pytest.mark.skipif(
        torch.__version__ < "2.12", reason="this flex does not compile on a CPU for small sizes"
    )
    def test_flex_stays_flex_where_the_pass_is_installed(self, tree: PrefixTree) -> None:
        """On a GPU flex is compiled; a comparison with itself would not be one."""
        inputs = operands(1, (4, 2), (tree.num_tokens, tree.num_tokens), dtype=torch.float32)
        torch._dynamo.utils.counters.clear()
        with passes.install(), torch._inductor.utils.fresh_cache():
            compiled = dispatch._compiled_flex()
            out = compiled(*inputs, block_mask=tree.mask.block_mask, enable_gqa=True)
        torch.testing.assert_close(out, attention(*inputs, tree.mask), atol=1e-5, rtol=1e-5)
        counters = torch._dynamo.utils.counters["inductor"]
        assert not [name for name in counters if name.startswith("tree_attn")]
        torch._dynamo.reset()

    def test_compiled_code_follows_it(
        self, tree: PrefixTree, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        inputs = operands(1, (4, 2), (tree.num_tokens, tree.num_tokens), dtype=torch.float32)
        mask, graphs = tree.mask, []

        def keep(gm: torch.fx.GraphModule, example: Any) -> Any:
            graphs.append(gm)
            return gm.forward

        compiled = torch.compile(
            lambda *tensors: attention(*tensors, mask), backend=keep, fullgraph=True
        )
        for chosen in ("tree", "flex"):
            torch._dynamo.reset()
            monkeypatch.setitem(os.environ, "TREE_ATTN_BACKEND", chosen)
            out = compiled(*inputs)
            torch.testing.assert_close(out, attention(*inputs, mask))
        has_op = ["tree_attn_op.tree_attention" in str(gm.graph) for gm in graphs]
        assert has_op == [True, False]
        torch._dynamo.reset()


class TestBlockMask:
    @staticmethod
    def make(ends: Tensor) -> BlockMask:
        return create_block_mask(
            lambda b, h, q, k: (q >= k) & (q < ends[k]), None, None, *ends.shape * 2, device="cpu"
        )

    def test_it_is_proven_once(self, tree: PrefixTree) -> None:
        block_mask = self.make(tree.subtree_end.clone())
        mask = as_tree_mask(block_mask)
        assert str(mask.predicate) == "q >= k & q < k0"
        assert as_tree_mask(block_mask) is mask
        inputs = operands(1, (2, 2), (tree.num_tokens, tree.num_tokens))
        torch.testing.assert_close(attention(*inputs, block_mask), attention(*inputs, tree.mask))

    def test_and_again_when_its_tensors_change(self, tree: PrefixTree) -> None:
        ends = tree.subtree_end.clone()
        block_mask = self.make(ends)
        before = as_tree_mask(block_mask)
        ends.fill_(tree.num_tokens)
        after = as_tree_mask(block_mask)
        assert not torch.equal(before.to_dense(), after.to_dense())
        assert torch.equal(after.to_dense(), as_tree_mask(self.make(ends)).to_dense())

    def test_inference_tensors_do_not_go_stale(self, tree: PrefixTree) -> None:
        with torch.inference_mode():
            ends = tree.subtree_end.clone()
            block_mask = self.make(ends)
            before = as_tree_mask(block_mask)
            ends.fill_(tree.num_tokens)
            after = as_tree_mask(block_mask)
        assert not torch.equal(before.to_dense(), after.to_dense())

    def test_it_is_not_kept_alive(self) -> None:
        tree = PrefixTree.from_sequences(multi_turn(1))
        block_mask = self.make(tree.subtree_end.clone())
        mask = tree.mask
        of_block_mask, of_mask = as_tree_mask(block_mask), as_block_mask(mask)
        assert as_block_mask(mask) is of_mask
        gone = [weakref.ref(of_block_mask), weakref.ref(of_mask)]
        del of_block_mask, of_mask, block_mask, mask, tree
        gc.collect()
        assert [one() for one in gone] == [None, None]

    def test_what_it_cannot_prove_it_refuses(self) -> None:
        table = torch.ones(32, 32, dtype=torch.bool)
        block_mask = create_block_mask(lambda b, h, q, k: table[q, k], 1, 1, 32, 32, device="cpu")
        inputs = operands(1, (2, 2), (32, 32), dtype=torch.float32)
        with pytest.raises(UnsupportedMask):
            attention(*inputs, block_mask, backend="tree")
        attention(*inputs, block_mask, backend="flex")

    def test_other_types(self) -> None:
        inputs = operands(1, (2, 2), (32, 32))
        dense = torch.ones(32, 32, dtype=torch.bool)
        for backend in dispatch.BACKENDS:
            with pytest.raises(TypeError, match="a TreeMask or a BlockMask, got Tensor"):
                attention(*inputs, dense, backend=backend)  # type: ignore[arg-type]

    def test_compiled_code_takes_proven_masks(self, tree: PrefixTree) -> None:
        block_mask = self.make(tree.subtree_end)
        inputs = operands(1, (2, 2), (tree.num_tokens, tree.num_tokens))
        compiled = torch.compile(attention, backend="eager", fullgraph=True)
        with pytest.raises(Exception, match=r"TreeMask\.from_block_mask"):
            compiled(*inputs, block_mask)
        torch._dynamo.reset()
