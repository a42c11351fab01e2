"""Training on several ranks gives the losses of one process."""

from __future__ import annotations

from tests.distributed import training_cases
from tests.distributed.launch import run_on_ranks


def test_two_ranks() -> None:
    run_on_ranks(2, training_cases.TWO)


def test_four_ranks() -> None:
    run_on_ranks(4, training_cases.FOUR)
