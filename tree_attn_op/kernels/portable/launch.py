"""Host side of the portable kernels: what is launched, with which arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tree_attn_op.kernels.configs import Kernel, KernelConfig, choose, device_of, padded_dim
from tree_attn_op.kernels.portable.backward_dkdv import dkdv_kernel
from tree_attn_op.kernels.portable.backward_dq import delta_kernel, dq_kernel
from tree_attn_op.kernels.portable.forward import forward_kernel
from tree_attn_op.layout import empty_like_layout
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


@dataclass(frozen=True)
class Lists:
    """The block lists of one side: per block of this side, the listed blocks of the other."""

    part_counts: Tensor
    part_indices: Tensor
    full_counts: Tensor | None
    full_indices: Tensor | None

    @property
    def heads_share(self) -> bool:
        return self.part_counts.shape[1] == 1

    def arguments(self) -> dict[str, Any]:
        """Kernel arguments; without full lists their places are filled and never read."""
        counts, indices = self.part_counts.contiguous(), self.part_indices.contiguous()
        full_counts, full_indices = counts, indices
        if self.full_counts is not None:
            assert self.full_indices is not None
            full_counts, full_indices = (
                self.full_counts.contiguous(),
                self.full_indices.contiguous(),
            )
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
    """The arguments that forward and backward share, checked."""

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
        q_vals, k_vals = _unit_stride(self.q_vals), _unit_stride(self.k_vals)
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
            "PRECISION": _dot_precision(self.query.dtype),
        }


def _dot_precision(dtype: torch.dtype) -> str:
    """How float32 products are computed: as flex_attention does, by the global matmul settings."""
    if dtype is not torch.float32 or torch.version.hip is not None:
        return "ieee"
    setting = torch.backends.cuda.matmul.fp32_precision
    if setting == "none":
        setting = "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    return "ieee" if setting == "ieee" else "tf32"


def _unit_stride(tensor: Tensor) -> Tensor:
    """The tensor, copied only if the elements of its last dimension are not adjacent."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _outer_strides(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.stride()[:-1])


def _tma_reads(tensor: Tensor) -> bool:
    """Whether the bulk copy engine can read a ``[B, H, S, D]`` tensor: 16-byte steps and base."""
    if tensor.data_ptr() % 16 or tensor.numel() == 0:
        return False
    size = tensor.element_size()
    return all(stride > 0 and stride * size % 16 == 0 for stride in _outer_strides(tensor))


def _descriptor(tensor: Tensor, rows: int) -> TensorDescriptor:
    block = [1, 1, rows, padded_dim(tensor.shape[3])]
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block)


def _options(config: KernelConfig) -> dict[str, Any]:
    options: dict[str, Any] = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if config.maxnreg is not None:
        options["maxnreg"] = config.maxnreg
    return options


def _tiles(config: KernelConfig, **tensors: tuple[Tensor, int]) -> dict[str, Any]:
    """Arguments for tensors read in tiles of one head: ``name=(tensor, rows of a tile)``."""
    tma = config.tma and all(_tma_reads(tensor) for tensor, _ in tensors.values())
    arguments: dict[str, Any] = {"TMA": tma}
    for name, (tensor, rows) in tensors.items():
        arguments[name] = _descriptor(tensor, rows) if tma else tensor
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


