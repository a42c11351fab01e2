"""Trees from sequences against a trie built token by token, on random and awkward sequences."""

from __future__ import annotations

import dataclasses
import pickle
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tree_attn_op import PrefixTree
from tree_attn_op.tree import TreeStatistics

from .oracle import check_trie

INT64 = st.integers(-(2**63), 2**63 - 1)
# Few distinct ids make deep sharing likely; the large ones catch any narrowing of the ids.
TOKEN = st.sampled_from([0, 1, 2, -1, 2**32, 2**32 + 1, -(2**63), 2**63 - 1])
SEQUENCES = st.lists(st.lists(TOKEN, max_size=8), max_size=12)


def in_order(sequences):
    """The tokens of the trie in DFS pre-order, children by ascending id."""
    children: dict[tuple[int, ...], set[int]] = {(): set()}
    for sequence in sequences:
        for depth, token in enumerate(sequence):
            children[tuple(sequence[:depth])].add(token)
            children.setdefault(tuple(sequence[: depth + 1]), set())
    found, pending = [], [()]
    while pending:
        prefix = pending.pop()
        found += prefix[-1:]
        pending.extend((*prefix, token) for token in sorted(children[prefix], reverse=True))
    return found


def check_against_oracle(sequences):
    tree = PrefixTree.from_sequences(sequences)
    check_trie(tree, sequences)
    assert tree.input_ids.tolist() == in_order(sequences)
    assert tree.source is None
    return tree


@given(SEQUENCES)
def test_equals_a_token_by_token_trie(sequences):
    check_against_oracle(sequences)


@given(st.lists(st.lists(INT64, max_size=4), max_size=6))
def test_any_64_bit_ids(sequences):
    check_against_oracle(sequences)


@pytest.mark.parametrize(
    ("sequences", "num_tokens"),
    [
        ([], 0),
        ([[]], 0),
        ([[], [], [7]], 1),
        ([[7]], 1),
        ([[7], [7], [7]], 1),
        ([[1, 2, 3], [1, 2], [1], []], 3),
        ([[1], [1, 2], [1, 2, 3], [1, 2, 3]], 3),
        ([[3, 1], [2, 1], [1, 1]], 6),
        ([[256], [1], [-256], [2**40]], 4),
    ],
)
def test_edge_cases(sequences, num_tokens):
    tree = check_against_oracle(sequences)
    assert tree.num_tokens == num_tokens
    assert tree.num_trajectory_tokens == sum(map(len, sequences))
    assert len(tree) == len(sequences)


@given(SEQUENCES, st.randoms(use_true_random=False))
def test_the_pack_does_not_depend_on_the_order(sequences, random):
    shuffled = random.sample(sequences, len(sequences))
    tree, other = PrefixTree.from_sequences(sequences), PrefixTree.from_sequences(shuffled)
    assert torch.equal(tree.input_ids, other.input_ids)
    assert torch.equal(tree.subtree_end, other.subtree_end)


def test_depths_beyond_16_bits():
    trunk = np.arange(70_000)
    sequences = [np.append(trunk, [1, 2]), np.append(trunk[:66_000], [3]), trunk]
    tree = PrefixTree.from_sequences(sequences)
    assert tree.num_tokens == 70_000 + 2 + 1
    assert tree.position_ids.max() == 70_001
    for index, sequence in enumerate(sequences):
        positions = tree.positions(index)
        assert torch.equal(tree.input_ids[positions], torch.from_numpy(sequence))
        assert torch.equal(tree.position_ids[positions], torch.arange(sequence.size))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_accepts_tensors_arrays_and_tuples(dtype):
    tree = PrefixTree.from_sequences(
        [torch.tensor([1, 2, 3], dtype=dtype), np.array([1, 2]), (1, 5)]
    )
    assert tree.input_ids.tolist() == [1, 2, 3, 5]
    assert tree.input_ids.dtype == tree.position_ids.dtype == torch.int64


