"""Context-parallel attention on one to four processes equals that of one process."""

from __future__ import annotations

import pytest

from tests.distributed import check_cases, context_parallel_cases
from tests.distributed.launch import run_on_ranks


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_equal_to_one_process(world_size: int) -> None:
    cases = [*context_parallel_cases.CASES]
    if world_size in (2, 3):
        cases += context_parallel_cases.COMPILED_CASES
    if world_size == 2:
        cases += context_parallel_cases.RECOMPILED_CASES
    run_on_ranks(world_size, [*cases, *check_cases.CASES])
