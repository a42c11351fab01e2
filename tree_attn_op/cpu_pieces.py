"""The work of one CPU call, cut into pieces with their masks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .blocks import refined_states
from .cpu_plan import Flags, Plan, Rectangle, Row, Tiles, plan
from .predicate import Predicate

TILE = 64
"""Most tokens of a tile; lists of smaller blocks have smaller tiles."""

# In tokens. Smaller rectangles are no faster than rows of tiles.
_FULL_RECTANGLE = (256, 128)
_PARTIAL_RECTANGLE = (512, 64)
MAX_COLUMNS = 2048
"""Most key tokens of a piece, unless PyTorch's own kernel computes it."""
MAX_PAIRS = 1 << 20
"""Most pairs whose mask is held at a time."""
_MAX_KEPT_BYTES = 1 << 22
"""Most bytes of values and lists of a call whose masks are kept."""
_BATCH_SCORES = 3 << 17
"""Scores of a batch, over all heads: enough for their number not to cost, few for the caches."""
_WIDTH_STEP = 16
"""Pieces are cut to multiples of this many columns where they can: faster, and more alike."""

Columns = slice | Tensor
Bias = tuple[slice, Tensor]
"""A range of a piece's columns, and what is added to its scores: 0, or -inf where hidden."""


def _tokens(tiles: Tiles, size: int) -> Tensor:
    """Token indices of tiles ``[...]``, as ``[..., size]``."""
    return torch.from_numpy(tiles[..., None] * size + np.arange(size))


@dataclass(frozen=True)
class Piece:
    """A block of query rows and key columns whose scores are computed at once.

    Attributes:
        rows: query tokens.
        columns: key tokens.
        bias: of the partial tiles.
        blind: whether the bias hides all columns from some row.
        first: whether no earlier piece holds any of the rows.
    """

    rows: slice
    columns: Columns
    bias: Sequence[Bias] = ()
    blind: bool = False
    first: bool = False

    @property
    def height(self) -> int:
        return self.rows.stop - self.rows.start

    @property
    def width(self) -> int:
        if isinstance(self.columns, slice):
            return self.columns.stop - self.columns.start
        return len(self.columns)


@dataclass(frozen=True)
class Batch:
    """Pieces of one shape, with biases at the same columns, whose scores are held at once.

    Attributes:
        pieces: none holds a row of another.
        height, width: query rows and key columns of each.
        bias: those of the pieces, stacked: ``[pieces, 1, rows, columns]``.
        first: whether no earlier piece holds any of the rows.
    """

    pieces: Sequence[Piece]
    height: int
    width: int
    bias: Sequence[Bias]
    first: bool


def batch_of(pieces: Sequence[Piece]) -> Batch:
    """The batch of pieces that are fit for one, which then share its memory."""
    one = pieces[0]
    bias = [
        (columns, torch.stack([piece.bias[i][1] for piece in pieces]).unsqueeze(1))
        for i, (columns, _) in enumerate(one.bias)
    ]
    pieces = [
        replace(piece, bias=[(columns, stack[at, 0]) for columns, stack in bias])
        for at, piece in enumerate(pieces)
    ]
    return Batch(pieces, one.height, one.width, bias, one.first)


