"""Reading and adding at repeated indices, with the same bits in each run, backward included."""

from __future__ import annotations

from torch import Tensor


def take(x: Tensor, index: Tensor, dim: int = 0) -> Tensor:
    """`x` at `index` [K] along `dim`."""
    if x.device.type == "cpu":
        return x.index_select(dim, index)
    # The gradient of index_select adds atomically on a GPU; that of indexing sorts first.
    return x[(slice(None),) * (dim % x.ndim) + (index,)]


def add_at(size: int, index: Tensor, values: Tensor) -> Tensor:
    """Zeros [size, ...] to which `values` [K, ...] are added at `index` [K]."""
    zeros = values.new_zeros(size, *values.shape[1:])
    if values.device.type == "cpu":
        return zeros.index_add(0, index, values)
    # For the same reason as above.
    return zeros.index_put((index,), values, accumulate=True)
