from __future__ import annotations

import pytest
import torch

from tests.kernels.block_list_cases import problem
from tree_attn_op.kernels.portable.block_lists import block_lists


@pytest.mark.parametrize("refine", [False, True], ids=["build", "refine"])
@pytest.mark.parametrize("seed", range(18))
def test_lists_equal_those_of_each_tile(seed: int, refine: bool) -> None:
    arguments, expected = problem(seed, refine)
    for found, wanted in zip(block_lists(*arguments), expected, strict=True):
        assert torch.equal(found, wanted)
