"""What the Hopper kernels take, and the arguments that their launches share."""

from __future__ import annotations

import torch
from torch import Tensor

from tree_attn_op.predicate import Predicate

from .compat import TensorDescriptor, gl

LOG2E = 1.4426950408889634
MAX_HEAD_DIM = 128
KEY_BLOCK = 64


def preferred_list_blocks(head_dim: int, group: int) -> tuple[int, int]:
    """Block sizes ``(query, key)`` of the lists that the kernels take.

    ``group`` is the number of query heads to a K/V head. With an even one, two heads share the 64
    tokens of a query tile; otherwise a query tile is 128 tokens of one head.
    """
    del head_dim
    return (64 if group % 2 == 0 else 128), KEY_BLOCK


def supports(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    list_heads: int,
    q_block_size: int,
    kv_block_size: int,
    scale: float,
) -> str | None:
    """Why these kernels cannot take a call, or None if they can.

    Args:
        query, key, value: ``[B, H, S, D]`` as given to the op.
        list_heads: size of the head dimension of the block lists.
        q_block_size, kv_block_size: tokens of a listed block.
        scale: factor of the scores.
    """
    if query.device.type != "cuda" or torch.cuda.get_device_capability(query.device)[0] != 9:
        return "not on a GPU of compute capability 9.x"
    if query.dtype not in (torch.bfloat16, torch.float16):
        return f"dtype {query.dtype}; bfloat16 and float16 are taken"
    if not scale > 0.0:
        return f"scale {scale}; a positive one is taken"
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.numel() == 0:
            return f"{name} is empty"
        width = tensor.shape[-1]
        if width > MAX_HEAD_DIM or width % 8 != 0:
            return f"head dim {width} of {name}; multiples of 8 up to {MAX_HEAD_DIM} are taken"
        if not tma_can_read(tensor):
            return f"{name} has strides {tuple(tensor.stride())}, which TMA cannot read"
    if list_heads != 1:
        return f"block lists with {list_heads} heads; lists shared by all heads are taken"
    blocks = preferred_list_blocks(query.shape[-1], query.shape[1] // key.shape[1])
    if (q_block_size, kv_block_size) != blocks:
        return f"blocks of {q_block_size} by {kv_block_size}; {blocks[0]} by {blocks[1]} are taken"
    return None


def tma_can_read(tensor: Tensor) -> bool:
    """Whether a ``[B, H, S, D]`` 16-bit tensor has the alignment that TMA wants."""
    if tensor.stride(-1) != 1 or tensor.data_ptr() % 16 != 0:
        return False
    sizes_and_strides = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    return all(size == 1 or (stride > 0 and stride % 8 == 0) for size, stride in sizes_and_strides)


def boxes_of(tensor: Tensor) -> TensorDescriptor:
    """A TMA descriptor of boxes of 64 tokens by 64 columns of a ``[B, H, S, D]`` tensor."""
    # The stride of a dimension of size 1 means nothing in PyTorch but must be aligned for TMA.
    aligned = -(-tensor.shape[-1] // 8) * 8
    strides = [
        aligned if size == 1 else stride
        for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    ]
    dtype = gl.bfloat16 if tensor.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for([1, 1, 64, 64], dtype)
    return TensorDescriptor(tensor, list(tensor.shape), [*strides, 1], [1, 1, 64, 64], layout)


def statistics_of(stats: Tensor) -> TensorDescriptor:
    """A TMA descriptor of the rows of 64 numbers in ``row_statistics``' result."""
    layout = gl.NVMMASharedLayout.get_default_for([1, 64], gl.float32)
    return TensorDescriptor(stats, [stats.numel() // 64, 64], [64, 1], [1, 64], layout)


def value_rows(values: Tensor) -> tuple[Tensor, int, int]:
    """``(values, batch stride, row stride)`` with rows dense and batch stride 0 if shared."""
    if values.stride(-1) != 1:
        values = values.contiguous()
    return values, values.stride(0) if values.shape[0] > 1 else 0, values.stride(1)


def dense_list(blocks: Tensor) -> Tensor:
    """A list ``[B, 1, ...]`` without its head dimension, dense."""
    return blocks.squeeze(1).contiguous()


def program_of(predicate: str) -> tuple[int, ...]:
    """The kernels' constexpr of a predicate's text."""
    return Predicate.parse(predicate).program


def chunks(width: int) -> int:
    """64-column boxes that hold a row of ``width`` elements."""
    return -(-width // 64)


def multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors: the persistent grids have a block for each."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
