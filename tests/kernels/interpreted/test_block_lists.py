from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.block_list_cases import flex_problem, problem, wide_problem
from tree_attn_op.kernels.portable import block_lists as implementation
from tree_attn_op.kernels.portable.block_lists import block_lists


def check(arguments: tuple, expected: list, **options: Any) -> None:
    for found, wanted in zip(block_lists(*arguments, **options), expected, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("refine", [False, True], ids=["build", "refine"])
@pytest.mark.parametrize("seed", range(18))
def test_lists_equal_those_of_each_tile(seed: int, refine: bool) -> None:
    check(*problem(seed, refine))


@pytest.mark.parametrize("seed", range(9))
def test_lists_as_flex_makes_them(seed: int) -> None:
    arguments, expected, options = flex_problem(seed)
    check(arguments, expected, **options)


@pytest.mark.parametrize("tile", [16, 48, 160])
@pytest.mark.parametrize("seed", range(3))
def test_more_than_one_program_looks_at(
    seed: int, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(implementation, "_CHUNK", 16)
    check(*wide_problem(seed, tile))
