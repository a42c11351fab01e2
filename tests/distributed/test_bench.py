"""The context-parallel benchmark runs, and does not time what is wrong."""

from __future__ import annotations

from tests.distributed import bench_cases
from tests.distributed.launch import run_on_ranks


def test_on_two_ranks() -> None:
    run_on_ranks(2, bench_cases.CASES)
