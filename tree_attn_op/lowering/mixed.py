"""Integers that depend on both the query and the key, in the forms that comparisons can separate.

An intermediate value of a mask is one of

- a Python number or an :class:`Expr`: of one side only;
- a :class:`Formula`: every Boolean of rank 0;
- an :class:`Affine`: a query part plus a key part, in the wrapping arithmetic of one dtype;
- :class:`Cases`: a choice between values by formulas, of which exactly one holds;
- an :class:`Extremum`: the least or the greatest of two values;
- a :class:`Division`: the quotient or the remainder of an affine value.

``comparison.py`` turns them into formulas, ``arithmetic.py`` computes with them. Only what is
exact for every input is done; anything else raises UnsupportedMask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from . import reasons
from .formula import Formula, as_expr, fact
from .functions import apply, result_type, split_constant
from .values import Deps, Expr, bare_index, constant, known_integer, one_sided, wrap


@dataclass(frozen=True)
class Affine:
    """``q + k + number`` computed in ``ring`` and then sign-extended to ``dtype``.

    ``q`` and ``k`` are expressions of dtype ``ring`` that depend on the query and on the key.
    """

    q: Expr
    k: Expr
    number: int
    ring: torch.dtype
    dtype: torch.dtype


@dataclass(frozen=True)
class Cases:
    """The value of the one branch whose formula holds; all values have ``dtype``."""

    branches: tuple[tuple[Formula, Value], ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Extremum:
    """The maximum (or the minimum) of two values of ``dtype``."""

    greatest: bool
    values: tuple[Value, Value]
    dtype: torch.dtype


@dataclass(frozen=True)
class Division:
    """``value // divisor`` or ``value % divisor`` of a positive divisor, rounded down."""

    remainder: bool
    value: Affine
    divisor: int
    dtype: torch.dtype


Value = bool | int | float | Expr | Formula | Affine | Cases | Extremum | Division
_BOTH_SIDES = (Affine, Cases, Extremum, Division)


def dtype_of(value: Value) -> Any:
    """What type promotion needs to know: a tensor's dtype, a number, or a number's Python type."""
    if isinstance(value, Formula):
        return torch.bool
    return value.dtype if isinstance(value, (Expr, *_BOTH_SIDES)) else value


def common_dtype(*values: Value) -> torch.dtype:
    """The dtype in which PyTorch combines the values."""
    return result_type(*map(dtype_of, values))


def deps_of(value: Any) -> Deps:
    return value.deps if isinstance(value, (Expr, Formula)) else Deps.NONE


def is_tensor(value: Any) -> bool:
    """Whether a value is an expression of a tensor, not of a Python number."""
    return isinstance(value, Expr) and not value.is_scalar


def pure_operands(*values: Value) -> tuple[Any, ...] | None:
    """All values as expressions or numbers if they belong to one side, else None."""
    deps = Deps.NONE
    for value in values:
        if isinstance(value, _BOTH_SIDES):
            return None
        deps |= deps_of(value)
    if not one_sided(deps):
        return None
    return tuple(as_expr(value) if isinstance(value, Formula) else value for value in values)


def as_value(expr: Any) -> Value:
    """The value of a new expression: Booleans of rank 0 are formulas."""
    if is_tensor(expr) and expr.dtype is torch.bool and not expr.shape:
        return fact(expr)
    return expr


def as_tensor(number: Any, dtype: torch.dtype) -> Expr:
    """A Python number, known or not, as a 0-d tensor of ``dtype``."""
    if not isinstance(number, Expr):
        return constant(number, dtype)
    if not number.is_scalar:
        return number
    # By way of the widest dtype: a number beyond ``dtype`` wraps, as it does next to a tensor.
    widest = {bool: torch.bool, int: torch.int64, float: torch.float64}[number.dtype]
    return apply("to", apply("tensor_of", number, widest), dtype)


def bits_of(dtype: torch.dtype) -> int:
    return torch.iinfo(dtype).bits


def index_difference(q: Expr, k: Expr) -> int:
    """Of ``q + k``: 1 if it is the query index minus the key index, -1 if the reverse, else 0."""
    if bare_index(q) and k.op == "neg" and bare_index(k.args[0]):
        return 1
    if bare_index(k) and q.op == "neg" and bare_index(q.args[0]):
        return -1
    return 0


def is_exact_offset(number: int, dtype: torch.dtype) -> bool:
    """Whether an index or a difference of indices plus ``number`` cannot wrap in ``dtype``."""
    return number == 0 or (bits_of(dtype) == 64 and abs(number) < 1 << 62)


def never_wraps(value: Affine) -> bool:
    return index_difference(value.q, value.k) != 0 and is_exact_offset(value.number, value.ring)


def divide(remainder: bool, value: Value, divisor: Value) -> Division | None:
    """The quotient or the remainder of an affine value, where comparisons of it separate."""
    number = known_integer(divisor)
    if not isinstance(value, Affine) or number is None:
        return None
    if value.dtype is not value.ring or common_dtype(value, divisor) is not value.ring:
        return None
    if not 0 < number <= torch.iinfo(value.ring).max:
        return None
    # Modulo a power of two, what wraps changes nothing.
    wraps_alike = remainder and number & (number - 1) == 0
    if not (never_wraps(value) or wraps_alike):
        return None
    return Division(remainder, value, number, value.dtype)


def affine(q: Expr | None, k: Expr | None, number: int, ring: torch.dtype) -> Value:
    """``q + k + number`` in ``ring``; an expression if it is of one side."""
    number = wrap(number, ring)
    q = None if q is None else convert_part(q, ring)
    k = None if k is None else convert_part(k, ring)
    if q is not None and k is not None:
        if not one_sided(q.deps | k.deps):
            return Affine(q, k, number, ring, ring)
        q, k = apply("add", q, k), None
    part = k if q is None else q
    return constant(number, ring) if part is None else apply("add", part, number)


def convert_part(expr: Expr, ring: torch.dtype) -> Expr:
    """``expr`` in ``ring``, its sign outside the conversion where that is the same."""
    if expr.op == "neg" and expr.dtype is not ring:
        inner = expr.args[0]
        if bits_of(ring) <= bits_of(expr.dtype) or bare_index(inner):
            return apply("neg", convert_part(inner, ring))
    return apply("to", expr, ring)


def linear(value: Value, ring: torch.dtype) -> tuple[Expr | None, Expr | None, int]:
    """A query part, a key part and a number whose sum in ``ring`` is the value.

    Raises:
        UnsupportedMask: the value may have wrapped in a narrower dtype.
    """
    if isinstance(value, Affine):
        if value.ring is not ring and not never_wraps(value):
            raise reasons.widened(value.ring, ring)
        return convert_part(value.q, ring), convert_part(value.k, ring), value.number
    if isinstance(value, Formula):
        value = as_expr(value)
    if isinstance(value, Division):
        raise reasons.mixed_value("computes with a quotient or remainder of")
    assert not isinstance(value, (Cases, Extremum))
    base, number = split_constant(apply("to", as_tensor(value, ring), ring))
    if base is None:
        return None, None, number
    return (None, base, number) if base.deps & Deps.K else (base, None, number)


def combine(op: str, a: Expr | None, b: Expr | None) -> Expr | None:
    """``a + b`` or ``a - b``, where None is nothing."""
    if b is None:
        return a
    if a is None:
        return b if op == "add" else apply("neg", b)
    return apply(op, a, b)
