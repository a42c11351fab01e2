"""From parent arrays, groups and nodes to DFS pre-order; no tokens are merged."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..arguments import check_int, check_iterable, check_type
from .arrays import Array, starts_of
from .forest import Segments
from .inputs import Integers, flags, integers
from .layout import Layout, branch_starts


@dataclass(frozen=True)
class Source:
    """The tokens that a tree is made from, where a batch may have holes.

    Attributes:
        shape: (S,), or (B, S) for a batch whose rows are forests of their own.
        kept: int64 [K], where the tokens that count stand in the flattened shape, ascending.
        ids: int64 [K], their token ids.
    """

    shape: tuple[int, ...]
    kept: Array
    ids: Array

    @classmethod
    def of(cls, shape: tuple[int, ...], input_ids: Integers | None, mask: Any | None) -> Source:
        """Check `input_ids` and `mask` against `shape`; without ids a token's place is its id."""
        size = int(np.prod(shape))
        kept = np.arange(size)
        if mask is not None:
            kept = np.flatnonzero(flags("attention_mask", mask, shape))
        if input_ids is None:
            return cls(shape, kept, kept)
        ids = integers("input_ids", input_ids, len(shape))
        if ids.shape != shape:
            raise ValueError(f"input_ids must have shape {shape}, its shape is {ids.shape}")
        return cls(shape, kept, ids.reshape(-1)[kept])

    @property
    def rows(self) -> Array:
        """int64 [K], the batch row of each token."""
        return self.kept // max(self.shape[-1], 1)

    def describe(self, token: int) -> str:
        """How errors call the token that is the `token`-th of those kept."""
        place = np.unravel_index(int(self.kept[token]), self.shape)
        return "token " + (str(place[0]) if len(place) == 1 else f"[{', '.join(map(str, place))}]")

    def indices(self, name: str, places: Integers) -> Array:
        """Flat places of this source as indices into `kept`, or an error with `name`."""
        given = integers(name, places, 1)
        index = np.searchsorted(self.kept, given)
        found = index < self.kept.size
        found[found] = self.kept[index[found]] == given[found]
        if not found.all():
            raise ValueError(f"{name} has {given[~found][0]}, which is no token of the tree")
        return index


def parents_layout(
    parents: Integers, input_ids: Integers | None, mask: Any | None, ends: Integers | None
) -> tuple[Layout, Source]:
    """The layout of PrefixTree.from_parents."""
    given = integers("parents", parents, (1, 2))
    source = Source.of(given.shape, input_ids, mask)
    local = given.reshape(-1)[source.kept]
    wrong = (local < -1) | (local >= given.shape[-1])
    if wrong.any():
        token = int(np.flatnonzero(wrong)[0])
        raise ValueError(
            f"parents must be -1 or indices below {given.shape[-1]}: {source.describe(token)} "
            f"has {local[token]}"
        )
    index = np.full(given.size, -1, dtype=np.int64)
    index[source.kept] = np.arange(source.kept.size)
    has_parent = local >= 0
    above = np.full(source.kept.size, -1, dtype=np.int64)
    above[has_parent] = index[(source.rows * given.shape[-1] + local)[has_parent]]
    lost = has_parent & (above < 0)
    if lost.any():
        token = int(np.flatnonzero(lost)[0])
        raise ValueError(
            f"{source.describe(token)} has a parent that attention_mask leaves out: {local[token]}"
        )
    return _token_layout(above, source, ends), source


