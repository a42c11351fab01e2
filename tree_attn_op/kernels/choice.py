"""Which kernels serve a call on a GPU: one table, and the reason when it is not the faster ones.

The Hopper kernels take what the table says; the portable ones take everything. A choice depends on
the arguments alone, never on a failure, and imports no Triton.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from . import configs

Kernels = Literal["hopper", "portable"]

ENVIRONMENT = "TREE_ATTN_KERNELS"
"""Environment variable, read at call time: ``portable`` keeps the Hopper kernels out."""

LEAST_SCALE = 2.0**-126
"""Below the normal numbers of float32 a scale may be 0 to a kernel, and 0 times the -inf of a
hidden score is no number."""

TMA_BYTES = 16
"""What addresses and strides that the copy engine (TMA) is given must be multiples of."""

logger = logging.getLogger("tree_attn_op")


@dataclass(frozen=True)
class Range:
    """What a family of kernels takes, before shapes and strides are looked at.

    Attributes:
        device: key of the device class (``configs.Device.family``).
        dtypes: of query, key and value.
        max_head_dim: largest head dim of query and of value.
        head_dim_multiple: what both must be multiples of.
        key_block: keys of a listed block.
        query_tokens: tokens of a listed query block, for an even and an odd number of query heads
            to a key/value head: two heads share a tile where they can.
    """

    device: str
    dtypes: tuple[torch.dtype, ...]
    max_head_dim: int
    head_dim_multiple: int
    key_block: int
    query_tokens: tuple[int, int]


HOPPER = Range(
    device="sm90",
    dtypes=(torch.bfloat16, torch.float16),
    max_head_dim=128,
    head_dim_multiple=8,
    key_block=64,
    query_tokens=(64, 128),
)


@dataclass(frozen=True)
class Choice:
    """The kernels that serve a call.

    Attributes:
        kernels: ``"hopper"`` or ``"portable"``.
        reason: why not the Hopper kernels, if they were a candidate on this device; else None.
    """

    kernels: Kernels
    reason: str | None = None


PORTABLE = Choice("portable")


def static_choice(
    device: configs.Device, dtype: torch.dtype, head_dim: int, value_dim: int
) -> Choice:
    """The choice as far as device, dtype and head dims decide it.

    Args:
        device: from ``configs.device_of``.
        dtype: of query, key and value.
        head_dim, value_dim: head dims of query/key and of value.
    """
    if device.family != HOPPER.device:
        return PORTABLE
    if dtype not in HOPPER.dtypes:
        return Choice("portable", f"dtype {dtype}; bfloat16 and float16 are taken")
    for name, dim in (("query", head_dim), ("value", value_dim)):
        if dim > HOPPER.max_head_dim or dim % HOPPER.head_dim_multiple:
            return Choice(
                "portable",
                f"head dim {dim} of {name}; multiples of {HOPPER.head_dim_multiple} up to "
                f"{HOPPER.max_head_dim} are taken",
            )
    return Choice("hopper")


def hopper_list_blocks(group: int) -> tuple[int, int]:
    """Block sizes ``(query, key)`` of the lists that the Hopper kernels take.

    Args:
        group: query heads to a key/value head.
    """
    return HOPPER.query_tokens[group % 2], HOPPER.key_block


def tma_strides(tensor: Tensor) -> tuple[int, ...] | None:
    """Strides for a TMA descriptor of a tensor, or None if the copy engine cannot read it.

    It reads rows of adjacent elements, from a base and in steps of a multiple of 16 bytes. The
    stride of a dimension of size 1 means nothing in PyTorch, so that it may be any number, but the
    descriptor has to hold one that the engine takes: that of the padded last dimension.

    Args:
        tensor: ``[..., D]``.
    """
    if tensor.numel() == 0 or tensor.stride(-1) != 1 or tensor.data_ptr() % TMA_BYTES:
        return None
    step = TMA_BYTES // tensor.element_size()
    padded = -(-tensor.shape[-1] // step) * step
    sizes_and_strides = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    strides = [padded if size == 1 else stride for size, stride in sizes_and_strides]
    if any(stride <= 0 or stride % step for stride in strides):
        return None
    return (*strides, 1)


def tma_can_read(tensor: Tensor) -> bool:
    """Whether the copy engine can read a tensor (see :func:`tma_strides`)."""
    return tma_strides(tensor) is not None


def call_choice(
    device: configs.Device,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    list_heads: int,
    q_block_size: int,
    kv_block_size: int,
    scale: float,
) -> Choice:
    """The choice for the arguments of a call on ``device``.

    Args:
        query, key, value: ``[B, H, S, D]``, not empty, as given to the op.
        list_heads: size of the head dimension of the block lists.
        q_block_size, kv_block_size: tokens of a listed block.
        scale: factor of the scores.
    """
    choice = static_choice(device, query.dtype, query.shape[3], value.shape[3])
    if choice.kernels == "portable":
        return choice
    if os.environ.get(ENVIRONMENT) == "portable":
        return Choice("portable", f"{ENVIRONMENT}=portable is set")
    if not scale >= LEAST_SCALE:
        return Choice("portable", f"scale {scale}; a positive, normal float32 is taken")
    if list_heads != 1:
        return Choice(
            "portable", f"block lists for {list_heads} heads; lists that all share are taken"
        )
    choice = _with_blocks(choice, query.shape[1] // key.shape[1], (q_block_size, kv_block_size))
    if choice.kernels == "portable":
        return choice
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not tma_can_read(tensor):
            return Choice(
                "portable",
                f"{name} has strides {tuple(tensor.stride())}, which the copy engine cannot read",
            )
    return choice


def choose_kernels(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    list_heads: int,
    q_block_size: int,
    kv_block_size: int,
    scale: float,
) -> Choice:
    """:func:`call_choice` on the tensors' device, each reason logged once."""
    device = configs.device_of(query.device)
    choice = call_choice(device, query, key, value, list_heads, q_block_size, kv_block_size, scale)
    if choice.reason is not None:
        _log(choice.reason)
    return choice


