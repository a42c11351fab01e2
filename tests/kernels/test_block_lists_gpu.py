from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.block_list_cases import flex_problem, problem, wide_problem
from tree_attn_op.kernels.portable import block_lists as implementation
from tree_attn_op.kernels.portable.block_lists import block_lists

pytestmark = pytest.mark.gpu


def check(arguments: tuple, expected: list, **options: Any) -> None:
    on_gpu = [x.cuda() if isinstance(x, torch.Tensor) else x for x in arguments]
    for found, wanted in zip(block_lists(*on_gpu, **options), expected, strict=True):
        assert torch.equal(found.cpu(), wanted)


@pytest.mark.parametrize("refine", [False, True], ids=["build", "refine"])
def test_lists_equal_those_of_each_tile(refine: bool) -> None:
    for seed in range(40):
        check(*problem(seed, refine))


def test_lists_as_flex_makes_them() -> None:
    for seed in range(18):
        arguments, expected, options = flex_problem(seed)
        check(arguments, expected, **options)


@pytest.mark.parametrize("chunk", [16, 1024])
def test_many_tiles(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementation, "_CHUNK", chunk)
    for seed in range(6):
        check(*wide_problem(seed, (16, 48, 160)[seed % 3]))