def test_does_not_alias_its_input():
    tokens = torch.tensor([1, 2, 3])
    tree = PrefixTree.from_sequences([tokens])
    tokens.zero_()
    assert tree.input_ids.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("sequences", "error", "message"),
    [
        ([[1], [1.5]], TypeError, "sequence 1 .*float64"),
        ([torch.ones(2)], TypeError, "sequence 0 .*float32"),
        ([torch.ones(2, dtype=torch.bfloat16)], TypeError, "sequence 0 .*bfloat16"),
        ([[True, False]], TypeError, "sequence 0 .*bool"),
        ([["a"]], TypeError, "sequence 0"),
        ([[2**64]], TypeError, "sequence 0 .*64 bits"),
        ([[1, 2**63]], TypeError, "sequence 0 .*64 bits"),
        ([[2**63]], ValueError, "sequence 0 .*above 9223372036854775807"),
        ([torch.ones(2, 2, dtype=torch.int64)], ValueError, r"sequence 0 .*\(2, 2\)"),
        ([7], ValueError, r"sequence 0 .*\(\)"),
    ],
)
def test_refuses_what_is_no_token_sequence(sequences, error, message):
    with pytest.raises(error, match=message):
        PrefixTree.from_sequences(sequences)


def test_unpack_takes_any_dim_and_carries_gradients():
    tree = PrefixTree.from_sequences([[1, 2, 3], [1, 2], [4]])
    x = torch.randn(2, tree.num_tokens, 5, dtype=torch.float64, requires_grad=True)
    parts = tree.unpack(x, dim=1)
    assert [tuple(part.shape) for part in parts] == [(2, 3, 5), (2, 2, 5), (2, 1, 5)]
    for index, part in enumerate(parts):
        assert torch.equal(part, x[:, tree.positions(index)])
    sum(part.sum() for part in parts).backward()
    assert torch.equal(x.grad[0, :, 0], torch.tensor([2.0, 2.0, 1.0, 1.0], dtype=torch.float64))


def test_unpack_and_positions_name_what_is_wrong():
    tree = PrefixTree.from_sequences([[1, 2, 3], [1, 2]])
    with pytest.raises(ValueError, match=r"\(4, 3\).*3 tokens along dim 0"):
        tree.unpack(torch.ones(4, 3), dim=0)
    with pytest.raises(ValueError, match="dim 1"):
        tree.unpack(torch.ones(3), dim=1)
    with pytest.raises(IndexError, match="trajectory 2 of a tree of 2"):
        tree.positions(2)
    assert torch.equal(tree.positions(-1), tree.positions(1))


def test_statistics():
    tree = PrefixTree.from_sequences([[1, 2, 3], [1, 2, 4]])
    assert tree.tree_token_ratio == pytest.approx(4 / 6)
    assert PrefixTree.from_sequences([]).tree_token_ratio == 1.0
    assert repr(tree) == "PrefixTree(2 trajectories, 4 tokens packed of 6)"
    assert tree.statistics == TreeStatistics(
        trajectories=2,
        tokens=4,
        trajectory_tokens=6,
        tree_token_ratio=4 / 6,
        attention_pairs=1 + 2 + 3 + 3,
        trajectory_attention_pairs=2 * (1 + 2 + 3),
        roots=1,
        leaves=2,
        forks=1,
        max_depth=3,
    )
    empty = PrefixTree.from_sequences([]).statistics
    assert (empty.tokens, empty.max_depth, empty.tree_token_ratio) == (0, 0, 1.0)


def test_mask_predicate():
    tree = PrefixTree.from_sequences([[1, 2], [1, 3]])
    assert str(tree.mask.predicate) == "q >= k & q < k0"


