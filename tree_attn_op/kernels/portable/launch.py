"""Host side of the portable kernels: what is launched, with which arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tree_attn_op.kernels import launching
from tree_attn_op.kernels.choice import tma_strides
from tree_attn_op.kernels.configs import (
    Kernel,
    KernelConfig,
    choose,
    device_of,
    dot_precision,
    padded_dim,
)
from tree_attn_op.kernels.portable.backward_dkdv import dkdv_kernel
from tree_attn_op.kernels.portable.backward_dq import delta_kernel, dq_kernel
from tree_attn_op.kernels.portable.forward import forward_kernel
from tree_attn_op.predicate import Predicate

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DELTA_ROWS = 32


class Launch(NamedTuple):
    """A kernel with its grid, arguments and compile options."""

    kernel: Any
    grid: tuple[int]
    arguments: dict[str, Any]
    options: dict[str, Any]

    def run(self) -> None:
        """Launches the kernel; an empty grid is no launch."""
        if self.grid[0] > 0:
            self.kernel[self.grid](**self.arguments, **self.options)

    def planned(self, tensors: int) -> launching.Launch:
        """The same launch for any tensors like these, the kernel's first arguments."""
        names = self.kernel.arg_names[:tensors]
        leading = [self.arguments[name] for name in names]
        fixed = {name: value for name, value in self.arguments.items() if name not in names}
        return launching.Launch(self.kernel, self.grid, leading, fixed, self.options)


@dataclass(frozen=True)
class Lists:
    """The block lists of one side, dense: per block of it, the listed blocks of the other."""

    part_counts: Tensor
    part_indices: Tensor
    full_counts: Tensor | None
    full_indices: Tensor | None

    @property
    def heads_share(self) -> bool:
        return self.part_counts.shape[1] == 1

    def arguments(self) -> dict[str, Any]:
        """Kernel arguments; without full lists their places are filled and never read."""
        counts, indices = self.part_counts, self.part_indices
        full_counts, full_indices = counts, indices
        if self.full_counts is not None:
            assert self.full_indices is not None
            full_counts, full_indices = self.full_counts, self.full_indices
        batches, heads, blocks = counts.shape
        return {
            "part_counts": counts,
            "part_indices": indices,
            "full_counts": full_counts,
            "full_indices": full_indices,
            "list_strides": (heads * blocks if batches > 1 else 0, blocks if heads > 1 else 0),
            "part_columns": indices.shape[3],
            "full_columns": full_indices.shape[3],
            "HAS_FULL": self.full_counts is not None,
        }


@dataclass(frozen=True)
class Problem:
    """The arguments that forward and backward share, checked; rows of tensors are dense."""

    query: Tensor
    key: Tensor
    value: Tensor
    q_vals: Tensor
    k_vals: Tensor
    predicate: str
    q_block_size: int
    kv_block_size: int
    scale: float

    def __post_init__(self) -> None:
        if self.query.dtype not in DTYPES:
            raise TypeError(f"GPU kernels take {DTYPES}, got {self.query.dtype}")
        heads, kv_heads = self.query.shape[1], self.key.shape[1]
        if heads % kv_heads:
            raise ValueError(f"{heads} query heads are no multiple of {kv_heads} key heads")

    @property
    def group(self) -> int:
        return self.query.shape[1] // self.key.shape[1]

    @property
    def q_len(self) -> int:
        return self.query.shape[2]

    @property
    def kv_len(self) -> int:
        return self.key.shape[2]

    def config(self, kernel: Kernel, heads_share_lists: bool) -> KernelConfig:
        """The table's configuration of ``kernel`` for this problem."""
        return choose(
            kernel,
            device_of(self.query.device),
            self.query.element_size(),
            self.query.shape[3],
            self.value.shape[3],
            self.group,
            heads_share_lists,
            self.q_block_size,
            self.kv_block_size,
        )

    def arguments(self) -> dict[str, Any]:
        """Kernel arguments that do not depend on the kernel."""
        q_vals, k_vals = self.q_vals, self.k_vals
        head_dim, value_dim = self.query.shape[3], self.value.shape[3]
        return {
            "q_vals": q_vals,
            "k_vals": k_vals,
            "q_batch_stride": q_vals.stride(0) if q_vals.shape[0] > 1 else 0,
            "k_batch_stride": k_vals.stride(0) if k_vals.shape[0] > 1 else 0,
            "q_row_stride": q_vals.stride(1),
            "k_row_stride": k_vals.stride(1),
            "num_heads": self.query.shape[1],
            "q_len": self.q_len,
            "kv_len": self.kv_len,
            "scale": self.scale,
            "PROGRAM": Predicate.parse(self.predicate).program,
            "GROUP": self.group,
            "Q_BLOCK": self.q_block_size,
            "KV_BLOCK": self.kv_block_size,
            "DIM": head_dim,
            "BLOCK_DIM": padded_dim(head_dim),
            "VALUE_DIM": value_dim,
            "BLOCK_VALUE_DIM": padded_dim(value_dim),
            # A listed block may be visited as several tiles: it is the block that must be whole.
            "EVEN_Q": self.q_len % self.q_block_size == 0,
            "EVEN_KV": self.kv_len % self.kv_block_size == 0,
            "PRECISION": dot_precision(self.query.dtype),
        }


