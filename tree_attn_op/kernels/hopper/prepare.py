"""Small kernels that put lists and statistics into the form that the large ones want."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2E = tl.constexpr(1.4426950408889634)
_BLOCK = 128


@triton.jit
def _ranks(first, second, mine, cost, count, stride, BLOCK: tl.constexpr):
    """Places of the tiles ``mine`` by falling sum of two counts, equal ones in their own order.

    ``first`` and ``second`` point at the counts of tile 0, ``cost`` is the sum for ``mine``.
    """
    rank = tl.zeros([BLOCK], tl.int32)
    for start in range(0, count, BLOCK):
        other = start + tl.arange(0, BLOCK)
        there = other < count
        other_cost = tl.load(first + other * stride, there, 0)
        other_cost += tl.load(second + other * stride, there, 0)
        heavier = other_cost[None, :] > cost[:, None]
        earlier = (other_cost[None, :] == cost[:, None]) & (other[None, :] < mine[:, None])
        rank += tl.sum(((heavier | earlier) & there[None, :]).to(tl.int32), 1)
    return rank


@triton.jit
def _rank_kernel(first, second, order, count, stride, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64) * count
    mine = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = mine < count
    first += row * stride
    second += row * stride
    cost = tl.load(first + mine * stride, valid, 0) + tl.load(second + mine * stride, valid, 0)
    rank = _ranks(first, second, mine, cost, count, stride, BLOCK)
    tl.store(order + row + rank, mine, valid)


def heaviest_first(first: Tensor, second: Tensor) -> Tensor:
    """The order of tiles by falling sum of two counts; equal ones in their own order.

    Args:
        first, second: int32 ``[batch, tiles]``, of equal strides (``tiles`` may be strided).

    Returns:
        int32 ``[batch, tiles]``: the number of the heaviest tile, of the next, and so on.
    """
    batch, count = first.shape
    order = torch.empty((batch, count), dtype=torch.int32, device=first.device)
    grid = (triton.cdiv(count, _BLOCK), batch)
    _rank_kernel[grid](first, second, order, count, first.stride(1), BLOCK=_BLOCK)
    return order


@triton.jit
def _schedule_kernel(
    partial_counts, partial_tiles, full_counts, full_tiles, schedule, count, width,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64) * count
    mine = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = mine < count
    partials = tl.load(partial_counts + row + mine, valid, 0)
    fulls = tl.load(full_counts + row + mine, valid, 0)
    rank = _ranks(partial_counts + row, full_counts + row, mine, partials + fulls, count, 1, BLOCK)
    # The first pair: an odd count gives it its first tile, two even ones give it two of one kind.
    even = ((partials | fulls) & 1) == 0
    both = tl.where(partials > 0, 1, tl.where(fulls > 0, 2, 0))
    state_0 = tl.where(even, both, (fulls & 1) * 2)
    state_1 = tl.where(even, both, partials & 1)
    list_row = (row + mine) * width
    tile_0 = tl.load(partial_tiles + list_row, state_0 == 1, 0)
    tile_0 += tl.load(full_tiles + list_row, state_0 == 2, 0)
    second = even.to(tl.int32)
    tile_1 = tl.load(partial_tiles + list_row + second, state_1 == 1, 0)
    tile_1 += tl.load(full_tiles + list_row + second, state_1 == 2, 0)
    entry = schedule + (row + rank) * 8
    tl.store(entry, mine, valid)
    tl.store(entry + 1, partials, valid)
    tl.store(entry + 2, fulls, valid)
    tl.store(entry + 3, tile_0 * 4 + state_0, valid)
    tl.store(entry + 4, tile_1 * 4 + state_1, valid)


def row_schedule(
    partial_counts: Tensor, partial_tiles: Tensor, full_counts: Tensor, full_tiles: Tensor
) -> Tensor:
    """The query tiles by falling cost, each with what a block must know before it visits one.

    In one place, so that a block gets it with one wait for memory, a row ahead of its use.

    Args:
        partial_counts, full_counts: int32 ``[batch, q_tiles]``, dense.
        partial_tiles, full_tiles: int32 ``[batch, q_tiles, kv_tiles]``, dense.

    Returns:
        int32 ``[batch, q_tiles, 8]``; equal costs in the order of tiles. An entry is
        ``(q_tile, partials, fulls, first_0, first_1, ...)``, the last three unused. The first pair
        of key tiles (see ``split_pairs`` in ``schedule.py``) is ``4 * tile + state``, where a
        state is 0 for a dead tile (its number is 0), 1 for a partial and 2 for a full one.
    """
    batch, count, width = partial_tiles.shape
    schedule = torch.empty((batch, count, 8), dtype=torch.int32, device=partial_tiles.device)
    grid = (triton.cdiv(count, _BLOCK), batch)
    _schedule_kernel[grid](
        partial_counts, partial_tiles, full_counts, full_tiles, schedule, count, width,
        BLOCK=_BLOCK,
    )  # fmt: skip
    return schedule


@triton.jit
def _scatter_states(states, counts, tiles, row, width, STATE: tl.constexpr, BLOCK: tl.constexpr):
    count = tl.load(counts + row)
    for start in range(0, width, BLOCK):
        index = start + tl.arange(0, BLOCK)
        valid = index < count
        tile = tl.load(tiles + row.to(tl.int64) * width + index, valid, 0)
        tl.store(states + tile, tl.full([BLOCK], STATE, tl.int8), valid)


@triton.jit
def _merge_kernel(
    counts, tiles, full_counts, full_tiles, scratch, merged_counts, entries,
    key_tiles, key_pairs, width, BLOCK: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0)
    batch = tl.program_id(1)
    merged_row = batch * key_pairs + pair
    states = scratch + merged_row.to(tl.int64) * 2 * width
    for start in range(0, 2 * width, BLOCK):
        index = start + tl.arange(0, BLOCK)
        tl.store(states + index, tl.zeros([BLOCK], tl.int8), index < 2 * width)
    tl.debug_barrier()
    for half in tl.static_range(2):
        key_tile = 2 * pair + half
        if key_tile < key_tiles:
            row = batch * key_tiles + key_tile
            _scatter_states(states + half * width, counts, tiles, row, width, 1, BLOCK)
            _scatter_states(states + half * width, full_counts, full_tiles, row, width, 2, BLOCK)
    tl.debug_barrier()
    mixed_seen = 0
    full_seen = 0
    out = entries + merged_row.to(tl.int64) * width
    for start in range(0, width, BLOCK):
        index = width - 1 - start - tl.arange(0, BLOCK)
        valid = index >= 0
        state_0 = tl.load(states + index, valid, 0).to(tl.int32)
        state_1 = tl.load(states + width + index, valid, 0).to(tl.int32)
        full = ((state_0 == 2) & (state_1 == 2)).to(tl.int32)
        mixed = ((state_0 + state_1 > 0) & (full == 0)).to(tl.int32)
        code = index * 16 + state_0 * 4 + state_1
        tl.store(out + mixed_seen + tl.cumsum(mixed, 0) - 1, code, mixed > 0)
        tl.store(out + width - (full_seen + tl.cumsum(full, 0)), code, full > 0)
        mixed_seen += tl.sum(mixed, 0)
        full_seen += tl.sum(full, 0)
    tl.store(merged_counts + 2 * merged_row, mixed_seen)
    tl.store(merged_counts + 2 * merged_row + 1, full_seen)


def merge_lists(
    counts: Tensor, tiles: Tensor, full_counts: Tensor, full_tiles: Tensor
) -> tuple[Tensor, Tensor]:
    """Query-side lists of single key tiles as lists of pairs of adjacent key tiles.

    Args:
        counts, full_counts: int32 ``[batch, key_tiles]``, dense.
        tiles, full_tiles: int32 ``[batch, key_tiles, query_tiles]``, dense.

    Returns:
        ``(counts, entries)``, int32 ``[batch, key_pairs, 2]`` and ``[batch, key_pairs,
        query_tiles]``. An entry is ``16 * query_tile + 4 * state + state`` with the states of the
        two key tiles: 0 hidden, 1 partial, 2 full. ``counts[..., 0]`` entries from the front are
        all that are not full for both, ``counts[..., 1]`` from the back are full for both. Both
        run from the last query tile to the first: keys of a branch have their last descendants
        in common, so that blocks that work on them side by side read the same queries.
    """
    batch, key_tiles, width = tiles.shape
    key_pairs = (key_tiles + 1) // 2
    device = tiles.device
    scratch = torch.empty((batch, key_pairs, 2, width), dtype=torch.int8, device=device)
    merged = torch.empty((batch, key_pairs, 2), dtype=torch.int32, device=device)
    entries = torch.empty((batch, key_pairs, width), dtype=torch.int32, device=device)
    _merge_kernel[(key_pairs, batch)](
        counts, tiles, full_counts, full_tiles, scratch, merged, entries,
        key_tiles, key_pairs, width, BLOCK=256,
    )  # fmt: skip
    return merged, entries


@triton.jit
def _stats_kernel(
    out, grad_out, lse, grad_lse, stats,
    out_batch, out_head, out_row, out_column, grad_batch, grad_head, grad_row, grad_column,
    lse_grad_batch, lse_grad_head, lse_grad_row, heads, q_len, width, tiles,
    HAS_LSE_GRAD: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    row = tile * 64 + tl.arange(0, 64)
    column = tl.arange(0, WIDTH)
    inside = row < q_len
    mask = inside[:, None] & (column[None, :] < width)
    offset = row.to(tl.int64)[:, None]
    o = tl.load(
        out + batch * out_batch + head * out_head + offset * out_row
        + column[None, :] * out_column,
        mask, 0.0,
    ).to(tl.float32)  # fmt: skip
    do = tl.load(
        grad_out + batch * grad_batch + head * grad_head + offset * grad_row
        + column[None, :] * grad_column,
        mask, 0.0,
    ).to(tl.float32)  # fmt: skip
    row_lse = tl.load(lse + (batch * heads + head) * q_len + row, inside, -float("inf"))
    seen = row_lse != -float("inf")
    delta = tl.sum(o * do, 1)
    if HAS_LSE_GRAD:
        pointer = grad_lse + batch * lse_grad_batch + head * lse_grad_head + row * lse_grad_row
        delta -= tl.load(pointer, inside, 0.0)
    base = stats + ((batch * heads + head) * tiles + tile) * 128 + tl.arange(0, 64)
    tl.store(base, tl.where(seen, row_lse * _LOG2E, float("inf")))
    tl.store(base + 64, tl.where(seen, delta, 0.0))


def row_statistics(
    out: Tensor, grad_out: Tensor, lse: Tensor, grad_lse: Tensor | None, tiles: int
) -> Tensor:
    """What the backward kernels need of each query row, in tiles of 64 rows.

    Args:
        out, grad_out: ``[B, H, Q, D]``, any strides.
        lse: float32 ``[B, H, Q]``, base e, dense; ``grad_lse``: the same shape or None.
        tiles: number of tiles to write, at least ``ceil(Q / 64)``.

    Returns:
        float32 ``[B, H, tiles, 2, 64]``: lse in base 2, and the sum of ``out * grad_out`` minus
        ``grad_lse``. A row that sees nothing, or lies behind the last, has lse +inf, so that every
        probability recomputed from it is 0.
    """
    batch, heads, q_len, width = out.shape
    stats = torch.empty((batch, heads, tiles, 2, 64), dtype=torch.float32, device=out.device)
    lse_grad = lse if grad_lse is None else grad_lse
    _stats_kernel[(tiles, batch * heads)](
        out, grad_out, lse, lse_grad, stats, *out.stride(), *grad_out.stride(),
        *lse_grad.stride(), heads, q_len, width, tiles,
        HAS_LSE_GRAD=grad_lse is not None, WIDTH=triton.next_power_of_2(width),
    )  # fmt: skip
    return stats
