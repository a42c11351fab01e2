"""Expressions that depend on the query or on the key, but not on both.

An :class:`Expr` is an immutable, structurally compared description of a computation on the
indices and the captured operands; ``emission.py`` turns it into graph nodes. It lives in one of
two worlds:

- *invariant*: built from captured operands and numbers only, any rank, emitted as it was written;
- *lifted*: built from an index or from a gather, rank 0 where the mask is written, emitted as
  ``[B or 1, length or 1]``. A captured 0-d tensor that meets a lifted value is reshaped to
  ``[1, 1]``, so that type promotion sees tensors of one rank, as it does in the mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntFlag
from functools import cached_property
from hashlib import blake2b
from typing import Any

import torch

from ..errors import UnsupportedMask
from . import reasons


class Deps(IntFlag):
    """The indices that a value depends on."""

    NONE = 0
    B = 1
    H = 2
    Q = 4
    K = 8


@dataclass(frozen=True)
class CapturedInfo:
    """What is known of one captured operand of a mask.

    Attributes:
        dtype: a tensor's dtype; None for a Python scalar.
        shape: a tensor's shape, whose entries may be SymInt; None for a scalar.
        device: a tensor's device; None for a scalar.
        scalar: a Python number, which becomes part of the mask, or a SymInt, SymFloat or SymBool,
            which stays an operand; None for a tensor.
    """

    dtype: torch.dtype | None = None
    shape: tuple[Any, ...] | None = None
    device: torch.device | None = None
    scalar: Any = None

    @staticmethod
    def of(value: Any) -> CapturedInfo:
        """The description of a (fake) tensor, a Python number or a symbolic number.

        Raises:
            UnsupportedMask: ``value`` is none of these.
        """
        if isinstance(value, torch.Tensor):
            return CapturedInfo(value.dtype, tuple(value.shape), value.device)
        if isinstance(value, (bool, int, float, torch.SymInt, torch.SymFloat, torch.SymBool)):
            return CapturedInfo(scalar=value)
        raise UnsupportedMask(f"captures an operand of type {type(value).__name__}")


def check_devices(captured: Iterable[CapturedInfo], device: torch.device | None = None) -> None:
    """Refuse captured tensors on different devices, or on another than ``device``.

    0-d tensors may live on the CPU, as PyTorch allows.
    """
    devices = {info.device for info in captured if info.shape and info.device is not None}
    if device is not None and not all(_same_device(device, other) for other in devices):
        devices.add(device)
    if len(devices) > 1:
        raise reasons.devices(sorted(map(str, devices)))


def _same_device(a: torch.device, b: torch.device) -> bool:
    known = a.index is not None and b.index is not None
    return a.type == b.type and (a.index == b.index or not known)


Number = bool | int | float


class Expr:
    """One value; see the module's text. Equal expressions compare and hash equal.

    Attributes:
        op: a key of FUNCTIONS or SCALAR_FUNCTIONS, or one of the leaves named there.
        args, kwargs: operands, with expressions at any depth of tuples.
        deps: the indices it depends on.
        dtype: the dtype of a tensor; for a symbolic scalar the Python type.
        shape: sizes of an invariant tensor, hints where symbolic; () for all lifted values.
        lifted: whether it lives in the lifted world.
        hint: an example of a scalar.
    """

    __slots__ = (
        "__dict__",
        "args",
        "deps",
        "depth",
        "digest",
        "dtype",
        "hint",
        "kwargs",
        "lifted",
        "op",
        "shape",
        "weight",
    )

    def __init__(
        self,
        op: str,
        args: tuple[Any, ...] = (),
        kwargs: tuple[tuple[str, Any], ...] = (),
        *,
        dtype: Any,
        deps: Deps = Deps.NONE,
        shape: tuple[int, ...] = (),
        lifted: bool = False,
        hint: Any = None,
    ):
        self.op, self.args, self.kwargs = op, args, kwargs
        self.deps, self.dtype, self.shape, self.lifted, self.hint = (
            deps,
            dtype,
            shape,
            lifted,
            hint,
        )
        self.digest = blake2b(
            repr((op, _key(args), _key(kwargs))).encode(), digest_size=16
        ).hexdigest()
        self.depth: int = 1 + max((c.depth for c in children(args, kwargs)), default=0)
        if self.depth > 2 * reasons.MAX_DEPTH:
            raise reasons.too_many("nested operations", self.depth, 2 * reasons.MAX_DEPTH)
        self.weight: int = min(1 + sum(child.weight for child in children(args, kwargs)), 1 << 20)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Expr) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        inner = ", ".join([*map(repr, self.args), *(f"{k}={v!r}" for k, v in self.kwargs)])
        return f"{self.op}({inner})"

    @property
    def is_scalar(self) -> bool:
        """Whether it is a Python number that is known at run time only."""
        return isinstance(self.dtype, type)

    @property
    def order(self) -> tuple[int, str]:
        """A sort key that does not depend on how a mask is spelled."""
        return (self.weight, self.digest)

    @cached_property
    def uses_captured_tensor(self) -> bool:
        if self.op == "captured":
            return not self.is_scalar
        return any(child.uses_captured_tensor for child in children(self.args, self.kwargs))


def children(*containers: Any) -> Iterator[Expr]:
    """The expressions directly inside nested tuples."""
    for item in containers:
        if isinstance(item, Expr):
            yield item
        elif isinstance(item, (tuple, list)):
            yield from children(*item)


def _key(item: Any) -> Any:
    if isinstance(item, Expr):
        return item.digest
    if isinstance(item, (tuple, list)):
        return tuple(map(_key, item))
    return (type(item).__name__, str(item))


def index(name: str) -> Expr:
    """The batch, head, query or key index ("b", "h", "q", "k"): int64, as in eager PyTorch."""
    return Expr("index", (name,), dtype=torch.int64, deps=Deps[name.upper()], lifted=True)


def captured(position: int, info: CapturedInfo) -> Expr | Number:
    """The captured operand at ``position``; a plain Python number stands for itself."""
    scalar = info.scalar
    if scalar is not None:
        if isinstance(scalar, (bool, int, float)):
            return scalar
        kind = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(scalar)]
        return Expr("captured", (position,), dtype=kind, hint=_hint(scalar, kind))
    assert info.shape is not None
    assert info.dtype is not None
    shape = tuple(_hint(size, int) for size in info.shape)
    return Expr("captured", (position,), dtype=info.dtype, shape=shape)


def _hint(number: Any, kind: type) -> Any:
    """An example of a number, read without adding a guard on it."""
    if isinstance(number, (bool, int, float)):
        return number
    hint = getattr(number.node, "hint", None)
    return kind(2) if hint is None else kind(hint)


def constant(value: Number, dtype: torch.dtype) -> Expr:
    """A 0-d tensor of a known value, converted to ``dtype`` as PyTorch converts it."""
    return Expr("constant", (real_tensor(value, dtype).item(), dtype), dtype=dtype)


def real_tensor(value: Number, dtype: torch.dtype) -> torch.Tensor:
    """A number as a 0-d tensor; integers beyond ``dtype`` wrap."""
    if isinstance(value, int) and not dtype.is_floating_point and dtype is not torch.bool:
        value = wrap(value, dtype)
    return torch.full((), value, dtype=dtype, device="cpu")


def wrap(value: int, dtype: torch.dtype) -> int:
    """``value`` in the two's complement arithmetic of ``dtype``."""
    info = torch.iinfo(dtype)
    span = 1 << info.bits
    return (value - info.min) % span + info.min


