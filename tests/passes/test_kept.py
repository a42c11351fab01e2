"""Calls that stay flex: each with its reason, and each as if the package were not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask

from passes import TreeAttentionPass
from passes.flex_call import FLEX_ATTENTION, KeepFlex, read_flex_call

from .hand_written import call_graph, reason_of
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