def _batches(pieces: Iterable[Piece], max_pairs: int) -> Iterator[Batch]:
    """The pieces in batches of ``max_pairs`` pairs, the first ones of any rows before others."""
    alike: dict[Any, list[Piece]] = {}
    for piece in pieces:
        at = tuple((columns.start, columns.stop) for columns, _ in piece.bias)
        alike.setdefault((not piece.first, piece.width, piece.height, at), []).append(piece)
    for _, group in sorted(alike.items(), key=lambda item: item[0]):
        step = max(max_pairs // (group[0].height * group[0].width), 1)
        for start in range(0, len(group), step):
            yield batch_of(group[start : start + step])


@dataclass(frozen=True)
class Mask:
    """The tile states of one batch row and its heads, planned, with the rows of values.

    It holds for ``heads`` query heads at once. ``kept`` has the pieces whose masks are small, for
    the next call with this mask.
    """

    predicate: Predicate
    q_vals: Sequence[Tensor]
    k_vals: Sequence[Tensor]
    q_len: int
    kv_len: int
    q_tile: int
    kv_tile: int
    heads: int
    plan: Plan
    kept: dict[Any, list[Any]] = field(default_factory=dict)

    def extent(self, rectangle: Rectangle) -> tuple[slice, Tensor]:
        """The query rows and the key tokens of a rectangle, none beyond the ends."""
        last = min(rectangle.last * self.q_tile, self.q_len)
        tokens = _tokens(rectangle.kv_tiles, self.kv_tile).flatten()
        return slice(rectangle.first * self.q_tile, last), tokens[tokens < self.kv_len]

    @staticmethod
    def columns(tokens: Tensor) -> Columns:
        first, last = int(tokens[0]), int(tokens[-1]) + 1
        return slice(first, last) if last - first == len(tokens) else tokens

    def allowed(self, q: Tensor, k: Tensor) -> Tensor:
        """The predicate for every pair of ``q`` and ``k``, which broadcast."""
        q_rows = [row[q] for row in self.q_vals]
        k_rows = [row[k] for row in self.k_vals]
        return self.predicate.evaluate(q, k, q_rows, k_rows)

    def _rectangle_pieces(self, full: bool, max_pairs: int, max_columns: int) -> Iterator[Piece]:
        for rectangle in self.plan.rectangles:
            if rectangle.full is not full:
                continue
            rows, tokens = self.extent(rectangle)
            step = max(max_pairs // min(len(tokens), max_columns), self.q_tile)
            for first in range(rows.start, rows.stop, step):
                part = slice(first, min(first + step, rows.stop))
                for each in tokens.split(max_columns):
                    if full:
                        yield Piece(part, self.columns(each))
                        continue
                    q = torch.arange(part.start, part.stop).unsqueeze(1)
                    allowed = self.allowed(q, each.unsqueeze(0))
                    seen = np.flatnonzero(allowed.any(0).numpy())
                    if not len(seen):
                        continue
                    seen_range = slice(int(seen[0]), int(seen[-1]) + 1)
                    allowed, each = allowed[:, seen_range], each[seen_range]
                    bias = [(slice(0, len(each)), _bias(allowed))]
                    blind = not bool(allowed.any(1).all())
                    yield Piece(part, self.columns(each), bias, blind)

    def rectangles(self, full: bool, max_pairs: int, max_columns: int) -> Iterable[Piece]:
        """The full or the partial rectangles in pieces; small masks are kept for the next call.

        Args:
            full: which of the two.
            max_pairs: most pairs of a piece, over one head.
            max_columns: most key tokens of a piece.
        """
        pairs = sum(
            (each.last - each.first) * len(each.kv_tiles)
            for each in self.plan.rectangles
            if not each.full
        )
        if full or pairs * self.q_tile * self.kv_tile > MAX_PAIRS:
            return self._rectangle_pieces(full, max_pairs, max_columns)
        at = (max_pairs, max_columns)
        if at not in self.kept:
            self.kept[at] = list(self._rectangle_pieces(False, *at))
        return self.kept[at]

    def rows(self) -> Iterable[Batch]:
        """The rows of tiles in batches; kept for the next call if their masks are small."""
        pairs = sum(int(row.partial.sum()) for row in self.plan.rows)
        if pairs * self.q_tile * self.kv_tile > MAX_PAIRS:
            return self._row_batches()
        if "rows" not in self.kept:
            self.kept["rows"] = list(self._row_batches())
        return self.kept["rows"]

    def _row_batches(self) -> Iterator[Batch]:
        # Masks are evaluated many at a time: one row's are too few to be worth a call.
        most = max(MAX_PAIRS // (self.q_tile * self.kv_tile), 1)
        waiting: list[Row] = []
        tiles = 0
        for row in self.plan.rows:
            waiting.append(row)
            tiles += int(row.partial.sum())
            if tiles >= most:
                yield from _batches(self._pieces_of(waiting), _BATCH_SCORES // self.heads)
                waiting, tiles = [], 0
        yield from _batches(self._pieces_of(waiting), _BATCH_SCORES // self.heads)

    def _pieces_of(self, rows: list[Row]) -> Iterator[Piece]:
        if not rows:
            return
        q_tiles = np.repeat([row.q_tile for row in rows], [row.partial.sum() for row in rows])
        kv_tiles = np.concatenate([row.kv_tiles[row.partial] for row in rows])
        q = _tokens(q_tiles, self.q_tile).unsqueeze(2)
        k = _tokens(kv_tiles, self.kv_tile).unsqueeze(1)
        # The overrun of a last tile repeats the last token; it is cut off below.
        allowed = self.allowed(q.clamp(max=self.q_len - 1), k.clamp(max=self.kv_len - 1))
        bias, rows_see, seen = _bias(allowed), allowed.any(2).numpy(), allowed.any(1).numpy()
        at = 0
        for row in rows:
            first = row.q_tile * self.q_tile
            height = min(self.q_tile, self.q_len - first)
            tokens = _tokens(row.kv_tiles, self.kv_tile).flatten()
            stop = len(tokens) - max(int(tokens[-1]) + 1 - self.kv_len, 0)
            places = np.flatnonzero(row.partial)
            mine = slice(at, at + len(places))
            at += len(places)
            start, stop = _trimmed(row, self.kv_tile, seen[mine], stop)
            if start >= stop:
                continue
            biases = []
            for tile, place in zip(bias[mine], places.tolist(), strict=True):
                begin = max(place * self.kv_tile, start)
                end = min((place + 1) * self.kv_tile, stop)
                if begin < end:
                    shown = slice(begin - place * self.kv_tile, end - place * self.kv_tile)
                    biases.append((slice(begin - start, end - start), tile[:height, shown]))
            blind = bool(row.partial.all()) and not rows_see[mine, :height].any(0).all()
            columns = self.columns(tokens[start:stop])
            yield Piece(slice(first, first + height), columns, biases, blind, row.first)


def _trimmed(row: Row, kv_tile: int, seen: Flags, stop: int) -> tuple[int, int]:
    """The range of a row's columns without most of the hidden ones at its ends."""
    visible = np.ones((len(row.kv_tiles), kv_tile), dtype=bool)
    visible[row.partial] = seen
    at = np.flatnonzero(visible.reshape(-1)[:stop])
    if not len(at):
        return 0, 0
    first, last = int(at[0]) // _WIDTH_STEP, int(at[-1]) // _WIDTH_STEP + 1
    return first * _WIDTH_STEP, min(last * _WIDTH_STEP, stop)


def _bias(allowed: Tensor) -> Tensor:
    return torch.zeros(allowed.shape).masked_fill_(~allowed, float("-inf"))


Place = tuple[int, slice, slice]
"""Batch row, heads and key heads that a mask holds for."""

Masks = list[tuple[Mask, list[Place]]]


@dataclass(frozen=True)
class _Call:
    """What the masks of a call follow from, equal where the contents are.

    ``content`` are the bytes of ``tensors``: q_vals, k_vals and the key-side lists.
    """

    predicate: str
    sizes: tuple[int, ...]
    content: tuple[bytes | None, ...]
    layout: tuple[tuple[torch.Size, torch.dtype] | None, ...]
    tensors: tuple[Tensor | None, ...] = field(compare=False)


def masks_of(
    query: Tensor,
    key: Tensor,
    q_vals: Tensor,
    k_vals: Tensor,
    predicate: str,
    lists: Sequence[Tensor | None],
    q_block_size: int,
    kv_block_size: int,
) -> Masks:
    """Every mask of the call, with where it holds.

    The last few are kept, so that the layers of a model share them. They are found by their
    contents, since a tensor may be written to between two calls.
    """
    batch, heads, q_len, _ = query.shape
    sizes = (batch, heads, key.shape[1], q_len, key.shape[2], q_block_size, kv_block_size)
    tensors = (q_vals, k_vals, *lists)
    if 0 in sizes:
        return []
    if sum(tensor.nbytes for tensor in tensors if tensor is not None) > _MAX_KEPT_BYTES:
        return _build(_Call(predicate, sizes, (), (), tensors))
    content = tuple(None if each is None else each.numpy().tobytes() for each in tensors)
    layout = tuple(None if each is None else (each.shape, each.dtype) for each in tensors)
    return _kept(_Call(predicate, sizes, content, layout, tensors))


@lru_cache(maxsize=8)
def _kept(call: _Call) -> Masks:
    copies = tuple(None if tensor is None else tensor.clone() for tensor in call.tensors)
    return _build(replace(call, tensors=copies))


def _build(call: _Call) -> Masks:
    q_vals, k_vals, *lists = call.tensors
    assert q_vals is not None
    assert k_vals is not None
    batch, heads, kv_heads, q_len, kv_len, q_block_size, kv_block_size = call.sizes
    predicate = Predicate.parse(call.predicate)
    group = heads // kv_heads
    q_tile, kv_tile = math.gcd(q_block_size, TILE), math.gcd(kv_block_size, TILE)
    blocks = (q_block_size, kv_block_size, q_tile, kv_tile)
    states = refined_states(predicate, q_vals, k_vals, q_len, kv_len, lists, *blocks).numpy()
    masks = []
    for b, h in product(*map(range, states.shape[:2])):
        work = plan(
            states[b, h],
            (max(_FULL_RECTANGLE[0] // q_tile, 1), max(_FULL_RECTANGLE[1] // kv_tile, 1)),
            (max(_PARTIAL_RECTANGLE[0] // q_tile, 1), max(_PARTIAL_RECTANGLE[1] // kv_tile, 1)),
            max(MAX_COLUMNS // kv_tile, 1),
        )
        q_rows = q_vals[b if q_vals.shape[0] > 1 else 0].unbind(0)
        k_rows = k_vals[b if k_vals.shape[0] > 1 else 0].unbind(0)
        rows = range(batch) if states.shape[0] == 1 else (b,)
        of, together = (slice(None), slice(None)), heads
        if states.shape[1] > 1:
            of, together = (slice(h, h + 1), slice(h // group, h // group + 1)), 1
        mask = Mask(predicate, q_rows, k_rows, q_len, kv_len, q_tile, kv_tile, together, work)
        masks.append((mask, [(row, *of) for row in rows]))
    return masks
