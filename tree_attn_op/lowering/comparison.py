"""Comparisons of values as formulas, and choices between values by formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from ..errors import UnsupportedMask
from ..predicate.nodes import MIRRORED, NEGATED, Op
from . import reasons
from .formula import (
    FALSE,
    TRUE,
    Comparison,
    Formula,
    Side,
    Truth,
    all_of,
    any_of,
    as_expr,
    exclusive,
    fact,
    fold,
    negate,
)
from .functions import apply, split_constant
from .mixed import (
    Affine,
    Cases,
    Division,
    Extremum,
    Value,
    affine,
    as_tensor,
    bits_of,
    combine,
    common_dtype,
    dtype_of,
    index_difference,
    is_exact_offset,
    is_tensor,
    linear,
    never_wraps,
    pure_operands,
)
from .values import Deps, Expr, bare_index, constant, index, is_integer, known_integer

MAX_INDEX = 1 << 30
"""Token indices are below this: differences of indices do not wrap, even in int32."""

_NAMES = {Op.EQ: "eq", Op.NE: "ne", Op.LT: "lt", Op.LE: "le", Op.GT: "gt", Op.GE: "ge"}


def compare(op: Op, a: Value, b: Value) -> Formula:
    """``a op b``, as PyTorch compares 0-d tensors and Python numbers.

    Raises:
        UnsupportedMask: the comparison does not separate into a query and a key side.
    """
    if isinstance(a, (Formula, bool)) and isinstance(b, (Formula, bool)):
        return _compare_booleans(op, *(Truth(v) if isinstance(v, bool) else v for v in (a, b)))
    operands = pure_operands(a, b)
    if operands is not None:
        return _compare_pure(op, *operands)
    if isinstance(a, Extremum):
        return _compare_extremum(op, a, b)
    if isinstance(b, Extremum):
        return _compare_extremum(MIRRORED[op], b, a)
    branches = combinations_of(a, b)
    if branches is not None:
        decided = [(guard, compare(op, *leaves)) for guard, leaves in branches]
        holds = any_of(*(all_of(guard, result) for guard, result in decided))
        fails = any_of(*(all_of(guard, negate(result)) for guard, result in decided))
        return holds if holds.atoms <= fails.atoms else negate(fails)
    if isinstance(a, Division):
        return _compare_division(op, a, b)
    if isinstance(b, Division):
        return _compare_division(MIRRORED[op], b, a)
    return _compare_mixed(op, a, b)


def as_formula(value: Value) -> Formula:
    """Whether a value is non-zero."""
    if isinstance(value, Formula):
        return value
    if isinstance(value, bool):
        return Truth(value)
    if isinstance(value, Expr) and value.dtype is torch.bool:
        return fact(value)
    return compare(Op.NE, value, 0)


def cases_of(value: Value) -> tuple[tuple[Formula, Value], ...] | None:
    """The branches of a value that formulas of both sides choose, else None."""
    if isinstance(value, Cases):
        return value.branches
    if isinstance(value, Formula) and not value.one_sided:
        return ((value, constant(True, torch.bool)), (negate(value), constant(False, torch.bool)))
    if isinstance(value, Extremum):
        first, second = value.values
        chosen = compare(Op.GE if value.greatest else Op.LE, first, second)
        return make_branches([(chosen, first), (negate(chosen), second)])
    return None


def make_branches(branches: list[tuple[Formula, Value]]) -> tuple[tuple[Formula, Value], ...]:
    """Branches with nested choices opened, equal values joined and impossible ones dropped."""
    joined: dict[Value, Formula] = {}
    for guard, value in branches:
        inner = value.branches if isinstance(value, Cases) else ((TRUE, value),)
        for inner_guard, leaf in inner:
            joined[leaf] = any_of(joined.get(leaf, FALSE), all_of(guard, inner_guard))
    kept = tuple((guard, value) for value, guard in joined.items() if guard != FALSE)
    if len(kept) > reasons.MAX_CASES:
        raise reasons.too_many("cases of one integer", len(kept), reasons.MAX_CASES)
    return kept


def make_cases(branches: list[tuple[Formula, Value]]) -> Value:
    """The value chosen by formulas, of which exactly one holds; all values have one dtype."""
    if all(dtype_of(value) is torch.bool for _, value in branches):
        return any_of(*(all_of(guard, as_formula(value)) for guard, value in branches))
    kept = make_branches(branches)
    return kept[0][1] if len(kept) == 1 else Cases(kept, dtype_of(kept[0][1]))


def combinations_of(*values: Value) -> list[tuple[Formula, tuple[Value, ...]]] | None:
    """Every combination of the values' cases with its formula; None if no value has cases."""
    cases = [cases_of(value) for value in values]
    if not any(cases):
        return None
    options = [given or ((TRUE, value),) for given, value in zip(cases, values, strict=True)]
    count = math.prod(map(len, options))
    if count > 4 * reasons.MAX_CASES:
        raise reasons.too_many("cases of one integer", count, 4 * reasons.MAX_CASES)
    branches = [
        (all_of(*(guard for guard, _ in chosen)), tuple(value for _, value in chosen))
        for chosen in product(*options)
    ]
    return [(guard, leaves) for guard, leaves in branches if guard != FALSE]


