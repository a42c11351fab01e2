"""The bench of tree building on a small batch; its trie is an oracle for larger trees as well."""

from __future__ import annotations

import json

import pytest

from bench import tree_building
from tree_attn_op import PrefixTree


def test_the_trie_equals_the_tree():
    sequences = tree_building.batch(48, 30_000)
    assert len(sequences) == 48
    assert sum(map(len, sequences)) == pytest.approx(30_000, rel=0.2)
    tree = PrefixTree.from_sequences(sequences)
    assert tree.tree_token_ratio < 0.6
    assert tree.statistics.forks > 20
    for name, values in tree_building.build_trie(sequences).items():
        assert getattr(tree, name).tolist() == values
    packed = sum(one.num_tokens for one in PrefixTree.pack(sequences, 4000))
    assert packed < sum(tree_building.pack_greedily(sequences, 4000))


def test_the_command_reports_every_way(tmp_path, capsys):
    out = tmp_path / "figures.json"
    arguments = ["--trajectories", "16", "--tokens", "4000", "--max-tokens", "1000"]
    tree_building.main([*arguments, "--rounds", "1", "--out", str(out)])
    figures = json.loads(out.read_text())
    table = capsys.readouterr().out
    assert len(figures["seconds"]) == 5
    assert all(f"| {name} |" in table for name in figures["seconds"])
    assert max(figures["packed"]) <= 1000


def test_a_wrong_tree_gets_no_time(monkeypatch):
    monkeypatch.setattr(
        tree_building, "build_trie", lambda sequences: {"parents": [0] * sum(map(len, sequences))}
    )
    with pytest.raises(SystemExit, match="no speed reported: parents differs"):
        tree_building.main(["--trajectories", "8", "--tokens", "800", "--max-tokens", "400"])