def _positive_scale(query: Tensor, scale: float) -> tuple[Tensor, float, float]:
    """``(query', scale', sign)`` with ``scale' > 0``, ``query' * scale' == query * scale``.

    The kernels scale the maximum of a row, not every score, which needs a positive scale; ``sign``
    takes the gradient of ``query'`` to that of ``query`` where the two differ.
    """
    if scale > 0:
        return query, scale, 1.0
    if scale < 0:
        return -query, -scale, -1.0
    return torch.zeros_like(query), 1.0, 0.0


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q_vals: Tensor,
    k_vals: Tensor,
    predicate: str,
    kv_num_blocks: Tensor,
    kv_indices: Tensor,
    full_kv_num_blocks: Tensor | None,
    full_kv_indices: Tensor | None,
    q_block_size: int,
    kv_block_size: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Tree attention: ``(out, lse)``.

    Args:
        query, key, value: ``[B, Hq, Q, D]``, ``[B, Hkv, K, D]``, ``[B, Hkv, K, Dv]``, bfloat16,
            float16 or float32, any strides. Copied only if the last dimension is not contiguous.
        q_vals, k_vals: ``[B or 1, rows, Q]`` and ``[B or 1, rows, K]``, both int32 or both int64.
        predicate: text of the predicate.
        kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices: key-side lists, int32.
        q_block_size, kv_block_size: block sizes of the lists, multiples of 16.
        scale: factor of the scores.

    Returns:
        ``out`` ``[B, Hq, Q, Dv]`` in the layout of ``query`` (see ``empty_like_layout``) and
        ``lse`` ``[B, Hq, Q]``, float32, base e. A row that sees nothing has out 0 and lse -inf.
    """
    scaled_query, positive_scale, _ = _positive_scale(query, scale)
    problem = Problem(
        _unit_stride(scaled_query),
        _unit_stride(key),
        _unit_stride(value),
        q_vals,
        k_vals,
        predicate,
        q_block_size,
        kv_block_size,
        positive_scale,
    )
    lists = Lists(kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices)
    batch, heads, q_len, _ = query.shape
    out = empty_like_layout(query, (batch, heads, q_len, value.shape[3]), query.dtype)
    lse = torch.empty((batch, heads, q_len), dtype=torch.float32, device=query.device)
    forward_launch(problem, lists, out, lse, problem.config("forward", lists.heads_share)).run()
    return out, lse


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    q_vals: Tensor,
    k_vals: Tensor,
    predicate: str,
    kv_num_blocks: Tensor,
    kv_indices: Tensor,
    full_kv_num_blocks: Tensor | None,
    full_kv_indices: Tensor | None,
    q_num_blocks: Tensor,
    q_indices: Tensor,
    full_q_num_blocks: Tensor | None,
    full_q_indices: Tensor | None,
    q_block_size: int,
    kv_block_size: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of :func:`forward`: ``(grad_query, grad_key, grad_value)``.

    Args:
        grad_out: ``[B, Hq, Q, Dv]``, any strides, expanded ones too.
        grad_lse: ``[B, Hq, Q]`` or None; of no effect on rows that see nothing.
        out, lse: what the forward returned.
        q_num_blocks, q_indices, full_q_num_blocks, full_q_indices: query-side lists, the transpose
            of the key-side lists.
        The rest as in :func:`forward`.

    Returns:
        Gradients with the shapes, dtypes and layouts of ``query``, ``key`` and ``value``. Equal
        inputs give equal bits.
    """
    scaled_query, positive_scale, sign = _positive_scale(query, scale)
    problem = Problem(
        _unit_stride(scaled_query),
        _unit_stride(key),
        _unit_stride(value),
        q_vals,
        k_vals,
        predicate,
        q_block_size,
        kv_block_size,
        positive_scale,
    )
    key_lists = Lists(kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices)
    query_lists = Lists(q_num_blocks, q_indices, full_q_num_blocks, full_q_indices)
    grad_out, out, lse = _unit_stride(grad_out), _unit_stride(out), lse.contiguous()
    delta = torch.empty_like(lse)
    grad_query = empty_like_layout(query, query.shape, query.dtype)
    grad_key = empty_like_layout(key, key.shape, key.dtype)
    grad_value = empty_like_layout(value, value.shape, value.dtype)
    dq_config = problem.config("dq", key_lists.heads_share)
    dkdv_config = problem.config("dkdv", query_lists.heads_share)

    delta_launch(out, grad_out, lse, grad_lse, delta).run()
    dkdv_launch(
        problem, query_lists, grad_out, lse, delta, grad_key, grad_value, dkdv_config
    ).run()
    dq_launch(problem, key_lists, grad_out, lse, delta, grad_query, dq_config).run()
    return (grad_query if sign == 1.0 else grad_query * sign), grad_key, grad_value
