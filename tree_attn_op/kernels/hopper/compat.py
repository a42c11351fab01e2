"""The Gluon names that the Hopper kernels use, imported in one place.

Gluon is experimental and moves between Triton releases. The kernels import its names from here, so
a release that renames one is met by a change to this file alone. Triton 3.6 and 3.7 agree on all
of them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
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
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "tma",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
