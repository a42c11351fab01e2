"""Dense oracle: the op's meaning in a few lines of differentiable torch, on any device.

Quadratic in memory. Tests compare the other implementations with it, in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from .predicate import Predicate


def reference_attention(
    query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over the allowed pairs; differentiable by autograd.

    Args:
        query: ``[B, Hq, Q, D]``, floating.
        key: ``[B, Hkv, K, D]``; Hkv divides Hq.
        value: ``[B, Hkv, K, Dv]``.
        allowed: bool ``[B or 1, Q, K]`` or ``[B or 1, Hq or 1, Q, K]``.
        scale: of the scores; None: ``D ** -0.5``.

    Returns:
        ``out [B, Hq, Q, Dv]`` and ``lse [B, Hq, Q]`` (base e). A row that sees nothing has out 0,
        lse -inf and gradients 0.
    """
    if allowed.dim() == 3:
        allowed = allowed.unsqueeze(1)
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    sees = allowed.any(-1, keepdim=True)
    # A blind row is computed with finite scores and masked afterwards, so that no NaN arises
    # whose gradient would be NaN too.
    scores = scores.masked_fill(~allowed & sees, float("-inf"))
    if scores.shape[-1] == 0:
        shape = scores.shape[:-1]
        zero = query.sum(-1) * 0
        return query.new_zeros(*shape, value.shape[-1]) + zero.unsqueeze(-1), zero - torch.inf
    lse = scores.logsumexp(-1)
    out = (scores - lse.unsqueeze(-1)).exp() @ value
    return (
        out.masked_fill(~sees, 0.0),
        lse.masked_fill(~sees.squeeze(-1), float("-inf")),
    )


def allowed_from_lists(
    predicate: Predicate,
    q_vals: Tensor,
    k_vals: Tensor,
    lists: Sequence[Tensor | None],
    q_block_size: int,
    kv_block_size: int,
    q_len: int,
    kv_len: int,
) -> Tensor:
    """The exact meaning of block lists with a predicate, pair by pair.

    Args:
        predicate: evaluated on the pairs of listed partial blocks.
        q_vals, k_vals: int ``[B or 1, rows, length]``.
        lists: ``kv_num_blocks, kv_indices`` and, optionally, ``full_kv_num_blocks,
            full_kv_indices`` (None where absent); further entries are ignored.
        q_block_size, kv_block_size: tokens a block.
        q_len, kv_len: lengths.

    Returns:
        bool ``[Bm, Hm, q_len, kv_len]``.
    """
    dense = predicate.dense(q_vals, k_vals, q_len, kv_len).unsqueeze(1)
    assert lists[0] is not None
    batch, heads, rows = lists[0].shape
    allowed = torch.zeros(
        max(batch, dense.shape[0]), heads, q_len, kv_len, dtype=torch.bool, device=dense.device
    )
    for full, (number, indices) in enumerate((lists[:2], (*lists[2:4], None, None)[:2])):
        if number is None or indices is None:
            continue
        for b, h, row in product(range(allowed.shape[0]), range(heads), range(rows)):
            at = (b if batch > 1 else 0, h, row)
            q = slice(row * q_block_size, (row + 1) * q_block_size)
            for column in indices[at][: int(number[at])].tolist():
                k = slice(column * kv_block_size, (column + 1) * kv_block_size)
                pairs = dense[b if dense.shape[0] > 1 else 0, 0, q, k]
                allowed[b, h, q, k] = True if full else pairs
    return allowed
