"""Which tiles of an item are visited, in which order.

For the kernels that keep query rows and walk over keys (forward, dQ), a *row* is one work item: a
tile of query tokens for one pair of heads (packed) or one head. Keys are visited in *pairs* of
listed key tiles: any two of them, adjacent or not, share one stage of the K/V ring. For kernels
that keep keys (dK/dV, the fast backward), an item is a pair of adjacent key tiles of one K/V head.
Which block works on which item: ``queue.py``.
"""

from __future__ import annotations

from .compat import gl, gluon

KEY_TILE = gl.constexpr(64)
"""Keys of a listed tile; a K/V tile holds two of them."""


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
def coded_tile(code):
    """Number and state of a tile: 0 dead, 1 partial, 2 full. A dead tile has number 0."""
    return code >> 2, code & 3


@gluon.jit
def head_of_item(head_item, GROUP: gl.constexpr, PACKED: gl.constexpr):
    """``(head, kv_head)`` of a row's item; packed, the first of two heads."""
    head = head_item
    if PACKED:
        head = head * 2
    return head, head // GROUP


@gluon.jit
def entries_of(codes, batch, key_pair):
    """Where the entries of a pair of key tiles begin.

    Args:
        codes: see ``dispatch_items`` in ``queue.py``.
    """
    row = batch * codes[3] + key_pair
    return codes[2] + row.to(gl.int64) * codes[5]


@gluon.jit
def load_entry(entry_pointer, entry, mixed, q_tiles):
    """The ``entry``-th code of an item: mixed ones from the front, full ones from the back."""
    index = entry
    if entry >= mixed:
        index = q_tiles - 1 - (entry - mixed)
    return gl.load(entry_pointer + gl.maximum(gl.minimum(index, q_tiles - 1), 0))
