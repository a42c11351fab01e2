"""Trees from parents, groups and nodes against their definitions, token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tree_attn_op import PrefixTree

from .oracle import check_structure


@st.composite
def forests(draw, max_size=14):
    """A parent array with its tokens in any order, children before parents included."""
    size = draw(st.integers(0, max_size))
    # Mostly the token before, so that there are unbranched stretches as well.
    topological = [
        draw(st.one_of(st.just(token - 1), st.just(token - 1), st.integers(-1, token - 1)))
        for token in range(size)
    ]
    place = list(range(size))
    if draw(st.booleans()):
        draw(st.randoms(use_true_random=False)).shuffle(place)
    parents = [-1] * size
    for token, parent in enumerate(topological):
        parents[place[token]] = place[parent] if parent >= 0 else -1
    return parents


def path(parents, token):
    """The tokens from the root down to `token`."""
    found = [token]
    while parents[found[-1]] >= 0:
        found.append(parents[found[-1]])
    return found[::-1]


def leaves(parents):
    return [token for token in range(len(parents)) if token not in parents]


def check_against_paths(tree, parents, ends):
    """The trajectories are the paths to `ends`, and each token is there once."""
    check_structure(tree)
    assert sorted(tree.source.tolist()) == list(range(len(parents)))
    expected = [path(parents, end) if end >= 0 else [] for end in ends]
    assert [part.tolist() for part in tree.unpack(tree.source)] == expected
    place = {token: position for position, token in enumerate(tree.source.tolist())}
    above = [place[parents[token]] if parents[token] >= 0 else -1 for token in place]
    assert tree.parents.tolist() == above


@given(forests(), st.data())
def test_parents(parents, data):
    tree = PrefixTree.from_parents(parents)
    check_against_paths(tree, parents, leaves(parents))
    assert torch.equal(tree.input_ids, tree.source)
    if parents:
        ends = data.draw(st.lists(st.integers(0, len(parents) - 1), max_size=4))
        check_against_paths(PrefixTree.from_parents(parents, ends=ends), parents, ends)


@given(forests())
def test_siblings_keep_their_order(parents):
    tree = PrefixTree.from_parents(parents)
    for parent in range(-1, tree.num_tokens):
        children = tree.source[tree.parents == parent]
        # Stretches keep the order of their first tokens, which are the children of forks.
        assert torch.equal(children, children.sort().values)


@given(st.lists(forests(6), min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_a_batch_of_parents_is_one_pack_and_one_mask_a_row(rows, random):
    width = max(map(len, rows)) + 1
    parents = np.full((len(rows), width), 99)
    kept = np.zeros(parents.shape, dtype=bool)
    flat = {}
    for row, tokens in enumerate(rows):
        columns = sorted(random.sample(range(width), len(tokens)))
        for column, parent in zip(columns, tokens, strict=True):
            parents[row, column] = columns[parent] if parent >= 0 else -1
            above = row * width + columns[parent] if parent >= 0 else -1
            flat[row * width + column] = above
            kept[row, column] = True
    ids = torch.arange(parents.size).view(parents.shape) * 3
    tree = PrefixTree.from_parents(torch.from_numpy(parents), ids, attention_mask=kept)
    check_structure(tree)
    assert tree.source_shape == parents.shape
    assert torch.equal(tree.input_ids, ids.flatten(0, 1)[tree.source])
    expected = [path(flat, token) for token in flat if token not in flat.values()]
    assert [part.tolist() for part in tree.unpack(tree.source)] == expected

    dense = torch.zeros(*parents.shape, width, dtype=torch.bool)
    for token in flat:
        dense[token // width, token % width, [seen % width for seen in path(flat, token)]] = True
    assert str(tree.source_mask.predicate) == "q0 >= k0 & q0 < k1"
    assert tree.source_mask.to_dense().shape in (dense.shape, (1, *dense.shape[1:]))
    assert torch.equal(tree.source_mask.to_dense().expand_as(dense), dense)


def test_a_chain_and_a_star_of_many_tokens():
    size = 200_000
    reverse_chain = np.append(np.arange(1, size), -1)
    tree = PrefixTree.from_parents(reverse_chain)
    assert torch.equal(tree.source, torch.arange(size - 1, -1, -1))
    assert torch.equal(tree.position_ids, torch.arange(size))
    star = np.where(np.arange(size) == 5, -1, 5)
    tree = PrefixTree.from_parents(star)
    assert len(tree) == size - 1
    assert tree.position_ids.bincount().tolist() == [1, size - 1]
    assert tree.num_trajectory_tokens == 2 * (size - 1)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([0],), {}, "cycle: token 0"),
        (([1, 2, 0, -1],), {}, "cycle: token 0"),
        (([-1, 2, 3, 2],), {}, "cycle: token 1"),
        (([-1, 2],), {}, "indices below 2: token 1 has 2"),
        (([[-1, 0], [-1, -2]],), {}, r"indices below 2: token \[1, 1\] has -2"),
        (([-1, 0], [1]), {}, r"input_ids must have shape \(2,\)"),
        (([[-1, 0]],), {"attention_mask": [1, 1]}, r"attention_mask must have shape \(1, 2\)"),
        (([[-1, 0]],), {"attention_mask": [[0, 1]]}, r"token \[0, 1\] has a parent .* out: 0"),
        (([-1, 0],), {"ends": [2]}, "ends has 2, which is no token"),
        (([-1, 0],), {"ends": [-1]}, "ends has -1, which is no token"),
        (([-1, -1],), {"attention_mask": [1, 0], "ends": [1]}, "ends has 1, which is no token"),
        (([[[-1]]],), {}, r"parents must have one or two dimensions, its shape is \(1, 1, 1\)"),
    ],
)
def test_refuses_what_is_no_forest(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        PrefixTree.from_parents(*arguments, **options)


def groups_of(parents, sizes):
    """Group and parent ids [S] of groups laid out one after another."""
    ids = [10 * group for group in range(len(parents))]
    above = [ids[p] if p >= 0 else -1 for p in parents]
    return np.repeat(ids, sizes), np.repeat(above, sizes)


def group_mask(groups, above):
    """The mask of two-level trees, as frameworks write it: bool [S, S]."""
    index = torch.arange(len(groups))
    q, k = index[:, None], index[None, :]
    groups, above = torch.as_tensor(groups), torch.as_tensor(above)
    return (q >= k) & ((groups[q] == groups[k]) | (above[q] == groups[k]))


@given(st.data())
def test_groups_of_two_levels_mean_what_their_mask_means(data):
    parents: list[int] = []
    for _ in range(data.draw(st.integers(0, 3))):
        prompt = len(parents)
        parents += [-1] + [prompt] * data.draw(st.integers(0, 3))
    sizes = [data.draw(st.integers(1, 3)) for _ in parents]
    groups, above = groups_of(parents, sizes)
    if data.draw(st.booleans()):
        # A root may also name itself.
        above = np.where(above == -1, groups, above)
    tree = PrefixTree.from_groups(groups, above)
    check_structure(tree)
    assert torch.equal(tree.source_mask.to_dense()[0], group_mask(groups, above))
    assert len(tree) == len([g for g in range(len(parents)) if g not in parents])


def test_interleaved_groups_keep_the_order_of_their_tokens():
    groups, above = [5, 5, 7, 8, 7, 8, 8], [-1, -1, 5, 5, 5, 5, 5]
    tree = PrefixTree.from_groups(groups, above, [1, 2, 3, 4, 5, 6, 7])
    assert torch.equal(tree.source_mask.to_dense()[0], group_mask(groups, above))
    assert tree.input_ids.tolist() == [1, 2, 3, 5, 4, 6, 7]
    assert [part.tolist() for part in tree.unpack(tree.input_ids)] == [
        [1, 2, 3, 5],
        [1, 2, 4, 6, 7],
    ]


@given(forests(6), st.data())
def test_deeper_groups_see_all_groups_above(parents, data):
    parents = [min(parent, token - 1) for token, parent in enumerate(parents)]
    sizes = [data.draw(st.integers(1, 3)) for _ in parents]
    tree = PrefixTree.from_groups(*groups_of(parents, sizes))
    check_structure(tree)
    group = np.repeat(np.arange(len(parents)), sizes)
    first = np.cumsum([0, *sizes])
    for token, row in enumerate(tree.source_mask.to_dense()[0]):
        seen = [t for g in path(parents, group[token]) for t in range(first[g], first[g + 1])]
        assert row.nonzero().squeeze(1).tolist() == [t for t in seen if t <= token]


def test_groups_of_a_batch_are_separate_rows():
    groups = torch.tensor([[0, 0, 1, 2, -1], [0, 2, 2, -1, -1]])
    above = torch.tensor([[-1, -1, 0, 0, -1], [-1, 0, 0, -1, -1]])
    tree = PrefixTree.from_groups(groups, above, attention_mask=groups >= 0)
    check_structure(tree)
    assert [part.tolist() for part in tree.unpack(tree.source)] == [
        [0, 1, 2],
        [0, 1, 3],
        [5, 6, 7],
    ]
    for row, dense in enumerate(tree.source_mask.to_dense()):
        kept = groups[row] >= 0
        expected = group_mask(groups[row], above[row]) & kept[:, None] & kept[None, :]
        assert torch.equal(dense, expected)


@pytest.mark.parametrize(
    ("groups", "above", "message"),
    [
        ([0, 1], [-1, 2], "token 1 has parent group 2, which no token of its row"),
        ([[0, 0], [1, 1]], [[-1, -1], [0, 0]], r"token \[1, 0\] has parent group 0, which no"),
        ([0, 1, 1], [-1, 0, -1], "token 2 of group 1 has -1, the group's first token 0"),
        ([0, 1, 0], [-1, 0, -1], "token 1 starts group 1 before its parent group 0 has ended"),
        ([1, 0], [0, -1], "token 0 starts group 1 before its parent group 0"),
        ([0, 1], [1, 0], "token 0 starts group 0 before its parent group 1"),
        ([0, -1], [-1, -1], "group_ids must not be -1"),
        ([0, 1], [-1], r"one shape, got \(2,\) and \(1,\)"),
    ],
)
def test_refuses_what_are_no_groups(groups, above, message):
    with pytest.raises(ValueError, match=message):
        PrefixTree.from_groups(groups, above)


@given(forests(8), st.data())
def test_nodes(parents, data):
    nodes = [(parent, data.draw(st.lists(st.integers(0, 2), max_size=3))) for parent in parents]
    ends = None
    chosen = leaves(parents)
    if nodes and data.draw(st.booleans()):
        chosen = ends = data.draw(st.lists(st.integers(0, len(nodes) - 1), max_size=4))
    tree = PrefixTree.from_nodes(nodes, ends=ends)
    check_structure(tree)
    assert tree.num_tokens == sum(len(tokens) for _, tokens in nodes)
    expected = [[t for n in path(parents, end) for t in nodes[n][1]] for end in chosen]
    assert [part.tolist() for part in tree.unpack(tree.input_ids)] == expected
    flat = torch.tensor([t for _, tokens in nodes for t in tokens], dtype=torch.int64)
    assert torch.equal(flat[tree.source], tree.input_ids)


def test_nodes_are_laid_out_in_the_order_of_the_list():
    nodes = [(-1, [9]), (0, [3, 3]), (0, torch.tensor([2])), (-1, ()), (3, np.array([1]))]
    tree = PrefixTree.from_nodes(nodes)
    assert tree.input_ids.tolist() == [9, 3, 3, 2, 1]
    assert torch.equal(tree.source, torch.arange(5))
    assert tree.trajectory_lengths == (3, 2, 1)


@pytest.mark.parametrize(
    ("nodes", "options", "error", "message"),
    [
        ([(-1, [1]), (2, [1])], {}, ValueError, "parent of node 1 must be -1 or a node below 2"),
        ([(-2, [1])], {}, ValueError, "parent of node 0 .* got -2"),
        ([(1, []), (0, [])], {}, ValueError, "cycle: node 0"),
        ([(-1, [1.5])], {}, TypeError, "tokens of node 0 must be of integers"),
        ([(0.0, [1])], {}, TypeError, "float"),
        ([(-1, [1], 2)], {}, ValueError, r"node 0 must be \(parent, tokens\), got 3 items"),
        ([(-1, [1])], {"ends": [1]}, ValueError, "ends must be nodes below 1"),
    ],
)
def test_refuses_what_are_no_nodes(nodes, options, error, message):
    with pytest.raises(error, match=message):
        PrefixTree.from_nodes(nodes, **options)


def test_a_tree_of_merged_sequences_has_no_source_mask():
    with pytest.raises(ValueError, match="from sequences has no source_mask"):
        _ = PrefixTree.from_sequences([[1]]).source_mask