def _outer_strides(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.stride()[:-1])


def _descriptor(tensor: Tensor, rows: int) -> TensorDescriptor | None:
    """A TMA descriptor of tiles of ``rows`` rows of one head, if the copy engine can read them."""
    strides = tma_strides(tensor)
    if strides is None:
        return None
    block = [1, 1, rows, padded_dim(tensor.shape[3])]
    return TensorDescriptor(tensor, list(tensor.shape), list(strides), block)


def _options(config: KernelConfig) -> dict[str, Any]:
    options: dict[str, Any] = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if config.maxnreg is not None:
        options["maxnreg"] = config.maxnreg
    return options


def _tiles(config: KernelConfig, **tensors: tuple[Tensor, int]) -> dict[str, Any]:
    """Arguments for tensors read in tiles of one head: ``name=(tensor, rows of a tile)``."""
    descriptors = {name: _descriptor(*tile) for name, tile in tensors.items() if config.tma}
    tma = config.tma and None not in descriptors.values()
    arguments: dict[str, Any] = {"TMA": tma}
    for name, (tensor, _) in tensors.items():
        arguments[name] = descriptors[name] if tma else tensor
        arguments[f"{name}_strides"] = _outer_strides(tensor)
    return arguments


def _packed(**tensors: Tensor) -> dict[str, Any]:
    """Arguments for tensors read or written through pointers."""
    strides = {f"{name}_strides": _outer_strides(tensor) for name, tensor in tensors.items()}
    return {**tensors, **strides}


def forward_launch(
    problem: Problem, lists: Lists, out: Tensor, lse: Tensor, config: KernelConfig
) -> Launch:
    """The launch that fills ``out`` and ``lse``."""
    tokens = config.block_m // config.pack
    tiles = triton.cdiv(problem.q_len, tokens)
    arguments = {
        **problem.arguments(),
        **lists.arguments(),
        **_packed(query=problem.query, out=out),
        **_tiles(config, key=(problem.key, config.block_n), value=(problem.value, config.block_n)),
        "lse": lse,
        "num_tiles": tiles,
        "PACK": config.pack,
        "TOKENS": tokens,
        "BLOCK_N": config.block_n,
    }
    batch, heads = problem.query.shape[:2]
    return Launch(
        forward_kernel, (batch * tiles * heads // config.pack,), arguments, _options(config)
    )


def delta_launch(
    out: Tensor, grad_out: Tensor, lse: Tensor, grad_lse: Tensor | None, delta: Tensor
) -> Launch:
    """The launch that fills ``delta``, rowsum(grad_out * out) - grad_lse."""
    batch, heads, q_len, value_dim = out.shape
    given = lse if grad_lse is None else grad_lse
    arguments = {
        **_packed(out=out, grad_out=grad_out),
        "lse": lse,
        "grad_lse": given,
        "delta": delta,
        "grad_lse_strides": tuple(given.stride()),
        "num_heads": heads,
        "q_len": q_len,
        "ROWS": DELTA_ROWS,
        "VALUE_DIM": value_dim,
        "BLOCK_VALUE_DIM": padded_dim(value_dim),
        "HAS_GRAD_LSE": grad_lse is not None,
    }
    grid = (batch * heads * triton.cdiv(q_len, DELTA_ROWS),)
    return Launch(delta_kernel, grid, arguments, {"num_warps": 4})


def dq_launch(
    problem: Problem,
    lists: Lists,
    grad_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    grad_query: Tensor,
    config: KernelConfig,
) -> Launch:
    """The launch that fills ``grad_query``."""
    tokens = config.block_m // config.pack
    tiles = triton.cdiv(problem.q_len, tokens)
    arguments = {
        **problem.arguments(),
        **lists.arguments(),
        **_packed(query=problem.query, grad_out=grad_out, grad_query=grad_query),
        **_tiles(config, key=(problem.key, config.block_n), value=(problem.value, config.block_n)),
        "lse": lse,
        "delta": delta,
        "num_tiles": tiles,
        "PACK": config.pack,
        "TOKENS": tokens,
        "BLOCK_N": config.block_n,
    }
    batch, heads = problem.query.shape[:2]
    return Launch(dq_kernel, (batch * tiles * heads // config.pack,), arguments, _options(config))


def dkdv_launch(
    problem: Problem,
    lists: Lists,
    grad_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    grad_key: Tensor,
    grad_value: Tensor,
    config: KernelConfig,
) -> Launch:
    """The launch that fills ``grad_key`` and ``grad_value``, from the query-side lists."""
    tiles = triton.cdiv(problem.kv_len, config.block_n)
    arguments = {
        **problem.arguments(),
        **lists.arguments(),
        **_packed(grad_key=grad_key, grad_value=grad_value),
        **_tiles(
            config,
            query=(problem.query, config.block_m),
            key=(problem.key, config.block_n),
            value=(problem.value, config.block_n),
            grad_out=(grad_out, config.block_m),
        ),
        "lse": lse,
        "delta": delta,
        "num_tiles": tiles,
        "HEADS": problem.group if lists.heads_share else 1,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
    }
    batch, kv_heads = problem.key.shape[:2]
    return Launch(dkdv_kernel, (batch * tiles * kv_heads,), arguments, _options(config))
