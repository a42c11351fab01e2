"""Which tiles a thread block visits, in which order.

Shared by the kernels that keep query rows and walk over keys (forward, dQ). A *row* is one work
item: a tile of query tokens for one pair of heads (packed) or one head. Rows are dealt to a
persistent grid, heaviest first, in alternating direction, so that the blocks' loads even out. Keys
are visited in *pairs* of listed key tiles: any two of them, adjacent or not, share one stage of
the K/V ring. Kernels that keep keys (dK/dV, the fast backward) deal out pairs of adjacent key
tiles in the same way: ``load_item`` and ``load_entry``.
"""

from __future__ import annotations

from .compat import gl, gluon

KEY_TILE = gl.constexpr(64)
"""Keys of a listed tile; a K/V tile holds two of them."""


@gluon.jit
def turns_of_block(rows):
    """Number of rows that this thread block gets."""
    block = gl.program_id(0)
    blocks = gl.num_programs(0)
    full = rows // blocks
    last = block
    if full % 2 == 1:
        last = blocks - 1 - block
    turns = full
    if last < rows - full * blocks:
        turns += 1
    return turns


@gluon.jit
def position_of_turn(turn, rows):
    """Place of the block's ``turn``-th row in the order; beyond the end, the last row."""
    block = gl.program_id(0)
    blocks = gl.num_programs(0)
    column = block
    if turn % 2 == 1:
        column = blocks - 1 - block
    return gl.minimum(turn * blocks + column, rows - 1)


@gluon.jit
def rows_of(lists):
    """Number of rows in all."""
    return lists[4] * lists[6] * lists[7]


@gluon.jit
def load_row(turn, lists):
    """What the schedule says of the ``turn``-th row of this block.

    Args:
        lists: ``(schedule, partial_tiles, full_tiles, list_batch_rows, q_tiles, kv_tiles, batches,
            head_items)``. ``schedule`` is what ``row_schedule`` returns; the next two are
            BlockMask lists without their head dimension. ``list_batch_rows`` is ``q_tiles``, or 0
            where all batches share one list.

    Returns:
        ``(q_tile, partials, fulls, first_0, first_1)``: a tile, its numbers of key tiles and its
        first pair. Loaded a row ahead: nothing here waits for another load.
    """
    position = position_of_turn(turn, rows_of(lists))
    rank = position // (lists[6] * lists[7])
    batch = position % (lists[6] * lists[7]) // lists[7]
    entry = lists[0] + (batch * lists[3] + rank).to(gl.int64) * 8
    q_tile = gl.load(entry)
    partials = gl.load(entry + 1)
    fulls = gl.load(entry + 2)
    first_0 = gl.load(entry + 3)
    first_1 = gl.load(entry + 4)
    return q_tile, partials, fulls, first_0, first_1


@gluon.jit
def heads_of_row(turn, lists, GROUP: gl.constexpr, PACKED: gl.constexpr):
    """Whose the ``turn``-th row is: ``(batch, head, kv_head)``; packed, the first of two heads."""
    position = position_of_turn(turn, rows_of(lists))
    rest = position % (lists[6] * lists[7])
    head = rest % lists[7]
    if PACKED:
        head = head * 2
    return rest // lists[7], head, head // GROUP


@gluon.jit
def split_pairs(partials, fulls):
    """How a row's tiles pair up: a first pair of any kind, then partial pairs, then full pairs.

    If a count is odd its first tile goes to the first pair, next to a dead tile if the other count
    is even: so every later pair is of one kind. An empty row has one pair of dead tiles.

    Returns:
        ``(partial_start, partial_pairs, full_start, full_pairs)``: the first tile after the first
        pair and the number of later pairs, for both kinds.
    """
    partial_start = partials & 1
    full_start = fulls & 1
    if ((partials | fulls) & 1) == 0:
        if partials > 0:
            partial_start = 2
        elif fulls > 0:
            full_start = 2
    return (
        partial_start,
        (partials - partial_start) // 2,
        full_start,
        (fulls - full_start) // 2,
    )


@gluon.jit
def load_tile(tiles, index, list_row, kv_tiles):
    """Number of the ``index``-th tile in a row's list; any number where the list has no such."""
    inside = gl.maximum(gl.minimum(index, kv_tiles - 1), 0)
    return gl.load(tiles + list_row.to(gl.int64) * kv_tiles + inside)


@gluon.jit
def first_tile(first):
    """Number and state of a tile of a row's first pair: 0 dead, 1 partial, 2 full."""
    return first >> 2, first & 3


@gluon.jit
def load_item(turn, codes):
    """The ``turn``-th work item of this block in a kernel that keeps keys.

    Args:
        codes: ``(order, counts, entries, list_batch_rows, key_pairs, q_tiles, batches,
            kv_heads)``; the first three are what ``BackwardPreparation`` returns.

    Returns:
        ``(batch, kv_head, key_pair, listed, entry_pointer, mixed, total)``; of ``listed`` bit 0
        and bit 1 say whether any query sees the pair's first and second key tile.
    """
    order, counts, entries, list_batch_rows, key_pairs, q_tiles, batches, kv_heads = codes
    position = position_of_turn(turn, key_pairs * batches * kv_heads)
    rank = position // (batches * kv_heads)
    rest = position % (batches * kv_heads)
    batch = rest // kv_heads
    code = gl.load(order + batch * list_batch_rows + rank)
    key_pair = code >> 2
    row = batch * list_batch_rows + key_pair
    mixed = gl.load(counts + 2 * row)
    total = mixed + gl.load(counts + 2 * row + 1)
    entry_pointer = entries + row.to(gl.int64) * q_tiles
    return batch, rest % kv_heads, key_pair, code & 3, entry_pointer, mixed, total


@gluon.jit
def load_entry(entry_pointer, entry, mixed, q_tiles):
    """The ``entry``-th code of an item: mixed ones from the front, full ones from the back."""
    index = entry
    if entry >= mixed:
        index = q_tiles - 1 - (entry - mixed)
    return gl.load(entry_pointer + gl.maximum(gl.minimum(index, q_tiles - 1), 0))
