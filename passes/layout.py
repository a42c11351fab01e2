"""How the output of flex_attention lies in memory, where ours lies differently."""

from __future__ import annotations

import functools

import torch
from torch.fx.experimental.symbolic_shapes import guard_or_false


def order_to_restore(given: torch.Tensor, wanted: torch.Tensor) -> list[int] | None:
    """The order of dimensions, outermost first, to copy ``given`` into to lie as ``wanted`` does.

    None if both lie alike. What follows the call may be a view that only the layout of flex's
    output allows.
    """
    dims = range(given.dim())
    if all(
        guard_or_false(given.stride(dim) == wanted.stride(dim))
        or guard_or_false(given.shape[dim] == 1)
        for dim in dims
    ):
        return None

    def outer_first(one: int, other: int) -> int:
        if guard_or_false(wanted.stride(one) > wanted.stride(other)):
            return -1
        return int(guard_or_false(wanted.stride(other) > wanted.stride(one)))

    return sorted(dims, key=functools.cmp_to_key(outer_first))
