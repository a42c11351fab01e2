"""A rewritten call computes what flex computes, and its graph stays in order."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import fx
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

import passes.rewrite
from passes import TreeAttentionPass
from passes.flex_call import is_flex_call
from tree_attn_op.reference import reference_attention

from .helpers import (
    REWRITTEN,
    PassThenEager,
    Tree,
    attention,
    block_mask,
    compiled,
    count_calls,
    dense,
    form_1,
    form_8,
    form_9,
    qkv,
)


def expect_equal_to_oracle(
    actual: torch.Tensor, tensors: tuple[torch.Tensor, ...], mask: BlockMask
) -> None:
    query = tensors[0]
    exact, _ = reference_attention(
        *(tensor.double() for tensor in tensors), dense(mask, query.shape[0], query.shape[1])
    )
    error = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}[query.dtype]
    torch.testing.assert_close(actual.double(), exact, atol=error, rtol=error)


@pytest.mark.parametrize("form", REWRITTEN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_the_oracle(form: int, dtype: torch.dtype) -> None:
    tensors = qkv(dtype=dtype)
    mask = block_mask(REWRITTEN[form](Tree(2, 192)), tensors)
    backend = PassThenEager()
    out = compiled(attention, backend)(*tensors, mask)
    assert len(backend.report.rewritten) == 1, str(backend.report)
    expect_equal_to_oracle(out, tensors, mask)


@pytest.mark.parametrize(
    ("length", "kv_length", "heads", "kv_heads", "dim"),
    [(1, 1, 1, 1, 16), (137, 137, 6, 3, 31), (137, 260, 4, 1, 80), (300, 129, 2, 2, 24)],
)
def test_odd_sizes(length: int, kv_length: int, heads: int, kv_heads: int, dim: int) -> None:
    tensors = qkv(2, length, kv_length=kv_length, heads=heads, kv_heads=kv_heads, dim=dim)
    tree = Tree(2, max(length, kv_length))
    mask = block_mask(form_9(tree), tensors)
    backend = PassThenEager()
    out = compiled(attention, backend)(*tensors, mask)
    assert len(backend.report.rewritten) == 1, str(backend.report)
    expect_equal_to_oracle(out, tensors, mask)


def test_direct_call_of_the_higher_order_op() -> None:
    tensors = qkv()
    mask = block_mask(form_8(Tree(2, 192)), tensors)

    def direct(query: Any, key: Any, value: Any) -> Any:
        options = {"BACKEND": "AUTO", "PRESCALE_QK": False, "ROWS_GUARANTEED_SAFE": False}
        options |= {"BLOCKS_ARE_CONTIGUOUS": False, "WRITE_DQ": True, "OUTPUT_LOGSUMEXP": False}
        return torch.ops.higher_order.flex_attention(
            query, key, value, lambda score, b, h, q, k: score, mask.as_tuple(), 0.25, options
        )[0]

    backend = PassThenEager()
    out = compiled(direct, backend)(*tensors)
    assert len(backend.report.rewritten) == 1, str(backend.report)
    expect_equal_to_oracle(out, tensors, mask)


def test_lse_is_base_e_at_the_api() -> None:
    tensors = qkv()
    mask = block_mask(form_1(Tree(2, 192)), tensors)

    def with_lse(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, aux = attention(*tensors, mask, return_aux=AuxRequest(lse=True))
        return out, aux.lse

    backend = PassThenEager()
    out, lse = compiled(with_lse, backend)(*tensors)
    assert len(backend.report.rewritten) == 1, str(backend.report)
    allowed = dense(mask, 2, 4)
    exact_out, exact_lse = reference_attention(*(t.double() for t in tensors), allowed)
    torch.testing.assert_close(out.double(), exact_out, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(lse.double(), exact_lse, atol=2e-6, rtol=2e-6)


def test_lse_is_converted_only_where_it_is_used() -> None:
    tensors = qkv()
    mask = block_mask(form_1(Tree(2, 192)), tensors)
    backend = PassThenEager()
    compiled(attention, backend)(*tensors, mask)
    assert not backend.graphs[0].graph.find_nodes(op="call_function", target=torch.div)


def test_rows_that_see_nothing() -> None:
    tensors = qkv()
    pad = torch.arange(192) >= 150
    node = Tree(2, 192).node
    mask = block_mask(lambda b, h, q, k: (q >= k) & (node[b, q] == node[b, k]) & ~pad[q], tensors)

    def with_lse(*tensors: torch.Tensor) -> Any:
        return attention(*tensors, mask, return_aux=AuxRequest(lse=True))

    backend = PassThenEager()
    out, aux = compiled(with_lse, backend)(*tensors)
    assert len(backend.report.rewritten) == 1, str(backend.report)
    assert torch.equal(out[:, :, 150:], torch.zeros_like(out[:, :, 150:]))
    assert torch.isneginf(aux.lse[:, :, 150:]).all()
    assert torch.isfinite(aux.lse[:, :, :150]).all()


def test_layers_share_values_and_lists() -> None:
    tensors = qkv()
    tree = Tree(2, 192)
    mask, other = block_mask(form_1(tree), tensors), block_mask(form_8(tree), tensors)

    def layers(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        for number in range(4):
            query = attention(query, key, value, other if number == 2 else mask)
        return query

    backend = PassThenEager()
    out = compiled(layers, backend)(*tensors)
    (graph,) = backend.graphs
    assert count_calls(graph, "tree_attention") == 4
    assert count_calls(graph, "block_lists") == 2
    torch.testing.assert_close(out, layers(*tensors))


def test_values_are_not_shared_across_a_write() -> None:
    tensors = qkv()
    mask = block_mask(form_1(Tree(2, 192)), tensors)
    everything = torch.ones(1, 1, 2, dtype=torch.int32)
    columns = torch.arange(2, dtype=torch.int32).expand(1, 1, 2, 2).contiguous()

    def layers(ids: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        def same(b: Any, h: Any, q: Any, k: Any) -> Any:
            return (q >= k) & (ids[b, q] == ids[b, k])

        lists = BlockMask.from_kv_blocks(
            everything * 2, columns, BLOCK_SIZE=128, mask_mod=same, seq_lengths=(192, 192)
        )
        first = attention(*tensors, lists)
        second = attention(*tensors, lists)
        ids.copy_(other)
        return torch.stack([first, second, attention(*tensors, lists)])

    assert mask.seq_lengths == (192, 192)
    ids, other = Tree(2, 192, seed=1).node, Tree(2, 192, seed=2).node
    expected = layers(ids.clone(), other)
    backend = PassThenEager()
    out = compiled(layers, backend)(ids.clone(), other)
    assert len(backend.report.rewritten) == 3, str(backend.report)
    assert count_calls(backend.graphs[0], "block_lists") == 2
    torch.testing.assert_close(out, expected)
    assert not torch.equal(out[1], out[2])


def test_writes_to_other_tensors_do_not_stop_sharing() -> None:
    tensors = qkv()
    mask = block_mask(form_1(Tree(2, 192)), tensors)

    def layers(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        query = attention(query, key, value, mask)
        query = torch.nn.functional.relu(query, inplace=True)
        query.mul_(2)
        return attention(query, key, value, mask)

    backend = PassThenEager()
    out = compiled(layers, backend)(*tensors)
    assert count_calls(backend.graphs[0], "block_lists") == 1
    torch.testing.assert_close(out, layers(*tensors))


def top_k_lists(mask: BlockMask) -> BlockMask:
    """A BlockMask that lists only some of another's blocks, chosen per row of blocks."""
    partial = mask.kv_num_blocks.clamp(max=1)
    return BlockMask.from_kv_blocks(
        partial,
        mask.kv_indices,
        mask.full_kv_num_blocks.clamp(max=1),
        mask.full_kv_indices,
        BLOCK_SIZE=mask.BLOCK_SIZE,
        mask_mod=mask.mask_mod,
        seq_lengths=mask.seq_lengths,
    )


