"""Which tiles a thread block visits, in which order.

Shared by the kernels that keep query rows and walk over keys (forward, dQ). A *row* is one work
item: a tile of query tokens for one pair of heads (packed) or one head. Rows are dealt to a
persistent grid, heaviest first, in alternating direction, so that the blocks' loads even out. Keys
are visited in *pairs* of listed key tiles: any two of them, adjacent or not, share one stage of
the K/V ring.
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
def load_row(turn, lists, GROUP: gl.constexpr, PACKED: gl.constexpr):
    """The ``turn``-th row of this block.

    Args:
        lists: ``(order, partial_counts, partial_tiles, full_counts, full_tiles, list_batch_rows,
            q_tiles, kv_tiles, batches, head_items)``. ``order`` is ``[batch of lists, q_tiles]``,
            query tiles by falling cost; the others are BlockMask lists without their head
            dimension. ``list_batch_rows`` is ``q_tiles``, or 0 where all batches share one list.

    Returns:
        ``(batch, head, kv_head, q_tile, list_row, partials, fulls)``: ``head`` is the first of the
        pair if packed; ``list_row`` is the row in the lists; then its numbers of tiles.
    """
    (
        order, partial_counts, _partial_tiles, full_counts, _full_tiles,
        list_batch_rows, q_tiles, _kv_tiles, batches, head_items,
    ) = lists  # fmt: skip
    position = position_of_turn(turn, q_tiles * batches * head_items)
    rank = position // (batches * head_items)
    rest = position % (batches * head_items)
    batch = rest // head_items
    head = rest % head_items
    if PACKED:
        head = head * 2
    q_tile = gl.load(order + batch * list_batch_rows + rank)
    list_row = batch * list_batch_rows + q_tile
    partials = gl.load(partial_counts + list_row)
    fulls = gl.load(full_counts + list_row)
    return batch, head, head // GROUP, q_tile, list_row, partials, fulls


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
def load_first_pair(list_row, partials, fulls, lists):
    """The first pair of a row.

    Returns:
        ``(tile_0, state_0, tile_1, state_1)``: numbers of the tiles, and 0 for a dead, 1 for a
        partial, 2 for a full one. The number of a dead tile means nothing.
    """
    kv_tiles = lists[7]
    state_0 = (fulls & 1) * 2
    state_1 = partials & 1
    pointer_0 = lists[4]
    pointer_1 = lists[2]
    second = 0
    if ((partials | fulls) & 1) == 0:
        second = 1
        if partials > 0:
            state_0 = 1
            state_1 = 1
            pointer_0 = lists[2]
        elif fulls > 0:
            state_0 = 2
            state_1 = 2
            pointer_1 = lists[4]
    tile_0 = load_tile(pointer_0, 0, list_row, kv_tiles)
    tile_1 = load_tile(pointer_1, second, list_row, kv_tiles)
    return tile_0, state_0, tile_1, state_1
