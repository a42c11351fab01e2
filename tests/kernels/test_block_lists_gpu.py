from __future__ import annotations

import pytest
import torch

from tests.kernels.block_list_cases import problem
from tree_attn_op.kernels.portable.block_lists import block_lists

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("refine", [False, True], ids=["build", "refine"])
def test_lists_equal_those_of_each_tile(refine: bool) -> None:
    for seed in range(40):
        arguments, expected = problem(seed, refine)
        on_gpu = [x.cuda() if isinstance(x, torch.Tensor) else x for x in arguments]
        for found, wanted in zip(block_lists(*on_gpu), expected, strict=True):
            assert torch.equal(found.cpu(), wanted)
