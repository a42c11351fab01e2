"""Array operations that the builders of trees share."""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def starts_of(lengths: Array) -> Array:
    """The exclusive running sum of `lengths`: where each of them starts."""
    return np.cumsum(lengths) - lengths


def ranges(starts: Array, lengths: Array) -> Array:
    """start, start + 1, ... for `length` numbers each, one range after another."""
    return np.arange(lengths.sum()) + np.repeat(starts - starts_of(lengths), lengths)


class RangeMinimum:
    """Minima over ranges of an array of n numbers, and the nearest number that is small enough.

    Takes O(n log n) memory and time to prepare (a sparse table: the minima of all ranges whose
    length is a power of two); every query is vectorised.
    """

    def __init__(self, values: Array):
        self._size = values.size
        table = [values]
        while 2 ** len(table) <= self._size:
            half, above = 2 ** (len(table) - 1), table[-1].copy()
            above[:-half] = np.minimum(above[:-half], above[half:])
            table.append(above)
        self._table = np.stack(table)

    @property
    def levels(self) -> Array:
        """[K, n]: at [k, i] the least of values[i : i + 2^k], where that is inside."""
        return self._table

    def minimum(self, start: Array, stop: Array) -> Array:
        """The least of values[start:stop], element by element; no range may be empty."""
        level = np.frexp(stop - start)[1] - 1
        return np.minimum(self._table[level, start], self._table[level, stop - 2**level])

    def last_at_most(self, index: Array, bound: Array) -> Array:
        """The last position at or before `index` whose value is at most `bound`, or -1."""
        stop = index + 1
        for level in reversed(range(len(self._table))):
            before = stop - 2**level
            larger = (before >= 0) & (self._table[level, np.maximum(before, 0)] > bound)
            stop = np.where(larger, before, stop)
        return stop - 1

    def first_at_most(self, index: Array, bound: Array) -> Array:
        """The first position at or after `index` whose value is at most `bound`, or n."""
        start = index.copy()
        for level in reversed(range(len(self._table))):
            inside = start + 2**level <= self._size
            larger = inside & (self._table[level, np.where(inside, start, 0)] > bound)
            start = np.where(larger, start + 2**level, start)
        return start
