"""CPU implementation: a few large matrix products over the listed tiles, forward and backward.

Memory beyond the outputs is bounded: the tile states, copies of the inputs in the dtype of the
sums, and a fixed number of scores. Products and sums are in float32 (float64 for float64 inputs),
and the same input gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from .cpu_pieces import MAX_COLUMNS, MAX_PAIRS, Columns, Piece, masks_of
from .layout import empty_like_layout

_MAX_SCORES = 1 << 21
"""Most scores held at a time, over all heads."""

# PyTorch's own kernel. None where a build lacks it.
_flash: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _take(tensor: Tensor, columns: Columns) -> Tensor:
    """``tensor[:, columns]``, a view if ``columns`` is a slice."""
    if isinstance(columns, slice):
        return tensor[:, columns]
    return tensor.index_select(1, columns)


def _accumulate(tensor: Tensor, columns: Columns, left: Tensor, right: Tensor) -> None:
    """``tensor[:, columns] += left @ right``."""
    if isinstance(columns, slice):
        tensor[:, columns].baddbmm_(left, right)
    else:
        tensor.index_add_(1, columns, left @ right)


@dataclass(frozen=True)
class _Heads:
    """What one batch row and its heads that share a mask compute with.

    ``query [H, Q, D]`` is as given; ``key`` and ``value`` ``[H / group, K, *]`` are in the dtype
    of the sums.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float

    @property
    def group(self) -> int:
        return self.query.shape[0] // self.key.shape[0]

    def rows(self, tensor: Tensor, rows: slice) -> Tensor:
        """``tensor [H, Q, *]`` at ``rows`` as ``[H / group, group * r, *]``.

        The heads of a group stand under each other, so that one product serves them all.
        """
        return tensor[:, rows].reshape(self.key.shape[0], -1, tensor.shape[-1])

    def unrows(self, rows: Tensor) -> Tensor:
        """The inverse of :meth:`rows`: ``[H, r, *]``."""
        return rows.view(self.query.shape[0], -1, rows.shape[-1])

    def scores(self, piece: Piece, exact: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Scores of a piece, hidden ones -inf, with its scaled query rows and key columns.

        Unless ``exact``, hidden scores have -inf added, much faster than being replaced, and a
        hidden NaN or +inf comes out as NaN.
        """
        key = _take(self.key, piece.columns)
        query = self.rows(self.query, piece.rows).to(key.dtype) * self.scale
        scores = query @ key.mT
        view = scores.view(self.key.shape[0], self.group, -1, key.shape[1])
        for columns, bias in piece.bias:
            if exact:
                view[..., columns].masked_fill_(bias < 0, float("-inf"))
            else:
                view[..., columns] += bias
        return scores, query, key

    def attend(self, piece: Piece, exact: bool) -> tuple[Tensor, Tensor]:
        """Attention over the columns of a piece: out ``[H, r, Dv]`` and lse ``[H, r]``."""
        scores, _, _ = self.scores(piece, exact)
        largest = scores.amax(-1, keepdim=True)
        weights = scores.softmax(-1)
        out = weights @ _take(self.value, piece.columns)
        # The greatest weight is exp(largest - lse).
        lse = largest - weights.amax(-1, keepdim=True).log_()
        if piece.blind:
            hidden = largest == float("-inf")
            out.masked_fill_(hidden, 0.0)
            lse.masked_fill_(hidden, float("-inf"))
        return self.unrows(out), self.unrows(lse).squeeze(-1)

    def backward(
        self,
        piece: Piece,
        grad_out: Tensor,
        lse: Tensor,
        delta: Tensor,
        sums: tuple[Tensor, Tensor, Tensor],
        exact: bool,
    ) -> None:
        """Add the gradients of a piece to the sums, that of query before its scale."""
        scores, query, key = self.scores(piece, exact)
        value, grad = _take(self.value, piece.columns), self.rows(grad_out, piece.rows)
        weights = scores.sub_(self.rows(lse, piece.rows)).exp_()
        grad_scores = (grad @ value.mT).sub_(self.rows(delta, piece.rows)).mul_(weights)
        sums[0][:, piece.rows] += self.unrows(grad_scores @ key)
        _accumulate(sums[1], piece.columns, grad_scores.mT, query)
        _accumulate(sums[2], piece.columns, weights.mT, grad)


def _merge(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Make attention over one set of keys that over its union with another, disjoint set."""
    weight = torch.sigmoid(new_lse - lse)
    # -inf minus -inf, where neither set has a visible key, is no weight.
    weight.masked_fill_(new_lse == float("-inf"), 0.0)
    out.lerp_(new_out.to(out.dtype), weight.unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, new_lse))