def distribute(function: Callable[..., Value], *values: Value) -> Value | None:
    """``function`` in every combination of the values' cases; None if no value has cases."""
    branches = combinations_of(*values)
    if branches is None:
        return None
    return make_cases([(guard, function(*leaves)) for guard, leaves in branches])


def _compare_booleans(op: Op, a: Formula, b: Formula) -> Formula:
    if op in (Op.EQ, Op.NE):
        apart = a.one_sided and b.one_sided and a.deps != Deps.NONE and b.deps != Deps.NONE
        if apart and pure_operands(a, b) is None:
            (a_expr, a_holds), (b_expr, b_holds) = fold(a), fold(b)
            flipped = op if a_holds == b_holds else NEGATED[op]
            return Comparison(flipped, (a_expr, None), (b_expr, None))
        different = exclusive(a, b)
        return different if op is Op.NE else negate(different)
    if op in (Op.GT, Op.GE):
        op, a, b = MIRRORED[op], b, a
    return (all_of if op is Op.LT else any_of)(negate(a), b)


def _compare_pure(op: Op, a: Any, b: Any) -> Formula:
    if not is_tensor(a):
        if not is_tensor(b):
            a = as_tensor(a, common_dtype(a))
        else:
            op, a, b = MIRRORED[op], b, a
    if is_tensor(b) and op in (Op.GT, Op.GE):
        op, a, b = MIRRORED[op], b, a
    if is_tensor(b) and op is Op.LE and all(is_integer(x.dtype) for x in (a, b)):
        return negate(fact(apply("lt", b, a)))
    return fact(apply(_NAMES[op], a, b))


def _compare_extremum(op: Op, a: Extremum, b: Value) -> Formula:
    if op is Op.NE:
        return negate(_compare_extremum(Op.EQ, a, b))
    first, second = a.values
    if op is Op.EQ:
        bound = Op.LE if a.greatest else Op.GE
        return any_of(
            all_of(compare(Op.EQ, first, b), compare(bound, second, b)),
            all_of(compare(Op.EQ, second, b), compare(bound, first, b)),
        )
    both = (op in (Op.LT, Op.LE)) == a.greatest
    return (all_of if both else any_of)(compare(op, first, b), compare(op, second, b))


def _compare_division(op: Op, a: Division, b: Value) -> Formula:
    number = known_integer(b)
    if number is None:
        raise reasons.mixed_value("compares a quotient or remainder of")
    b = number
    value, divisor = a.value, a.divisor
    if not a.remainder:
        if op is Op.NE:
            return negate(_compare_division(Op.EQ, a, b))
        if op is Op.EQ:
            return all_of(_compare_division(Op.GE, a, b), _compare_division(Op.LE, a, b))
        if op in (Op.LE, Op.GT):
            op, b = {Op.LE: Op.LT, Op.GT: Op.GE}[op], b + 1
        return compare(op, value, b * divisor)
    if op not in (Op.EQ, Op.NE):
        raise reasons.mixed_value("compares by order the remainder of")
    if not 0 <= b < divisor:
        return Truth(op is Op.NE)
    q, k, number = value.q, value.k, value.number - b
    if q.op == "neg":
        q, k, number = q.args[0], apply("neg", k), -number
    other = affine(None, apply("neg", k), -number, value.ring)
    return compare(op, apply("remainder", q, divisor), apply("remainder", other, divisor))


