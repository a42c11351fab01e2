"""Block lists from a predicate, on the device: a few small launches, no host synchronisation.

``tile_bounds`` reduces each value row to its least and greatest value per tile: O(length).
``list_tiles`` decides the state of each tile from those bounds in three-valued logic and writes
the lists in one go: O(tiles). With lists of coarser blocks given, it refines them: a tile inherits
EMPTY and FULL from its block, and the predicate decides inside PARTIAL blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tree_attn_op.kernels.portable.tile_states import tile_states
from tree_attn_op.predicate import Predicate

_INT64_MIN = tl.constexpr(-(2**63))
_INT64_MAX = tl.constexpr(2**63 - 1)

_CHUNK = 1024
"""Most tiles that one program decides at a time."""


@triton.jit
def tile_bounds(
    values,
    bounds,
    length,
    num_tiles,
    stride_batch,
    stride_row,
    stride_token,
    TILE: tl.constexpr,
    PADDED: tl.constexpr,
):
    """bounds[batch, row, 0 or 1, tile] = least, greatest of values[batch, row, tokens of tile]."""
    tile = tl.program_id(0)
    row = tl.program_id(1)
    batch = tl.program_id(2)
    lane = tl.arange(0, PADDED)
    token = tile.to(tl.int64) * TILE + lane
    inside = (lane < TILE) & (token < length)
    base = values + batch.to(tl.int64) * stride_batch + row.to(tl.int64) * stride_row
    value = tl.load(base + token * stride_token, inside, other=0).to(tl.int64)
    least = tl.min(tl.where(inside, value, _INT64_MAX), 0)
    greatest = tl.max(tl.where(inside, value, _INT64_MIN), 0)
    at = (batch.to(tl.int64) * tl.num_programs(1) + row) * 2 * num_tiles + tile
    tl.store(bounds + at, least)
    tl.store(bounds + at + num_tiles, greatest)


@triton.jit
def _mark(states, counts, indices, at, num_columns, width, value, CHUNK: tl.constexpr):
    """states[column] = value for the columns listed in row ``at``; those out of range are none."""
    count = tl.load(counts + at)
    lane = tl.arange(0, CHUNK)
    for start in range(0, width, CHUNK):
        listed = (start + lane < count) & (start + lane < width)
        column = tl.load(indices + at * width + start + lane, listed, other=-1)
        tl.store(states + column, value, (column >= 0) & (column < num_columns))


@triton.jit
def expand_lists(
    counts,
    indices,
    full_counts,
    full_indices,
    states,
    num_rows,
    num_columns,
    width,
    full_width,
    HAS_FULL: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """states[..., row, column] = 0, 1 or 2 for unlisted, partial and full blocks."""
    at = tl.program_id(1).to(tl.int64) * num_rows + tl.program_id(0)
    states += at * num_columns
    lane = tl.arange(0, CHUNK)
    for start in range(0, num_columns, CHUNK):
        tl.store(states + start + lane, 0, start + lane < num_columns)
    tl.debug_barrier()  # the marks must land after the zeros of other threads
    _mark(states, counts, indices, at, num_columns, width, 1, CHUNK)
    if HAS_FULL:
        tl.debug_barrier()
        _mark(states, full_counts, full_indices, at, num_columns, full_width, 2, CHUNK)


@triton.jit
def list_tiles(
    q_bounds,
    k_bounds,
    coarse,
    counts,
    indices,
    full_counts,
    full_indices,
    q_len,
    kv_len,
    num_q,
    num_k,
    num_coarse_k,
    heads,
    stride_q_batch,
    stride_k_batch,
    stride_coarse_batch,
    stride_coarse_head,
    P: tl.constexpr,
    WRAPS_AT_32: tl.constexpr,
    BY_QUERY: tl.constexpr,
    Q_TILE: tl.constexpr,
    K_TILE: tl.constexpr,
    Q_RATIO: tl.constexpr,
    K_RATIO: tl.constexpr,
    HAS_COARSE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The partial and full lists of one row of tiles: a query tile's keys, or the other way round.

    Indices ascend; behind the listed ones stand the others, ascending too, as flex's builder
    leaves them, so that every element is written.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    batch = tl.program_id(2)
    q_bounds += batch.to(tl.int64) * stride_q_batch
    k_bounds += batch.to(tl.int64) * stride_k_batch
    coarse += batch.to(tl.int64) * stride_coarse_batch + head.to(tl.int64) * stride_coarse_head
    if BY_QUERY:
        num_rows = num_q
        num_columns = num_k
    else:
        num_rows = num_k
        num_columns = num_q
    at = (batch.to(tl.int64) * heads + head) * num_rows + row
    indices += at * num_columns
    full_indices += at * num_columns
    lane = tl.arange(0, CHUNK)
    here = tl.full((1,), 0, tl.int32) + row
    always = here >= 0
    num_partial = 0
    num_full = 0
    for start in range(0, num_columns, CHUNK):
        column = start + lane
        inside = column < num_columns
        # fmt: off
        if BY_QUERY:
            state = tile_states(
                P, WRAPS_AT_32, here, column, always, inside, q_bounds, k_bounds, coarse,
                q_len, kv_len, num_q, num_k, num_coarse_k,
                Q_TILE, K_TILE, Q_RATIO, K_RATIO, HAS_COARSE,
            )
        else:
            state = tile_states(
                P, WRAPS_AT_32, column, here, inside, always, q_bounds, k_bounds, coarse,
                q_len, kv_len, num_q, num_k, num_coarse_k,
                Q_TILE, K_TILE, Q_RATIO, K_RATIO, HAS_COARSE,
            )
        # fmt: on
        num_partial += tl.sum((inside & (state == 1)).to(tl.int32), 0)
        num_full += tl.sum((inside & (state == 2)).to(tl.int32), 0)
    tl.store(counts + at, num_partial)
    tl.store(full_counts + at, num_full)
    seen_partial = 0
    seen_full = 0
    for start in range(0, num_columns, CHUNK):
        column = start + lane
        inside = column < num_columns
        # fmt: off
        if BY_QUERY:
            state = tile_states(
                P, WRAPS_AT_32, here, column, always, inside, q_bounds, k_bounds, coarse,
                q_len, kv_len, num_q, num_k, num_coarse_k,
                Q_TILE, K_TILE, Q_RATIO, K_RATIO, HAS_COARSE,
            )
        else:
            state = tile_states(
                P, WRAPS_AT_32, column, here, inside, always, q_bounds, k_bounds, coarse,
                q_len, kv_len, num_q, num_k, num_coarse_k,
                Q_TILE, K_TILE, Q_RATIO, K_RATIO, HAS_COARSE,
            )
        # fmt: on
        partial = (inside & (state == 1)).to(tl.int32)
        full = (inside & (state == 2)).to(tl.int32)
        before = seen_partial + tl.cumsum(partial, 0) - partial
        place = tl.where(partial == 1, before, num_partial + column - before)
        tl.store(indices + place, column, inside)
        before = seen_full + tl.cumsum(full, 0) - full
        place = tl.where(full == 1, before, num_full + column - before)
        tl.store(full_indices + place, column, inside)
        seen_partial += tl.sum(partial, 0)
        seen_full += tl.sum(full, 0)


def block_lists(
    q_vals: Tensor,
    k_vals: Tensor,
    predicate: str,
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
) -> tuple[Tensor, ...]:
    """The op ``tree_attn_op::block_lists`` for a GPU; see DESIGN.md for arguments and results."""
    device = q_vals.device
    program = Predicate.parse(predicate).program
    num_q = triton.cdiv(q_len, new_q_block_size)
    num_k = triton.cdiv(kv_len, new_kv_block_size)
    batch = max(q_vals.shape[0], k_vals.shape[0])
    heads = 1
    if kv_num_blocks is not None:
        batch = max(batch, kv_num_blocks.shape[0])
        heads = kv_num_blocks.shape[1]

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    by_query = (
        empty(batch, heads, num_q),
        empty(batch, heads, num_q, num_k),
        empty(batch, heads, num_q),
        empty(batch, heads, num_q, num_k),
    )
    by_key = (
        empty(batch, heads, num_k),
        empty(batch, heads, num_k, num_q),
        empty(batch, heads, num_k),
        empty(batch, heads, num_k, num_q),
    )
    if batch * heads * num_q * num_k == 0:
        for counts in (by_query[0], by_query[2], by_key[0], by_key[2]):
            counts.zero_()
        return by_query + by_key

    def bounds_of(values: Tensor, length: int, tile: int, num_tiles: int) -> Tensor:
        rows = values.shape[1]
        bounds = empty(values.shape[0], rows, 2, num_tiles, dtype=torch.int64)
        if rows:
            tile_bounds[(num_tiles, rows, values.shape[0])](
                values,
                bounds,
                length,
                num_tiles,
                *values.stride(),
                TILE=tile,
                PADDED=triton.next_power_of_2(tile),
            )
        return bounds

    q_bounds = bounds_of(q_vals, q_len, new_q_block_size, num_q)
    k_bounds = bounds_of(k_vals, kv_len, new_kv_block_size, num_k)

    has_coarse = kv_num_blocks is not None
    coarse_k = stride_coarse_batch = stride_coarse_head = 0
    coarse = by_query[0]  # not read
    if kv_num_blocks is not None and kv_indices is not None:
        coarse_q = triton.cdiv(q_len, q_block_size)
        coarse_k = triton.cdiv(kv_len, kv_block_size)
        coarse = empty(*kv_num_blocks.shape, coarse_k, dtype=torch.int8)
        has_full = full_kv_num_blocks is not None and full_kv_indices is not None
        full = (full_kv_num_blocks, full_kv_indices) if has_full else (kv_num_blocks, kv_indices)
        expand_lists[(coarse_q, kv_num_blocks.shape[0] * heads)](
            kv_num_blocks.contiguous(),
            kv_indices.contiguous(),
            *(tensor.contiguous() for tensor in full if tensor is not None),
            coarse,
            coarse_q,
            coarse_k,
            kv_indices.shape[-1],
            full[1].shape[-1] if full[1] is not None else 0,
            HAS_FULL=has_full,
            CHUNK=min(_CHUNK, triton.next_power_of_2(coarse_k)),
        )
        stride_coarse_batch = coarse.stride(0) if coarse.shape[0] > 1 else 0
        stride_coarse_head = coarse.stride(1)

    for lists, rows, columns, is_by_query in (
        (by_query, num_q, num_k, True),
        (by_key, num_k, num_q, False),
    ):
        list_tiles[(rows, heads, batch)](
            q_bounds,
            k_bounds,
            coarse,
            *lists,
            q_len,
            kv_len,
            num_q,
            num_k,
            coarse_k,
            heads,
            q_bounds.stride(0) if q_vals.shape[0] > 1 else 0,
            k_bounds.stride(0) if k_vals.shape[0] > 1 else 0,
            stride_coarse_batch,
            stride_coarse_head,
            P=program,
            WRAPS_AT_32=q_vals.dtype is torch.int32,
            BY_QUERY=is_by_query,
            Q_TILE=new_q_block_size,
            K_TILE=new_kv_block_size,
            Q_RATIO=q_block_size // new_q_block_size,
            K_RATIO=kv_block_size // new_kv_block_size,
            HAS_COARSE=has_coarse,
            CHUNK=min(_CHUNK, max(16, triton.next_power_of_2(columns))),
        )
    return by_query + by_key
