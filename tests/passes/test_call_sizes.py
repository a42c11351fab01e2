"""Calls that stay flex for their sizes: those that it decodes, and small ones on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
from torch._inductor import config as inductor_config

from passes import TreeAttentionPass
from passes.checks import check_size
from passes.flex_call import FLEX_ATTENTION, KeepFlex, read_flex_call, uses_decoding_kernel

from .hand_written import call_graph, reason_of


@pytest.mark.parametrize(
    ("change", "decodes"),
    [
        ({}, True),
        ({"length": 128}, False),
        ({"heads": 6}, False),
        ({"device": "cpu"}, False),
        ({"device": "cpu", "length": 1}, True),
        ({"device": "cpu", "length": 1, "kv_length": 900}, False),
        ({"device": "cpu", "length": 1, "options": {"PARTITION_SIZE": 4096}}, False),
        ({"options": {"BACKEND": "TRITON"}}, False),
        ({"options": {"BACKEND": "TRITON_DECODE"}}, True),
        ({"options": {"FORCE_USE_FLEX_ATTENTION": True}}, False),
        ({"list_heads": 4}, False),
        ({"list_heads": 4, "kv_heads": 4}, True),
    ],
)
def test_calls_that_flex_decodes(change: dict[str, Any], decodes: bool) -> None:
    options: dict[str, Any] = {"length": 64, "kv_length": 4096, "device": "cuda"}
    gm = call_graph(**{**options, **change})
    (node,) = gm.graph.find_nodes(op="call_function", target=FLEX_ATTENTION)
    assert uses_decoding_kernel(read_flex_call(node)) == decodes
    if decodes:
        assert "decoding kernel" in reason_of(gm)


@pytest.mark.parametrize(
    ("change", "small"),
    [
        ({"length": 2048}, True),
        ({"length": 2048, "device": "cpu"}, False),
        ({"length": 32768}, False),
        ({"length": 256, "kv_length": 4096}, True),
        ({"length": 16384, "heads": 16}, False),
    ],
)
def test_small_calls_on_a_gpu(
    change: dict[str, Any], small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TREE_ATTN_REWRITE_SMALL", raising=False)
    gm = call_graph(**{"device": "cuda", **change})
    (node,) = gm.graph.find_nodes(op="call_function", target=FLEX_ATTENTION)
    call = read_flex_call(node)
    with inductor_config.patch({"triton.cudagraphs": True}):
        check_size(call)
    if not small:
        check_size(call)
        return
    with pytest.raises(KeepFlex, match="busy for less time than the op's launches take") as kept:
        check_size(call)
    assert "rewrite_small=True" in str(kept.value.hint)
    assert "busy for less time" in reason_of(gm)


@pytest.mark.parametrize("rewrite_small", [False, True])
def test_small_calls_are_rewritten_if_wanted(
    rewrite_small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr("passes.rewrite.check_size", asked.append)
    graph_pass = TreeAttentionPass(rewrite_small=rewrite_small)
    graph_pass(call_graph().graph)
    assert [call.rewritten for call in graph_pass.report] == [True]
    assert len(asked) == (not rewrite_small)
