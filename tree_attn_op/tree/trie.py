"""From token sequences to a trie in DFS pre-order: lexicographic order and common prefixes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .arrays import Array, RangeMinimum, ranges, starts_of
from .inputs import Ragged
from .layout import Layout


@dataclass(frozen=True)
class SortedSequences:
    """Sequences in lexicographic order of the part that they may share; arrays are int64.

    Sorting puts sequences that share a prefix next to each other, so what a sequence shares with
    its predecessor is all that it shares with any sequence before it, and the tokens after that,
    sequence by sequence, are the trie in DFS pre-order.

    Attributes:
        ids: [T], the tokens, in the order of the batch.
        order: [M], the place in the batch of each sequence.
        starts: [M], where each begins in `ids`.
        lengths: [M].
        shared: [M], how many tokens each has in common with the one before it; 0 for the first.
        minima: the minima of ranges of `shared`: sequences a < b have
            min(shared[a + 1], ..., shared[b]) tokens in common.
    """

    ids: Array
    order: Array
    starts: Array
    lengths: Array
    shared: Array
    minima: RangeMinimum

    @classmethod
    def of(cls, batch: Ragged, limits: Array) -> SortedSequences:
        """Sort `batch`, of which each sequence may share as many tokens as `limits` [M] says."""
        starts = starts_of(batch.lengths)
        order = _order(batch, starts, limits)
        starts, limits = starts[order], limits[order]
        shared = _shared_with_predecessor(batch.ids, starts, limits)
        return cls(batch.ids, order, starts, batch.lengths[order], shared, RangeMinimum(shared))

    def __len__(self) -> int:
        return self.order.size

    def subset(self, chosen: Array) -> SortedSequences:
        """Some of the sequences, by their ascending positions in this order."""
        shared = np.zeros(chosen.size, dtype=np.int64)
        shared[1:] = self.minima.minimum(chosen[:-1] + 1, chosen[1:] + 1)
        return SortedSequences(
            self.ids,
            self.order[chosen],
            self.starts[chosen],
            self.lengths[chosen],
            shared,
            RangeMinimum(shared),
        )

    def layout(self) -> Layout:
        """The trie; its trajectories are the sequences, in the order of the batch."""
        if not len(self):
            return Layout(*(np.empty(0, dtype=np.int64) for _ in range(5)))
        # Sequence i adds a run of tokens to the pack, from depth shared[i] on.
        new = self.lengths - self.shared
        first = starts_of(new)
        size = int(new.sum())
        parents = np.arange(-1, size - 1)
        begun = np.flatnonzero(new)
        parents[first[begun]] = self._position(begun - 1, self.shared[begun] - 1, first)
        ends = np.empty(len(self), dtype=np.int64)
        ends[np.argsort(np.argsort(self.order))] = self._position(
            np.arange(len(self)), self.lengths - 1, first
        )
        return Layout(
            input_ids=self.ids[ranges(self.starts + self.shared, new)],
            depth=ranges(self.shared, new),
            parents=parents,
            subtree_end=self._subtree_ends(first, new, size),
            ends=ends,
        )

    def _position(self, sequence: Array, depth: Array, first: Array) -> Array:
        """The pack position of the token at `depth` of each of `sequence`; -1 for depth -1."""
        # The run that holds it is the last one, up to the sequence's own, that begins so high.
        run = self.minima.last_at_most(sequence, depth)
        return np.where(depth >= 0, first[run] + depth - self.shared[run], -1)

    def _subtree_ends(self, first: Array, new: Array, size: int) -> Array:
        """A token's descendants end with the first later run that begins at its depth or above."""
        index = np.arange(len(self))
        next_higher = self.minima.first_at_most(index + 1, self.shared)
        end_of_run = np.append(first, size)[next_higher]
        # Within a run the end changes at each depth at which a later run leaves it.
        leaves = np.flatnonzero(self.shared > 0)
        run = self.minima.last_at_most(leaves - 1, self.shared[leaves] - 1)
        at = first[run] + self.shared[leaves] - self.shared[run]
        inside = at < first[run] + new[run]
        begun = new > 0
        changes = np.concatenate([first[begun], at[inside]])
        values = np.concatenate([end_of_run[begun], first[leaves[inside]]])
        # Of several runs that leave at one place the first counts: the least value.
        order = np.lexsort((values, changes))
        changes, values = changes[order], values[order]
        kept = np.diff(changes, prepend=-1) > 0
        return np.repeat(values[kept], np.diff(changes[kept], append=size))


def _order(batch: Ragged, starts: Array, limits: Array) -> Array:
    """The stable order by the shareable part, a prefix before what it is a prefix of; then by the
    rest, so that it does not depend on the order of the batch."""
    # Big-endian bytes compare as unsigned numbers do; flipping the sign bit makes them unsigned.
    size = 8
    if batch.ids.size and batch.ids.min() >= 0 and batch.ids.max() <= np.iinfo(np.uint32).max:
        keys, size = batch.ids.astype(">u4").tobytes(), 4
    else:
        keys = (batch.ids.view(np.uint64) ^ np.uint64(1 << 63)).astype(">u8").tobytes()
    begin, end = (starts * size).tolist(), ((starts + batch.lengths) * size).tolist()
    if np.array_equal(limits, batch.lengths):
        whole = [keys[a:b] for a, b in zip(begin, end, strict=True)]
        return np.array(sorted(range(len(whole)), key=whole.__getitem__), dtype=np.int64)
    limit = ((starts + limits) * size).tolist()
    parts = [(keys[a:b], keys[b:c]) for a, b, c in zip(begin, limit, end, strict=True)]
    return np.array(sorted(range(len(parts)), key=parts.__getitem__), dtype=np.int64)


def _shared_with_predecessor(ids: Array, starts: Array, limits: Array) -> Array:
    """How many of its first `limits` tokens each sequence has in common with the one before it."""
    common = np.minimum(limits[1:], limits[:-1])
    differs = np.flatnonzero(ids[ranges(starts[1:], common)] != ids[ranges(starts[:-1], common)])
    offsets = starts_of(common)
    # The first difference of each pair, or its whole common length where there is none.
    index = np.searchsorted(differs, offsets)
    difference = np.append(differs, ids.size)[index] - offsets
    shared = np.zeros(starts.size, dtype=np.int64)
    shared[1:] = np.minimum(difference, common)
    return shared
