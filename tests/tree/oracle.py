"""Trees built token by token, and what holds of every tree, checked token by token."""

from __future__ import annotations

import torch

from tree_attn_op import PrefixTree


def trie(sequences, limits=None):
    """The prefixes that are nodes of the trie of `sequences`, as keys, by sequence.

    A key is (the tokens up to and with the node, None or the sequence that it is private to).
    """
    if limits is None:
        limits = [len(sequence) for sequence in sequences]
    return [
        [
            (tuple(sequence[: depth + 1]), None if depth < limit else index)
            for depth in range(len(sequence))
        ]
        for index, (sequence, limit) in enumerate(zip(sequences, limits, strict=True))
    ]


def check_structure(tree: PrefixTree) -> None:
    """The tensors of a tree agree with its `parents` alone, and it is in DFS pre-order."""
    parents = tree.parents.tolist()
    visible: list[set[int]] = []
    for position, parent in enumerate(parents):
        assert -1 <= parent < position
        # In pre-order a parent is the token before, or one of those above that.
        assert parent == -1 or parent in visible[position - 1]
        visible.append({position} | (visible[parent] if parent >= 0 else set()))
    size = len(parents)
    assert tree.num_tokens == size
    assert tree.position_ids.tolist() == [len(seen) - 1 for seen in visible]
    descendants = [[p for p in range(size) if n in visible[p]] for n in range(size)]
    assert tree.subtree_end.tolist() == [max(below) + 1 for below in descendants]
    paths = [sorted(visible[end]) if end >= 0 else [] for end in tree.trajectory_ends.tolist()]
    assert [tree.positions(i).tolist() for i in range(len(tree))] == paths
    assert tree.trajectory_positions.tolist() == [p for path in paths for p in path]
    assert tree.trajectory_lengths == tuple(map(len, paths))
    assert tree.multiplicity.tolist() == [sum(n in path for path in paths) for n in range(size)]
    expected = torch.zeros(1, size, size, dtype=torch.bool)
    for position, seen in enumerate(visible):
        expected[0, position, list(seen)] = True
    assert torch.equal(tree.mask.to_dense(), expected)


def check_trie(tree: PrefixTree, sequences, limits=None) -> None:
    """`tree` is the trie of `sequences`: two tokens are one exactly where their keys are equal."""
    check_structure(tree)
    assert [part.tolist() for part in tree.unpack(tree.input_ids)] == [list(s) for s in sequences]
    keys = [key for path in trie(sequences, limits) for key in path]
    assert tree.num_tokens == len(set(keys))
    by_key = dict(zip(keys, tree.trajectory_positions.tolist(), strict=True))
    assert [by_key[key] for key in keys] == tree.trajectory_positions.tolist()
    assert len(set(by_key.values())) == len(by_key)
