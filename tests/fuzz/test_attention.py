"""Random calls of the op on a CPU, forward and backward, against the float64 oracle."""

from __future__ import annotations

import pytest

from . import settings
from .bounds import check_results, run_op
from .problems import Choices, draw

SHORT = Choices()
LONG = Choices(longest=1500, blocks=((64, 64), (128, 128), (32, 64)), dims=((16, 16), (8, 24)))
"""Long enough for large rectangles of tiles, which the CPU implementation treats apart."""


def run(seeds: range, choices: Choices) -> None:
    for seed in seeds:
        problem = draw(seed, choices)
        try:
            check_results(problem, run_op(problem))
        except Exception as error:
            where = f"{settings.replay(seed)}: {problem.description}"
            raise AssertionError(f"{error} ({where})") from error


@pytest.mark.parametrize("seeds", settings.seed_ranges(60, chunk=30), ids=settings.name_of)
def test_random_calls(seeds: range) -> None:
    run(seeds, SHORT)


@pytest.mark.parametrize("seeds", settings.seed_ranges(60, chunk=30), ids=settings.name_of)
def test_random_long_calls(seeds: range) -> None:
    run(seeds[::10], LONG)
