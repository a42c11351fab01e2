"""The assembly that masks scores."""

from __future__ import annotations

import math
import operator
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton.experimental.gluon")

from tests.strategies import K_ROWS, Q_ROWS, nodes, random_values
from tree_attn_op.kernels.hopper.masking import select_text
from tree_attn_op.predicate import Kind, Op, Predicate

from .cases import Case, Problem
from .compiling import compile_only


def run(text: str, operands: list[float]) -> float:
    """The first operand after the few instructions that the text may hold."""
    predicates: dict[str, bool] = {}
    result = math.nan

    def value(name: str) -> float:
        if name.startswith("$"):
            return operands[int(name[1:]) - 1]
        return -math.inf if name == "0xff800000" else int(name)

    lines = text.splitlines()
    assert (lines[0], lines[-1]) == ("{", "}")
    declared = re.fullmatch(r"\.reg \.pred p<(\d+)>;", lines[1])
    assert declared is not None
    for line in lines[2:-1]:
        word, rest = line.rstrip(";").split(" ", 1)
        to, *given = rest.split(", ")
        name, *parts = word.split(".")
        assert parts.pop() in ("s32", "s64", "pred", "b32")
        if to.startswith("p"):
            assert int(to[1:]) < int(declared[1])
        if name == "mov":
            predicates[to] = bool(int(given[0]))
        elif name in ("and", "or"):
            left, right = (predicates[x] for x in given)
            predicates[to] = left and right if name == "and" else left or right
        elif name == "setp":
            found = bool(getattr(operator, parts[0])(value(given[0]), value(given[1])))
            if len(parts) > 1:
                before = predicates[given[2]]
                found = found and before if parts[1] == "and" else found or before
            predicates[to] = found
        else:
            assert (name, to) == ("selp", "$0")
            result = value(given[0] if predicates[given[2]] else given[1])
    return result


def sides(program: tuple[int, ...], q: int, k: int, q_vals, k_vals) -> list[float]:
    """Both sides of the comparisons, found without following the program's structure."""

    def term(kind: int, number: int) -> int:
        return {
            Kind.NONE: 0, Kind.Q_INDEX: q, Kind.K_INDEX: k, Kind.LITERAL: number,
            Kind.Q_ROW: lambda: int(q_vals[0, number, q]),
            Kind.K_ROW: lambda: int(k_vals[0, number, k]),
        }[Kind(kind)]  # fmt: skip

    found: list[float] = []
    at = 0
    while at < len(program):
        op = Op(program[at])
        if op in (Op.AND, Op.OR):
            at += 2 + program[at + 1]
        elif op in (Op.TRUE, Op.FALSE):
            at += 2
        else:
            terms = [term(*program[at + 1 + 2 * i : at + 3 + 2 * i]) for i in range(4)]
            a, b, c, d = (x() if callable(x) else x for x in terms)
            found += [_wrapped(a - b), _wrapped(c - d)]
            at += 9
    return found


def _wrapped(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


@settings(deadline=None, max_examples=200)
@given(nodes, st.integers(0, 2**31), st.booleans())
def test_text_is_the_predicate(node, seed: int, wide: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    q_vals = random_values(generator, Q_ROWS, 3, torch.int64)
    k_vals = random_values(generator, K_ROWS, 4, torch.int64)
    predicate = Predicate(node)
    program = predicate.program
    dense = predicate.dense(q_vals, k_vals, 3, 4)[0].tolist()
    plain, gated = (select_text(program, wide, x) for x in (False, True))
    for q in range(3):
        for k in range(4):
            operands = sides(program, q, k, q_vals, k_vals)
            masked = 2.5 if dense[q][k] else -math.inf
            assert run(plain, [2.5, *operands]) == masked
            for gate in (0, 1, 2):
                assert run(gated, [2.5, gate, *operands]) == (masked if gate else -math.inf)


@pytest.mark.parametrize(
    ("predicate", "index_dtype"),
    [
        ("True", torch.int32),
        ("q - k < 7", torch.int64),
        ("q >= k & (q0 == k0 | q1 - k1 > 2 & k <= 99)", torch.int32),
    ],
)
def test_it_assembles(predicate: str, index_dtype: torch.dtype) -> None:
    case = Case("x", predicate, 200, 200, head_dim=64, index_dtype=index_dtype)
    problem = Problem(case, 0, device="cpu")
    with compile_only() as compiled:
        out, lse = problem.forward()
        problem.backward(out, lse, "by length")
    for name in ("forward_kernel", "dkdv_kernel", "dq_kernel", "fast_backward_kernel"):
        comparisons = len(sides(Predicate.parse(predicate).program, 0, 0, *values())) // 2
        width = "s32" if index_dtype == torch.int32 else "s64"
        found = len(re.findall(rf"setp\.\w+(\.\w+)?\.{width} p\d+, %", compiled[name].asm["ptx"]))
        assert found >= comparisons, name


def values() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(1, 2, 1, dtype=torch.int64), torch.zeros(1, 2, 1, dtype=torch.int64)
