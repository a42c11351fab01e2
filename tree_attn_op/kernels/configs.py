"""Tile shapes and launch options of the portable kernels, by architecture, dtype and head dim.

A small table instead of an autotuner: a call never waits for a search, and equal calls run equal
kernels. :func:`choose` takes the entry for the device and adapts it to the call: tiles must divide
the blocks of the lists, and head dims beyond the table's get smaller tiles.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch

Kernel = Literal["forward", "dq", "dkdv"]
MIN_TILE = 16


@dataclass(frozen=True)
class KernelConfig:
    """How one kernel is launched.

    Attributes:
        block_m: query rows of a tile. Forward and dQ: rows of the resident tile, ``pack`` heads
            times ``block_m // pack`` tokens. dK/dV: query tokens a step.
        block_n: key tokens a step (forward, dQ) or of the resident tile (dK/dV).
        num_warps, num_stages: as in ``triton.Config``.
        pack: heads of a group that share a tile (forward, dQ).
        tma: read tiles through tensor descriptors where strides and alignment allow.
        maxnreg: cap on registers a thread, so that two programs fit a multiprocessor, or None.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    pack: int = 1
    tma: bool = False
    maxnreg: int | None = None


@dataclass(frozen=True)
class Device:
    """What a choice depends on.

    Attributes:
        family: key of the table.
        shared_memory: bytes of shared memory that one program may use.
    """

    family: str
    shared_memory: int


CUDA_DEVICES: dict[int, Device] = {
    80: Device("sm80", 166912),
    86: Device("sm86", 101376),
    87: Device("sm80", 166912),
    89: Device("sm86", 101376),
    90: Device("sm90", 232448),
    100: Device("sm100", 232448),
    103: Device("sm100", 232448),
    120: Device("sm86", 101376),
    121: Device("sm86", 101376),
}
"""Shared memory a program may opt into, by compute capability (CUDA C++ Programming Guide)."""

HIP = Device("hip", 65536)
"""AMD: local data share of a workgroup."""

GENERIC = Device("generic", 65536)


def _c(
    block_m: int, block_n: int, num_warps: int, num_stages: int, **options: int
) -> KernelConfig:
    return KernelConfig(block_m, block_n, num_warps, num_stages, **options)  # type: ignore[arg-type]


# (kernel, bytes an element) -> configs for padded head dims up to 64, 128, 256
_Row = tuple[KernelConfig, KernelConfig, KernelConfig]
_FP32: dict[Kernel, _Row] = {
    "forward": (_c(64, 32, 4, 2), _c(32, 32, 4, 2), _c(32, 16, 4, 1)),
    "dq": (_c(32, 32, 4, 1), _c(32, 16, 4, 1), _c(16, 16, 4, 1)),
    "dkdv": (_c(32, 32, 4, 1), _c(16, 32, 4, 1), _c(16, 16, 4, 1)),
}
_TABLE: dict[str, dict[Kernel, _Row]] = {
    "sm80": {
        "forward": (_c(128, 64, 4, 3), _c(128, 64, 8, 3), _c(64, 32, 4, 3)),
        "dq": (_c(64, 64, 4, 2), _c(64, 64, 4, 2), _c(64, 32, 8, 2)),
        "dkdv": (_c(64, 64, 4, 2), _c(64, 64, 4, 2), _c(32, 64, 8, 2)),
    },
    "sm86": {
        "forward": (_c(128, 64, 4, 3), _c(128, 32, 8, 3), _c(64, 32, 4, 2)),
        "dq": (_c(64, 64, 4, 2), _c(64, 32, 4, 2), _c(32, 32, 4, 1)),
        "dkdv": (_c(64, 64, 4, 2), _c(32, 64, 4, 2), _c(32, 32, 4, 1)),
    },
    # Measured on an H200 against the other candidates of bench/tune_portable.py. Two programs a
    # multiprocessor (64 x 64 tiles of 4 warps, or 8 warps at 128 registers) hide each other's
    # softmax, which Triton does not overlap with the matrix products of one program.
    "sm90": {
        "forward": (
            _c(64, 64, 4, 3, tma=True),
            _c(128, 64, 8, 2, pack=2, tma=True, maxnreg=128),
            _c(64, 32, 4, 3),
        ),
        "dq": (
            _c(128, 64, 8, 3, pack=2, tma=True, maxnreg=128),
            _c(128, 64, 8, 3, pack=2, tma=True),
            _c(64, 64, 8, 2),
        ),
        "dkdv": (
            _c(64, 64, 4, 3, tma=True),
            _c(64, 64, 4, 2, tma=True),
            _c(64, 64, 8, 2),
        ),
    },
    "sm100": {
        "forward": (_c(128, 64, 4, 3), _c(128, 64, 8, 3), _c(64, 32, 4, 3)),
        "dq": (_c(64, 64, 4, 2), _c(64, 64, 4, 2), _c(64, 32, 4, 2)),
        "dkdv": (_c(64, 64, 4, 2), _c(64, 64, 4, 2), _c(32, 64, 4, 2)),
    },
    "hip": {
        "forward": (_c(128, 64, 4, 1), _c(128, 32, 4, 1), _c(64, 32, 4, 1)),
        "dq": (_c(64, 64, 4, 1), _c(64, 32, 4, 1), _c(32, 32, 4, 1)),
        "dkdv": (_c(64, 64, 4, 1), _c(32, 64, 4, 1), _c(32, 32, 4, 1)),
    },
    "generic": {
        "forward": (_c(64, 32, 4, 1), _c(64, 32, 4, 1), _c(32, 16, 4, 1)),
        "dq": (_c(32, 32, 4, 1), _c(32, 32, 4, 1), _c(16, 16, 4, 1)),
        "dkdv": (_c(32, 32, 4, 1), _c(32, 32, 4, 1), _c(16, 16, 4, 1)),
    },
}


