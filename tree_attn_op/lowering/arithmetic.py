"""Element-wise operations on the values of a mask; see ``mixed.py`` for what the values are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from . import reasons
from .comparison import as_formula, distribute, make_cases
from .formula import Formula, all_of, any_of, as_expr, negate, select
from .functions import COMMUTATIVE, apply
from .mixed import (
    Affine,
    Division,
    Extremum,
    Value,
    affine,
    as_tensor,
    as_value,
    bits_of,
    combine,
    common_dtype,
    deps_of,
    divide,
    dtype_of,
    is_tensor,
    linear,
    never_wraps,
    pure_operands,
)
from .values import Deps, Expr, constant, is_integer, known_integer, one_sided, wrap


def elementwise(op: str, *values: Value, **kwargs: Any) -> Value:
    """An operation with no rule for values of both sides, other than case by case."""
    operands = pure_operands(*values)
    if operands is not None:
        number_first = not is_tensor(operands[0]) and any(map(is_tensor, operands))
        if number_first and op not in COMMUTATIVE:
            # PyTorch's functions take a tensor first: one of the dtype that the number has there.
            operands = (as_tensor(operands[0], common_dtype(*values)), *operands[1:])
        return as_value(apply(op, *operands, **kwargs))
    result = distribute(lambda *leaves: elementwise(op, *leaves, **kwargs), *values)
    if result is None and op in ("floor_divide", "remainder"):
        result = divide(op == "remainder", *values)
    if result is None:
        raise reasons.mixed_value(f"computes {op} of")
    return result


def cast(value: Value, dtype: torch.dtype) -> Value:
    """A tensor's value, or a number, converted to ``dtype``."""
    if isinstance(value, (bool, int, float)) or (isinstance(value, Expr) and value.is_scalar):
        return as_value(as_tensor(value, dtype))
    if dtype is torch.bool:
        if isinstance(value, Expr) and value.shape:
            return apply("to", value, dtype)
        return as_formula(value)
    if dtype_of(value) is dtype:
        return value
    operands = pure_operands(value)
    if operands is not None:
        return as_value(apply("to", operands[0], dtype))
    if not is_integer(dtype):
        raise reasons.not_integer(dtype)
    if isinstance(value, Affine):
        if bits_of(dtype) <= bits_of(value.ring) or never_wraps(value):
            return affine(value.q, value.k, value.number, dtype)
        if not value.ring.is_signed:
            raise reasons.unsigned(value.ring)
        return Affine(value.q, value.k, value.number, value.ring, dtype)
    if isinstance(value, Division):
        if value.remainder and value.divisor <= torch.iinfo(dtype).max:
            return replace(value, dtype=dtype)
        raise reasons.mixed_value("converts a quotient or remainder of")
    result = distribute(lambda leaf: cast(leaf, dtype), value)
    assert result is not None
    return result


def arithmetic(op: str, a: Value, b: Value) -> Value:
    """``add``, ``sub`` or ``mul``."""
    if op != "sub" and all(isinstance(v, (Formula, bool)) for v in (a, b)):
        # PyTorch's sum of bools is their disjunction.
        return (any_of if op == "add" else all_of)(as_formula(a), as_formula(b))
    if pure_operands(a, b) is not None:
        return elementwise(op, a, b)
    result = distribute(lambda x, y: arithmetic(op, x, y), a, b)
    if result is not None:
        return result
    ring = common_dtype(a, b)
    if not is_integer(ring):
        raise reasons.not_integer(ring)
    if op == "mul":
        return _scale(a, b, ring)
    (q, k, number), (b_q, b_k, b_number) = linear(a, ring), linear(b, ring)
    total = number + b_number if op == "add" else number - b_number
    return affine(combine(op, q, b_q), combine(op, k, b_k), total, ring)


