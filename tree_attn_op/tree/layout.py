"""Where the tokens of a tree lie: the arrays that every builder makes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .arrays import Array, starts_of


@dataclass(frozen=True)
class Layout:
    """A token tree in DFS pre-order; all arrays are int64.

    Attributes:
        input_ids: [N].
        depth: [N], how many ancestors each token has.
        parents: [N], the position of each token's parent, or -1.
        subtree_end: [N], one past the last descendant of each token.
        ends: [M], the position of the last token of each trajectory, -1 where it has none.
        source: [N], where each token stood in the arrays that the tree was made from; None where
            tokens were merged.
    """

    input_ids: Array
    depth: Array
    parents: Array
    subtree_end: Array
    ends: Array
    source: Array | None = None


def run_starts(parents: Array) -> Array:
    """For each token, where the run of consecutive positions begins that are a path down to it."""
    position = np.arange(parents.size)
    return np.maximum.accumulate(np.where(parents == position - 1, 0, position))


def trajectory_positions(parents: Array, depth: Array, ends: Array) -> Array:
    """The positions of all trajectories, one after another, each in its token order: int64 [T].

    Walks up from all ends at once, a whole run of consecutive positions at each step; the steps
    are as many as the most runs of a trajectory, which is one more than the forks at which it is
    not the first branch.
    """
    lengths = np.where(ends >= 0, depth[ends] + 1, 0) if depth.size else np.zeros_like(ends)
    offsets = starts_of(lengths)
    positions = np.empty(lengths.sum(), dtype=np.int64)
    first = run_starts(parents)
    row, stop = offsets[ends >= 0], ends[ends >= 0]
    pieces: list[tuple[Array, Array, Array]] = []
    while row.size:
        start = first[stop]
        pieces.append((row + depth[start], start, stop - start + 1))
        above = parents[start]
        row, stop = row[above >= 0], above[above >= 0]
    if pieces:
        target, start, length = (np.concatenate(column) for column in zip(*pieces, strict=True))
        # The pieces cover T without gaps, so that in order they are one array of running numbers.
        order = np.argsort(target)
        shift = (start - target)[order]
        positions[:] = np.arange(positions.size) + np.repeat(shift, length[order])
    return positions


def branch_starts(parents: Array) -> Array:
    """The first token of each unbranched stretch, ascending: roots, and all children of forks."""
    children = np.bincount(parents[parents >= 0], minlength=parents.size)
    position = np.arange(parents.size)
    return np.flatnonzero((parents != position - 1) | (parents < 0) | (children[parents] > 1))