@lru_cache(maxsize=256)
def _log(reason: str) -> None:
    logger.info("tree_attention runs the portable kernels, not the Hopper ones: %s", reason)


def preferred_list_blocks(
    device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int, group: int
) -> tuple[int, int]:
    """Block sizes at which lists serve the device's kernels best: fine lists exclude more work.

    Args:
        device: where the kernels will run.
        dtype: dtype of query, key and value.
        head_dim, value_dim: head dims of query and value.
        group: query heads that share a key head.

    Returns:
        ``(q_block_size, kv_block_size)``; (128, 128) on a CPU.
    """
    if device.type != "cpu":
        choice = static_choice(configs.device_of(device), dtype, head_dim, value_dim)
        if choice.kernels == "hopper":
            return hopper_list_blocks(group)
    return configs.preferred_list_blocks(device, dtype, max(head_dim, value_dim), group)


def describe(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    group: int,
    list_blocks: tuple[int, int],
) -> str:
    """The implementation that will serve such a call, for reports: strides are not known yet.

    Args:
        device, dtype, head_dim, value_dim, group: as in :func:`preferred_list_blocks`.
        list_blocks: block sizes ``(query, key)`` of the lists that the call gets.
    """
    if device.type == "cpu":
        return "cpu"
    choice = static_choice(configs.device_of(device), dtype, head_dim, value_dim)
    if choice.kernels == "hopper":
        choice = _with_blocks(choice, group, list_blocks)
    return choice.kernels if choice.reason is None else f"{choice.kernels}: {choice.reason}"


def _with_blocks(choice: Choice, group: int, blocks: tuple[int, int]) -> Choice:
    taken = hopper_list_blocks(group)
    if blocks == taken:
        return choice
    return Choice(
        "portable", f"blocks of {blocks[0]} by {blocks[1]}; {taken[0]} by {taken[1]} are taken"
    )