def without_full_lists(mask: BlockMask) -> BlockMask:
    return BlockMask.from_kv_blocks(
        mask.kv_num_blocks,
        mask.kv_indices,
        BLOCK_SIZE=mask.BLOCK_SIZE,
        mask_mod=mask.mask_mod,
        seq_lengths=mask.seq_lengths,
    )


def with_empty_rows(mask: BlockMask) -> BlockMask:
    keep = torch.arange(mask.kv_num_blocks.shape[-1], dtype=torch.int32) % 2
    return BlockMask.from_kv_blocks(
        mask.kv_num_blocks * keep,
        mask.kv_indices,
        mask.full_kv_num_blocks * keep,
        mask.full_kv_indices,
        BLOCK_SIZE=mask.BLOCK_SIZE,
        mask_mod=mask.mask_mod,
        seq_lengths=mask.seq_lengths,
    )


def all_full(mask: BlockMask) -> BlockMask:
    """Its partial blocks listed as full: the mask_mod is not asked there."""
    return BlockMask.from_kv_blocks(
        torch.zeros_like(mask.kv_num_blocks),
        mask.kv_indices,
        mask.kv_num_blocks,
        mask.kv_indices,
        BLOCK_SIZE=mask.BLOCK_SIZE,
        mask_mod=mask.mask_mod,
        seq_lengths=mask.seq_lengths,
    )


