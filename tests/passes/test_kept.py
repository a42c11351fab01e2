"""Calls that stay flex: each with its reason, and each as if the package were not there."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch._inductor import config as inductor_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import AuxRequest, BlockMask

from passes import TreeAttentionPass
from passes.checks import check_size
from passes.flex_call import (
    FLEX_ATTENTION,
    KeepFlex,
    read_flex_call,
    uses_decoding_kernel,
)

from .helpers import PassThenEager, Tree, attention, block_mask, compiled, form_1, qkv

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def kept_reason(fn: Callable[..., Any], *args: Any, same: bool = True) -> str:
    """Why the one call of ``fn`` is kept; its result must be what it is without the pass."""
    backend = PassThenEager()
    out = compiled(fn, backend)(*args)
    (call,) = backend.report
    assert not call.rewritten, call
    assert backend.before == backend.after
    assert torch._dynamo.utils.counters["inductor"]["tree_attn_kept"] == 1
    if same:
        torch.testing.assert_close(out, fn(*args))
    assert call.reason is not None
    return str(call.reason)


def with_option(name: str, value: Any, tensors: Tensors | None = None) -> Callable[..., Any]:
    tensors = qkv() if tensors is None else tensors
    mask = block_mask(form_1(Tree(2, 192)), tensors)
    return lambda *tensors: attention(*tensors, mask, kernel_options={name: value})


def test_unknown_kernel_option() -> None:
    reason = kept_reason(with_option("SM_SCALE", 1.0), *qkv())
    assert reason == "kernel option SM_SCALE may change the result"


def test_flash_backend_with_lse() -> None:
    tensors = qkv()
    mask = block_mask(form_1(Tree(2, 192)), tensors)

    def flash(*tensors: torch.Tensor) -> Any:
        return attention(
            *tensors,
            mask,
            return_aux=AuxRequest(lse=True),
            kernel_options={"BACKEND": "FLASH"},
        )

    assert "lse is used" in kept_reason(flash, *tensors, same=False)


@pytest.mark.parametrize(
    "options",
    [
        {"BACKEND": "FLASH"},
        {"BACKEND": "TRITON"},
        {"FORCE_USE_FLEX_ATTENTION": True},
        {"BLOCK_M": 64, "BLOCK_N": 32, "num_stages": 2, "num_warps": 4, "PRESCALE_QK": True},
        {"fwd_BLOCK_M": 64, "bwd_BLOCK_M1": 32, "USE_TMA": True, "BLOCKS_ARE_CONTIGUOUS": True},
        {"ROWS_GUARANTEED_SAFE": True, "WRITE_DQ": False},
    ],
)
def test_scheduling_options_do_not_stop_a_rewrite(options: dict[str, Any]) -> None:
    tensors = qkv()
    mask = block_mask(form_1(Tree(2, 192)), tensors)
    backend = PassThenEager()
    out = compiled(attention, backend)(*tensors, mask, kernel_options=options)
    assert len(backend.report.rewritten) == 1, str(backend.report)
    torch.testing.assert_close(out, attention(*tensors, mask))


def test_float32_precision_of_one_call() -> None:
    reason = kept_reason(with_option("FLOAT32_PRECISION", "'ieee'"), *qkv())
    assert "FLOAT32_PRECISION" in reason


def test_max_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    # flex refuses max_scores on a CPU when it applies the options; the pass must see them anyway.
    original = torch.nn.attention.flex_attention._apply_kernel_options

    def allow_max(*args: Any) -> Any:
        options = original(*args[:5], None) if len(args) > 5 else original(*args)
        options["OUTPUT_MAX"] = True
        return options

    monkeypatch.setattr(torch.nn.attention.flex_attention, "_apply_kernel_options", allow_max)
    tensors = qkv()
    mask = block_mask(form_1(Tree(2, 192)), tensors)

    def with_max(*tensors: torch.Tensor) -> Any:
        out, aux = attention(*tensors, mask, return_aux=AuxRequest(max_scores=True))
        return out, aux.max_scores

    assert "max_scores" in kept_reason(with_max, *tensors)


@pytest.mark.parametrize(
    "score_mod",
    [
        lambda score, b, h, q, k: 20 * torch.tanh(score / 20),
        lambda score, b, h, q, k: torch.where(q >= k, score, -float("inf")),
        lambda score, b, h, q, k: score + (q - k),
        lambda score, b, h, q, k: b + score * 0,
    ],
    ids=["softcap", "mask", "bias", "other"],
)
def test_score_mod(score_mod: Any) -> None:
    tensors = qkv()
    mask = block_mask(form_1(Tree(2, 192)), tensors)
    reason = kept_reason(lambda *t: attention(*t, mask, score_mod=score_mod), *tensors)
    assert reason == "its score_mod changes the scores"


SCORE_MODS = {
    "where": (lambda score, b, h, q, k: torch.where(q >= k, score, -float("inf")), True),
    "where_not": (lambda score, b, h, q, k: torch.where(q < k, -float("inf"), score), True),
    "masked_fill": (lambda score, b, h, q, k: score.masked_fill(q < k, -float("inf")), True),
    "alibi": (lambda score, b, h, q, k: score - 0.5 * (q - k), False),
    "softcap": (lambda score, b, h, q, k: 20 * torch.tanh(score / 20), False),
    "bias_and_mask": (
        lambda score, b, h, q, k: torch.where(q >= k, score + (k - q), -float("inf")),
        False,
    ),
    "penalty": (lambda score, b, h, q, k: torch.where(q >= k, score, -2.0), False),
}


@pytest.mark.parametrize("name", SCORE_MODS)
def test_only_a_mask_is_sent_to_the_mask_mod(name: str) -> None:
    score_mod, is_mask = SCORE_MODS[name]
    tensors = qkv()
    mask = block_mask(form_1(Tree(2, 192)), tensors)
    backend = PassThenEager()
    compiled(attention, backend)(*tensors, mask, score_mod=score_mod)
    (call,) = backend.report.kept
    assert ("mask_mod" in (call.hint or "")) == is_mask


def test_score_mod_that_returns_its_score() -> None:
    tensors = qkv()
    mask = block_mask(form_1(Tree(2, 192)), tensors)

    def unchanged(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        _unused = score * 2 + q
        return score

    backend = PassThenEager()
    compiled(attention, backend)(*tensors, mask, score_mod=unchanged)
    assert len(backend.report.rewritten) == 1, str(backend.report)


def test_no_mask() -> None:
    reason = kept_reason(lambda *tensors: attention(*tensors, None), *qkv())
    assert reason == "its mask reads no tensor, so no prefix is shared"


def test_one_block_of_any_length_with_a_mask() -> None:
    """The BlockMask that flex makes when it is given none, with a mask_mod put into it."""
    tensors = qkv()
    mask = block_mask(form_1(Tree(2, 192)), tensors)
    one = BlockMask.from_kv_blocks(
        torch.ones(1, 1, 1, dtype=torch.int32),
        torch.zeros(1, 1, 1, 1, dtype=torch.int32),
        BLOCK_SIZE=1 << 30,
        mask_mod=mask.mask_mod,
        seq_lengths=(1, 1),
    )
    backend = PassThenEager()
    out = compiled(attention, backend)(*tensors, one)
    assert len(backend.report.rewritten) == 1, str(backend.report)
    torch.testing.assert_close(out, attention(*tensors, mask))


def test_batch_broadcast() -> None:
    query, key, value = qkv()
    mask = block_mask(form_1(Tree(2, 192)), (query, key, value))
    reason = kept_reason(lambda *t: attention(*t, mask), query, key[:1], value[:1])
    assert reason == "query, key and value differ in batch size"


def test_head_dim_too_large() -> None:
    tensors = qkv(dim=320)
    mask = block_mask(form_1(Tree(2, 192)), tensors)
    reason = kept_reason(lambda *t: attention(*t, mask), *tensors)
    assert reason == "head dimension 320 of query is not in 1 to 256"


@pytest.mark.parametrize("block_size", [24, (128, 40)])
def test_block_sizes(block_size: Any) -> None:
    tensors = qkv()
    mask = block_mask(form_1(Tree(2, 192)), tensors, BLOCK_SIZE=block_size)
    assert "no multiple of 16" in kept_reason(lambda *t: attention(*t, mask), *tensors)


def test_block_list_of_another_dtype() -> None:
    tensors = qkv()
    mask = block_mask(form_1(Tree(2, 192)), tensors)
    lists = {
        name: getattr(mask, name).long()
        for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    }
    wide = BlockMask(
        (192, 192), *lists.values(), None, None, None, None, (128, 128), mask.mask_mod
    )
    assert "int32" in kept_reason(lambda *t: attention(*t, wide), *tensors)


def test_mixed_dtypes() -> None:
    query, key, value = qkv()
    mask = block_mask(form_1(Tree(2, 192)), (query, key, value))
    tensors = query, key.bfloat16(), value.bfloat16()
    backend = PassThenEager()
    try:
        compiled(attention, backend)(*tensors, mask)
    except Exception:
        # Some versions refuse the call themselves, before or after the pass has looked at it.
        assert not backend.report.rewritten
    else:
        (call,) = backend.report
        assert "the op takes one dtype" in call.reason


def test_unsupported_dtype_is_kept() -> None:
    gm = call_graph(dtype=torch.float8_e4m3fn)
    assert reason_of(gm) == "no implementation for torch.float8_e4m3fn on cpu"


def test_lengths_of_another_mask() -> None:
    gm = call_graph(made_for=(256, 256))
    assert reason_of(gm) == (
        "the block mask was made for Q_LEN 256 and KV_LEN 256, the call has 192 and 192"
    )


def test_too_few_rows_of_blocks() -> None:
    gm = call_graph(rows=1)
    assert reason_of(gm) == "block list kv_num_blocks has 1 rows of blocks, not 2"


def test_lists_of_another_batch_size() -> None:
    gm = call_graph(list_batch=3)
    assert reason_of(gm) == "block list kv_num_blocks has batch size 3, not 1 or 2"


def test_head_counts_that_do_not_divide() -> None:
    gm = call_graph(heads=5)
    assert reason_of(gm) == "5 query heads are no multiple of 2 key heads"


def test_captured_tensor_on_another_device() -> None:
    gm = call_graph(captured_device="meta")
    assert reason_of(gm) == "its mask reads ids on meta, the query is on cpu"


def test_a_device_without_an_implementation() -> None:
    gm = call_graph(device="meta")
    assert reason_of(gm) == "no implementation for device type meta"


def test_unknown_block_mask_layout() -> None:
    gm = call_graph()
    (call,) = gm.graph.find_nodes(op="call_function", target=FLEX_ATTENTION)
    args = list(call.args)
    args[4] = (*args[4][:10], None, *args[4][10:])
    call.args = tuple(args)
    assert reason_of(gm).startswith("unknown layout of the block mask: 14 entries")


@pytest.mark.parametrize(("entries", "extra"), [(13, 0), (17, 4)])
def test_both_block_mask_layouts(entries: int, extra: int) -> None:
    gm = call_graph(extra=extra)
    (node,) = gm.graph.find_nodes(op="call_function", target=FLEX_ATTENTION)
    assert len(node.args[4]) == entries
    call = read_flex_call(node)
    assert (call.q_block_size, call.kv_block_size, call.q_len) == (128, 128, 192)
    assert call.kv_indices.name == "kv_indices"
    graph_pass = TreeAttentionPass()
    graph_pass(gm.graph)
    assert [report.rewritten for report in graph_pass.report] == [True], str(graph_pass.report)


def test_results_used_as_a_tuple() -> None:
    gm = call_graph()
    (node,) = gm.graph.find_nodes(op="call_function", target=FLEX_ATTENTION)
    (output,) = gm.graph.find_nodes(op="output")
    output.args = (node,)
    with pytest.raises(KeepFlex, match="used as a tuple"):
        read_flex_call(node)


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
    graph_pass, before = TreeAttentionPass(), str(gm.graph)
    graph_pass(gm.graph)
    (call,) = graph_pass.report
    assert not call.rewritten
    assert str(gm.graph) == before
    return str(call.reason)