def groups_layout(
    group_ids: Integers,
    parent_ids: Integers,
    input_ids: Integers | None,
    mask: Any | None,
) -> tuple[Layout, Source]:
    """The layout of PrefixTree.from_groups."""
    groups = integers("group_ids", group_ids, (1, 2))
    above = integers("parent_ids", parent_ids, (1, 2))
    if above.shape != groups.shape:
        raise ValueError(
            f"group_ids and parent_ids must have one shape, got {groups.shape} and {above.shape}"
        )
    source = Source.of(groups.shape, input_ids, mask)
    groups, above = groups.reshape(-1)[source.kept], above.reshape(-1)[source.kept]
    if (groups == -1).any():
        raise ValueError(
            "group_ids must not be -1, which as a parent means none; leave padding out with "
            "attention_mask"
        )

    # Each group is a chain of its tokens in their order, and rows share no groups.
    names, dense = np.unique(groups, return_inverse=True)
    keys, first, number = np.unique(
        source.rows * names.size + dense, return_index=True, return_inverse=True
    )
    differs = above != above[first][number]
    if differs.any():
        token = int(np.flatnonzero(differs)[0])
        raise ValueError(
            f"the tokens of a group must have one parent group: {source.describe(token)} of "
            f"group {groups[token]} has {above[token]}, the group's first token "
            f"{above[first][number][token]}"
        )
    by_group = np.argsort(number, kind="stable")
    chain = np.full(groups.size, -1, dtype=np.int64)
    inner = np.flatnonzero(np.diff(number[by_group]) == 0) + 1
    chain[by_group[inner]] = by_group[inner - 1]
    last = np.empty(first.size, dtype=np.int64)
    last[number[by_group]] = by_group

    parent_of = above[first]
    has_parent = (parent_of != -1) & (parent_of != groups[first])
    child = np.flatnonzero(has_parent)
    parent, known = _find(keys, names, source.rows[first[child]], parent_of[child])
    if not known.all():
        token = int(first[child[~known][0]])
        raise ValueError(
            f"{source.describe(token)} has parent group {above[token]}, which no token of its "
            "row belongs to; a root has -1 or its own group"
        )
    early = first[child] < last[parent]
    if early.any():
        token = int(first[child[early][0]])
        raise ValueError(
            f"{source.describe(token)} starts group {groups[token]} before its parent group "
            f"{above[token]} has ended: it would not see all of it"
        )
    chain[first[child]] = last[parent]
    return _token_layout(chain, source, None), source


def nodes_layout(
    nodes: Sequence[tuple[int, Integers]], ends: Integers | None
) -> tuple[Layout, Source]:
    """The layout of PrefixTree.from_nodes."""
    check_iterable("nodes", nodes, "(parent, tokens)")
    parents = np.empty(len(nodes), dtype=np.int64)
    parts = []
    for index, node in enumerate(nodes):
        check_type(f"node {index}", node, (tuple, list), "(parent, tokens)")
        if len(node) != 2:
            raise ValueError(f"node {index} must be (parent, tokens), got {len(node)} items")
        parent, tokens = node
        check_int(f"the parent of node {index}", operator.index(parent))
        if not -1 <= parent < len(nodes):
            raise ValueError(
                f"the parent of node {index} must be -1 or a node below {len(nodes)}, got {parent}"
            )
        parents[index] = parent
        parts.append(integers(f"the tokens of node {index}", tokens, 1))
    lengths = np.array([part.size for part in parts], dtype=np.int64)
    segments = Segments.of(parents, lengths, lambda node: f"node {node}")
    ids = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
    source = Source((ids.size,), np.arange(ids.size), ids)
    if ends is None:
        chosen = np.flatnonzero(np.bincount(parents[parents >= 0], minlength=len(nodes)) == 0)
    else:
        chosen = integers("ends", ends, 1)
        if ((chosen < 0) | (chosen >= len(nodes))).any():
            raise ValueError(f"ends must be nodes below {len(nodes)}")
    return segments.layout(source.ids, starts_of(lengths), chosen), source


def _token_layout(parents: Array, source: Source, ends: Integers | None) -> Layout:
    """The layout of tokens with `parents` [K], in any order that has no cycle."""
    first = branch_starts(parents)
    segment = np.zeros(parents.size, dtype=np.int64)
    segment[first] = 1
    segment = np.cumsum(segment) - 1
    lengths = np.diff(first, append=parents.size)
    above = parents[first]
    segments = Segments.of(
        np.where(above >= 0, segment[above], -1) if first.size else above,
        lengths,
        lambda index: source.describe(int(first[index])),
    )
    if ends is None:
        leaf = np.bincount(parents[parents >= 0], minlength=parents.size) == 0
        chosen = np.flatnonzero(leaf)
    else:
        chosen = source.indices("ends", ends)
    layout = segments.layout(source.ids, first, np.arange(first.size))
    assert layout.source is not None
    place = np.empty(parents.size, dtype=np.int64)
    place[layout.source] = np.arange(parents.size)
    return replace(layout, ends=place[chosen], source=source.kept[layout.source])


def _find(keys: Array, names: Array, rows: Array, groups: Array) -> tuple[Array, Array]:
    """Which of the groups with ascending `keys` (row * names + rank of the name) have these rows
    and names, and whether there is such a group."""
    rank = np.searchsorted(names, groups)
    known = rank < names.size
    known[known] = names[rank[known]] == groups[known]
    wanted = rows * names.size + rank
    place = np.searchsorted(keys, wanted)
    known &= place < keys.size
    known[known] = keys[place[known]] == wanted[known]
    return np.where(known, place, 0), known
