"""Packing into bins: the budget, nothing lost, and never worse than greedy first fit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tree_attn_op import PrefixTree
from tree_attn_op.tree import packing
from tree_attn_op.tree.inputs import Ragged
from tree_attn_op.tree.trie import SortedSequences

from .oracle import check_trie, trie

SEQUENCES = st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=14)


def greedy_first_fit(sequences, max_tokens, limits=None):
    """Total tokens of sequence by sequence into the first bin with room, with sets of nodes."""
    bins: list[set] = []
    for path in trie(sequences, limits):
        nodes = set(path)
        for one in bins:
            if len(one | nodes) <= max_tokens:
                one |= nodes
                break
        else:
            bins.append(nodes)
    return sum(map(len, bins))


def check_packing(trees, sequences, max_tokens, limits=None):
    for tree in trees:
        members = [sequences[i] for i in tree.trajectory_ids]
        check_trie(tree, members, limits and [limits[i] for i in tree.trajectory_ids])
        assert tree.num_tokens <= max_tokens
        assert list(tree.trajectory_ids) == sorted(tree.trajectory_ids)
    packed = sorted(i for tree in trees for i in tree.trajectory_ids)
    assert packed == list(range(len(sequences)))
    sizes = [tree.num_tokens for tree in trees]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) <= greedy_first_fit(sequences, max_tokens, limits)


@given(SEQUENCES, st.integers(6, 20), st.booleans(), st.data())
def test_bins_keep_the_budget_and_are_never_worse_than_greedy(sequences, budget, limited, data):
    limits = None
    if limited:
        limits = [data.draw(st.integers(0, len(sequence))) for sequence in sequences]
    trees = PrefixTree.pack(sequences, budget, share_lengths=limits)
    check_packing(trees, sequences, budget, limits)
    assert all(len(tree) for tree in trees)


@given(SEQUENCES, st.integers(6, 20))
def test_one_plan_is_greedy_first_fit(sequences, budget):
    batch = Ragged.of_sequences(sequences)
    ordered = SortedSequences.of(batch, batch.lengths)
    problem = packing._Problem(ordered, budget)
    as_given = np.argsort(ordered.order).tolist()
    bins = problem.first_fit(problem.item(at, at + 1) for at in as_given)
    assert sum(budget - one.room for one in bins) == greedy_first_fit(sequences, budget)


def least_tokens(sequences, max_tokens):
    """The fewest tokens of all ways to divide `sequences` over bins."""

    def partitions(rest):
        if not rest:
            yield []
            return
        for groups in partitions(rest[1:]):
            yield [*groups, [rest[0]]]
            for at, group in enumerate(groups):
                yield [*groups[:at], [*group, rest[0]], *groups[at + 1 :]]

    sizes = (
        [len({tuple(s[: n + 1]) for s in group for n in range(len(s))}) for group in groups]
        for groups in partitions(sequences)
    )
    return min(sum(bins) for bins in sizes if max(bins) <= max_tokens)


@pytest.mark.parametrize(
    ("sequences", "budget", "least"),
    [
        ([[1, 5, 2, 3], [1, 3, 9], [1, 8], [1, 6, 2], [2]], 5, 11),
        ([[1, 1, 6], [2], [1, 1, 7, 7, 7, 5], [9, 6], [1, 7]], 6, 13),
        ([[9, 3, 4], [9, 1, 5], [9], [3], [3, 6]], 4, 8),
    ],
    ids=["greedy", "subtrees in order", "largest subtrees first"],
)
def test_batches_of_which_one_plan_alone_finds_the_best_bins(sequences, budget, least):
    assert least_tokens(sequences, budget) == least
    assert sum(tree.num_tokens for tree in PrefixTree.pack(sequences, budget)) == least


def test_one_tree_where_all_fits():
    sequences = [[1, 2, 3], [1, 2, 4], [1, 2, 5]]
    (tree,) = PrefixTree.pack(sequences, 5)
    assert tree.num_tokens == 5
    assert len(PrefixTree.pack(sequences, 4)) == 2


def grpo(groups, completions, prompt, completion, seed=0):
    """Sequences of `groups` prompts with completions each, shuffled."""
    rng = np.random.default_rng(seed)
    sequences = []
    for _ in range(groups):
        shared = rng.integers(0, 1000, prompt)
        sequences += [
            np.concatenate([shared, rng.integers(0, 1000, rng.integers(1, completion))])
            for _ in range(completions)
        ]
    order = rng.permutation(len(sequences))
    return [sequences[i] for i in order]


def test_a_shuffled_grpo_batch_keeps_its_groups_together():
    # Two groups a bin, and greedy tears most of them apart.
    sequences = grpo(groups=8, completions=8, prompt=60, completion=20)
    trees = PrefixTree.pack(sequences, 460)
    total = sum(tree.num_tokens for tree in trees)
    assert total == PrefixTree.from_sequences(sequences).num_tokens
    assert total < 0.8 * greedy_first_fit([s.tolist() for s in sequences], 460)


def test_a_group_beyond_the_budget_is_split_at_a_low_price():
    sequences = grpo(groups=2, completions=16, prompt=50, completion=60)
    trees = PrefixTree.pack(sequences, 400)
    merged = PrefixTree.from_sequences(sequences).num_tokens
    # One more copy of a prompt for each bin beyond the first of a group.
    assert sum(tree.num_tokens for tree in trees) <= merged + 50 * (len(trees) - 1)
    check_packing(trees, [s.tolist() for s in sequences], 400)


@given(SEQUENCES, st.integers(1, 4), st.integers(0, 5))
def test_ranks_get_equally_many_trees(sequences, ranks, least):
    trees = PrefixTree.pack(sequences, 8, num_ranks=ranks, min_trees=least)
    check_packing(trees, sequences, 8)
    needed = len(PrefixTree.pack(sequences, 8))
    assert len(trees) >= max(needed, least)
    assert len(trees) % ranks == 0
    assert len(trees) - max(needed, least) < ranks
    assert len({len(trees[rank::ranks]) for rank in range(ranks)}) == 1


def test_an_empty_tree_is_a_tree():
    tree = PrefixTree.pack([[1, 2]], 4, num_ranks=2)[1]
    assert (len(tree), tree.num_tokens, tree.tree_token_ratio) == (0, 0, 1.0)
    assert tree.mask.to_dense().shape == (1, 0, 0)
    assert tree.gather_logprobs(torch.zeros(1, 0, 7)) == []
    assert tree.scatter([]).shape == (0,)
    logits = torch.zeros(0, 7, requires_grad=True)
    tree.token_logprobs(logits).sum().backward()
    assert logits.grad.shape == (0, 7)


def test_nothing_needs_no_tree():
    assert PrefixTree.pack([], 4) == []
    assert len(PrefixTree.pack([[], []], 4)) == 1


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([[1], [1, 2, 3]], 2), {}, "sequence 1 has 3 tokens, more than the max_tokens of 2"),
        (([[1]], 0), {}, "max_tokens must be at least 1, got 0"),
        (([[1]], 4), {"num_ranks": 0}, "num_ranks must be at least 1, got 0"),
        (([[1]], 4), {"min_trees": -1}, "min_trees must be at least 0, got -1"),
        (([[1]], 4), {"share_lengths": [1, 2]}, "each of the 1 sequences, got 2"),
    ],
)
def test_refuses_what_cannot_be_packed(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        PrefixTree.pack(*arguments, **options)
