"""The Gluon names that the Hopper kernels use, imported in one place.

Gluon is experimental and moves between Triton releases. The kernels import its names from here, so
a release that renames one is met by a change to this file alone. Triton 3.6 and 3.7 agree on all
of them. One is made here: the TMA unit's reductions are in the builder of every release since 3.6,
but have a name only since 3.8.
"""

from __future__ import annotations

from typing import Any

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = [
    "TensorDescriptor",
    "async_add_shared_to_global",
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "tma",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]


@builtin
def async_add_shared_to_global(
    tensor_desc: Any, coord: Any, src: Any, _semantic: Any = None
) -> None:
    """Add a box in shared memory to one in global memory, as part of a bulk group.

    As ``tma.async_copy_shared_to_global`` in all else; the sums are atomic element by element.
    """
    coordinates = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coordinates, src.handle
    )
