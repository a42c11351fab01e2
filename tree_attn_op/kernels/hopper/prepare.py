"""Small kernels that put lists and statistics into the form that the large ones want.

One launch before the forward (``RowSchedule``), one before the backward (``BackwardPreparation``),
whose programs do different things that do not wait for each other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launching import Launch, Output

_LOG2E = tl.constexpr(1.4426950408889634)
_BLOCK = 32
_OTHERS = 128
_OTHERS_IN_BACKWARD = 32  # few registers, for the statistics' sake: they wait for memory
_MERGE_BLOCK = 256

Lists = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""Counts and tiles of partial blocks, then those of full ones, if there are: ``[B, 1, rows]`` and
``[B, 1, rows, columns]``, int32, dense."""


@triton.jit
def _costs(counts, full_counts, item, items, PER: tl.constexpr, HAS_FULL: tl.constexpr):
    """Numbers of listed tiles of the rows ``PER * item`` and on, of ``items`` rows in all."""
    cost = tl.zeros_like(item)
    for part in tl.static_range(PER):
        row = PER * item + part
        cost += tl.load(counts + row, row < items, 0)
        if HAS_FULL:
            cost += tl.load(full_counts + row, row < items, 0)
    return cost


@triton.jit
def _ranks(
    counts, full_counts, mine, cost, count, items,
    PER: tl.constexpr, HAS_FULL: tl.constexpr, BLOCK: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """Places of ``mine`` among ``count`` items by falling cost, equal ones in their own order.

    Returns:
        ``(places, total, heaviest)``: with the sum and the largest of all costs.
    """
    rank = tl.zeros([BLOCK], tl.int32)
    total = 0
    heaviest = 0
    for start in range(0, count, OTHERS):
        other = start + tl.arange(0, OTHERS)
        other_cost = _costs(counts, full_counts, other, items, PER, HAS_FULL)
        heavier = other_cost[None, :] > cost[:, None]
        earlier = (other_cost[None, :] == cost[:, None]) & (other[None, :] < mine[:, None])
        rank += tl.sum(((heavier | earlier) & (other < count)[None, :]).to(tl.int32), 1)
        total += tl.sum(other_cost, 0)
        heaviest = tl.maximum(heaviest, tl.max(other_cost, 0))
    return rank, total, heaviest


@triton.jit
def _heads_together(total, heaviest, blocks):
    """How many K/V heads are worked on at a time.

    One keeps what the blocks read and add to in the L2 cache. But the blocks end together only if
    the heaviest item takes no longer than what is left when it begins, and that is the work of
    the last heads. ``blocks`` is the number of thread blocks for each item of a head and rank.
    """
    return tl.maximum(tl.cdiv(2 * heaviest.to(tl.int64) * blocks, 3 * tl.maximum(total, 1)), 1)


@triton.jit
def _schedule_rows(
    item, counts, tiles, full_counts, full_tiles, schedule, count, width, blocks_a_row, least,
    HAS_FULL: tl.constexpr, BLOCK: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """The ``item``-th BLOCK of all entries of the schedule; see :class:`RowSchedule`."""
    blocks = tl.cdiv(count, BLOCK)
    row = (item // blocks).to(tl.int64) * count
    mine = item % blocks * BLOCK + tl.arange(0, BLOCK)
    valid = mine < count
    counts += row
    full_counts += row
    partials = tl.load(counts + mine, valid, 0)
    fulls = tl.zeros_like(partials)
    if HAS_FULL:
        fulls = tl.load(full_counts + mine, valid, 0)
    rank, total, heaviest = _ranks(
        counts, full_counts, mine, partials + fulls, count, count, 1, HAS_FULL, BLOCK, OTHERS
    )
    # The first pair: an odd count gives it its first tile, two even ones give it two of one kind.
    even = ((partials | fulls) & 1) == 0
    both = tl.where(partials > 0, 1, tl.where(fulls > 0, 2, 0))
    state_0 = tl.where(even, both, (fulls & 1) * 2)
    state_1 = tl.where(even, both, partials & 1)
    list_row = (row + mine) * width
    second = even.to(tl.int32)
    tile_0 = tl.load(tiles + list_row, state_0 == 1, 0)
    tile_1 = tl.load(tiles + list_row + second, state_1 == 1, 0)
    if HAS_FULL:
        tile_0 += tl.load(full_tiles + list_row, state_0 == 2, 0)
        tile_1 += tl.load(full_tiles + list_row + second, state_1 == 2, 0)
    entry = schedule + (row + rank) * 8
    tl.store(entry, mine, valid)
    tl.store(entry + 1, partials, valid)
    tl.store(entry + 2, fulls, valid)
    tl.store(entry + 3, tile_0 * 4 + state_0, valid)
    tl.store(entry + 4, tile_1 * 4 + state_1, valid)
    together = _heads_together(total, heaviest, blocks_a_row)
    tl.store(entry + 5, tl.zeros_like(mine) + together.to(tl.int32), valid)
    tl.store(entry + 6, tl.zeros_like(mine), valid)
    tl.store(entry + 7, tl.zeros_like(mine) + (total >= least * count).to(tl.int32), valid)


@triton.jit(do_not_specialize=["count", "width", "blocks_a_row", "least"])
def row_schedule_kernel(
    counts, tiles, full_counts, full_tiles, schedule, count, width, blocks_a_row, least,
    HAS_FULL: tl.constexpr, BLOCK: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """The work of :class:`RowSchedule`."""
    _schedule_rows(
        tl.program_id(0), counts, tiles, full_counts, full_tiles, schedule, count, width,
        blocks_a_row, least, HAS_FULL, BLOCK, OTHERS,
    )  # fmt: skip


@triton.jit
def _scatter_states(states, counts, tiles, row, width, STATE: tl.constexpr, BLOCK: tl.constexpr):
    count = tl.load(counts + row)
    for start in range(0, width, BLOCK):
        index = start + tl.arange(0, BLOCK)
        valid = index < count
        tile = tl.load(tiles + row.to(tl.int64) * width + index, valid, 0)
        tl.store(states + tile, tl.full([BLOCK], STATE, tl.int8), valid)


@triton.jit
def _merge_pair(
    item, counts, tiles, full_counts, full_tiles, states, merged_counts, entries,
    key_tiles, key_pairs, width, HAS_FULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The lists of the ``item``-th pair of key tiles; see :class:`BackwardPreparation`."""
    pair = item % key_pairs
    batch = item // key_pairs
    states += item.to(tl.int64) * 2 * width
    for start in range(0, 2 * width, BLOCK):
        index = start + tl.arange(0, BLOCK)
        tl.store(states + index, tl.zeros([BLOCK], tl.int8), index < 2 * width)
    tl.debug_barrier()
    for half in tl.static_range(2):
        key_tile = 2 * pair + half
        if key_tile < key_tiles:
            row = batch * key_tiles + key_tile
            mine = states + half * width
            _scatter_states(mine, counts, tiles, row, width, 1, BLOCK)
            if HAS_FULL:
                _scatter_states(mine, full_counts, full_tiles, row, width, 2, BLOCK)
    tl.debug_barrier()
    mixed_seen = 0
    full_seen = 0
    out = entries + item.to(tl.int64) * width
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
    tl.store(merged_counts + 2 * item, mixed_seen)
    tl.store(merged_counts + 2 * item + 1, full_seen)


@triton.jit
def _order_pairs(
    item, counts, full_counts, order, key_tiles, key_pairs, blocks,
    HAS_FULL: tl.constexpr, BLOCK: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """The ``item``-th BLOCK of all key pairs put where they belong in the order."""
    items_a_batch = tl.cdiv(key_pairs, BLOCK)
    batch = item // items_a_batch
    counts += batch.to(tl.int64) * key_tiles
    full_counts += batch.to(tl.int64) * key_tiles
    mine = item % items_a_batch * BLOCK + tl.arange(0, BLOCK)
    cost = _costs(counts, full_counts, mine, key_tiles, 2, HAS_FULL)
    rank, total, heaviest = _ranks(
        counts, full_counts, mine, cost, key_pairs, key_tiles, 2, HAS_FULL, BLOCK, OTHERS
    )
    if item == 0:
        tl.store(order, _heads_together(total, heaviest, blocks).to(tl.int32))
        tl.store(order + 1, 0)
    listed = tl.zeros_like(mine)
    for half in tl.static_range(2):
        tile_cost = _costs(counts, full_counts, 2 * mine + half, key_tiles, 1, HAS_FULL)
        listed += (tile_cost > 0).to(tl.int32) << half
    place = order + 2 + batch.to(tl.int64) * key_pairs + rank
    tl.store(place, mine * 4 + listed, mine < key_pairs)


@triton.jit
def _row_statistics(
    item, out, grad_out, lse, grad_lse, stats,
    out_batch, out_head, out_row, out_column, grad_batch, grad_head, grad_row, grad_column,
    lse_grad_batch, lse_grad_head, lse_grad_row, heads, q_len, width, stats_tiles,
    HAS_LSE_GRAD: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The statistics of the ``item``-th tile of 64 query rows of all heads."""
    tile = item % stats_tiles
    head_row = (item // stats_tiles).to(tl.int64)
    batch = head_row // heads
    head = head_row % heads
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
    row_lse = tl.load(lse + head_row * q_len + row, inside, -float("inf"))
    seen = row_lse != -float("inf")
    delta = tl.sum(o * do, 1)
    if HAS_LSE_GRAD:
        pointer = grad_lse + batch * lse_grad_batch + head * lse_grad_head + row * lse_grad_row
        delta -= tl.load(pointer, inside, 0.0)
    base = stats + (head_row * stats_tiles + tile) * 128 + tl.arange(0, 64)
    tl.store(base, tl.where(seen, row_lse * _LOG2E, float("inf")))
    tl.store(base + 64, tl.where(seen, delta, 0.0))


_SIZES = [
    "batches", "key_tiles", "key_pairs", "q_tiles", "kv_tiles", "heads", "q_len", "blocks",
    "blocks_a_row",
]  # fmt: skip


@triton.jit(do_not_specialize=[*_SIZES, "stats_tiles"])
def prepare_backward_kernel(
    out, grad_out, lse, grad_lse, stats,
    counts, tiles, full_counts, full_tiles,
    row_counts, row_tiles, row_full_counts, row_full_tiles,
    merged_counts, entries, order, schedule, states,
    batches, key_tiles, key_pairs, q_tiles, kv_tiles,
    out_batch, out_head, out_row, out_column, grad_batch, grad_head, grad_row, grad_column,
    lse_grad_batch, lse_grad_head, lse_grad_row, heads, q_len, width, stats_tiles,
    blocks, blocks_a_row,
    HAS_FULL: tl.constexpr, HAS_ROW_FULL: tl.constexpr, SCHEDULE: tl.constexpr,
    HAS_LSE_GRAD: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, OTHERS: tl.constexpr, MERGE_BLOCK: tl.constexpr,
):  # fmt: skip
    """The work of :class:`BackwardPreparation`: what a program does goes by its number."""
    item = tl.program_id(0)
    merges = key_pairs * batches
    orders = tl.cdiv(key_pairs, BLOCK) * batches
    schedules = 0
    if SCHEDULE:
        schedules = tl.cdiv(q_tiles, BLOCK) * batches
    if item < merges:
        _merge_pair(
            item, counts, tiles, full_counts, full_tiles, states.to(tl.pointer_type(tl.int8)),
            merged_counts, entries, key_tiles, key_pairs, q_tiles, HAS_FULL, MERGE_BLOCK,
        )  # fmt: skip
    elif item < merges + orders:
        _order_pairs(
            item - merges, counts, full_counts, order, key_tiles, key_pairs, blocks,
            HAS_FULL, BLOCK, OTHERS,
        )  # fmt: skip
    elif item < merges + orders + schedules:
        if SCHEDULE:
            _schedule_rows(
                item - merges - orders, row_counts, row_tiles, row_full_counts, row_full_tiles,
                schedule, q_tiles, kv_tiles, blocks_a_row, 0, HAS_ROW_FULL, BLOCK, OTHERS,
            )  # fmt: skip
    else:
        _row_statistics(
            item - merges - orders - schedules, out, grad_out, lse, grad_lse, stats,
            out_batch, out_head, out_row, out_column,
            grad_batch, grad_head, grad_row, grad_column,
            lse_grad_batch, lse_grad_head, lse_grad_row, heads, q_len, width, stats_tiles,
            HAS_LSE_GRAD, WIDTH,
        )  # fmt: skip


def filled(lists: Lists) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Lists with something in the place of full ones that are missing; it is not read."""
    counts, tiles, full_counts, full_tiles = lists
    if full_counts is None or full_tiles is None:
        return counts, tiles, counts, tiles
    return counts, tiles, full_counts, full_tiles


class RowSchedule:
    """The query tiles by falling cost, each with what a block must know before it visits one.

    In one place, so that a block gets it with one wait for memory, a row ahead of its use.

    Args:
        lists: key-side lists, of one key.
        blocks_a_row: thread blocks that there are for each item of a row of one K/V head.
        least: key tiles that rows must list on average to be long.

    Calls take such lists and return int32 ``[batch, q_tiles, 8]``; equal costs in the order of
    tiles. An entry is ``(q_tile, partials, fulls, first_0, first_1, together, 0, long)``;
    ``together`` is how many K/V heads are worked on at a time, the 0 of the first entry is where
    the kernel counts the rows that it has handed out, and ``long`` is 1 where the batch's rows
    are. The first pair of key tiles (see ``split_pairs`` in ``schedule.py``) is ``4 * tile +
    state``, where a state is 0 for a dead tile (its number is 0), 1 for a partial and 2 for a full
    one.
    """

    def __init__(self, lists: Lists, blocks_a_row: int, least: int):
        batch, _, count, width = lists[1].shape
        self._schedule = Output.dense((batch, count, 8), torch.int32, lists[1].device)
        fixed = {
            "count": count, "width": width, "blocks_a_row": blocks_a_row, "least": least,
            "HAS_FULL": lists[2] is not None, "BLOCK": _BLOCK,
            "OTHERS": _OTHERS,
        }  # fmt: skip
        grid = (batch * triton.cdiv(count, _BLOCK),)
        self._launch = Launch(row_schedule_kernel, grid, (), fixed, {"num_warps": 4})

    def __call__(self, lists: Lists) -> Tensor:
        schedule = self._schedule()
        self._launch(*filled(lists), schedule)
        return schedule


class BackwardPreparation:
    """All that the backward kernels want prepared, in one launch.

    Args:
        out, grad_out: ``[B, H, Q, D]``, any strides.
        lse, grad_lse: float32 ``[B, H, Q]``, base e, dense; the same shape, any strides, or None.
        by_query: query-side lists (a row is a tile of 64 keys).
        by_key: key-side lists, or None for no schedule.
        stats_tiles: tiles of 64 query rows, at least ``ceil(Q / 64)``.
        blocks: thread blocks of the large kernels.
        blocks_a_row: see :class:`RowSchedule`.

    Calls take the same but for the last three, and return ``(order, counts, entries, schedule,
    stats)``, the first four flat int32 tensors:

    - ``counts`` ``[batch, key_pairs, 2]`` and ``entries`` ``[batch, key_pairs, query_tiles]`` are
      the query-side lists of pairs of adjacent key tiles. An entry is ``16 * query_tile + 4 *
      state + state`` with the states of the two key tiles: 0 hidden, 1 partial, 2 full.
      ``counts[..., 0]`` entries from the front are all that are not full for both,
      ``counts[..., 1]`` from the back are full for both. Both run from the last query tile to the
      first: keys of a branch have their last descendants in common, so that blocks that work on
      them side by side read the same queries.
    - ``order`` ``[2 + batch * key_pairs]``: how many K/V heads are worked on at a time, a 0 where
      the kernel counts the items that it has handed out, and each batch's pairs by falling number
      of tiles in the two lists, as ``4 * pair + listed``, where bits 0 and 1 of ``listed`` say
      whose list is not empty. The number of entries, in which a tile of both lists counts once,
      would have to be waited for.
    - ``schedule``: what :class:`RowSchedule` returns.
    - ``stats`` float32 ``[B, H, stats_tiles, 2, 64]``: lse in base 2, and the sum of ``out *
      grad_out`` minus ``grad_lse``. A row that sees nothing, or lies behind the last, has lse
      +inf, so that every probability recomputed from it is 0.
    """

    def __init__(
        self,
        out: Tensor,
        grad_out: Tensor,
        lse: Tensor,
        grad_lse: Tensor | None,
        by_query: Lists,
        by_key: Lists | None,
        stats_tiles: int,
        blocks: int,
        blocks_a_row: int,
    ):
        device = out.device
        batch, heads, q_len, width = out.shape
        list_batches, _, key_tiles, q_tiles = by_query[1].shape
        key_pairs = (key_tiles + 1) // 2
        items = key_pairs * list_batches
        self._counts = 2 * items
        entries = q_tiles * items
        schedule = 8 * q_tiles * list_batches if by_key is not None else 0
        scratch = (2 * items, entries, 2 + items, schedule, triton.cdiv(entries, 2))
        # Each piece begins at a multiple of 128 bytes.
        self._pieces = [-(-size // 32) * 32 for size in scratch]
        self._scratch = Output.dense((sum(self._pieces),), torch.int32, device)
        self.stats = Output.dense((batch, heads, stats_tiles, 2, 64), torch.float32, device)
        schedules = triton.cdiv(q_tiles, _BLOCK) * list_batches if by_key is not None else 0
        orders = triton.cdiv(key_pairs, _BLOCK) * list_batches
        grid = (items + orders + schedules + batch * heads * stats_tiles,)
        given = lse if grad_lse is None else grad_lse
        names = (
            *(f"out_{axis}" for axis in ("batch", "head", "row", "column")),
            *(f"grad_{axis}" for axis in ("batch", "head", "row", "column")),
            *(f"lse_grad_{axis}" for axis in ("batch", "head", "row")),
        )
        strides = (*out.stride(), *grad_out.stride(), *given.stride())
        fixed = {
            **dict(zip(names, strides, strict=True)),
            "batches": list_batches, "key_tiles": key_tiles, "key_pairs": key_pairs,
            "q_tiles": q_tiles, "kv_tiles": 0 if by_key is None else by_key[1].shape[3],
            "heads": heads, "q_len": q_len, "width": width, "stats_tiles": stats_tiles,
            "blocks": blocks, "blocks_a_row": blocks_a_row,
            "HAS_FULL": by_query[2] is not None, "SCHEDULE": by_key is not None,
            "HAS_ROW_FULL": by_key is not None and by_key[2] is not None,
            "HAS_LSE_GRAD": grad_lse is not None, "WIDTH": triton.next_power_of_2(width),
            "BLOCK": _BLOCK, "OTHERS": _OTHERS_IN_BACKWARD, "MERGE_BLOCK": _MERGE_BLOCK,
        }  # fmt: skip
        self._launch = Launch(prepare_backward_kernel, grid, (), fixed, {"num_warps": 4})

    def __call__(
        self,
        out: Tensor,
        grad_out: Tensor,
        lse: Tensor,
        grad_lse: Tensor | None,
        by_query: Lists,
        by_key: Lists | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        pieces = self._scratch().split_with_sizes(self._pieces)
        counts, entries, order, schedule, states = pieces
        counts = counts[: self._counts]
        stats = self.stats()
        self._launch(
            out, grad_out, lse, lse if grad_lse is None else grad_lse, stats,
            *filled(by_query), *filled(by_query if by_key is None else by_key),
            counts, entries, order, schedule, states,
        )  # fmt: skip
        return order, counts, entries, schedule, stats
