"""Element-wise operations of a mask, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import UnsupportedMask
from ..predicate.nodes import Op
from . import reasons
from .arithmetic import arithmetic, cast, choose, elementwise, extremum, invert, negative
from .comparison import as_formula, compare
from .formula import Formula, all_of, any_of, exclusive
from .functions import apply
from .mixed import as_tensor, common_dtype, dtype_of, is_tensor
from .registry import HANDLERS, handles
from .values import Expr, constant, is_integer


def _whole(*values: Any) -> bool:
    """Whether an operand is a captured tensor as a whole."""
    return any(isinstance(value, Expr) and bool(value.shape) for value in values)


def _register_binary() -> None:
    def comparison(name: str, op: Op) -> None:
        def handler(self: Any, other: Any) -> Any:
            if _whole(self, other):
                return elementwise(name, self, other)
            return compare(op, self, other)

        HANDLERS[name] = handler

    for op in (Op.EQ, Op.NE, Op.LT, Op.LE, Op.GT, Op.GE):
        comparison(op.name.lower(), op)

    def connective(name: str, combine: Callable[..., Formula]) -> None:
        def bitwise(self: Any, other: Any) -> Any:
            if isinstance(self, (Formula, bool)) and isinstance(other, (Formula, bool)):
                return combine(as_formula(self), as_formula(other))
            return elementwise(f"bitwise_{name}", self, other)

        def logical(self: Any, other: Any) -> Any:
            if _whole(self, other):
                return elementwise(f"logical_{name}", self, other)
            return combine(as_formula(self), as_formula(other))

        HANDLERS[f"bitwise_{name}"], HANDLERS[f"logical_{name}"] = bitwise, logical

    for name, combine in (("and", all_of), ("or", any_of), ("xor", exclusive)):
        connective(name, combine)

    def plain(name: str) -> None:
        HANDLERS[name] = lambda *values: elementwise(name, *values)

    for name in ["ceil", "floor", "round", "sign", "trunc"]:
        plain(name)


_register_binary()


@handles("add")
def _add(self: Any, other: Any, *, alpha: Any = 1) -> Any:
    return _arithmetic("add", self, _scaled(other, alpha))


@handles("sub")
def _sub(self: Any, other: Any, *, alpha: Any = 1) -> Any:
    return _arithmetic("sub", self, _scaled(other, alpha))


@handles("rsub")
def _rsub(self: Any, other: Any, alpha: Any = 1) -> Any:
    return _arithmetic("sub", other, _scaled(self, alpha))


@handles("mul")
def _mul(self: Any, other: Any) -> Any:
    return _arithmetic("mul", self, other)


def _arithmetic(op: str, a: Any, b: Any) -> Any:
    return elementwise(op, a, b) if _whole(a, b) else arithmetic(op, a, b)


def _scaled(value: Any, alpha: Any) -> Any:
    return value if type(alpha) is int and alpha == 1 else _arithmetic("mul", value, alpha)


@handles("neg")
def _neg(self: Any) -> Any:
    return elementwise("neg", self) if _whole(self) else negative(self)


@handles("abs")
def _abs(self: Any) -> Any:
    if isinstance(self, Expr):
        return elementwise("abs", self)
    if isinstance(self, (int, float)):
        return abs(self)
    # Exact in wrapping arithmetic too: the least integer is its own negation.
    return extremum(True, self, negative(self))


@handles("bitwise_not")
def _bitwise_not(self: Any) -> Any:
    return elementwise("bitwise_not", self) if _whole(self) else invert(self)


@handles("logical_not")
def _logical_not(self: Any) -> Any:
    return elementwise("logical_not", self) if _whole(self) else invert(as_formula(self))


def _register_division() -> None:
    def divide(name: str) -> None:
        HANDLERS[name] = lambda self, other: elementwise(name, self, _divisor(self, other))

    for name in ("floor_divide", "remainder", "fmod"):
        divide(name)


_register_division()


@handles("true_divide")
def _true_divide(self: Any, other: Any) -> Any:
    return elementwise("true_divide", self, other)


@handles("div")
def _div(self: Any, other: Any, *, rounding_mode: str | None = None) -> Any:
    if rounding_mode is None:
        return elementwise("true_divide", self, other)
    if rounding_mode == "floor":
        return elementwise("floor_divide", self, _divisor(self, other))
    return elementwise("div", self, _divisor(self, other), rounding_mode=rounding_mode)


def _divisor(dividend: Any, divisor: Any) -> Any:
    """The divisor with 1 for 0: values are computed for tokens that the mask itself never sees,
    and an integer division by zero may trap."""
    if not is_tensor(divisor):
        if isinstance(divisor, (int, float)) and divisor == 0:
            raise UnsupportedMask("divides by zero")
        if not is_tensor(dividend) or not isinstance(divisor, Expr):
            return divisor
        divisor = as_tensor(divisor, common_dtype(dividend, divisor))
    if not is_integer(divisor.dtype):
        return divisor
    return apply("where", apply("eq", divisor, 0), constant(1, divisor.dtype), divisor)


@handles("bitwise_left_shift")
def _left_shift(self: Any, other: Any) -> Any:
    return elementwise("bitwise_left_shift", self, other)


@handles("bitwise_right_shift")
def _right_shift(self: Any, other: Any) -> Any:
    return elementwise("bitwise_right_shift", self, other)


@handles("maximum")
def _maximum(self: Any, other: Any) -> Any:
    return _extremum(True, self, other)


@handles("minimum")
def _minimum(self: Any, other: Any) -> Any:
    return _extremum(False, self, other)


def _extremum(greatest: bool, a: Any, b: Any) -> Any:
    numbers = [not isinstance(v, Formula) and not hasattr(v, "dtype") for v in (a, b)]
    if numbers[0] != numbers[1]:
        # torch.max(tensor, 0) is a reduction.
        raise reasons.unsupported("the maximum or minimum along a dimension")
    if _whole(a, b):
        return elementwise("maximum" if greatest else "minimum", a, b)
    return extremum(greatest, a, b)


@handles("clamp")
def _clamp(self: Any, min: Any = None, max: Any = None) -> Any:
    if _whole(self):
        limits = {"min": min, "max": max}
        return elementwise(
            "clamp", self, **{name: limit for name, limit in limits.items() if limit is not None}
        )
    result = self if min is None else extremum(True, self, min)
    return result if max is None else extremum(False, result, max)


@handles("clamp_min", "relu")
def _clamp_min(self: Any, min: Any = 0) -> Any:
    return _clamp(self, min)


@handles("clamp_max")
def _clamp_max(self: Any, max: Any) -> Any:
    return _clamp(self, None, max)


@handles("where")
def _where(condition: Any, self: Any, other: Any) -> Any:
    if _whole(condition, self, other):
        return elementwise("where", condition, self, other)
    if dtype_of(condition) is not torch.bool:
        raise UnsupportedMask("uses torch.where with a condition that is not bool")
    return choose(as_formula(condition), self, other)


@handles("to")
def _to(self: Any, *arguments: Any, dtype: Any = None) -> Any:
    for argument in arguments:
        if isinstance(argument, torch.dtype):
            dtype = argument
        elif is_tensor(argument) or isinstance(argument, Formula):
            dtype = dtype_of(argument)
    return self if dtype is None else cast(self, dtype)


def _register_casts() -> None:
    def method(name: str, dtype: torch.dtype) -> None:
        HANDLERS[name] = lambda self: cast(self, dtype)

    for name in ["bfloat16", "bool", "double", "float", "half", "int", "long", "short"]:
        method(name, getattr(torch, name))
    method("char", torch.int8)
    method("byte", torch.uint8)


_register_casts()


@handles("type_as")
def _type_as(self: Any, other: Any) -> Any:
    return cast(self, dtype_of(other))
