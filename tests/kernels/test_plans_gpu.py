"""The ops on a GPU, call after call: what is remembered of one must not get into another."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.cases import Case, errors, make_inputs, oracle
from tests.kernels.poison import poison_empty
from tree_attn_op import list_checks, ops
from tree_attn_op.kernels.choice import ENVIRONMENT

pytestmark = pytest.mark.gpu

OPS = torch.ops.tree_attn_op
TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 2e-3}
BASE = Case(
    heads=8, kv_heads=2, q_len=512, kv_len=512, dim=128, blocks=(64, 64), value_range=(0, 512),
    dtype=torch.bfloat16, grad_lse=True,
)  # fmt: skip
CASES = {
    "first": BASE,
    "again": replace(BASE, seed=1),
    "tails": replace(BASE, q_len=444, kv_len=444, seed=2),
    "head-major": replace(BASE, sequence_major=False, seed=3),
    "strided rows": replace(BASE, last_stride=2, seed=4),
    "another group": replace(BASE, heads=6, blocks=(128, 64), seed=5),
    "another predicate": replace(BASE, predicate="q0 >= k0", seed=6),
    "no full lists": replace(BASE, full_lists=False, seed=7),
    "a negative scale": replace(BASE, scale=-0.1, seed=8),
    "a scale below float32": replace(BASE, scale=1e-46, seed=11),
    "lists for each head": replace(BASE, list_heads=8, dropped_blocks=True, seed=9),
    "float32": replace(BASE, dtype=torch.float32, dim=64, seed=10),
}


def _check(name: str, case: Case) -> None:
    inputs = make_inputs(case, "cuda")
    leaves = [t.detach().requires_grad_() for t in (inputs.query, inputs.key, inputs.value)]
    mask = (inputs.q_vals, inputs.k_vals, case.predicate)
    lists = (*inputs.key_lists, *inputs.query_lists)
    out, lse = OPS.tree_attention(*leaves, *mask, *lists, *case.blocks, case.softmax_scale)
    grads = torch.autograd.grad((out, lse), leaves, (inputs.grad_out, inputs.grad_lse))
    results = dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *grads), strict=True))
    for result, (rms, _) in errors(results, oracle(case, inputs)).items():
        assert rms < TOLERANCE[case.dtype], f"{name}: {result}: error {rms:.1e}"


@pytest.mark.parametrize("kernels", ["", "portable"])
def test_calls_in_any_order(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, kernels)
    poison_empty(monkeypatch)
    for _ in range(2):
        for name, case in CASES.items():
            _check(name, case)
            _check(name, replace(case, seed=case.seed + 100))


def _arguments() -> list[Any]:
    inputs = make_inputs(BASE, "cuda")
    lists = (*inputs.key_lists, *inputs.query_lists)
    tensors = (inputs.query, inputs.key, inputs.value, inputs.q_vals, inputs.k_vals)
    return [*tensors, BASE.predicate, *lists, *BASE.blocks, BASE.softmax_scale]


def test_the_second_call_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = _arguments()
    first = OPS.tree_attention(*arguments)

    def refuse(*arguments: object) -> None:
        raise AssertionError("checked again")

    monkeypatch.setattr(ops, "_check_call", refuse)
    for one, other in zip(first, OPS.tree_attention(*arguments), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(AssertionError, match="checked again"):
        OPS.tree_attention(*arguments[:-1], 0.123)


def test_plain_tensors_are_not_dispatched_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = _arguments()
    want, _ = OPS.tree_attention(*arguments)

    def redispatch(*arguments: object) -> None:
        raise AssertionError("dispatched again")

    monkeypatch.setattr(torch._ops.OpOverload, "redispatch", redispatch)
    with torch.no_grad():
        assert torch.equal(OPS.tree_attention(*arguments)[0], want)
    arguments[0] = arguments[0].detach().requires_grad_()
    out, _ = OPS.tree_attention(*arguments)
    out.sum().backward()
    assert torch.equal(out, want)


def test_numbers_of_lists_are_checked_with_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = _arguments()
    OPS.tree_attention(*arguments)
    monkeypatch.setitem(os.environ, list_checks.VARIABLE, "1")
    arguments[6] = arguments[6] + 1000
    with pytest.raises(ValueError, match="kv_num_blocks must be"):
        OPS.tree_attention(*arguments)


def test_in_a_graph() -> None:
    arguments = _arguments()
    want = OPS.tree_attention(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = OPS.tree_attention(*arguments)
    for tensor in captured:
        tensor.fill_(7.0)
    graph.replay()
    torch.cuda.synchronize()
    for one, other in zip(captured, want, strict=True):
        assert torch.equal(one, other)
