"""Pictures say what the mask says; the figures themselves only have to be drawn."""

from __future__ import annotations

import sys

import pytest
import torch

from tree_attn_op import PrefixTree, TreeMask
from tree_attn_op.predicate import EMPTY, FULL, PARTIAL
from tree_attn_op.tree import plot

TREE = PrefixTree.from_sequences([[*range(400)], [*range(300), 7, 8], [500] * 150])


def test_tile_states_agree_with_the_dense_mask():
    lists = TREE.mask.lists
    states = plot.tile_states(lists)
    dense = TREE.mask.to_dense()[0]
    assert {EMPTY, PARTIAL, FULL} == set(states.unique().tolist())
    rows = dense.split(lists.q_block_size)
    for row, tiles in enumerate(states.tolist()):
        for column, tile in enumerate(rows[row].split(lists.kv_block_size, 1)):
            if tiles[column] == EMPTY:
                assert not tile.any()
            elif tiles[column] == FULL:
                assert tile.all()
    counts = plot.tile_counts(states)
    assert sum(counts.values()) == states.numel()
    assert counts["full"] == int((states == FULL).sum()) > 0


@pytest.mark.parametrize("pixels", [7, 100, 2000])
def test_the_picture_samples_pairs_of_the_mask(pixels, monkeypatch):
    monkeypatch.setattr(plot, "_PIXELS", pixels)
    batch = PrefixTree.from_parents([[-1, 0, 0, 2] * 50, [-1, 0, 1, 2] * 50])
    for mask, row in ((TREE.mask, 0), (batch.source_mask, 0), (batch.source_mask, 1)):
        dense = mask.to_dense()[row]
        step = -(-dense.shape[0] // pixels)
        assert torch.equal(plot._sampled_pairs(mask, row), dense[::step, ::step])


def drawn(figure, tmp_path):
    path = tmp_path / "figure.png"
    figure.savefig(path)
    return path.read_bytes().startswith(b"\x89PNG")


def test_draws_masks(tmp_path):
    assert drawn(TREE.plot_mask(), tmp_path)
    assert drawn(PrefixTree.from_sequences([]).plot_mask(), tmp_path)
    values = torch.empty(1, 0, 33, dtype=torch.int32)
    keys = torch.empty(1, 0, 70, dtype=torch.int32)
    assert drawn(plot.plot_mask(TreeMask.from_predicate("q >= k", values, keys, 33, 70)), tmp_path)


@pytest.mark.parametrize("sequences", [[], [[1]], [[1, 2], [1, 3, 4], [2]]])
def test_draws_trees(sequences, tmp_path):
    assert drawn(PrefixTree.from_sequences(sequences).plot(), tmp_path)


def test_stretches_are_drawn_where_their_leaves_are():
    figure = PrefixTree.from_sequences([[1, 2, 3], [1, 2, 4, 5], [9]]).plot()
    joints, bars = figure.axes[0].collections
    assert [path.vertices.tolist() for path in bars.get_paths()] == [
        [[0, 0.5], [2, 0.5]],
        [[2, 0], [3, 0]],
        [[2, 1], [4, 1]],
        [[0, 2], [1, 2]],
    ]
    assert bars.get_array().tolist() == [2, 1, 1, 1]
    assert [path.vertices.tolist() for path in joints.get_paths()] == [
        [[2, 0.5], [2, 0]],
        [[2, 0.5], [2, 1]],
    ]


def test_draws_into_axes_that_are_given():
    from matplotlib.figure import Figure

    figure = Figure()
    axes = figure.subplots(1, 2)
    assert TREE.plot(axes[1]) is figure
    assert not axes[0].collections
    assert axes[1].collections


def test_says_what_to_install_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for draw in (TREE.plot, TREE.plot_mask):
        with pytest.raises(ImportError, match=r"pip install tree-attn-op\[plot\]"):
            draw()