def _flash_attend(
    query: Tensor, key: Tensor, value: Tensor, piece: Piece, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention over the columns of a rectangle by PyTorch's own kernel, on the call's inputs."""
    bias = None
    if piece.bias:
        bias = piece.bias[0][1].to(torch.promote_types(query.dtype, torch.float32))
    out, lse = _flash(
        query[None, :, piece.rows],
        _take(key, piece.columns)[None],
        _take(value, piece.columns)[None],
        attn_mask=bias,
        scale=scale,
    )
    out, lse = out[0], lse[0]
    if piece.blind:
        # The kernel gives such rows lse 0.
        assert bias is not None
        hidden = (bias == float("-inf")).all(1)
        out.masked_fill_(hidden.unsqueeze(-1), 0.0)
        lse.masked_fill_(hidden, float("-inf"))
    return out, lse


def _flash_fits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether PyTorch's own kernel computes this call: it takes one head dim for all three."""
    dense = all(tensor.stride(-1) == 1 for tensor in (query, key, value))
    return _flash is not None and dense and query.shape[-1] == value.shape[-1]


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
    flash = _flash_fits(query, key, value)
    pairs = max(_MAX_SCORES // max(query.shape[1], 1), 1)
    for exact in (False, True):
        out.zero_()
        lse.fill_(float("-inf"))
        for mask, places in masks:
            for piece in mask.rows():
                for b, h, g in places:
                    heads = _Heads(query[b, h], keys[b, g], values[b, g], scale)
                    target = out[b, h, piece.rows], lse[b, h, piece.rows]
                    found = heads.attend(piece, exact)
                    if piece.first:
                        target[0].copy_(found[0])
                        target[1].copy_(found[1])
                    else:
                        _merge(*target, *found)
            for full in (False, True):
                by_flash = flash and (full or not exact)
                most = (mask.q_len * mask.kv_len if full else MAX_PAIRS) if by_flash else pairs
                columns = mask.kv_len if by_flash else MAX_COLUMNS
                for piece in mask.rectangles(full, most, columns):
                    for b, h, g in places:
                        if by_flash:
                            inputs = (query[b, h], key[b, g], value[b, g])
                            found = _flash_attend(*inputs, piece, scale)
                        else:
                            heads = _Heads(query[b, h], keys[b, g], values[b, g], scale)
                            found = heads.attend(piece, exact)
                        _merge(out[b, h, piece.rows], lse[b, h, piece.rows], *found)
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
                mask.rows(),
                mask.rectangles(False, pairs, MAX_COLUMNS),
                mask.rectangles(True, pairs, MAX_COLUMNS),
            )
            for piece in pieces:
                for b, h, g in places:
                    heads = _Heads(query[b, h], keys[b, g], values[b, g], scale)
                    into = (sums[0][b, h], sums[1][b, g], sums[2][b, g])
                    rows = (grad_out[b, h], lse[b, h], delta[b, h])
                    heads.backward(piece, *rows, into, exact)
        if not any(bool(each.isnan().any()) for each in sums):
            break
    sums[0] *= scale
    dq, dk, dv = (
        empty_like_layout(tensor, tuple(tensor.shape), tensor.dtype).copy_(each)
        for tensor, each in zip(inputs, sums, strict=True)
    )
    return dq, dk, dv