def device_of_capability(capability: int) -> Device:
    """The device class of a CUDA compute capability, ``10 * major + minor``.

    One newer than the table is taken for the smallest of the newest, an older one for generic.
    """
    if capability in CUDA_DEVICES:
        return CUDA_DEVICES[capability]
    return CUDA_DEVICES[120] if capability > max(CUDA_DEVICES) else GENERIC


_devices: dict[int, Device] = {}


def _device_of_index(index: int) -> Device:
    # No lru_cache: Dynamo, which traces callers of this, warns of those.
    found = _devices.get(index)
    if found is None:
        found = _query_device(index)
        if not torch.compiler.is_compiling():
            _devices[index] = found
    return found


def _query_device(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        return HIP
    device = device_of_capability(10 * properties.major + properties.minor)
    limit = getattr(properties, "shared_memory_per_block_optin", device.shared_memory)
    return replace(device, shared_memory=limit)


def device_of(device: torch.device) -> Device:
    """The device class of a torch device (queried once); devices without an entry are generic."""
    if device.type == "cuda":
        return _device_of_index(
            torch.cuda.current_device() if device.index is None else device.index
        )
    return GENERIC


_UNCHANGED: AbstractContextManager[None] = nullcontext()


def current(device: torch.device) -> AbstractContextManager[Any]:
    """While this lasts, Triton launches on ``device``: it asks for the current one, no tensor."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _UNCHANGED
    return torch.cuda.device(device)


def dot_precision(dtype: torch.dtype) -> str:
    """How float32 products are computed: as flex_attention does, by the global matmul settings."""
    if dtype is not torch.float32 or torch.version.hip is not None:
        return "ieee"
    setting = torch.backends.cuda.matmul.fp32_precision
    if setting == "none":
        setting = "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    return "ieee" if setting == "ieee" else "tf32"


def padded_dim(dim: int) -> int:
    """Width at which a kernel holds a head dim: the next power of two, at least 16."""
    return max(MIN_TILE, 1 << (dim - 1).bit_length())


def _power_of_two_divisor(number: int, at_most: int) -> int:
    """The largest power of two that divides ``number``, at most ``at_most``, itself one."""
    return min(number & -number, at_most)


def shared_memory_estimate(
    kernel: Kernel, config: KernelConfig, itemsize: int, head_dim: int, value_dim: int
) -> int:
    """About what a launch will ask for, in bytes: resident tiles, stages and scratch.

    Triton decides, so this is no bound; tests compile every entry of the table and look.
    """
    width = padded_dim(head_dim) + padded_dim(value_dim)
    if kernel == "forward":
        resident, step = config.block_m * padded_dim(head_dim), config.block_n * width
    elif kernel == "dq":
        resident, step = config.block_m * width, config.block_n * width
    else:
        resident, step = config.block_n * width, config.block_m * width
    scratch = config.block_m * config.block_n
    return (resident + config.num_stages * step + scratch) * itemsize + 1024


def fit_shared_memory(
    kernel: Kernel,
    config: KernelConfig,
    itemsize: int,
    head_dim: int,
    value_dim: int,
    limit: int,
) -> KernelConfig:
    """``config`` with fewer stages, then smaller tiles, until it fits ``limit`` or is smallest."""

    def fits(candidate: KernelConfig) -> bool:
        need = shared_memory_estimate(kernel, candidate, itemsize, head_dim, value_dim)
        return need <= limit

    while not fits(config):
        if config.num_stages > 1:
            config = replace(config, num_stages=config.num_stages - 1)
        elif max(config.block_m // config.pack, config.block_n) <= MIN_TILE:
            break
        elif config.block_m // config.pack > config.block_n:
            config = replace(config, block_m=config.block_m // 2)
        else:
            config = replace(config, block_n=config.block_n // 2)
    return config


def find_config(
    kernel: Kernel,
    device: Device,
    itemsize: int,
    head_dim: int,
    value_dim: int,
    group: int,
    heads_share_lists: bool,
    q_block_size: int,
    kv_block_size: int,
) -> KernelConfig:
    """The configuration of one launch.

    Args:
        kernel: which kernel.
        device: from :func:`device_of`.
        itemsize: bytes an element of query, key and value, 2 or 4.
        head_dim, value_dim: head dims of query/key and of value, at most 256.
        group: query heads that share a key head.
        heads_share_lists: whether the block lists are the same for all heads, so that heads of a
            group can share a tile.
        q_block_size, kv_block_size: block sizes of the lists, multiples of 16.

    Returns:
        A configuration whose tiles divide the blocks of the lists and fit the shared memory.

    Raises:
        ValueError: a block size is no positive multiple of 16.
    """
    for name, size in (("q_block_size", q_block_size), ("kv_block_size", kv_block_size)):
        if size <= 0 or size % MIN_TILE:
            raise ValueError(f"{name} must be a positive multiple of {MIN_TILE}, got {size}")
    table = _TABLE[device.family] if itemsize == 2 else _FP32
    width = max(padded_dim(head_dim), padded_dim(value_dim))
    entry = table[kernel][0 if width <= 64 else 1 if width <= 128 else 2]
    base = fit_shared_memory(kernel, entry, itemsize, head_dim, value_dim, device.shared_memory)
    pack, tokens = 1, _power_of_two_divisor(q_block_size, base.block_m)
    if kernel != "dkdv" and heads_share_lists:
        # Where the lists' blocks are smaller than the tile, more heads fill it.
        pack = _power_of_two_divisor(group, base.pack)
        tokens = _power_of_two_divisor(q_block_size, base.block_m // pack)
        pack = _power_of_two_divisor(group, max(pack, base.block_m // tokens))
    block_n = _power_of_two_divisor(kv_block_size, base.block_n)
    config = replace(base, block_m=pack * tokens, block_n=block_n, pack=pack)
    resident = config.block_n if kernel == "dkdv" else config.block_m
    if resident < (base.block_n if kernel == "dkdv" else base.block_m):
        # At least 16 rows a warp, the height of a matrix instruction.
        config = replace(config, num_warps=min(base.num_warps, max(1, resident // 16)))
    return config


choose = lru_cache(maxsize=1024)(find_config)
"""The same, remembered: for launches, of which there are many."""


def list_blocks_of(device: Device, itemsize: int, head_dim: int, group: int) -> tuple[int, int]:
    """Block sizes of the finest lists that cut no tile of any kernel on ``device``."""
    kernels: tuple[Kernel, ...] = ("forward", "dq", "dkdv")
    whole = 256
    configs = [
        find_config(kernel, device, itemsize, head_dim, head_dim, group, True, whole, whole)
        for kernel in kernels
    ]
    return max(c.block_m // c.pack for c in configs), max(c.block_n for c in configs)


def preferred_list_blocks(
    device: torch.device, dtype: torch.dtype, head_dim: int, group: int
) -> tuple[int, int]:
    """Block sizes at which lists serve the kernels best: fine lists exclude more work.

    Args:
        device: where the kernels will run.
        dtype: dtype of query, key and value.
        head_dim: the larger of the head dims of query and value.
        group: query heads that share a key head.

    Returns:
        ``(q_block_size, kv_block_size)``; (128, 128) on a CPU.
    """
    if device.type == "cpu":
        return 128, 128
    return list_blocks_of(device_of(device), dtype.itemsize, head_dim, group)