def per_head(mask: BlockMask) -> BlockMask:
    """A list of its own for every head."""
    keep = torch.tensor([1, 0, 1, 1], dtype=torch.int32).view(1, 4, 1)
    return BlockMask.from_kv_blocks(
        mask.kv_num_blocks * keep,
        mask.kv_indices.expand(-1, 4, -1, -1).contiguous(),
        mask.full_kv_num_blocks.expand(-1, 4, -1).contiguous(),
        mask.full_kv_indices.expand(-1, 4, -1, -1).contiguous(),
        BLOCK_SIZE=mask.BLOCK_SIZE,
        mask_mod=mask.mask_mod,
        seq_lengths=mask.seq_lengths,
    )


@pytest.mark.parametrize(
    "change", [top_k_lists, without_full_lists, with_empty_rows, all_full, per_head]
)
@pytest.mark.parametrize("block_size", [16, 48, (64, 32), 128])
def test_hand_made_lists_keep_their_meaning(change: Any, block_size: Any) -> None:
    tensors = qkv(length=200)
    built = block_mask(form_8(Tree(2, 200)), tensors, BLOCK_SIZE=block_size)
    mask = change(built)
    assert change is without_full_lists or not torch.equal(dense(mask, 2, 4), dense(built, 2, 4))
    backend = PassThenEager()
    out = compiled(attention, backend)(*tensors, mask)
    assert len(backend.report.rewritten) == 1, str(backend.report)
    expect_equal_to_oracle(out, tensors, mask)


def test_lists_with_fewer_columns_than_blocks() -> None:
    """Top-k lists may hold k columns only."""
    tensors = qkv(length=256)
    whole = block_mask(form_8(Tree(2, 256)), tensors, BLOCK_SIZE=64)
    narrow = [
        part[..., :2].contiguous() if part.dim() == 4 else part.clamp(max=2)
        for part in (
            whole.kv_num_blocks,
            whole.kv_indices,
            whole.full_kv_num_blocks,
            whole.full_kv_indices,
        )
    ]
    mask = BlockMask((256, 256), *narrow, None, None, None, None, (64, 64), whole.mask_mod)
    backend = PassThenEager()
    out = compiled(attention, backend)(*tensors, mask)
    assert len(backend.report.rewritten) == 1, str(backend.report)
    expect_equal_to_oracle(out, tensors, mask)


def test_sliced_lists_keep_their_meaning() -> None:
    query, key, value = qkv(length=256)
    whole = block_mask(form_8(Tree(2, 256)), (query, key, value), BLOCK_SIZE=64)
    mask = whole[:, :, :2]
    mask.mask_mod, mask.seq_lengths = whole.mask_mod, (128, 256)
    tensors = (query[:, :, :128], key, value)
    backend = PassThenEager()
    out = compiled(attention, backend)(*tensors, mask)
    assert len(backend.report.rewritten) == 1, str(backend.report)
    expect_equal_to_oracle(out, tensors, mask)


def test_autocast_casts_as_flex_does() -> None:
    query, key, value = qkv()
    mask = block_mask(form_1(Tree(2, 192)), (query, key, value))

    def under_autocast(query: Any, key: Any, value: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return attention(query, key, value, mask)

    backend = PassThenEager()
    out = compiled(under_autocast, backend)(query, key, value)
    if not backend.report.rewritten:
        # Before torch 2.13, flex did not take part in autocast.
        pytest.fail(str(backend.report))
    expected = under_autocast(query, key, value)
    assert out.dtype == expected.dtype
    torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)


def test_a_layout_that_a_view_relies_on() -> None:
    """Sequence-first storage, as in Megatron: what flex returns can be viewed, so ours must be."""
    packed = torch.randn(192, 2, 4, 3, 16)
    query, key, value = (packed[:, :, :, part].permute(1, 2, 0, 3) for part in range(3))
    mask = block_mask(form_1(Tree(2, 192)), (query, key, value))

    def layer(query: Any, key: Any, value: Any) -> Any:
        return (
            flex_attention(query, key, value, block_mask=mask).permute(2, 0, 1, 3).view(192, 2, 64)
        )

    backend = PassThenEager()
    out = compiled(layer, backend)(query, key, value)
    assert len(backend.report.rewritten) == 1, str(backend.report)
    expect_equal_to_oracle(out.view(192, 2, 4, 16).permute(1, 2, 0, 3), (query, key, value), mask)


