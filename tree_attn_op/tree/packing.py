"""Sequences into bins under a token budget, so that what they share is stored once in a bin.

The least number of packed tokens is hard to find (bin packing is a special case). Several plans
are made and the best is taken. One of them is the greedy one that frameworks use, sequence by
sequence into the first bin with room, so that the result is never worse than that.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from .arrays import Array
from .trie import SortedSequences


class _Item(NamedTuple):
    """Sequences start ... stop - 1 of the sorted order, which go into one bin together.

    Attributes:
        tokens: of their common trie.
        common: tokens that all of them share.
        reusable: tokens that they share with any other sequence.
    """

    start: int
    stop: int
    tokens: int
    common: int
    reusable: int


@dataclass
class _Bin:
    """Items of one bin, in sorted order, and the room that is left."""

    room: int
    starts: list[int] = field(default_factory=list)
    stops: list[int] = field(default_factory=list)

    def add(self, item: _Item, new_tokens: int) -> None:
        at = bisect.bisect(self.starts, item.start)
        self.starts.insert(at, item.start)
        self.stops.insert(at, item.stop)
        self.room -= new_tokens


def plan(sequences: SortedSequences, max_tokens: int) -> list[Array]:
    """Assign sequences to bins whose tries have at most `max_tokens` tokens each.

    Args:
        sequences: none longer than `max_tokens`.
        max_tokens: the budget.

    Returns:
        For each bin the ascending sorted positions of its sequences, the bin with the most tokens
        first.
    """
    problem = _Problem(sequences, max_tokens)
    as_given = np.argsort(sequences.order).tolist()
    subtrees = list(problem.subtrees())
    plans = [
        problem.first_fit(problem.item(at, at + 1) for at in as_given),
        problem.best_fit(subtrees),
        problem.best_fit(sorted(subtrees, key=lambda item: -item.tokens)),
    ]
    best = min(plans, key=lambda bins: (sum(max_tokens - b.room for b in bins), len(bins)))
    return [
        np.concatenate([np.arange(a, b) for a, b in zip(one.starts, one.stops, strict=True)])
        for one in sorted(best, key=lambda one: one.room)
    ]


class _Problem:
    """What the plans share: how many tokens ranges of the sorted sequences have in common."""

    def __init__(self, sequences: SortedSequences, max_tokens: int):
        self._max_tokens = max_tokens
        self._shared = [*sequences.shared.tolist(), 0]
        self._lengths = sequences.lengths.tolist()
        # The tokens that sequences up to each add, so that ranges of them are differences.
        self._added = [0, *np.cumsum(sequences.lengths - sequences.shared).tolist()]
        self._levels = [level.tolist() for level in sequences.minima.levels]

    def item(self, start: int, stop: int) -> _Item:
        first = self._shared[start]
        tokens = self._added[stop] - self._added[start] + first
        common = self._least(start + 1, stop) if stop - start > 1 else self._lengths[start]
        after = self._shared[stop]
        return _Item(start, stop, tokens, common, first + after - min(first, after, common))

    def subtrees(self) -> Iterator[_Item]:
        """The largest ranges that fit in a bin when ranges are cut where they share least."""
        pending = [(0, len(self._lengths))] if self._lengths else []
        while pending:
            start, stop = pending.pop()
            item = self.item(start, stop)
            if item.tokens <= self._max_tokens:
                yield item
                continue
            inside = self._shared[start + 1 : stop]
            cut = start + 1 + inside.index(item.common)
            pending += [(cut, stop), (start, cut)]

    def first_fit(self, items: Iterable[_Item]) -> list[_Bin]:
        """Each item into the first bin that has room for what it adds."""
        bins: list[_Bin] = []
        for item in items:
            # No bin can hold more of an item than other sequences share with it.
            least = item.tokens - item.reusable
            for one in bins:
                if one.room >= least:
                    new = item.tokens - self._overlap(item, one)
                    if new <= one.room:
                        one.add(item, new)
                        break
            else:
                self._open(bins, item)
        return bins

    def best_fit(self, items: Iterable[_Item]) -> list[_Bin]:
        """Each item into the bin with which it shares most, then the one that it fills best."""
        bins: list[_Bin] = []
        for item in items:
            least = item.tokens - item.reusable
            best: tuple[int, int] | None = None
            for one in bins:
                if one.room >= least:
                    overlap = self._overlap(item, one)
                    key = (overlap, -one.room)
                    if item.tokens - overlap <= one.room and (best is None or key > best):
                        best, chosen = key, one
            if best is None:
                self._open(bins, item)
            else:
                chosen.add(item, item.tokens - best[0])
        return bins

    def _open(self, bins: list[_Bin], item: _Item) -> None:
        bins.append(_Bin(self._max_tokens))
        bins[-1].add(item, item.tokens)

    def _overlap(self, item: _Item, one: _Bin) -> int:
        """The tokens of an item that are in the bin already.

        They are those on the way to its first sequence that the nearest sequence before has, and
        those on the way to its last that the nearest after has.
        """
        at = bisect.bisect(one.starts, item.start)
        before = self._least(one.stops[at - 1], item.start + 1) if at else 0
        after = self._least(item.stop, one.starts[at] + 1) if at < len(one.starts) else 0
        return before + after - min(before, after, item.common)

    def _least(self, start: int, stop: int) -> int:
        """The minimum of shared[start:stop]."""
        level = (stop - start).bit_length() - 1
        row = self._levels[level]
        return min(row[start], row[stop - (1 << level)])