def _scale(a: Value, b: Value, ring: torch.dtype) -> Value:
    if isinstance(b, Affine):
        a, b = b, a
    # The factor has to be the same for all queries and keys of a batch row.
    if not isinstance(a, Affine) or isinstance(b, Affine) or deps_of(b) & (Deps.Q | Deps.K):
        raise reasons.mixed_value("multiplies")
    q, k, number = linear(a, ring)
    assert q is not None
    assert k is not None
    b = b if known_integer(b) is None else known_integer(b)  # type: ignore[assignment]
    if isinstance(b, (bool, int)):
        if b == 1:
            return affine(q, k, number, ring)
        if b == -1:
            return affine(apply("neg", q), apply("neg", k), -number, ring)
        factor: Any = wrap(int(b), ring)
        return affine(apply("mul", q, factor), apply("mul", k, factor), number * factor, ring)
    (factor,) = pure_operands(cast(b, ring)) or ()
    if number:
        q = apply("add", q, number)
    return affine(apply("mul", q, factor), apply("mul", k, factor), 0, ring)


def negative(value: Value) -> Value:
    """``-value``."""
    if pure_operands(value) is not None:
        return elementwise("neg", value)
    result = distribute(negative, value)
    return arithmetic("mul", value, -1) if result is None else result


def invert(value: Value) -> Value:
    """``~value``: the negation of a Boolean, the bits' complement of an integer."""
    if isinstance(value, Formula):
        return negate(value)
    if pure_operands(value) is not None:
        return elementwise("bitwise_not", value)
    return arithmetic("sub", negative(value), 1)


def extremum(greatest: bool, a: Value, b: Value) -> Value:
    """The maximum or the minimum of two tensors, or of a tensor and a number."""
    dtype = common_dtype(a, b)
    if isinstance(a, (Formula, bool)) and isinstance(b, (Formula, bool)):
        return (any_of if greatest else all_of)(as_formula(a), as_formula(b))
    operands = pure_operands(a, b)
    if operands is not None:
        a, b = operands if is_tensor(operands[0]) else reversed(operands)
        if is_tensor(a) and not is_tensor(b):
            limit = {"min": b} if greatest else {"max": b}
            return as_value(apply("clamp", a, **limit))
        return as_value(apply("maximum" if greatest else "minimum", a, b))
    if not is_integer(dtype):
        raise reasons.not_integer(dtype)
    return Extremum(greatest, (cast(a, dtype), cast(b, dtype)), dtype)


def choose(condition: Formula, yes: Value, no: Value) -> Value:
    """``where(condition, yes, no)``."""
    dtype = common_dtype(yes, no)
    yes, no = cast(yes, dtype), cast(no, dtype)
    if yes == no:
        return yes
    operands = pure_operands(condition, yes, no)
    if isinstance(yes, Formula) and isinstance(no, Formula):
        if operands is not None and yes.atoms and no.atoms:
            return as_value(apply("where", *operands))
        return select(condition, yes, no)
    if operands is not None:
        return as_value(apply("where", *operands))
    merged = _choose_affine(condition, yes, no)
    if merged is not None:
        return merged
    return make_cases([(condition, yes), (negate(condition), no)])


def _choose_affine(condition: Formula, yes: Value, no: Value) -> Value | None:
    """A one-sided choice between affine values as an affine value, where there is one."""
    affines = [value for value in (yes, no) if isinstance(value, Affine)]
    if not affines or not condition.one_sided:
        return None
    ring = affines[0].ring
    if any(value.ring is not ring or value.dtype is not ring for value in affines):
        return None
    if not all(isinstance(value, (Affine, Expr)) for value in (yes, no)):
        return None
    parts: list[Expr | None] = []
    first, second = linear(yes, ring), linear(no, ring)
    on_query = one_sided(condition.deps | Deps.Q)
    for on_this, a, b in ((on_query, first[0], second[0]), (not on_query, first[1], second[1])):
        if on_this and first[2] != second[2]:
            a = apply("add", constant(0, ring) if a is None else a, first[2])
            b = apply("add", constant(0, ring) if b is None else b, second[2])
        if a == b:
            parts.append(a)
            continue
        a = constant(0, ring) if a is None else a
        b = constant(0, ring) if b is None else b
        if not one_sided(condition.deps | a.deps | b.deps):
            return None
        parts.append(apply("where", as_expr(condition), a, b))
    number = first[2] if first[2] == second[2] else 0
    return affine(parts[0], parts[1], number, ring)
