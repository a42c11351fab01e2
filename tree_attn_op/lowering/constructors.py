"""Operations of a mask that make, index or describe tensors, by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import UnsupportedMask
from . import reasons
from .arithmetic import cast
from .formula import Formula
from .functions import apply
from .indexing import index_tensor, shape_of, take, view
from .mixed import Value, common_dtype, dtype_of, is_tensor
from .registry import HANDLERS, handles
from .values import size


@handles("clone", "contiguous", "detach", "alias", "lift_fresh", "lift_fresh_copy")
def _same(self: Any) -> Any:
    return self


def _require_rank_0(shape: Sequence[Any]) -> None:
    if list(shape):
        raise UnsupportedMask(
            f"makes a tensor of shape {list(shape)}", hint="Make 0-d tensors, of shape ()"
        )


def _flat(shape: Sequence[Any]) -> Sequence[Any]:
    return shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape


def _new(value: Any, dtype: torch.dtype) -> Value:
    _require_rank_0(shape_of(value))
    return cast(value, dtype)


def _register_factories() -> None:
    def factories(name: str, value: int) -> None:
        def absolute(*shape: Any, size: Any = (), dtype: torch.dtype | None = None) -> Value:
            _require_rank_0((*_flat(shape), *_flat((size,))))
            return _new(value, dtype or torch.get_default_dtype())

        def new(self: Any, *shape: Any, size: Any = (), dtype: torch.dtype | None = None) -> Value:
            _require_rank_0((*_flat(shape), *_flat((size,))))
            return _new(value, dtype or dtype_of(self))

        def like(self: Any, *, dtype: torch.dtype | None = None) -> Value:
            _require_rank_0(shape_of(self))
            return _new(value, dtype or dtype_of(self))

        HANDLERS[name], HANDLERS[f"new_{name}"], HANDLERS[f"{name}_like"] = absolute, new, like

    factories("zeros", 0)
    factories("ones", 1)


_register_factories()


@handles("full")
def _full(size: Any, fill_value: Any, *, dtype: torch.dtype | None = None) -> Value:
    _require_rank_0(size)
    return _new(fill_value, dtype or _number_dtype(fill_value))


@handles("new_full")
def _new_full(self: Any, size: Any, fill_value: Any, *, dtype: Any = None) -> Value:
    _require_rank_0(size)
    return _new(fill_value, dtype or dtype_of(self))


@handles("full_like")
def _full_like(self: Any, fill_value: Any, *, dtype: torch.dtype | None = None) -> Value:
    _require_rank_0(shape_of(self))
    return _new(fill_value, dtype or dtype_of(self))


@handles("scalar_tensor")
def _scalar_tensor(s: Any, *, dtype: torch.dtype | None = None) -> Value:
    return _new(s, dtype or torch.get_default_dtype())


@handles("tensor", "as_tensor")
def _tensor(data: Any, *, dtype: torch.dtype | None = None) -> Value:
    if isinstance(data, (tuple, list)):
        raise reasons.unsupported("torch.tensor of a list")
    return _new(data, dtype or _number_dtype(data))


@handles("new_tensor")
def _new_tensor(self: Any, data: Any, *, dtype: torch.dtype | None = None) -> Value:
    return _tensor(data, dtype=dtype)


def _number_dtype(number: Any) -> torch.dtype:
    if is_tensor(number) or isinstance(number, Formula):
        return dtype_of(number)
    return common_dtype(number)


@handles("getitem")
def _getitem(self: Any, index: Any) -> Any:
    if isinstance(self, (tuple, list)):
        return self[index]
    return index_tensor(self, index if isinstance(index, tuple) else (index,))


@handles("index")
def _index(self: Any, indices: Sequence[Any]) -> Any:
    return index_tensor(self, tuple(slice(None) if i is None else i for i in indices))


@handles("select")
def _select(self: Any, dim: int, index: Any) -> Any:
    dim = range(len(shape_of(self)))[dim]
    return index_tensor(self, (*[slice(None)] * dim, index))


@handles("slice")
def _slice(self: Any, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> Any:
    dim = range(len(shape_of(self)))[dim]
    if end is not None and isinstance(end, int) and end >= torch.iinfo(torch.int64).max:
        end = None
    start = None if isinstance(start, int) and start == 0 else start
    cut = slice(start, end, None if isinstance(step, int) and step == 1 else step)
    return index_tensor(self, (*[slice(None)] * dim, cut))


@handles("take")
def _take(self: Any, index: Any) -> Any:
    return take(self, index)


@handles("view", "reshape", "_unsafe_view")
def _view(self: Any, *shape: Any) -> Any:
    if any(isinstance(entry, torch.dtype) for entry in shape):
        raise reasons.unsupported("a view with another dtype")
    if not shape_of(self):
        _require_rank_0(_flat(shape))
        return self
    return view("reshape", self, tuple(_flat(shape)))


@handles("expand", "broadcast_to")
def _expand(self: Any, *shape: Any) -> Any:
    _require_rank_0(shape_of(self))
    _require_rank_0(_flat(shape))
    return self


@handles("flatten", "ravel")
def _flatten(self: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    if (start_dim, end_dim) not in ((0, -1), (0, len(shape_of(self)) - 1)):
        raise reasons.unsupported("flatten of some of the dimensions")
    return view("reshape", self, (-1,))


@handles("transpose", "swapaxes")
def _transpose(self: Any, dim0: int, dim1: int) -> Any:
    return view("transpose", self, dim0, dim1)


@handles("t")
def _t(self: Any) -> Any:
    return view("transpose", self, 0, 1)


@handles("permute")
def _permute(self: Any, *dims: Any) -> Any:
    return view("permute", self, tuple(_flat(dims)))


@handles("unsqueeze")
def _unsqueeze(self: Any, dim: int) -> Any:
    return view("unsqueeze", self, dim)


@handles("squeeze")
def _squeeze(self: Any, *dims: Any) -> Any:
    if shape_of(self):
        raise reasons.unsupported("squeeze")
    return self


@handles("size", "sym_size")
def _size(self: Any, dim: int | None = None) -> Any:
    shape = shape_of(self)
    if dim is None:
        return tuple(size(self, d) for d in range(len(shape)))
    return size(self, range(len(shape))[dim])


@handles("dim", "ndimension")
def _dim(self: Any) -> int:
    return len(shape_of(self))


@handles("numel")
def _numel(self: Any) -> Any:
    result: Any = 1
    for dim in range(len(shape_of(self))):
        result = apply("mul", result, size(self, dim))
    return result


@handles("getattr")
def _getattr(self: Any, name: str) -> Any:
    if name == "shape":
        return _size(self)
    if name == "dtype":
        return dtype_of(self)
    if name == "ndim":
        return len(shape_of(self))
    if name == "device":
        return None  # every handler ignores it: all values of a mask live on one device
    raise reasons.unsupported(f"the attribute {name!r} of a tensor")


def _register_reads() -> None:
    def read(name: str) -> None:
        def handler(*_: Any, **__: Any) -> Any:
            raise reasons.reads_data(f"Tensor.{name}()")

        HANDLERS[name] = handler

    for name in ["item", "tolist", "numpy", "_local_scalar_dense"]:
        read(name)


_register_reads()
