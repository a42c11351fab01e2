"""A graph with one flex_attention call, written by hand, and what the pass says of it."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from passes import TreeAttentionPass
from passes.flex_call import FLEX_ATTENTION


def call_graph(
    *,
    length: int = 192,
    kv_length: int | None = None,
    heads: int = 4,
    kv_heads: int = 2,
    list_batch: int = 2,
    list_heads: int = 1,
    rows: int | None = None,
    made_for: tuple[int, int] | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    captured_device: str | None = None,
    options: dict[str, Any] | None = None,
    extra: int = 0,
) -> fx.GraphModule:
    """A graph with one call, written by hand: what flex's own checks would not let through."""
    kv_length = length if kv_length is None else kv_length
    rows = -(-length // 128) if rows is None else rows
    columns = -(-kv_length // 128)
    graph = fx.Graph()
    with FakeTensorMode(allow_non_fake_inputs=True):

        def give(name: str, *shape: int, dtype: torch.dtype, on: str = device) -> fx.Node:
            node = graph.placeholder(name)
            node.meta["example_value"] = torch.empty(shape, dtype=dtype, device=on)
            return node

        query = give("query", 2, heads, length, 16, dtype=dtype)
        key = give("key", 2, kv_heads, kv_length, 16, dtype=dtype)
        value = give("value", 2, kv_heads, kv_length, 16, dtype=dtype)
        ids = give(
            "ids", 2, max(length, kv_length), dtype=torch.int64, on=captured_device or device
        )
        counts = give("kv_num_blocks", list_batch, list_heads, rows, dtype=torch.int32)
        indices = give("kv_indices", list_batch, list_heads, rows, columns, dtype=torch.int32)
        out = torch.empty(2, heads, length, 16, dtype=dtype, device=device)
        stats = torch.empty(2, heads, length, device=device)

    root = torch.nn.Module()
    root.score_mod = fx.symbolic_trace(_score_mod)
    root.mask_mod = fx.symbolic_trace(_mask_mod)
    lengths = (length, kv_length) if made_for is None else made_for
    lists = (counts, indices, None, None, None, None, None, None, *(None,) * extra)
    call = graph.call_function(
        FLEX_ATTENTION,
        (
            query,
            key,
            value,
            graph.get_attr("score_mod"),
            (*lengths, *lists, 128, 128, graph.get_attr("mask_mod")),
            0.25,
            options or {},
            (),
            (ids,),
        ),
    )
    call.meta["example_value"] = (out, stats, stats)
    item = graph.call_function(operator.getitem, (call, 0))
    item.meta["example_value"] = out
    graph.output((item,))
    return fx.GraphModule(root, graph)


def _score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score


def _mask_mod(b: Any, h: Any, q: Any, k: Any, ids: Any) -> Any:
    return (q >= k) & (ids[b, q] == ids[b, k])


def reason_of(gm: fx.GraphModule) -> str:
    """Why the pass keeps the one call of a graph, which it must leave as it is."""
    graph_pass, before = TreeAttentionPass(), str(gm.graph)
    graph_pass(gm.graph)
    (call,) = graph_pass.report
    assert not call.rewritten
    assert str(gm.graph) == before
    return str(call.reason)
