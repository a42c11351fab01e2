"""Per-trajectory values on the pack against a loop over trajectories and tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tree_attn_op import PrefixTree

SEQUENCES = st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=8)


def loop(tree, values):
    """For each pack position the values of all trajectories there, in their order."""
    found = [[] for _ in range(tree.num_tokens)]
    for index, value in enumerate(values):
        for position, one in zip(tree.positions(index).tolist(), value, strict=True):
            found[position].append(one)
    return found


@given(SEQUENCES, st.sampled_from([(), (2,)]))
def test_reductions(sequences, trailing):
    tree = PrefixTree.from_sequences(sequences)
    values = [torch.randn(len(s), *trailing, dtype=torch.float64) for s in sequences]
    found = loop(tree, values)
    flat = torch.cat(values) if values else torch.zeros(0, *trailing, dtype=torch.float64)
    for reduction, reduce in (
        ("sum", lambda x: x.sum(0)),
        ("mean", lambda x: x.mean(0)),
        ("first", lambda x: x[0]),
    ):
        expected = [reduce(torch.stack(x)) for x in found]
        for given_values in (values, flat):
            result = tree.scatter(given_values, reduction)
            assert result.shape[0] == tree.num_tokens
            if expected:
                torch.testing.assert_close(result, torch.stack(expected))


@given(SEQUENCES)
def test_unpack_and_scatter_are_inverse(sequences):
    tree = PrefixTree.from_sequences(sequences)
    x = torch.randn(tree.num_tokens, dtype=torch.float64)
    for reduction in ("mean", "first", "equal"):
        if len(tree):
            torch.testing.assert_close(tree.scatter(tree.unpack(x), reduction), x)


def test_numbers_hold_for_all_tokens_of_their_trajectory():
    tree = PrefixTree.from_sequences([[1, 2], [1, 3, 4], []])
    assert tree.scatter([0.5, -2.0, 7.0]).tolist() == [-1.5, 0.5, -2.0, -2.0]
    advantages = torch.tensor([0.5, -2.0, 7.0])
    assert tree.scatter(advantages.unbind(), "first").tolist() == [0.5, 0.5, -2.0, -2.0]


def test_a_padded_batch_comes_through_its_mask():
    ids = torch.tensor([[0, 1, 2], [1, 3, 4]])
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]]).bool()
    tree = PrefixTree.from_padded(ids, mask)
    values = torch.tensor([[9.0, 1.0, 2.0], [3.0, 4.0, 5.0]])
    assert tree.scatter(values[mask]).tolist() == [4.0, 2.0, 4.0, 5.0]


def test_booleans_are_counted_and_integers_stay_exact():
    tree = PrefixTree.from_sequences([[1, 2], [1, 3]])
    masks = [torch.tensor([True, True]), torch.tensor([True, False])]
    assert tree.scatter(masks).tolist() == [2, 1, 0]
    assert tree.scatter(masks, "first").tolist() == [True, True, False]
    large = 2**60 + 1
    assert tree.scatter([torch.tensor([large, 0]), torch.tensor([1, 0])])[0] == large + 1
    with pytest.raises(TypeError, match=r"mean of torch\.int64"):
        tree.scatter(masks, "mean")


def test_equal_names_who_disagrees():
    tree = PrefixTree.from_sequences([[5], [1, 2, 3], [1, 2, 4]])
    agree = [
        torch.zeros(1),
        torch.tensor([1.0, torch.nan, 3.0]),
        torch.tensor([1.0, torch.nan, 4]),
    ]
    result = tree.scatter(agree, "equal")
    torch.testing.assert_close(
        result, torch.tensor([1.0, torch.nan, 3.0, 4.0, 0.0]), equal_nan=True
    )
    differ = [torch.zeros(1), torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.5, 4.0])]
    with pytest.raises(
        ValueError, match=r"trajectories 1 and 2 share token 1 but .*: 2\.0 and 2\.5"
    ):
        tree.scatter(differ, "equal")
    assert tree.scatter(differ, "equal", tolerance=0.5)[1] == 2.0
    rows = [x[:, None].expand(-1, 2) for x in differ]
    with pytest.raises(
        ValueError, match=r"share token 1 but .*: \[2\.0, 2\.0\] and \[2\.5, 2\.5\]"
    ):
        tree.scatter(rows, "equal")


def test_tokens_of_no_trajectory_get_zero():
    tree = PrefixTree.from_parents([-1, 0, 1, 0], ends=[1, 1])
    for reduction, expected in (("sum", 4.0), ("mean", 2.0), ("first", 1.0)):
        result = tree.scatter([1.0, 3.0], reduction)
        assert result.tolist() == [expected, expected, 0.0, 0.0]


def test_gradients():
    tree = PrefixTree.from_sequences([[1, 2, 3], [1, 2, 4], [1]])
    values = torch.randn(tree.num_trajectory_tokens, dtype=torch.float64, requires_grad=True)
    for reduction in ("sum", "mean", "first"):
        assert torch.autograd.gradcheck(lambda v, r=reduction: tree.scatter(v, r), values)


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        (torch.zeros(4), {}, r"trajectories' 5 tokens, its shape is \(4,\)"),
        (torch.zeros(()), {}, r"5 tokens, its shape is \(\)"),
        (torch.zeros(2, 3), {}, r"a padded batch is values\[attention_mask\]"),
        ([1.0], {}, "values are of 1 trajectories, the tree has 2"),
        ([torch.zeros(3), torch.zeros(3)], {}, "trajectory 1 has 2 tokens, its values 3 entries"),
        ([1.0, 2.0], {"reduction": "max"}, "'sum', 'mean', 'first' or 'equal', got 'max'"),
    ],
)
def test_refuses_values_that_do_not_fit(values, options, message):
    tree = PrefixTree.from_sequences([[1, 2, 3], [1, 2]])
    with pytest.raises(ValueError, match=message):
        tree.scatter(values, **options)
