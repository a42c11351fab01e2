"""The demo's data and checks, and the demo itself on a small model."""

from __future__ import annotations

import pytest
import torch

import demo.__main__ as command
from demo import batch as batches
from tree_attn_op import PrefixTree


def test_the_batch_has_the_shape_of_a_grpo_step():
    batch = batches.load()
    assert (batch.groups, len(batch.sequences)) == (4, 16)
    assert all(sequence[-1] == batches.END_OF_TEXT for sequence in batch.sequences)
    for group in batch.advantages.view(batch.groups, -1):
        assert group.sum().item() == pytest.approx(0.0, abs=1e-6)
        assert group.any()
    tree = PrefixTree.from_sequences(batch.sequences)
    assert tree.tree_token_ratio < 0.4


def test_the_loss_weighs_completion_tokens_by_advantage():
    batch = batches.Batch(
        sequences=[torch.tensor([1, 2, 3]), torch.tensor([1, 2, 0, 3])],
        prompt_lengths=[2, 2],
        advantages=torch.tensor([0.5, -0.5]),
        groups=1,
    )
    logits = [torch.randn(3, 5), torch.randn(4, 5)]
    first, second = (one.log_softmax(-1) for one in logits)
    expected = -(0.5 * first[1, 3] - 0.5 * (second[1, 0] + second[2, 3])) / 3
    torch.testing.assert_close(batches.policy_loss(logits, batch), expected)


def test_a_difference_or_a_nan_fails_the_demo(capsys):
    checks = command.Checks()
    one = torch.ones(3)
    checks.close("equal", [one], [one + 1e-6])
    assert checks.failed == []
    checks.close("different", [one], [one + 1e-3])
    checks.close("not a number", [one * torch.nan], [one])
    assert len(checks.failed) == 2
    assert capsys.readouterr().out.count("FAILED") == 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_demo_passes_and_draws_its_picture(tmp_path, capsys):
    status = command.main(
        ["--device", "cpu", "--layers", "1", "--hidden-size", "64", "--out", str(tmp_path)]
    )
    shown = capsys.readouterr().out
    assert status == 0, shown
    assert "every call is rewritten" in shown
    assert (tmp_path / "mask.png").read_bytes().startswith(b"\x89PNG")
