"""Forests of token segments in DFS pre-order, whatever order they are given in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .arrays import Array, ranges
from .layout import Layout


@dataclass(frozen=True)
class Segments:
    """Unbranched stretches of tokens, possibly empty, in a forest; arrays are int64 [S].

    Attributes:
        parents: the segment that each hangs from, or -1.
        lengths: how many tokens each has.
        order: the segments in DFS pre-order, siblings in ascending order.
        starts: the pack position of the first token of each.
        ends: one past the pack position of the last token below each.
        depths: how many tokens are above each.
    """

    parents: Array
    lengths: Array
    order: Array
    starts: Array
    ends: Array
    depths: Array

    @classmethod
    def of(cls, parents: Array, lengths: Array, describe: Callable[[int], str]) -> Segments:
        """Order the segments; `describe(segment)` names one in the error about a cycle."""
        count = parents.size
        tour, cyclic = _euler_tour(parents)
        if cyclic.size:
            raise ValueError(f"parents form a cycle: {describe(int(cyclic[0]))} has no root above")
        entering = tour < count
        segment = np.where(entering, tour, tour - count)
        length = lengths[segment]
        position = np.where(entering, length, 0)
        position = np.cumsum(position) - position
        depth = np.cumsum(np.where(entering, length, -length)) - length
        order = segment[entering]
        starts, ends, depths = (np.empty(count, dtype=np.int64) for _ in range(3))
        starts[order], depths[order] = position[entering], depth[entering]
        ends[segment[~entering]] = position[~entering]
        return cls(parents, lengths, order, starts, ends, depths)

    def layout(self, ids: Array, first: Array, chosen: Array) -> Layout:
        """The layout of the tokens; its `source` is where they stand in `ids`.

        Args:
            ids: [K], the tokens; segment s is those from `first[s]` on.
            first: [S].
            chosen: the segments with which the trajectories end.
        """
        lengths = self.lengths[self.order]
        index = ranges(first[self.order], lengths)
        last = self._last_tokens()
        above = np.where(self.parents >= 0, last[self.parents], -1) if last.size else last
        parents = np.arange(-1, index.size - 1)
        begun = self.lengths > 0
        parents[self.starts[begun]] = above[begun]
        return Layout(
            input_ids=ids[index],
            depth=ranges(self.depths[self.order], lengths),
            parents=parents,
            subtree_end=np.repeat(self.ends[self.order], lengths),
            ends=last[chosen],
            source=index,
        )

    def _last_tokens(self) -> Array:
        """The position of the last token of each segment, or if it is empty of those above it."""
        last = self.starts + self.lengths - 1
        # Empty segments look to the nearest one above that is not; each round halves the way.
        nearest = np.where(self.lengths > 0, np.arange(last.size), self.parents)
        while True:
            jump = np.where(nearest >= 0, nearest[nearest], -1)
            if np.array_equal(jump, nearest):
                return np.where(nearest >= 0, last[nearest], -1)
            nearest = jump


def _euler_tour(parents: Array) -> tuple[Array, Array]:
    """Walk around the forest of S nodes: enters (s) and exits (S + s) in order.

    The tour is a linked list, whose order is found by pointer doubling (list ranking, after
    Wyllie): O(S log S) work in O(log S) steps.

    Returns:
        The tour [2 S], and the nodes that are on no tour because they have no root: if there are
        any, the tour is of no use.
    """
    count = parents.size
    # 32 bits halve the memory that each step reads at random; on a cycle distances grow to 4 S.
    dtype = np.int32 if count < 2**28 else np.int64
    siblings = np.argsort(parents, kind="stable")
    parent = parents[siblings]
    opens = np.diff(parent, prepend=-2) != 0
    stop = 2 * count
    after = np.full(2 * count + 1, stop, dtype=dtype)
    after[:count] = np.arange(count, 2 * count)
    inner = opens & (parent >= 0)
    after[parent[inner]] = siblings[inner]
    last = np.append(opens[1:], True) if count else opens
    after[siblings[~last] + count] = siblings[np.flatnonzero(~last) + 1]
    up = last & (parent >= 0)
    after[siblings[up] + count] = parent[up] + count
    distance = np.ones(2 * count + 1, dtype=dtype)
    distance[stop] = 0
    for _ in range((2 * count).bit_length()):
        distance += distance[after]
        after = after[after]
    cyclic = np.flatnonzero(after[:count] != stop)
    tour = np.empty(2 * count, dtype=np.int64)
    if not cyclic.size:
        tour[2 * count - distance[:-1]] = np.arange(2 * count)
    return tour, cyclic
