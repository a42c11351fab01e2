"""Look-ups in captured tensors: one index a dimension, given at once or one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import UnsupportedMask
from . import reasons
from .comparison import distribute
from .formula import Formula
from .functions import apply
from .mixed import Affine, Cases, Division, Extremum, Value, as_value, is_tensor
from .values import Expr, gather

Index = Any
"""None (a dimension that is not indexed yet), an int, or an expression."""


@dataclass(frozen=True)
class Rows:
    """A captured tensor that is indexed in some of its dimensions, as in ``table[b]``."""

    base: Expr
    index: tuple[Index, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        sizes = zip(self.base.shape, self.index, strict=True)
        return tuple(size for size, item in sizes if item is None)


def shape_of(value: Any) -> tuple[int, ...]:
    """Sizes (hints where symbolic): () unless ``value`` is a captured tensor or rows of one."""
    return value.shape if isinstance(value, (Expr, Rows)) else ()


def index_tensor(target: Any, items: Sequence[Any]) -> Any:
    """``target[items]``.

    Raises:
        UnsupportedMask: an index depends on both query and key, is no integer, or is a slice or a
            new axis of something that a query or a key index was applied to.
    """
    if not shape_of(target):
        if all(item is Ellipsis for item in items):
            return target
        raise UnsupportedMask("indexes a 0-d tensor")
    for item in items:
        if isinstance(item, (Affine, Division)):
            raise reasons.table()
        if isinstance(item, (Cases, Extremum)):
            return _index_by_cases(target, items)
    base = target.base if isinstance(target, Rows) else target
    index = list(target.index if isinstance(target, Rows) else [None] * len(base.shape))
    free = [dim for dim, item in enumerate(index) if item is None]
    for dim, item in zip(free, _full_length(items, len(free)), strict=True):
        if isinstance(item, slice):
            if item == slice(None):
                continue
            if isinstance(target, Rows):
                raise UnsupportedMask("slices a row of a captured tensor")
            bounds = (item.start, item.stop, item.step)
            base = apply("slice", base, dim, *bounds)
        else:
            index[dim] = _checked(item)
    if not any(map(is_tensor, index)):
        # Known positions only: still a tensor that depends on no index.
        for dim in reversed(range(len(index))):
            if index[dim] is not None:
                base = apply("select", base, dim, index[dim])
        return as_value(base)
    if any(item is None for item in index):
        return Rows(base, tuple(index))
    return as_value(gather(base, tuple(index)))


def _full_length(items: Sequence[Any], dims: int) -> list[Any]:
    """One item a dimension."""
    items = list(items)
    if any(item is None for item in items):
        raise UnsupportedMask("adds a dimension to a captured tensor (an index of None)")
    ellipses = [at for at, item in enumerate(items) if item is Ellipsis]
    missing = dims - (len(items) - len(ellipses))
    if missing < 0 or len(ellipses) > 1:
        raise UnsupportedMask(f"indexes a tensor of {dims} dimensions with {len(items)} indices")
    at = ellipses[0] if ellipses else len(items)
    return [*items[:at], *[slice(None)] * missing, *items[at + len(ellipses) :]]


def _checked(item: Any) -> Index:
    if type(item) is int or (isinstance(item, Expr) and item.dtype is int):
        return item
    if is_tensor(item):
        if item.shape:
            raise UnsupportedMask(
                "indexes a captured tensor with a whole tensor",
                hint="Index with 0-d values computed from b, q or k",
            )
        if item.dtype in (torch.int64, torch.int32):
            return item
        raise UnsupportedMask(
            f"indexes a captured tensor with {reasons.short(item.dtype)} values",
            hint="Convert the index to int64",
        )
    if isinstance(item, (Formula, bool)):
        raise UnsupportedMask(
            "indexes a captured tensor with a bool", hint="Convert the index to int64"
        )
    raise UnsupportedMask(f"indexes a captured tensor with {type(item).__name__}")


def _index_by_cases(target: Any, items: Sequence[Any]) -> Value:
    at = [i for i, item in enumerate(items) if isinstance(item, (Cases, Extremum))]

    def look_up(*leaves: Value) -> Value:
        chosen = dict(zip(at, leaves, strict=True))
        result = index_tensor(target, [chosen.get(i, item) for i, item in enumerate(items)])
        if shape_of(result):
            raise reasons.table()
        return result

    result = distribute(look_up, *(items[i] for i in at))
    assert result is not None
    return result


def take(target: Any, item: Any) -> Any:
    """``torch.take``: the tensor seen as one-dimensional."""
    return index_tensor(view("reshape", target, (-1,)), (item,))


def view(op: str, target: Any, *args: Any) -> Expr:
    """Another shape of a captured tensor."""
    if not isinstance(target, Expr) or not target.shape:
        raise reasons.unsupported(f"{op} of a value of one token")
    return apply(op, target, *args)