def test_new_nodes_carry_metadata() -> None:
    tensors = qkv()
    mask = block_mask(form_1(Tree(2, 192)), tensors)

    class Layer(torch.nn.Module):
        def forward(self, *tensors: torch.Tensor) -> Any:
            return attention(*tensors, mask)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([Layer()])

        def forward(self, *tensors: torch.Tensor) -> Any:
            return self.layers[0](*tensors)

    seen: dict[str, Any] = {}

    class Tag(TreeAttentionPass):
        def __call__(self, graph: fx.Graph) -> None:
            for node in graph.nodes:
                if is_flex_call(node):
                    node.meta |= {"recompute": 7, "ac_graph_id": 3}
                    seen["value"] = node.meta["example_value"]
                    seen["meta"] = dict(node.meta)
            super().__call__(graph)

    backend = PassThenEager(Tag())
    compiled(Model(), backend)(*tensors)
    (node,) = backend.graphs[0].graph.find_nodes(
        op="call_function", target=torch.ops.tree_attn_op.tree_attention.default
    )
    for name in ("stack_trace", "nn_module_stack", "recompute", "ac_graph_id"):
        assert node.meta[name] == seen["meta"][name]
    out, lse = node.meta["example_value"]
    assert out.shape == seen["value"][0].shape
    assert out.stride() == seen["value"][0].stride()
    assert lse.shape == seen["value"][1].shape
    for inserted in backend.graphs[0].graph.nodes:
        if inserted.op == "call_function":
            assert "example_value" in inserted.meta, inserted
    (call,) = backend.report
    assert call.layer.endswith("layers.0"), call


def test_what_became_dead_is_removed() -> None:
    tensors = qkv()
    mask = block_mask(form_1(Tree(2, 192)), tensors)
    backend = PassThenEager()
    compiled(attention, backend)(*tensors, mask)
    (gm,) = backend.graphs
    assert not gm.graph.find_nodes(op="get_attr")
    assert not list(gm.children())
    unused = [n for n in gm.graph.nodes if not n.users and n.op not in ("placeholder", "output")]
    assert not unused


def test_a_second_run_changes_nothing() -> None:
    tensors = qkv()
    tree = Tree(2, 192)
    mask = block_mask(form_1(tree), tensors)
    causal = block_mask(lambda b, h, q, k: q >= k, tensors)
    backend = PassThenEager()

    def layers(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return attention(attention(query, key, value, mask), key, value, causal)

    compiled(layers, backend)(*tensors)
    (gm,) = backend.graphs
    once, reported = str(gm.graph), len(backend.report)
    backend.graph_pass(gm.graph)
    assert str(gm.graph) == once
    assert len(backend.report) == reported == 2


# A failure anywhere leaves flex in place, and the graph as it was.

FAILURES = [
    "read_flex_call",
    "check_call",
    "graph_structure",
    "lower",
    "emit",
    "preferred_list_blocks",
    "operand_dtype",
]


@pytest.mark.parametrize("name", FAILURES)
def test_never_raises(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("injected")

    monkeypatch.setattr(passes.rewrite, name, fail)
    expect_untouched(caplog)


def test_never_raises_after_partial_emission(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def emit_then_fail(lowered: Any, graph: fx.Graph, captured: Any, *sizes: Any) -> Any:
        graph.call_function(torch.zeros, (3,))
        raise ZeroDivisionError("injected")

    monkeypatch.setattr(passes.rewrite, "emit", emit_then_fail)
    expect_untouched(caplog)


def test_never_raises_when_the_values_are_wrong(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def floats(lowered: Any, graph: fx.Graph, captured: Any, *sizes: Any) -> Any:
        rows = graph.call_function(torch.zeros, (1, 1))
        return rows, rows

    monkeypatch.setattr(passes.rewrite, "emit", floats)
    expect_untouched(caplog, error="")


def test_never_raises_when_lint_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class FailingLint(TreeAttentionPass):
        def __call__(self, graph: fx.Graph) -> None:
            def lint(graph: fx.Graph) -> None:
                raise ZeroDivisionError("injected")

            with monkeypatch.context() as patch:
                patch.setattr(fx.Graph, "lint", lint)
                super().__call__(graph)

    expect_untouched(caplog, graph_pass=FailingLint)


def expect_untouched(
    caplog: pytest.LogCaptureFixture,
    error: str = "injected",
    graph_pass: type[TreeAttentionPass] = TreeAttentionPass,
) -> None:
    tensors = qkv()
    mask = block_mask(form_1(Tree(2, 192)), tensors)

    def two(query: Any, key: Any, value: Any) -> Any:
        query, lse = attention(query, key, value, mask, return_lse=True)
        return attention(query, key, value, mask), lse

    graphs: list[str] = []

    class Compare(graph_pass):  # type: ignore[valid-type,misc]
        def __call__(self, graph: fx.Graph) -> None:
            graphs.append(str(graph))
            super().__call__(graph)
            graphs.append(str(graph))

    backend = PassThenEager(Compare())
    with caplog.at_level(logging.DEBUG, logger="passes"):
        out = compiled(two, backend)(*tensors)
    assert graphs[0] == graphs[1]
    torch.testing.assert_close(out, two(*tensors))
    assert [call.rewritten for call in backend.report] == [False, False]
    for call in backend.report:
        assert call.reason.startswith("internal error: "), call
        assert error in call.reason
    assert any(record.exc_info for record in caplog.records)