def size(base: Expr, dim: int) -> Expr:
    """The run-time size of one dimension of an invariant tensor."""
    return Expr("size", (base, dim), dtype=int, hint=base.shape[dim])


def gather(base: Expr, indices: tuple[Expr | int, ...]) -> Expr:
    """``base[indices]`` with one index a dimension, at least one of them a tensor."""
    deps = common_deps(children(indices))
    if 0 in base.shape:
        raise reasons.empty_table()
    if (deps & Deps.Q) and (deps & Deps.K):
        raise reasons.table()
    return Expr("gather", (base, indices), dtype=base.dtype, deps=deps, lifted=True)


def common_deps(exprs: Iterable[Expr]) -> Deps:
    """All that some values depend on; refuses those that depend on the head."""
    deps = Deps.NONE
    for expr in exprs:
        deps |= expr.deps
    if deps & Deps.H:
        raise reasons.head_dependent()
    return deps


def one_sided(deps: Deps) -> bool:
    """Whether a value of these dependences is one number a query or one number a key."""
    return not ((deps & Deps.Q) and (deps & Deps.K))


def is_integer(dtype: Any) -> bool:
    """Whether ``dtype`` is a torch integer dtype; bool is none."""
    return isinstance(dtype, torch.dtype) and not (
        dtype.is_floating_point or dtype.is_complex or dtype is torch.bool
    )


def bare_index(expr: Expr) -> str | None:
    """ "q" or "k" if ``expr`` is that index itself, in int64 or int32, else None."""
    while expr.op == "to" and expr.dtype in (torch.int32, torch.int64):
        expr = expr.args[0]
    return expr.args[0] if expr.op == "index" and expr.args[0] in "qk" else None


def known_integer(value: Any) -> int | None:
    """The value of an int or of a constant integer (or bool) tensor, else None."""
    if type(value) is int:
        return value
    if isinstance(value, Expr) and value.op == "constant":
        number = value.args[0]
        return int(number) if isinstance(number, (bool, int)) else None
    return None
