"""Calls through plans against the float64 oracle: no two that differ may be mixed up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.cases import Case, Inputs, assert_matches, make_inputs, oracle
from tests.kernels.poison import poison_empty
from tree_attn_op.kernels import portable
from tree_attn_op.kernels.plans import Plans
from tree_attn_op.kernels.portable.block_lists import block_lists, plan_block_lists
from tree_attn_op.predicate import Predicate

BASE = Case(heads=4, kv_heads=2, q_len=48, kv_len=48, dim=16, value_range=(0, 48), grad_lse=True)
CASES = {
    "again": replace(BASE, seed=1),
    "other strides": replace(BASE, sequence_major=False, seed=2),
    "strided rows": replace(BASE, last_stride=2, seed=3),
    "another length": replace(BASE, q_len=40, kv_len=40, seed=4),
    "another group": replace(BASE, kv_heads=4, seed=5),
    "another scale": replace(BASE, scale=0.7, seed=6),
    "a negative scale": replace(BASE, scale=-0.7, seed=7),
    "no scale": replace(BASE, scale=0.0, seed=8),
    "a scale below float32": replace(BASE, scale=1e-46, seed=15),
    "another predicate": replace(BASE, predicate="q0 >= k0", seed=9),
    "no full lists": replace(BASE, full_lists=False, seed=10),
    "other blocks": replace(BASE, blocks=(16, 32), seed=11),
    "lists for each head": replace(BASE, list_heads=4, dropped_blocks=True, seed=12),
    "no gradient of lse": replace(BASE, grad_lse=False, seed=13),
    "float16": replace(BASE, dtype=torch.float16, seed=14),
}


class _Calls:
    """The portable kernels, through plans that stay."""

    def __init__(self) -> None:
        self.forward, self.backward = Plans(), Plans()

    def __call__(self, case: Case, inputs: Inputs) -> dict[str, Tensor]:
        tensors = (inputs.query, inputs.key, inputs.value)
        mask = (inputs.q_vals, inputs.k_vals, case.predicate)
        mask = (*mask, *inputs.key_lists, *inputs.query_lists)
        sizes = (*case.blocks, case.softmax_scale)
        dtype = inputs.query.dtype
        arguments: tuple[Any, ...] = (*tensors, *mask, *sizes)
        out, lse = self.forward.run(lambda a: portable.plan_forward(*a), arguments, dtype)
        grads = (inputs.grad_out, inputs.grad_lse)
        arguments = (*grads, *tensors, out, lse, *mask, *sizes)
        results = self.backward.run(lambda a: portable.plan_backward(*a), arguments, dtype)
        assert out.stride() == torch.empty_like(inputs.grad_out).stride()
        return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *results), strict=True))


def test_calls_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_empty(monkeypatch)
    calls = _Calls()
    for name, case in [("first", BASE), *CASES.items(), *CASES.items()]:
        inputs = make_inputs(case)
        tolerance = 1e-2 if case.dtype is torch.float16 else 1e-4
        try:
            assert_matches(calls(case, inputs), oracle(case, inputs), tolerance)
        except AssertionError as error:
            raise AssertionError(name) from error
    # A plan each; "again" has the first's, strided rows have one that leads to it, and the forward
    # knows nothing of a gradient of lse.
    assert len(calls.forward) == len(CASES) - 1
    assert len(calls.backward) == len(CASES)


def test_block_lists() -> None:
    predicate = Predicate.parse("q >= k & q0 == k0")
    plans = Plans()
    for length in (100, 100, 90):
        values = torch.randint(0, 4, (2, 1, length, 2)).int()
        for column in (values[..., 0], values[..., 0].contiguous(), values[..., 0].long()):
            for given in (False, True):
                sizes: tuple[int, ...] = (32, 32, 32, 32)
                coarse: tuple[Tensor | None, ...] = (None,) * 4
                if given:
                    arguments = (column, column, predicate, length, length, *coarse, *sizes)
                    coarse, sizes = block_lists(*arguments)[:4], (32, 32, 16, 16)
                arguments = (column, column, predicate, length, length, *coarse, *sizes)
                found = plans.run(lambda a: plan_block_lists(*a), (*arguments, True))
                for one, other in zip(found, block_lists(*arguments), strict=True):
                    assert torch.equal(one, other)
    assert len(plans) == 2 * 3 * 2
