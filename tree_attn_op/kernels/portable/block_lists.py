"""Block lists from a predicate, on the device: two small launches, no host synchronisation.

A third launch comes with lists to refine. What the launches do: ``block_list_kernels.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tree_attn_op.kernels.configs import current
from tree_attn_op.kernels.portable.block_list_kernels import expand_lists, list_tiles, tile_bounds
from tree_attn_op.predicate import Predicate

_CHUNK = 1024
"""Most tiles, or tokens of a tile, that one program looks at at a time."""


def block_lists(
    q_vals: Tensor,
    k_vals: Tensor,
    predicate: Predicate,
    q_len: int,
    kv_len: int,
    kv_num_blocks: Tensor | None,
    kv_indices: Tensor | None,
    full_kv_num_blocks: Tensor | None,
    full_kv_indices: Tensor | None,
    q_block_size: int,
    kv_block_size: int,
    new_q_block_size: int,
    new_kv_block_size: int,
    *,
    batch: int = 1,
    heads: int = 1,
    full_at_ends: bool = True,
) -> tuple[Tensor, ...]:
    """The op ``tree_attn_op::block_lists`` for a GPU; see DESIGN.md for arguments and results.

    Lengths and the batch are at least 1.

    Args:
        batch, heads: of the lists, where neither values nor given lists have more.
        full_at_ends: whether a tile that runs over an end may be listed as full. It means the
            same; flex's builder lists it as partial.
    """
    device = q_vals.device
    num_q = _cdiv(q_len, new_q_block_size)
    num_k = _cdiv(kv_len, new_kv_block_size)
    q_batch, q_rows, _ = q_vals.shape
    k_batch, k_rows, _ = k_vals.shape
    batch = max(batch, q_batch, k_batch)
    if kv_num_blocks is not None:
        batch = max(batch, kv_num_blocks.shape[0])
        heads = kv_num_blocks.shape[1]

    lists = [
        torch.empty(shape, dtype=torch.int32, device=device)
        for shape in (
            *((batch, heads, num_q), (batch, heads, num_q, num_k)) * 2,
            *((batch, heads, num_k), (batch, heads, num_k, num_q)) * 2,
        )
    ]
    if heads == 0:
        return tuple(lists)

    q_items, k_items = q_batch * q_rows * num_q, k_batch * k_rows * num_k
    bounds = torch.empty(2 * (q_items + k_items), dtype=torch.int64, device=device)
    with current(device):
        if q_items or k_items:
            tile_bounds[(q_items + k_items,)](
                q_vals,
                k_vals,
                bounds,
                q_items,
                q_len,
                kv_len,
                *q_vals.stride(),
                *k_vals.stride(),
                q_rows,
                k_rows,
                new_q_block_size,
                new_kv_block_size,
                min(_CHUNK, _power_of_2(new_q_block_size)),
                min(_CHUNK, _power_of_2(new_kv_block_size)),
            )
        coarse = bounds  # not read
        coarse_batch = 0
        if kv_num_blocks is not None and kv_indices is not None:
            full = (full_kv_num_blocks, full_kv_indices)
            coarse = _expanded(kv_num_blocks, kv_indices, *full, _cdiv(kv_len, kv_block_size))
            coarse_batch = coarse.shape[0]
        longest = max(num_q, num_k)
        list_tiles[(num_q + num_k, heads, batch)](
            bounds,
            coarse,
            *lists,
            q_len,
            kv_len,
            predicate.program,
            q_vals.dtype is torch.int32,
            q_rows,
            k_rows,
            q_batch > 1,
            k_batch > 1,
            new_q_block_size,
            new_kv_block_size,
            q_block_size // new_q_block_size,
            kv_block_size // new_kv_block_size,
            coarse_batch > 0,
            coarse_batch > 1,
            full_at_ends,
            min(_CHUNK, max(16, _power_of_2(longest))),
            longest <= _CHUNK,
        )
    return tuple(lists)


def _expanded(
    num_blocks: Tensor,
    indices: Tensor,
    full_num_blocks: Tensor | None,
    full_indices: Tensor | None,
    columns: int,
) -> Tensor:
    """What the lists say of every block: int8 states ``[batch, heads, rows, columns]``."""
    batch, heads, rows = num_blocks.shape
    states = torch.empty((batch, heads, rows, columns), dtype=torch.int8, device=indices.device)
    has_full = full_num_blocks is not None and full_indices is not None
    if full_num_blocks is None or full_indices is None:
        full_num_blocks, full_indices = num_blocks, indices  # not read
    expand_lists[(rows, batch * heads)](
        num_blocks.contiguous(),
        indices.contiguous(),
        full_num_blocks.contiguous(),
        full_indices.contiguous(),
        states,
        rows,
        columns,
        indices.shape[-1],
        full_indices.shape[-1],
        HAS_FULL=has_full,
        CHUNK=min(_CHUNK, _power_of_2(columns)),
    )
    return states


def _cdiv(length: int, block: int) -> int:
    return (length + block - 1) // block


def _power_of_2(size: int) -> int:
    """The least power of 2 that is no less than ``size``, which is at least 1."""
    return 1 << (size - 1).bit_length()