def test_a_million_tokens_in_under_a_second():
    rng = np.random.default_rng(0)
    system = rng.integers(0, 50_000, 400)
    turns = [rng.integers(0, 50_000, 500) for _ in range(64)]
    sequences = [
        np.concatenate([system, turns[i // 8], turns[i // 2 % 64], rng.integers(0, 50_000, 600)])
        for i in range(512)
    ]
    assert sum(map(len, sequences)) > 1_000_000
    # The best of several: what else runs on the machine is not what is measured.
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        PrefixTree.from_sequences(sequences)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 1.0


@given(st.data())
def test_shares_only_up_to_the_given_lengths(data):
    sequences = data.draw(SEQUENCES)
    limits = [data.draw(st.integers(0, len(sequence) + 1)) for sequence in sequences]
    tree = PrefixTree.from_sequences(sequences, share_lengths=limits)
    check_trie(tree, sequences, limits)
    random = data.draw(st.randoms(use_true_random=False))
    order = random.sample(range(len(sequences)), len(sequences))
    other = PrefixTree.from_sequences(
        [sequences[i] for i in order], share_lengths=torch.tensor([limits[i] for i in order])
    )
    assert torch.equal(tree.input_ids, other.input_ids)
    assert torch.equal(tree.parents, other.parents)


def test_equal_completions_stay_apart():
    tree = PrefixTree.from_sequences([[1, 2, 3], [1, 2, 3], [1, 2]], share_lengths=[2, 2, 2])
    assert tree.input_ids.tolist() == [1, 2, 3, 3]
    assert [tree.positions(i).tolist() for i in range(3)] == [[0, 1, 2], [0, 1, 3], [0, 1]]


@pytest.mark.parametrize(
    ("limits", "error", "message"),
    [
        ([1], ValueError, "each of the 2 sequences, got 1"),
        ([1, -1], ValueError, r"not be negative, got \[1, -1\]"),
        ([1, 1.5], TypeError, "share_lengths must be of integers"),
    ],
)
def test_refuses_limits_that_do_not_fit(limits, error, message):
    with pytest.raises(error, match=message):
        PrefixTree.from_sequences([[1], [2]], share_lengths=limits)


@given(SEQUENCES, st.booleans(), st.randoms(use_true_random=False))
def test_padded_rows_are_sequences_whatever_side_the_padding_is_on(sequences, as_bool, random):
    width = max(map(len, sequences), default=0) + 2
    ids = torch.full((len(sequences), width), 7)
    mask = torch.zeros(len(sequences), width, dtype=torch.bool if as_bool else torch.int32)
    for row, sequence in enumerate(sequences):
        columns = sorted(random.sample(range(width), len(sequence)))
        ids[row, columns] = torch.tensor(sequence, dtype=torch.int64)
        mask[row, columns] = 1
    limits = [min(2, len(sequence)) for sequence in sequences]
    for options in ({}, {"share_lengths": limits}):
        tree = PrefixTree.from_padded(ids, mask, **options)
        expected = PrefixTree.from_sequences(sequences, **options)
        assert_same(tree, expected)


@given(SEQUENCES)
def test_ragged_tokens_are_sequences(sequences):
    flat = torch.tensor([token for sequence in sequences for token in sequence], dtype=torch.int64)
    offsets = np.cumsum([0, *map(len, sequences)])
    expected = PrefixTree.from_sequences(sequences)
    assert_same(PrefixTree.from_ragged(flat, offsets), expected)
    assert_same(PrefixTree.from_ragged(flat, torch.from_numpy(offsets).int()), expected)


def assert_same(tree, expected):
    for name in ("input_ids", "position_ids", "parents", "subtree_end", "trajectory_ends"):
        assert torch.equal(getattr(tree, name), getattr(expected, name)), name
    assert tree.trajectory_lengths == expected.trajectory_lengths
    assert tree.trajectory_ids == expected.trajectory_ids


def test_padded_without_a_mask_is_all_tokens():
    tree = PrefixTree.from_padded([[1, 2], [1, 3]])
    assert tree.input_ids.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([1, 2], None), ValueError, r"input_ids must have two dimensions, its shape is \(2,\)"),
        (([[1], [2, 3]], None), ValueError, "input_ids must be rectangular"),
        (([[1.5]], None), TypeError, "input_ids must be of integers"),
        (([[1, 2]], [1, 1]), ValueError, r"attention_mask must have shape \(1, 2\)"),
        (([[1, 2]], [[1, 2]]), ValueError, "attention_mask must be boolean, or of 0 and 1"),
    ],
)
def test_refuses_what_is_no_padded_batch(arguments, error, message):
    with pytest.raises(error, match=message):
        PrefixTree.from_padded(*arguments)


@pytest.mark.parametrize("offsets", [[], [0], [0, 2], [0, 4], [1, 3], [0, 2, 1, 3]])
def test_refuses_offsets_that_do_not_divide_the_tokens(offsets):
    with pytest.raises(ValueError, match="cu_seqlens must ascend from 0 to the 3 tokens"):
        PrefixTree.from_ragged([1, 2, 3], offsets)


def test_pickles_without_what_is_computed_on_demand():
    tree = PrefixTree.from_sequences([[1, 2, 3], [1, 2]])
    tree.mask, tree.trajectory_positions, tree.loss_terms  # noqa: B018
    copy = pickle.loads(pickle.dumps(tree))
    assert_same(copy, tree)
    assert "mask" not in copy.__dict__
    assert "trajectory_positions" not in copy.__dict__
    assert torch.equal(copy.mask.to_dense(), tree.mask.to_dense())
    with pytest.raises(dataclasses.FrozenInstanceError):
        copy.input_ids = tree.input_ids


@pytest.mark.gpu
def test_stays_on_the_device_of_its_sequences():
    tree = PrefixTree.from_sequences([torch.tensor([1, 2], device="cuda"), [1, 3]])
    assert tree.device.type == tree.mask.k_vals.device.type == "cuda"
    assert tree.to("cpu").device.type == "cpu"
