"""The Hopper kernels against the definition in float64, on a GPU of compute capability 9.x."""

from __future__ import annotations

import sys
from unittest import mock

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from tree_attn_op.kernels.hopper.form import LONG_ROWS

from .cases import CASES, LIMITS, Case, Problem, errors

FORWARD = sys.modules["tree_attn_op.kernels.hopper.forward"]
hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="needs a GPU of compute capability 9.x",
)
pytestmark = [pytest.mark.gpu, hopper]
by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.mark.parametrize("least", [0, 10**6], ids=["long", "short"])
@by_name
def test_forward(case: Case, least: int, seed: int) -> None:
    with mock.patch.object(FORWARD, "LONG_LISTS", least):
        found = errors(case, seed, "forward")
    for name, error in found.items():
        assert error < LIMITS[case.dtype], (name, error)


@by_name
def test_backward(case: Case, seed: int) -> None:
    for name, error in errors(case, seed, "deterministic").items():
        assert error < LIMITS[case.dtype], (name, error)


@by_name
def test_fast_backward(case: Case, seed: int) -> None:
    for name, error in errors(case, seed, "fast").items():
        assert error < LIMITS[case.dtype], (name, error)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("name", ["tree_tail", "dim_64_random", "group_3_fp16"])
def test_choice_on_the_device(name: str, fast: bool, seed: int) -> None:
    case = next(case for case in CASES if case.name == name)
    least = 0 if fast else 10**6
    with mock.patch.dict(LONG_ROWS, {1: least, 2: least}):
        found = errors(case, seed, "by length")
    for gradient, error in found.items():
        assert error < LIMITS[case.dtype], (gradient, error)


def test_same_bits_twice(seed: int) -> None:
    problem = Problem(Case("repeat", q_len=4096, kv_len=4096), seed)
    out, lse = problem.forward()
    grads = problem.backward(out, lse)
    for _ in range(20):
        again = problem.forward()
        assert torch.equal(out, again[0])
        assert torch.equal(lse, again[1])
        for first, second in zip(grads, problem.backward(out, lse), strict=True):
            assert torch.equal(first, second)
