"""How the CPU implementation cuts the listed tiles into a few large matrix products.

Three kinds of work hold every listed tile once. A *full rectangle* is a run of rows of tiles that
share full columns, such as a prompt under all its completions; it needs no mask. A *partial
rectangle* is the same of partial columns, such as the tile where that prompt ends. What remains,
near the diagonal and at ragged edges, is done row by row of tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .predicate import EMPTY, FULL, PARTIAL

Tiles = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Rectangle:
    """Query tiles ``first <= i < last``, each with all of ``kv_tiles``; ``full`` or partial."""

    first: int
    last: int
    kv_tiles: Tiles
    full: bool


@dataclass(frozen=True)
class Row:
    """One query tile with its key tiles.

    Attributes:
        q_tile: the query tile.
        kv_tiles, partial: its key tiles, and which of them are partial.
        first: whether this is the first row of that query tile.
    """

    q_tile: int
    kv_tiles: Tiles
    partial: Flags
    first: bool


@dataclass(frozen=True)
class Plan:
    rectangles: list[Rectangle]
    rows: list[Row]


def _take_rectangles(
    state: npt.NDArray[np.int8], wanted: int, min_rows: int, min_columns: int
) -> list[Rectangle]:
    """Take the large rectangles of tiles ``wanted`` out of ``state``, which is changed.

    Blocks of rows of halving size are searched for columns that are wanted over the whole block;
    what is found grows up and down as far as it can, so that its edges need no alignment.
    """
    found = []
    flags = state == wanted
    rows, columns = flags.shape
    size = 1 << max(rows.bit_length() - 1, 0)
    while size >= min_rows and flags.any():
        blocks = rows // size
        shared = flags[: blocks * size].reshape(blocks, size, columns).all(1)
        for block in np.flatnonzero(shared.sum(1) >= min_columns):
            first, last = int(block) * size, (int(block) + 1) * size
            # Looked up again: an earlier rectangle may have grown into this block.
            kv_tiles = np.flatnonzero(flags[first:last].all(0))
            if len(kv_tiles) < min_columns:
                continue
            while first > 0 and flags[first - 1, kv_tiles].all():
                first -= 1
            while last < rows and flags[last, kv_tiles].all():
                last += 1
            flags[first:last, kv_tiles] = False
            state[first:last, kv_tiles] = EMPTY
            found.append(Rectangle(first, last, kv_tiles, wanted == FULL))
        size //= 2
    return found


def plan(
    state: npt.NDArray[np.int8],
    full_shape: tuple[int, int],
    partial_shape: tuple[int, int],
    max_columns: int,
) -> Plan:
    """Work that together holds each listed tile once.

    Args:
        state: EMPTY, PARTIAL or FULL, ``[query tiles, key tiles]``.
        full_shape, partial_shape: least rows and columns of a rectangle, in tiles.
        max_columns: most key tiles of a :class:`Row`; longer ones are cut.
    """
    state = state.copy()
    rectangles = _take_rectangles(state, FULL, *full_shape)
    rectangles += _take_rectangles(state, PARTIAL, *partial_shape)
    rows = []
    for q_tile in np.flatnonzero(state.any(1)):
        kv_tiles = np.flatnonzero(state[q_tile])
        for at in range(0, len(kv_tiles), max_columns):
            part = kv_tiles[at : at + max_columns]
            rows.append(Row(int(q_tile), part, state[q_tile, part] == PARTIAL, at == 0))
    return Plan(rectangles, rows)
