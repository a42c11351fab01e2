"""Repeated launches of the Hopper kernels are what Triton would launch."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from unittest import mock

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from tests.kernels.repeated import check_repeated, recorded
from tree_attn_op.kernels import hopper
from tree_attn_op.kernels.hopper.form import LONG_ROWS

from .cases import Case, Problem

CASES = [
    Case("tree", q_len=256, kv_len=256),
    Case(
        "no_lse_grad",
        q_len=200,
        kv_len=330,
        grad_lse=False,
        sequence_major=False,
        heads=3,
        kv_heads=3,
    ),
    Case("batch_dim_64", "q0 <= k0", 256, 192, batch=2, head_dim=64, lists="random"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("full", [True, False])
def test_launches(case: Case, full: bool) -> None:
    forward, backward = [], []
    for seed in (0, 1):
        problem = Problem(case, seed, device="cpu")
        tensors = [problem.query, problem.key, problem.value]
        lists = list(problem.lists.tensors)
        if not full:
            lists[2:4] = lists[6:8] = [None, None]
        mask = [problem.q_vals, problem.k_vals, case.predicate, *lists]
        sizes = [problem.lists.q_block_size, problem.lists.kv_block_size, problem.scale]
        forward.append([*tensors, *mask, *sizes])
        out, lse = torch.empty_like(problem.grad_out), torch.empty(problem.query.shape[:3])
        grads = [problem.grad_out, problem.grad_lse]
        backward.append([*grads, *tensors, out, lse, *mask, *sizes])
    with ExitStack() as stack:
        for name in ("forward", "backward"):
            module = sys.modules[f"tree_attn_op.kernels.hopper.{name}"]
            stack.enter_context(mock.patch.object(module, "multiprocessors", return_value=132))
        launches = stack.enter_context(recorded())
        check_repeated(hopper.plan_forward, forward, launches)
        check_repeated(hopper.plan_backward, backward, launches)
        # Long rows: both forms are launched.
        stack.enter_context(mock.patch.dict(LONG_ROWS, {1: 0, 2: 0}))
        stack.enter_context(mock.patch.object(module, "FEW_TILES", 0))
        kept = len(launches)
        check_repeated(hopper.plan_backward, backward, launches)
        assert len(launches) > kept
