"""The Hopper kernels' source, run in Python, against the definition in float64."""

from __future__ import annotations

import sys
from unittest import mock

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from tree_attn_op.blocks import BlockLists, lists_of
from tree_attn_op.kernels.hopper.backward import Form, head_splits
from tree_attn_op.kernels.hopper.form import LONG_ROWS

from .cases import LIMITS, Case, Problem, relative_error
from .simulating import as_python, simulated

FORWARD = sys.modules["tree_attn_op.kernels.hopper.forward"]
BACKWARD = sys.modules["tree_attn_op.kernels.hopper.backward"]
CASES = [
    Case("tree", q_len=256, kv_len=256),
    Case("causal", "q >= k", 450, 450, heads=4, head_dim=64),
    Case("batch_group_1", "q >= k & q0 == k0", 300, 300, batch=2, heads=2, head_dim=64),
    Case("everything", "True", 200, 330, batch=2, heads=2, kv_heads=1),
    Case("nothing", "False", 130, 130, heads=2, kv_heads=1, head_dim=64),
    Case("random_lists", "q0 <= k0", 600, 630, lists="random", heads=4, head_dim=64),
    Case("random_group_1", "q0 <= k0", 500, 500, lists="random", heads=1, kv_heads=1, batch=2),
    Case("dim_128_64", "q >= k", 200, 200, heads=2, kv_heads=1, v_head_dim=64),
    Case("long_tail", "True", 128, 1000, heads=2, kv_heads=1, head_dim=64),
    Case("long_causal", "q >= k", 1100, 1100, heads=2, kv_heads=2),
]


@pytest.mark.parametrize("late", [False, True], ids=["loads_at_once", "loads_late"])
@pytest.mark.parametrize("blocks", [1, 3, 1000])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_simulation(case: Case, blocks: int, late: bool, seed: int) -> None:
    problem = Problem(case, seed, device="cpu")
    expected = problem.expected()
    results: dict[str, torch.Tensor] = {}
    with simulated(blocks, late):
        for form, least in (("long", 0), ("short", 10**6)):
            with mock.patch.object(FORWARD, "LONG_LISTS", least):
                found = zip(("out", "lse"), problem.forward(), strict=True)
            results |= {f"{form} {name}": result for name, result in found}
        out, lse = expected["out"].to(case.dtype), expected["lse"].float()
        for form in ("deterministic", "fast"):
            gradients = zip(("dq", "dk", "dv"), problem.backward(out, lse, form), strict=True)
            results |= {f"{form} {name}": gradient for name, gradient in gradients}
    for name, result in results.items():
        error = relative_error(result, expected[name.split()[-1]])
        assert error < LIMITS[torch.bfloat16], name


@pytest.mark.parametrize("form", ["deterministic", "fast"])
def test_key_tiles_that_nobody_sees_may_hold_anything(form: Form, seed: int) -> None:
    problem = Problem(Case("x", "True", 256, 256, heads=2, kv_heads=1, head_dim=64), seed, "cpu")
    state = torch.full((1, 1, 4, 4), 2, dtype=torch.int8)
    state[..., 1] = 0
    problem.lists = BlockLists(*lists_of(state), 64, 64, 256, 256)
    expected = problem.expected()
    problem.key[:, :, 64:128] = torch.nan
    problem.value[:, :, 64:128] = torch.inf
    out, lse = expected["out"].to(problem.case.dtype), expected["lse"].float()
    with simulated(3, False):
        found = problem.backward(out, lse, form)
    for name, gradient in zip(("dq", "dk", "dv"), found, strict=True):
        assert relative_error(gradient, expected[name]) < LIMITS[torch.bfloat16], name


@pytest.mark.parametrize("fast", [False, True])
def test_simulation_of_a_choice_on_the_device(fast: bool, seed: int) -> None:
    problem = Problem(CASES[1], seed, device="cpu")
    expected = problem.expected()
    out, lse = expected["out"].to(problem.case.dtype), expected["lse"].float()
    least = 0 if fast else 1000
    # The forms may split heads differently, and so round differently.
    whole = mock.patch.object(BACKWARD, "head_splits", return_value=1)
    with simulated(3, False), mock.patch.dict(LONG_ROWS, {1: least}), whole:
        results = {
            form: problem.backward(out, lse, form)
            for form in ("by length", "fast", "deterministic")
        }
    for mine, same in zip(
        results["by length"], results["fast" if fast else "deterministic"], strict=True
    ):
        assert torch.equal(mine, same)
    # Which of the two it was can be told from dQ.
    assert not torch.equal(results["fast"][0], results["deterministic"][0])


@pytest.mark.parametrize(
    ("group", "items", "most", "parts"),
    [
        (4, 1024, 4, 1),
        (4, 791, 4, 2),
        (4, 100, 4, 4),
        (4, 100, 2, 2),
        (6, 250, 6, 6),
        (1, 1, 1, 1),
    ],
)
def test_splits(group: int, items: int, most: int, parts: int) -> None:
    assert head_splits(group, items, 132, most) == parts


@pytest.mark.parametrize("form", ["deterministic", "fast"])
def test_split_heads(form: Form, seed: int) -> None:
    problem = Problem(
        Case("x", q_len=300, kv_len=300, heads=8, kv_heads=1, head_dim=64), seed, "cpu"
    )
    expected = problem.expected()
    out, lse = expected["out"].to(problem.case.dtype), expected["lse"].float()
    for parts in (1, 2, 4):
        split = mock.patch.object(BACKWARD, "head_splits", return_value=parts)
        with simulated(3, False), split as asked:
            found = problem.backward(out, lse, form)
        assert asked.call_args.args == (8, 3, 3, 8 if form == "deterministic" else 4)
        for name, gradient in zip(("dq", "dk", "dv"), found, strict=True):
            assert relative_error(gradient, expected[name]) < LIMITS[torch.bfloat16], name


@pytest.mark.parametrize("ranks", [1, 5])
def test_every_item_has_one_place(ranks: int) -> None:
    functions = as_python()
    for columns in range(1, 20):
        for together in range(1, 22):
            width = functions["_group_width"](columns, together)
            places = [
                functions["_rank_and_column"](at, ranks, columns, width)
                for at in range(ranks * columns)
            ]
            assert sorted(places) == [(r, c) for r in range(ranks) for c in range(columns)]
            # The last of them, the columns that end together, are as many as asked for.
            if columns >= together:
                assert len({column for _, column in places[-ranks * width :]}) >= together
