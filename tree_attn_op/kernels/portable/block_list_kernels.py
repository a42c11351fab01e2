"""Device code of the block lists.

``prepare_tiles`` reduces the value rows of both sides to their least and greatest value per tile:
O(length). ``list_tiles`` decides the state of each tile from those bounds in three-valued logic
and writes the lists of both directions: O(tiles). With lists of coarser blocks given,
``prepare_tiles`` writes down their states as well and ``list_tiles`` refines: a tile inherits
EMPTY and FULL from its block, and the predicate decides inside PARTIAL blocks.

Both find bounds and states in one buffer of int64: the bounds, then the states as int8.

Lengths and strides are not specialised on, so that another length is no other kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tree_attn_op.kernels.portable.tile_states import tile_states

_INT64_MIN = tl.constexpr(-(2**63))
_INT64_MAX = tl.constexpr(2**63 - 1)

_STRIDES = ["q_stride_batch", "q_stride_row", "k_stride_batch", "k_stride_row"]


@triton.jit
def _reduce_tile(
    values, bounds, item, length, rows, stride_batch, stride_row, stride_token,
    TILE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The ``item``-th of all tiles of one side: bounds[batch, row, 0 or 1, tile]."""
    num_tiles = (length + TILE - 1) // TILE
    tile = item % num_tiles
    row = (item // num_tiles) % rows
    batch = item // num_tiles // rows
    values += batch.to(tl.int64) * stride_batch + row.to(tl.int64) * stride_row
    first = tile.to(tl.int64) * TILE
    lane = tl.arange(0, LANES)
    low = tl.full((LANES,), _INT64_MAX, tl.int64)
    high = tl.full((LANES,), _INT64_MIN, tl.int64)
    tokens = tl.minimum(length - first, TILE).to(tl.int32)
    for start in range(0, tokens, LANES):
        inside = start + lane < tokens
        token = first + start + lane
        value = tl.load(values + token * stride_token, inside, other=0).to(tl.int64)
        low = tl.minimum(low, tl.where(inside, value, _INT64_MAX))
        high = tl.maximum(high, tl.where(inside, value, _INT64_MIN))
    at = (batch.to(tl.int64) * rows + row) * 2 * num_tiles + tile
    tl.store(bounds + at, tl.min(low, 0))
    tl.store(bounds + at + num_tiles, tl.max(high, 0))


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
def _expand_row(
    row, counts, indices, full_counts, full_indices, states, num_columns, width, full_width,
    HAS_FULL: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """states[row, column] = 0, 1 or 2 for unlisted, partial and full blocks."""
    at = row.to(tl.int64)
    states += at * num_columns
    lane = tl.arange(0, CHUNK)
    for start in range(0, num_columns, CHUNK):
        tl.store(states + start + lane, 0, start + lane < num_columns)
    tl.debug_barrier()  # the marks must land after the zeros of other threads
    _mark(states, counts, indices, at, num_columns, width, 1, CHUNK)
    if HAS_FULL:
        tl.debug_barrier()
        _mark(states, full_counts, full_indices, at, num_columns, full_width, 2, CHUNK)


_COARSE = ["num_columns", "width", "full_width"]


@triton.jit(
    do_not_specialize=["q_items", "k_items", "q_len", "kv_len", *_STRIDES, *_COARSE],
    do_not_specialize_on_alignment=["q_values", "k_values"],
)
def prepare_tiles(
    q_values,
    k_values,
    counts,
    indices,
    full_counts,
    full_indices,
    bounds,
    q_items,
    k_items,
    q_len,
    kv_len,
    q_stride_batch,
    q_stride_row,
    q_stride_token,
    k_stride_batch,
    k_stride_row,
    k_stride_token,
    num_columns,
    width,
    full_width,
    Q_ROWS: tl.constexpr,
    K_ROWS: tl.constexpr,
    Q_TILE: tl.constexpr,
    K_TILE: tl.constexpr,
    Q_LANES: tl.constexpr,
    K_LANES: tl.constexpr,
    HAS_COARSE: tl.constexpr,
    HAS_FULL: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Least and greatest value of each row over its tiles, of both sides, and given states.

    The first ``q_items`` programs write ``[q batch, Q_ROWS, 2, query tiles]``, the next
    ``k_items`` behind it ``[k batch, K_ROWS, 2, key tiles]``, the others behind that the states of
    the given lists, one row of ``num_columns`` blocks each.
    """
    item = tl.program_id(0)
    # fmt: off
    if item < q_items:
        if Q_ROWS > 0:
            _reduce_tile(
                q_values, bounds, item, q_len, Q_ROWS,
                q_stride_batch, q_stride_row, q_stride_token, Q_TILE, Q_LANES,
            )
    elif item < q_items + k_items:
        if K_ROWS > 0:
            _reduce_tile(
                k_values, bounds + 2 * q_items, item - q_items, kv_len, K_ROWS,
                k_stride_batch, k_stride_row, k_stride_token, K_TILE, K_LANES,
            )
    else:
        if HAS_COARSE:
            states = (bounds + 2 * (q_items + k_items)).to(tl.pointer_type(tl.int8))
            _expand_row(
                item - q_items - k_items, counts, indices, full_counts, full_indices, states,
                num_columns, width, full_width, HAS_FULL, CHUNK,
            )
    # fmt: on


@triton.jit
def _list_row(
    row, head, batch, q_bounds, k_bounds, coarse, counts, indices, full_counts, full_indices,
    q_len, kv_len, num_q, num_k, num_coarse_k,
    P: tl.constexpr, WRAPS_AT_32: tl.constexpr, BY_QUERY: tl.constexpr,
    Q_TILE: tl.constexpr, K_TILE: tl.constexpr, Q_RATIO: tl.constexpr, K_RATIO: tl.constexpr,
    HAS_COARSE: tl.constexpr, FULL_AT_ENDS: tl.constexpr,
    CHUNK: tl.constexpr, ONE_CHUNK: tl.constexpr,
):  # fmt: skip
    """The partial and full lists of one row of tiles: a query tile's keys, or the other way round.

    Indices ascend; behind the listed ones stand the others, ascending too, as flex's builder
    leaves them, so that every element is written.
    """
    if BY_QUERY:
        num_rows = num_q
        num_columns = num_k
    else:
        num_rows = num_k
        num_columns = num_q
    at = (batch.to(tl.int64) * tl.num_programs(1) + head) * num_rows + row
    indices += at * num_columns
    full_indices += at * num_columns
    lane = tl.arange(0, CHUNK)
    num_partial = 0
    num_full = 0
    # fmt: off
    if not ONE_CHUNK:
        # How many are listed in all must be known before the first of the others is placed.
        for start in range(0, num_columns, CHUNK):
            partial, full = _row_states(
                row, start + lane, q_bounds, k_bounds, coarse,
                q_len, kv_len, num_q, num_k, num_coarse_k, P, WRAPS_AT_32, BY_QUERY,
                Q_TILE, K_TILE, Q_RATIO, K_RATIO, HAS_COARSE, FULL_AT_ENDS,
            )
            num_partial += tl.sum(partial, 0)
            num_full += tl.sum(full, 0)
    seen_partial = 0
    seen_full = 0
    for start in range(0, num_columns, CHUNK):
        column = start + lane
        inside = column < num_columns
        partial, full = _row_states(
            row, column, q_bounds, k_bounds, coarse,
            q_len, kv_len, num_q, num_k, num_coarse_k, P, WRAPS_AT_32, BY_QUERY,
            Q_TILE, K_TILE, Q_RATIO, K_RATIO, HAS_COARSE, FULL_AT_ENDS,
        )
        # fmt: on
        if ONE_CHUNK:
            num_partial = tl.sum(partial, 0)
            num_full = tl.sum(full, 0)
        before = seen_partial + tl.cumsum(partial, 0) - partial
        place = tl.where(partial == 1, before, num_partial + column - before)
        tl.store(indices + place, column, inside)
        before = seen_full + tl.cumsum(full, 0) - full
        place = tl.where(full == 1, before, num_full + column - before)
        tl.store(full_indices + place, column, inside)
        if not ONE_CHUNK:
            seen_partial += tl.sum(partial, 0)
            seen_full += tl.sum(full, 0)
    tl.store(counts + at, num_partial)
    tl.store(full_counts + at, num_full)


@triton.jit
def _row_states(
    row, column, q_bounds, k_bounds, coarse, q_len, kv_len, num_q, num_k, num_coarse_k,
    P: tl.constexpr, WRAPS_AT_32: tl.constexpr, BY_QUERY: tl.constexpr,
    Q_TILE: tl.constexpr, K_TILE: tl.constexpr, Q_RATIO: tl.constexpr, K_RATIO: tl.constexpr,
    HAS_COARSE: tl.constexpr, FULL_AT_ENDS: tl.constexpr,
):  # fmt: skip
    """Which tiles of a row are partial, and which are full: 0 or 1 for a vector of columns."""
    here = tl.full((1,), 0, tl.int32) + row
    always = here >= 0
    if BY_QUERY:
        q_tile = here
        q_inside = always
        k_tile = column
        k_inside = column < num_k
        inside = k_inside
    else:
        q_tile = column
        q_inside = column < num_q
        k_tile = here
        k_inside = always
        inside = q_inside
    # fmt: off
    state = tile_states(
        P, WRAPS_AT_32, q_tile, k_tile, q_inside, k_inside, q_bounds, k_bounds, coarse,
        q_len, kv_len, num_q, num_k, num_coarse_k,
        Q_TILE, K_TILE, Q_RATIO, K_RATIO, HAS_COARSE, FULL_AT_ENDS,
    )
    # fmt: on
    return (inside & (state == 1)).to(tl.int32), (inside & (state == 2)).to(tl.int32)


@triton.jit(do_not_specialize=["coarse_at", "q_len", "kv_len"])
def list_tiles(
    bounds,
    kv_counts,
    kv_indices,
    full_kv_counts,
    full_kv_indices,
    q_counts,
    q_indices,
    full_q_counts,
    full_q_indices,
    coarse_at,
    q_len,
    kv_len,
    P: tl.constexpr,
    WRAPS_AT_32: tl.constexpr,
    Q_ROWS: tl.constexpr,
    K_ROWS: tl.constexpr,
    Q_BATCHED: tl.constexpr,
    K_BATCHED: tl.constexpr,
    Q_TILE: tl.constexpr,
    K_TILE: tl.constexpr,
    Q_RATIO: tl.constexpr,
    K_RATIO: tl.constexpr,
    HAS_COARSE: tl.constexpr,
    COARSE_BATCHED: tl.constexpr,
    FULL_AT_ENDS: tl.constexpr,
    CHUNK: tl.constexpr,
    ONE_CHUNK: tl.constexpr,
):
    """The lists of every query tile, then those of every key tile: one row of tiles a program.

    Args:
        bounds: what ``prepare_tiles`` wrote.
        coarse_at: where in it the states of the given blocks begin, ``[batch or 1, heads, blocks,
            blocks]``, of blocks of ``Q_RATIO * Q_TILE`` by ``K_RATIO * K_TILE`` tokens; not read
            unless HAS_COARSE.
        Q_ROWS, K_ROWS: rows of values a side.
        Q_BATCHED, K_BATCHED, COARSE_BATCHED: whether there are several, one a batch row.
        FULL_AT_ENDS: whether a tile that runs over an end may be full.
        CHUNK: columns that a program looks at at a time; ONE_CHUNK: there are no more.
    """
    item = tl.program_id(0)
    head = tl.program_id(1)
    batch = tl.program_id(2)
    num_q = (q_len + Q_TILE - 1) // Q_TILE
    num_k = (kv_len + K_TILE - 1) // K_TILE
    q_bounds = bounds
    k_bounds = bounds + tl.full((), 2 * Q_ROWS, tl.int64) * num_q
    if Q_BATCHED:
        q_bounds += batch.to(tl.int64) * (2 * Q_ROWS) * num_q
        k_bounds += (tl.num_programs(2) - 1).to(tl.int64) * (2 * Q_ROWS) * num_q
    if K_BATCHED:
        k_bounds += batch.to(tl.int64) * (2 * K_ROWS) * num_k
    num_coarse_k = 0
    coarse = (bounds + coarse_at).to(tl.pointer_type(tl.int8))
    if HAS_COARSE:
        num_coarse_k = (kv_len + K_RATIO * K_TILE - 1) // (K_RATIO * K_TILE)
        num_coarse_q = (q_len + Q_RATIO * Q_TILE - 1) // (Q_RATIO * Q_TILE)
        which = head.to(tl.int64)
        if COARSE_BATCHED:
            which += batch.to(tl.int64) * tl.num_programs(1)
        coarse += which * num_coarse_q * num_coarse_k
    # fmt: off
    if item < num_q:
        _list_row(
            item, head, batch, q_bounds, k_bounds, coarse,
            kv_counts, kv_indices, full_kv_counts, full_kv_indices,
            q_len, kv_len, num_q, num_k, num_coarse_k, P, WRAPS_AT_32, True,
            Q_TILE, K_TILE, Q_RATIO, K_RATIO, HAS_COARSE, FULL_AT_ENDS, CHUNK, ONE_CHUNK,
        )
    else:
        _list_row(
            item - num_q, head, batch, q_bounds, k_bounds, coarse,
            q_counts, q_indices, full_q_counts, full_q_indices,
            q_len, kv_len, num_q, num_k, num_coarse_k, P, WRAPS_AT_32, False,
            Q_TILE, K_TILE, Q_RATIO, K_RATIO, HAS_COARSE, FULL_AT_ENDS, CHUNK, ONE_CHUNK,
        )
    # fmt: on
