"""Random calls of the op on a GPU, forward and backward, against the float64 oracle.

What the kernels are compiled for (dtype, head dims, predicate, heads, blocks) is one of a few
combinations; lengths, batches, layouts, values, lists, scales and magnitudes are drawn.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from . import settings
from .bounds import check_results, run_op
from .problems import Choices, draw

pytestmark = pytest.mark.gpu

# Strides that are multiples of 16 elements, as their divisibility is compiled for too.
_EVEN = ("BHSD", "BSHD", "SBHD", "sliced", "one batch", "one head", "one token", "overlapping")


def _choices(
    dtype: torch.dtype,
    dims: tuple[int, int],
    predicate: str,
    heads: tuple[int, int],
    blocks: tuple[int, int],
    values: torch.dtype = torch.int32,
    full_lists: bool = True,
    layouts: tuple[str, ...] = _EVEN,
) -> Choices:
    return Choices(
        dtypes=(dtype,),
        dims=(dims,),
        predicates=(predicate,),
        heads=(heads,),
        blocks=(blocks,),
        values=(values,),
        full_lists=(full_lists,),
        layouts=layouts,
        longest=1200,
        device="cuda",
    )


KERNELS = {
    "tree": _choices(torch.bfloat16, (64, 64), "q >= k & q < k0", (4, 2), (64, 64)),
    "groups": _choices(
        torch.bfloat16, (128, 128), "q >= k & (q0 == k0 | q1 == k0)", (8, 2), (128, 128)
    ),
    "odd_dims": _choices(
        torch.float16,
        (72, 40),
        "q >= k & q0 == k0 & q - k < 20",
        (3, 3),
        (48, 16),
        full_lists=False,
        layouts=("BSHD", "DSHB", "step 2"),
    ),
    "float32": _choices(
        torch.float32, (32, 32), "q0 - k0 < 3 | k1 != 2", (2, 1), (64, 32), values=torch.int64
    ),
}


@pytest.fixture(autouse=True)
def exact_float32() -> Iterator[None]:
    """float32 products in float32, whatever another test has left."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("seeds", settings.seed_ranges(100, chunk=100), ids=settings.name_of)
@pytest.mark.parametrize("kernels", KERNELS)
def test_random_calls(kernels: str, seeds: range) -> None:
    for seed in seeds:
        problem = draw(seed, KERNELS[kernels])
        try:
            check_results(problem, run_op(problem))
        except Exception as error:
            where = f"{settings.replay(seed)}: {problem.description}"
            raise AssertionError(f"{error} ({where})") from error
