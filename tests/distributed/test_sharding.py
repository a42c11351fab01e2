"""DTensors with sharded heads or batch give what one process gives."""

from __future__ import annotations

from tests.distributed import sharding_cases
from tests.distributed.launch import run_on_ranks


def test_dtensors() -> None:
    run_on_ranks(4, sharding_cases.CASES)
