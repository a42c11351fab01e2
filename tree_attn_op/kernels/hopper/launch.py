"""Arguments that the launches of the Hopper kernels share."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from tree_attn_op.predicate import Predicate

from .compat import TensorDescriptor, gl

LOG2E = 1.4426950408889634


@lru_cache
def _box_layout(shape: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """The layout in shared memory of a box; making one costs as much as a launch."""
    types = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}
    return gl.NVMMASharedLayout.get_default_for(list(shape), types[dtype])


def boxes_of(tensor: Tensor) -> TensorDescriptor:
    """A TMA descriptor of boxes of 64 tokens by 64 columns of a ``[B, H, S, D]`` tensor."""
    # The stride of a dimension of size 1 means nothing in PyTorch but must be aligned for TMA.
    aligned = -(-tensor.shape[-1] // 8) * 8
    strides = [
        aligned if size == 1 else stride
        for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    ]
    box = (1, 1, 64, 64)
    layout = _box_layout(box, tensor.dtype)
    return TensorDescriptor(tensor, list(tensor.shape), [*strides, 1], list(box), layout)


def statistics_of(stats: Tensor) -> TensorDescriptor:
    """A TMA descriptor of the rows of 64 numbers of ``BackwardPreparation``'s statistics."""
    layout = _box_layout((1, 64), torch.float32)
    return TensorDescriptor(stats, [stats.numel() // 64, 64], [64, 1], [1, 64], layout)


def value_strides(q_vals: Tensor, k_vals: Tensor) -> dict[str, int]:
    """Kernel arguments: strides of batches, 0 if all share one, and of rows."""
    return {
        "q_batch_stride": q_vals.stride(0) if q_vals.shape[0] > 1 else 0,
        "q_stride": q_vals.stride(1),
        "k_batch_stride": k_vals.stride(0) if k_vals.shape[0] > 1 else 0,
        "k_stride": k_vals.stride(1),
    }


def program_of(predicate: str) -> tuple[int, ...]:
    """The kernels' constexpr of a predicate's text."""
    return Predicate.parse(predicate).program


def chunks(width: int) -> int:
    """64-column boxes that hold a row of ``width`` elements."""
    return -(-width // 64)


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors: the persistent grids have a block for each."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
