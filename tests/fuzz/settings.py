"""How many random cases to run, and from which seed."""

from __future__ import annotations

import os

CASES_VARIABLE = "TREE_ATTN_FUZZ_CASES"
"""Environment variable: how many cases each fuzz test draws."""

SEED_VARIABLE = "TREE_ATTN_FUZZ_SEED"
"""Environment variable: the seed of the first case; the others follow it."""

FIRST_SEED = 20261130


def first_seed() -> int:
    """The seed of the first case."""
    return int(os.environ.get(SEED_VARIABLE, FIRST_SEED))


def seed_ranges(default_cases: int, chunk: int) -> list[range]:
    """The seeds of all cases in chunks, each of which is one test.

    Args:
        default_cases: how many, unless the environment says.
        chunk: most seeds of a test.
    """
    cases = int(os.environ.get(CASES_VARIABLE, default_cases))
    first = first_seed()
    stop = first + cases
    return [range(start, min(start + chunk, stop)) for start in range(first, stop, chunk)]


def name_of(seeds: range) -> str:
    """The test id of a chunk: its first and last seed."""
    return f"seeds {seeds.start} to {seeds.stop - 1}"


def replay(seed: int) -> str:
    """How to run one case alone, for the message of a failure."""
    return f"{SEED_VARIABLE}={seed} {CASES_VARIABLE}=1"