def _compare_mixed(op: Op, a: Value, b: Value) -> Formula:
    """A comparison of two of: Affine, expression, number; of both sides together."""
    dtype = common_dtype(a, b)
    if not is_integer(dtype):
        if isinstance(b, float):
            return _compare_with_float(op, a, b, dtype)
        if isinstance(a, float):
            return _compare_with_float(MIRRORED[op], b, a, dtype)
        raise reasons.not_integer(dtype)
    if dtype is torch.uint64:
        raise reasons.unsigned(dtype)
    left, right = _operand(a, dtype), _operand(b, dtype)
    if isinstance(left, Affine):
        if isinstance(right, Affine):
            return _compare_linear(op, left, right, max(left.ring, right.ring, key=bits_of))
        return _compare_affine(op, left, right, dtype)
    if isinstance(right, Affine):
        return _compare_affine(MIRRORED[op], right, left, dtype)
    assert isinstance(left, Expr)
    assert isinstance(right, Expr)
    return _compare_sides(op, left, right)


def _operand(value: Value, dtype: torch.dtype) -> Affine | Expr | int:
    """One side of a comparison in ``dtype``; known numbers as numbers."""
    number = known_integer(value)
    if number is None:
        if isinstance(value, Affine):
            return value
        return as_expr(value) if isinstance(value, Formula) else as_tensor(value, dtype)
    info = torch.iinfo(dtype)
    if not info.min <= number <= info.max:
        raise UnsupportedMask(
            f"compares with {number}, which does not fit in {reasons.short(dtype)}"
        )
    return number


def _compare_with_float(op: Op, a: Value, b: float, dtype: torch.dtype) -> Formula:
    """Integers against a float: the integers next to the float decide, if all are exact."""
    value = torch.tensor(b, dtype=dtype).item()
    integral = is_integer(dtype_of(a)) or dtype_of(a) is torch.bool
    if not (integral and math.isfinite(value) and abs(value) <= 1 / torch.finfo(dtype).eps):
        raise reasons.not_integer(dtype)
    if op in (Op.EQ, Op.NE) and value != int(value):
        return Truth(op is Op.NE)
    return compare(op, a, math.ceil(value) if op in (Op.LT, Op.GE) else math.floor(value))


def _compare_sides(op: Op, a: Expr, b: Expr) -> Formula:
    """A value of one side against a value of the other."""
    if b.deps & Deps.Q:
        op, a, b = MIRRORED[op], b, a
    (a_base, a_number), (b_base, b_number) = split_constant(a), split_constant(b)
    if (
        a_base is not None
        and b_base is not None
        and bare_index(a_base)
        and bare_index(b_base)
        and is_exact_offset(a_number, a.dtype)
        and is_exact_offset(b_number, b.dtype)
    ):
        return _compare_indices(op, b_number - a_number)
    return Comparison(op, (a, None), (b, None))


def _compare_indices(op: Op, number: int) -> Formula:
    """``q - k op number``."""
    if abs(number) >= MAX_INDEX:
        return Truth(
            (op in (Op.LT, Op.LE)) == (number > 0) if op not in (Op.EQ, Op.NE) else op is Op.NE
        )
    # Over integers, x <= c is x < c + 1 and x > c is x >= c + 1; with zero, indices are compared.
    if op in (Op.LE, Op.GT) and number != 0:
        op, number = {Op.LE: Op.LT, Op.GT: Op.GE}[op], number + 1
    if op in (Op.LT, Op.GE) and number == 1:
        op, number = {Op.LT: Op.LE, Op.GE: Op.GT}[op], 0
    q, k = index("q"), index("k")
    if number == 0:
        return Comparison(op, (q, None), (k, None))
    return Comparison(op, (q, k), (number, None))


