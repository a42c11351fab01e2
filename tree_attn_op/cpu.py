"""CPU implementation: a few large matrix products over the listed tiles, forward and backward.

Memory beyond the outputs is bounded: the tile states, copies of the inputs in the dtype of the
sums, and a fixed number of scores. Products and sums are in float32 (float64 for float64 inputs),
and the same input gives the same bits.
"""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor

from .cpu_attend import (
    Heads,
    Scratch,
    attend_flash,
    flash_fits,
    hide,
    linear_fits,
    merge,
    take,
)
from .cpu_pieces import MAX_COLUMNS, MAX_PAIRS, Columns, Piece, batch_of, masks_of
from .layout import empty_like_layout

_MAX_SCORES = 1 << 21
"""Most scores held at a time, over all heads."""
_LINEAR_SCORES = 1 << 20
"""Most scores of a piece that oneDNN computes, over one group of heads."""


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _accumulate(tensor: Tensor, columns: Columns, left: Tensor, right: Tensor) -> None:
    """``tensor[:, columns] += left @ right``."""
    if isinstance(columns, slice):
        tensor[:, columns].baddbmm_(left, right)
    else:
        tensor.index_add_(1, columns, left @ right)


def _add_gradients(
    heads: Heads,
    piece: Piece,
    grad_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    sums: tuple[Tensor, Tensor, Tensor],
    exact: bool,
) -> None:
    """Add the gradients of a piece to the sums, that of query before its scale."""
    key, value = take(heads.key, piece.columns), take(heads.value, piece.columns)
    query = heads.rows(heads.query, piece.rows).to(key.dtype) * heads.scale
    grad = heads.rows(grad_out, piece.rows)
    scores = query @ key.mT
    hide(scores.view(key.shape[0], heads.group, -1, key.shape[1]), piece.bias, exact)
    weights = scores.sub_(heads.rows(lse, piece.rows)).exp_()
    grad_scores = (grad @ value.mT).sub_(heads.rows(delta, piece.rows)).mul_(weights)
    sums[0][:, piece.rows] += heads.unrows(grad_scores @ key)
    _accumulate(sums[1], piece.columns, grad_scores.mT, query)
    _accumulate(sums[2], piece.columns, weights.mT, grad)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q_vals: Tensor,
    k_vals: Tensor,
    predicate: str,
    kv_num_blocks: Tensor,
    kv_indices: Tensor,
    full_kv_num_blocks: Tensor | None,
    full_kv_indices: Tensor | None,
    q_block_size: int,
    kv_block_size: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The op ``tree_attn_op::tree_attention`` on a CPU; arguments as there, already checked.

    Returns:
        ``out [B, Hq, Q, Dv]`` of query's dtype, ``lse [B, Hq, Q]`` float32 (float64 for float64).
    """
    dtype = _accumulation_dtype(query.dtype)
    shape = (*query.shape[:3], value.shape[-1])
    result = empty_like_layout(query, shape, query.dtype)
    out = result if result.dtype == dtype else torch.empty(shape, dtype=dtype)
    lse = torch.empty(query.shape[:3], dtype=dtype)
    keys, values = key.to(dtype), value.to(dtype)
    lists = (kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices)
    masks = masks_of(query, key, q_vals, k_vals, predicate, lists, q_block_size, kv_block_size)
    linear, flash = linear_fits(query), flash_fits(query, key, value)
    heads, group = query.shape[1], query.shape[1] // max(key.shape[1], 1)
    scratch = Scratch(dtype)
    for exact in (False, True):
        out.zero_()
        lse.fill_(float("-inf"))
        for mask, places in masks:
            for batch in mask.rows():
                for b, h, g in places:
                    of = Heads(query[b, h], keys[b, g], values[b, g], scale)
                    of.attend(batch, exact, scratch, out[b, h], lse[b, h])
            for full in (False, True):
                by_flash = flash and not linear and (full or not exact)
                limits = max(_MAX_SCORES // heads, 1), MAX_COLUMNS
                if linear:
                    limits = max(_LINEAR_SCORES // group, 1), MAX_COLUMNS
                elif by_flash:
                    limits = mask.q_len * mask.kv_len if full else MAX_PAIRS, mask.kv_len
                for piece in mask.rectangles(full, *limits):
                    for b, h, g in places:
                        of = Heads(query[b, h], keys[b, g], values[b, g], scale)
                        target = out[b, h], lse[b, h]
                        if linear:
                            found = of.attend_linear(piece, exact)
                        elif by_flash:
                            inputs = query[b, h], key[b, g], value[b, g]
                            found = attend_flash(*inputs, piece, scale)
                        else:
                            of.attend(batch_of([piece]), exact, scratch, *target)
                            continue
                        merge(target[0][:, piece.rows], target[1][:, piece.rows], *found)
        if not lse.isnan().any():
            break
    if result is not out:
        result.copy_(out)
    return result, lse


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    q_vals: Tensor,
    k_vals: Tensor,
    predicate: str,
    kv_num_blocks: Tensor,
    kv_indices: Tensor,
    full_kv_num_blocks: Tensor | None,
    full_kv_indices: Tensor | None,
    q_block_size: int,
    kv_block_size: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The op ``tree_attn_op::tree_attention_backward`` on a CPU; the key-side lists are enough.

    Returns:
        Gradients of query, key and value, of their dtypes and layouts.
    """
    dtype = _accumulation_dtype(query.dtype)
    grad_out = grad_out.to(dtype)
    delta = (grad_out * out.to(dtype)).sum(-1, keepdim=True)
    lse = lse.unsqueeze(-1)
    if grad_lse is not None:
        delta -= grad_lse.to(dtype).unsqueeze(-1)
    # exp(score - inf) is 0: a row that sees nothing has no gradient.
    blind = lse == float("-inf")
    lse, delta = lse.masked_fill(blind, float("inf")), delta.masked_fill_(blind, 0.0)
    keys, values = key.to(dtype), value.to(dtype)
    lists = (kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices)
    masks = masks_of(query, key, q_vals, k_vals, predicate, lists, q_block_size, kv_block_size)
    pairs = max(_MAX_SCORES // max(query.shape[1], 1), 1)
    inputs = (query, key, value)
    sums = [torch.empty(tensor.shape, dtype=dtype) for tensor in inputs]
    for exact in (False, True):
        for each in sums:
            each.zero_()
        for mask, places in masks:
            pieces = chain(
                chain.from_iterable(batch.pieces for batch in mask.rows()),
                mask.rectangles(False, pairs, MAX_COLUMNS),
                mask.rectangles(True, pairs, MAX_COLUMNS),
            )
            for piece in pieces:
                for b, h, g in places:
                    heads = Heads(query[b, h], keys[b, g], values[b, g], scale)
                    into = (sums[0][b, h], sums[1][b, g], sums[2][b, g])
                    rows = (grad_out[b, h], lse[b, h], delta[b, h])
                    _add_gradients(heads, piece, *rows, into, exact)
        if not any(bool(each.isnan().any()) for each in sums):
            break
    sums[0] *= scale
    dq, dk, dv = (
        empty_like_layout(tensor, tuple(tensor.shape), tensor.dtype).copy_(each)
        for tensor, each in zip(inputs, sums, strict=True)
    )
    return dq, dk, dv
