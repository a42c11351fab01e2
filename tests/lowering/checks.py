"""The check that a lowered mask means what PyTorch computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

from tests.lowering.generator import KV_LEN, Q_LEN, B, RandomMask
from tree_attn_op.lowering import (
    CapturedInfo,
    Lowered,
    UnsupportedMask,
    evaluate,
    lower,
    lower_mask_mod,
)
from tree_attn_op.lowering.emission import evaluator


def dense(
    lowered: Lowered, captured: Sequence[Any], batch: int, q_len: int, kv_len: int
) -> Tensor:
    """The lowered mask as bool [batch, q_len, kv_len], after checks of the values' layout."""
    q_vals, k_vals = evaluate(lowered, captured, batch, q_len, kv_len, "cpu")
    for values, rows, length in (
        (q_vals, lowered.q_rows, q_len),
        (k_vals, lowered.k_rows, kv_len),
    ):
        assert values.dtype is lowered.value_dtype
        assert values.shape[0] in (1, batch)
        assert values.shape[1:] == (len(rows), length)
        assert values.is_contiguous()
    infos = [CapturedInfo.of(value) for value in captured]
    borrow = evaluator(lowered, infos, batch, q_len, kv_len, "cpu", borrow=True)
    for values, borrowed in zip((q_vals, k_vals), borrow(*captured), strict=True):
        assert borrowed.dtype is values.dtype
        assert torch.equal(borrowed, values)
    return lowered.predicate.dense(q_vals, k_vals, q_len, kv_len).expand(batch, q_len, kv_len)


def reference(mask_mod: Callable[..., Tensor], batch: int, q_len: int, kv_len: int) -> Tensor:
    """The mask as flex_attention evaluates it, bool [batch, q_len, kv_len]."""
    return create_mask(mask_mod, batch, 1, q_len, kv_len, device="cpu")[:, 0]


def lower_random(mask: RandomMask, traced: bool) -> tuple[Lowered, Sequence[Any]]:
    """Lower a random mask in the aten dialect (traced) or as it was generated."""
    if traced:
        return lower_mask_mod(mask.mask_mod, "cpu")
    return lower(mask.graph_module, mask.infos), mask.captured


def verdict(mask: RandomMask, traced: bool) -> str:
    """ "equal", "unequal", "refused" (by the lowering) or "invalid" (PyTorch raises)."""
    try:
        lowered, captured = lower_random(mask, traced)
    except UnsupportedMask:
        return "refused"
    expected = mask.dense()
    if expected is None:
        return "invalid"
    found = dense(lowered, captured, B, Q_LEN, KV_LEN)
    return "equal" if torch.equal(found, expected) else "unequal"