def _compare_index_differences(op: Op, a: Affine, b: Affine) -> Formula:
    """Of two differences of the query and the key index, each plus a number."""
    sign, other_sign = index_difference(a.q, a.k), index_difference(b.q, b.k)
    number = b.number - a.number
    if sign == other_sign:
        return compare(op, 0, number)
    # 2 * sign * (q - k) op number
    half = -(-number // 2) if op in (Op.LT, Op.GE) else number // 2
    return _compare_indices(op, half) if sign > 0 else _compare_indices(MIRRORED[op], -half)


def _compare_affine(op: Op, a: Affine, b: Expr | int, dtype: torch.dtype) -> Formula:
    if never_wraps(a):
        if not isinstance(b, Expr):
            if index_difference(a.q, a.k) < 0:
                return _compare_indices(MIRRORED[op], a.number - b)
            return _compare_indices(op, b - a.number)
        if a.number == 0 and op not in (Op.EQ, Op.NE):
            return Comparison(op, _side(a.q, a.k, 0), (b, None))
        return _compare_linear(op, a, b, dtype)
    ring = torch.iinfo(a.ring)
    if not isinstance(b, Expr):
        if not ring.min <= b <= ring.max:
            return Truth(
                (op in (Op.LT, Op.LE)) == (b > 0) if op not in (Op.EQ, Op.NE) else op is Op.NE
            )
    elif b.dtype is not torch.bool:
        given = torch.iinfo(b.dtype)
        if given.min < ring.min or given.max > ring.max:
            return _compare_beyond(op, replace(a, dtype=a.ring), b)
    return _compare_linear(op, a, b, a.ring)


def _compare_beyond(op: Op, a: Affine, b: Expr) -> Formula:
    """``a op b`` where ``b`` may be beyond every value that ``a`` can take."""
    if op is Op.NE:
        return negate(_compare_beyond(Op.EQ, a, b))
    ring, given = torch.iinfo(a.ring), torch.iinfo(b.dtype)
    above = compare(Op.GT, b, ring.max) if given.max > ring.max else FALSE
    below = compare(Op.LT, b, ring.min) if given.min < ring.min else FALSE
    within = compare(op, a, apply("to", b, a.ring))
    if op is Op.EQ:
        return all_of(negate(above), negate(below), within)
    if op in (Op.LT, Op.LE):
        return any_of(above, all_of(negate(below), within))
    return any_of(below, all_of(negate(above), within))


def _compare_linear(op: Op, a: Value, b: Value, ring: torch.dtype) -> Formula:
    (q, k, number), (b_q, b_k, b_number) = linear(a, ring), linear(b, ring)
    if op in (Op.EQ, Op.NE):
        # Terms move across an equality, whatever wraps.
        left = affine(combine("sub", q, b_q), None, 0, ring)
        right = affine(None, combine("sub", b_k, k), b_number - number, ring)
        return compare(op, left, right)
    if not ring.is_signed:
        raise reasons.unsigned(ring)
    if isinstance(a, Affine) and isinstance(b, Affine) and never_wraps(a) and never_wraps(b):
        return _compare_index_differences(op, a, b)
    lhs, rhs = _side(q, k, number), _side(b_q, b_k, b_number)
    bits = None if all(map(_never_wraps, (lhs, rhs))) else bits_of(ring)
    return Comparison(op, lhs, rhs, bits)


def _side(q: Expr | None, k: Expr | None, number: int) -> Side:
    """``q + k + number`` as one side of a comparison."""
    if q is None or k is None:
        part = k if q is None else q
        return (number if part is None else apply("add", part, number), None)
    if k.op == "neg":
        return (apply("add", q, number), k.args[0])
    if q.op == "neg":
        return (apply("add", k, number), q.args[0])
    return (apply("add", q, number), apply("neg", k))


def _never_wraps(side: Side) -> bool:
    plus, minus = side
    if minus is None:
        return True
    return isinstance(plus, Expr) and bool(bare_index(plus) and bare_index(minus))
