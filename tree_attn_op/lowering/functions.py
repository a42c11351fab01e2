"""Operations on expressions: their functions, their identities and the types of their results."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from ..errors import UnsupportedMask
from . import reasons
from .values import (
    Expr,
    children,
    common_deps,
    constant,
    is_integer,
    known_integer,
    one_sided,
    real_tensor,
    wrap,
)


def sliced(dim: int, start: Any, stop: Any, step: Any) -> tuple[slice, ...]:
    """The index that slices one dimension."""
    return (*[slice(None)] * dim, slice(start, stop, step))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: getattr(torch, name)
    for name in (
        "abs",
        "add",
        "bitwise_and",
        "bitwise_left_shift",
        "bitwise_not",
        "bitwise_or",
        "bitwise_right_shift",
        "bitwise_xor",
        "ceil",
        "clamp",
        "div",
        "eq",
        "floor",
        "floor_divide",
        "fmod",
        "ge",
        "gt",
        "le",
        "logical_and",
        "logical_not",
        "logical_or",
        "lt",
        "maximum",
        "minimum",
        "mul",
        "ne",
        "neg",
        "permute",
        "remainder",
        "reshape",
        "round",
        "select",
        "sign",
        "sub",
        "transpose",
        "trunc",
        "true_divide",
        "unsqueeze",
        "where",
    )
}
FUNCTIONS["to"] = torch.Tensor.to
FUNCTIONS["slice"] = lambda x, dim, start, stop, step: x[sliced(dim, start, stop, step)]
"""The function of an operation on tensors. ``index``, ``captured``, ``constant``, ``tensor_of``,
``gather`` and ``size`` have rules of their own."""

SCALAR_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floor_divide": operator.floordiv,
    "remainder": operator.mod,
    "true_divide": operator.truediv,
    "neg": operator.neg,
    "abs": operator.abs,
    "minimum": torch.sym_min,
    "maximum": torch.sym_max,
}
"""The function of an operation whose operands are all Python numbers."""

COMMUTATIVE = frozenset(
    (
        "add",
        "mul",
        "eq",
        "ne",
        "bitwise_and",
        "bitwise_or",
        "bitwise_xor",
        "logical_and",
        "logical_or",
        "maximum",
        "minimum",
    )
)


_BAREBONES = (torch.uint16, torch.uint32, torch.uint64)
_ANY_DTYPE = frozenset(
    (
        "to",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "where",
        "reshape",
        "transpose",
        "permute",
        "unsqueeze",
        "slice",
        "select",
    )
)
"""Operations that PyTorch has for the dtypes above too."""

INVERSE_COMPARISON = {"eq": "ne", "ne": "eq", "lt": "ge", "ge": "lt", "gt": "le", "le": "gt"}


def apply(op: str, *args: Any, **kwargs: Any) -> Any:
    """``op`` of expressions and numbers: an expression, or a number if all operands are numbers.

    Raises:
        UnsupportedMask: PyTorch would raise, or the operation is not element-wise here.
    """
    operands = list(children(args, tuple(kwargs.values())))
    if op == "tensor_of":
        return Expr(op, args, dtype=args[1])
    deps = common_deps(operands)
    if not one_sided(deps):
        raise reasons.mixed_value(f"computes {op} of")
    if all(operand.is_scalar for operand in operands):
        return _apply_scalar(op, args, kwargs, operands)
    if op not in _ANY_DTYPE and any(operand.dtype in _BAREBONES for operand in operands):
        raise UnsupportedMask(
            f"computes {op} of unsigned integers wider than 8 bits",
            hint="Convert the values to int64 before computing with them",
        )
    if op in COMMUTATIVE:
        args = tuple(sorted(args, key=_operand_order))
    simple = _simplify(op, args, kwargs)
    if simple is not None:
        return simple
    if all(operand.op == "constant" for operand in operands):
        return _fold(op, args, kwargs)
    lifted = any(operand.lifted for operand in operands)
    if lifted and any(operand.shape for operand in operands):
        raise UnsupportedMask(
            f"computes {op} of a whole captured tensor and a value of one token",
            hint="Index the captured tensor with b, q or k first",
        )
    dtype, shape = _result(op, args, kwargs)
    return Expr(
        op,
        args,
        tuple(sorted(kwargs.items())),
        dtype=dtype,
        deps=deps,
        shape=shape,
        lifted=lifted,
    )


def _operand_order(operand: Any) -> tuple[bool, int, str]:
    is_tensor = isinstance(operand, Expr) and not operand.is_scalar
    weight, digest = operand.order if isinstance(operand, Expr) else (0, repr(operand))
    return (not is_tensor, weight, digest)


def _apply_scalar(
    op: str, args: tuple[Any, ...], kwargs: dict[str, Any], operands: list[Expr]
) -> Any:
    function = SCALAR_FUNCTIONS.get(op)
    if function is None or kwargs:
        raise reasons.unsupported(f"{op} of captured Python numbers")
    try:
        hint = function(*(arg.hint if isinstance(arg, Expr) else arg for arg in args))
    except (ArithmeticError, TypeError) as error:
        raise UnsupportedMask(f"computes {op} of captured Python numbers: {error}") from error
    if not operands:
        return hint
    return Expr(op, args, dtype=type(hint), hint=hint)


def _simplify(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Expr | None:
    """Identities that hold in the wrapping arithmetic of every integer dtype."""
    first = args[0]
    if op == "to" and first.dtype is args[1]:
        return first
    if op == "neg" and not first.dtype.is_floating_point:
        if first.op == "neg":
            return first.args[0]
        if first.op == "sub" and _is_int_tensor(first.args[0], first.dtype):
            left, right = first.args
            if _is_int_tensor(right, first.dtype):
                return apply("sub", right, left)
    if op in ("add", "sub") and not kwargs and len(args) == 2:
        left, right = args
        if type(right) is int and right == 0 and _is_int_tensor(left):
            return left
        if _is_int_tensor(left) and _is_int_tensor(right, left.dtype):
            inverse = {"add": "sub", "sub": "add"}[op]
            if right.op == "neg":
                return apply(inverse, left, right.args[0])
            if op == "add" and left.op == "neg":
                return apply("sub", right, left.args[0])
            if op == "sub" and left == right and not left.shape:
                return constant(0, left.dtype)
    if op in ("mul", "bitwise_and") and any(known_integer(arg) == 0 for arg in args):
        dtype, shape = _result(op, args, kwargs)
        if is_integer(dtype) and not shape:
            return constant(0, dtype)
    if op == "mul" and type(args[1]) is int and args[1] == 1 and _is_int_tensor(first):
        return first
    return None


def _is_int_tensor(value: Any, dtype: torch.dtype | None = None) -> bool:
    return (
        isinstance(value, Expr)
        and not value.is_scalar
        and is_integer(value.dtype)
        and (dtype is None or value.dtype is dtype)
    )


def _fold(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Expr:
    def real(arg: Any) -> Any:
        return real_tensor(*arg.args) if isinstance(arg, Expr) else arg

    try:
        result = FUNCTIONS[op](*map(real, args), **{k: real(v) for k, v in kwargs.items()})
    except (RuntimeError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise _refused(op, error) from error
    return constant(result.item(), result.dtype)


def _refused(op: str, error: Exception) -> UnsupportedMask:
    message = str(error).split("\n", 1)[0]
    return UnsupportedMask(f"computes {op}, which PyTorch refuses: {message}")


def _result(
    op: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.dtype, tuple[int, ...]]:
    """The dtype and the shape of a result, by PyTorch's own rules."""

    def signature(arg: Any) -> Any:
        if isinstance(arg, Expr):
            return _Sample(arg.dtype, arg.shape, arg.hint)
        if isinstance(arg, (tuple, list)):
            return tuple(map(signature, arg))
        return _Static(type(arg), arg)

    try:
        return _result_of(
            op,
            tuple(map(signature, args)),
            tuple((name, signature(value)) for name, value in sorted(kwargs.items())),
        )
    except (RuntimeError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise _refused(op, error) from error


@dataclass(frozen=True)
class _Sample:
    dtype: Any
    shape: tuple[int, ...]
    hint: Any


@dataclass(frozen=True)
class _Static:
    kind: type  # tells True from 1, which compare equal
    value: Any


@lru_cache(maxsize=4096)
def _result_of(op: str, args: Any, kwargs: Any) -> tuple[torch.dtype, tuple[int, ...]]:
    def sample(arg: Any) -> Any:
        if isinstance(arg, _Sample):
            if isinstance(arg.dtype, type):
                return arg.hint
            return torch.empty(arg.shape, dtype=arg.dtype, device="meta")
        return tuple(map(sample, arg)) if isinstance(arg, tuple) else arg.value

    result = FUNCTIONS[op](*map(sample, args), **{name: sample(arg) for name, arg in kwargs})
    return result.dtype, tuple(result.shape)


def result_type(*values: Any) -> torch.dtype:
    """The dtype in which PyTorch compares or combines 0-d tensors and Python numbers.

    Each value is a torch dtype (a 0-d tensor of it), a Python type or a Python number.

    Raises:
        UnsupportedMask: the dtypes have no common dtype in PyTorch.
    """

    def example(value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return torch.empty((), dtype=value, device="meta")
        return value(1) if isinstance(value, type) else value

    result = example(values[0])
    try:
        if len(values) == 1:
            return torch.result_type(result, result)
        return torch.result_type(result, example(values[1]))
    except (RuntimeError, OverflowError) as error:
        raise _refused("a common dtype", error) from error


def split_constant(expr: Expr) -> tuple[Expr | None, int]:
    """``expr`` as (base, number) with ``expr == base + number`` in its own dtype."""
    total = 0
    if not is_integer(expr.dtype):
        return expr, 0
    while True:
        if expr.op == "constant":
            return None, wrap(total + expr.args[0], expr.dtype)
        if expr.op not in ("add", "sub") or expr.kwargs or not is_integer(expr.dtype):
            return expr, wrap(total, expr.dtype)
        left, right = expr.args
        number = known_integer(right)
        if number is not None and _is_int_tensor(left, expr.dtype):
            total, expr = total + (number if expr.op == "add" else -number), left
            continue
        number = known_integer(left)
        if number is not None and _is_int_tensor(right, expr.dtype):
            total += number
            expr = right if expr.op == "add" else apply("neg", right)
            continue
        return expr, wrap(total, expr.dtype)
