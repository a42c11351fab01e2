"""Where outputs lie in memory: one rule for kernels, CPU code and fakes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sequence_major(reference: Tensor) -> bool:
    """Whether ``reference`` ``[B, H, S, *]`` lies in memory as ``[B, S, H, *]``.

    That is so when its sequence stride is above its head stride. With one head or one token the
    two orders are the same memory, and the stride of a dimension of size 1 means nothing (it may
    differ between a fake and the real tensor), so those count as head-major.
    """
    if reference.dim() != 4:
        raise ValueError(f"expected a [B, H, S, D] tensor, got shape {tuple(reference.shape)}")
    if reference.shape[1] == 1 or reference.shape[2] == 1:
        return False
    return bool(reference.stride(2) > reference.stride(1))


def empty_like_layout(reference: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialised dense tensor that follows the layout of another.

    Args:
        reference: ``[B, H, S, *]``, any strides; only its sizes, strides and device are read.
        shape: ``(B, H, S, D)`` of the result.
        dtype: dtype of the result.

    Returns:
        Tensor of ``shape`` on ``reference``'s device, stored as ``[B, S, H, D]`` if ``reference``
        is (see :func:`sequence_major`), else as ``[B, H, S, D]``. Real, meta and fake tensors get
        the same strides.
    """
    batch, heads, length, width = shape
    if sequence_major(reference):
        stored = torch.empty((batch, length, heads, width), dtype=dtype, device=reference.device)
        return stored.transpose(1, 2)
    return torch.empty((batch, heads, length, width), dtype=dtype, device=reference.device)
