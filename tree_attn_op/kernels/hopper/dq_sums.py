"""Launch of the fast backward: dK, dV and dQ in one kernel, not the same bits every time."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tree_attn_op.kernels.choice import tma_can_read
from tree_attn_op.layout import empty_like_layout

from .compat import TensorDescriptor, gl
from .configs import Config
from .fast_backward_kernel import fast_backward_kernel
from .launch import (
    LOG2E,
    boxes_of,
    chunks,
    dense_list,
    multiprocessors,
    program_of,
    statistics_of,
    value_rows,
)
from .prepare import heaviest_first, merge_lists, row_statistics

FAST = {1: Config(stages=4), 2: Config(stages=2)}
"""By the number of 64-column chunks of the wider of the two head dims."""


@triton.jit
def _finish_kernel(
    acc, dq, dq_batch, dq_head, dq_row, dq_column, heads, q_len, width, tiles, scale,
    WIDTH: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    begin = ((batch * heads + head) * tiles + tile) * (64 * WIDTH)
    parts = tl.load(acc + begin + tl.arange(0, 64 * WIDTH))
    # Blocks of eight columns; in one (warp, 8 rows, 4 columns, upper or lower rows, 2 columns).
    parts = tl.reshape(parts, [WIDTH // 8, 4, 8, 4, 2, 2])
    rows = tl.reshape(tl.permute(parts, (1, 4, 2, 0, 3, 5)), [64, WIDTH])
    row = tile * 64 + tl.arange(0, 64)
    column = tl.arange(0, WIDTH)
    mask = (row < q_len)[:, None] & (column < width)[None, :]
    offset = row.to(tl.int64)[:, None] * dq_row + column[None, :] * dq_column
    tl.store(dq + batch * dq_batch + head * dq_head + offset, rows * scale, mask)


def finish_dq(acc: Tensor, dq: Tensor, scale: float) -> None:
    """Write the summed query gradient, scaled, in its final order and dtype.

    Args:
        acc: float32 ``[B, H, tiles, WIDTH / 8, 4, 8, 4, 2, 2]``, dense. A tile is 64 query rows;
            what belongs to row ``16 a + 8 b + c`` and column ``8 d + 2 e + f`` of it lies at
            ``[d, a, c, e, b, f]``, the order in which a warpgroup's threads hold a product.
        dq: ``[B, H, Q, D]`` with ``D <= WIDTH``, any strides.
        scale: factor of the scores.
    """
    batch, heads, q_len, width = dq.shape
    _finish_kernel[(acc.shape[2], batch * heads)](
        acc, dq, *dq.stride(), heads, q_len, width, acc.shape[2], scale, WIDTH=8 * acc.shape[3],
        num_warps=4,
    )  # fmt: skip


def _sums_of(acc: Tensor, rows: int) -> TensorDescriptor:
    """A TMA descriptor of boxes of ``rows`` times 256 numbers of the dQ buffer."""
    layout = gl.NVMMASharedLayout(0, 32, rank=2)
    shape = [acc.numel() // 256, 256]
    return TensorDescriptor(acc, shape, [256, 1], [rows, 256], layout)


def fast_backward(
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
    q_num_blocks: Tensor,
    q_indices: Tensor,
    full_q_num_blocks: Tensor | None,
    full_q_indices: Tensor | None,
    q_block_size: int,
    kv_block_size: int,
    scale: float,
    config: Config | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; arguments as of the op ``tree_attention_backward``.

    The call must be one that the Hopper kernels take; ``config`` overrides the choice by head dim.
    Key-side lists are not needed. dQ is summed in float32 in an order that may differ from run to
    run; dK and dV are the same bits every time.

    Returns:
        ``(dq, dk, dv)`` in the dtypes and layouts of query, key and value.
    """
    batch, heads, q_len, width = query.shape
    kv_heads, kv_len, v_width = key.shape[1], key.shape[2], value.shape[3]
    qk_chunks, v_chunks = chunks(width), chunks(v_width)
    config = config or FAST[max(qk_chunks, v_chunks)]
    if not tma_can_read(grad_out):
        grad_out = grad_out.contiguous()
    dq = empty_like_layout(query, tuple(query.shape), query.dtype)
    dk = empty_like_layout(key, tuple(key.shape), key.dtype)
    dv = empty_like_layout(value, tuple(value.shape), value.dtype)
    counts, tiles = dense_list(q_num_blocks), dense_list(q_indices)
    if full_q_num_blocks is None or full_q_indices is None:
        full_counts, full_tiles = torch.zeros_like(counts), tiles
    else:
        full_counts, full_tiles = dense_list(full_q_num_blocks), dense_list(full_q_indices)
    merged_counts, entries = merge_lists(counts, tiles, full_counts, full_tiles)
    list_batches, key_pairs, q_tiles = entries.shape
    step_tiles = q_block_size // 64
    stats_tiles = q_tiles * step_tiles
    stats = row_statistics(out, grad_out, lse, grad_lse, stats_tiles)
    acc = torch.zeros(
        (batch, heads, stats_tiles, 8 * qk_chunks, 4, 8, 4, 2, 2),
        dtype=torch.float32, device=query.device,
    )  # fmt: skip
    q_rows, q_batch_stride, q_stride = value_rows(q_vals)
    k_rows, k_batch_stride, k_stride = value_rows(k_vals)
    q_desc, k_desc, v_desc, do_desc = map(boxes_of, (query, key, value, grad_out))
    blocks = min(key_pairs * batch * kv_heads, multiprocessors(query.device))
    fast_backward_kernel[(blocks,)](
        q_desc, do_desc, k_desc, v_desc, boxes_of(dk), boxes_of(dv),
        _sums_of(acc, 8 * qk_chunks), statistics_of(stats),
        q_rows, k_rows, heaviest_first(merged_counts[..., 0], merged_counts[..., 1]),
        merged_counts, entries, q_batch_stride, q_stride, k_batch_stride, k_stride,
        key_pairs if list_batches > 1 else 0, key_pairs, q_tiles, batch, kv_heads, heads,
        q_len, kv_len, stats_tiles, scale, scale * LOG2E,
        GROUP=heads // kv_heads, STEP_TILES=step_tiles,
        STAGES=config.stages, PROGRAM=program_of(predicate), Q_TAIL=q_len % q_block_size != 0,
        KV_TAIL=kv_len % kv_block_size != 0, QK_CHUNKS=qk_chunks, V_CHUNKS=v_chunks,
        REGISTERS=config.registers, PRODUCER_REGISTERS=config.producer_registers, num_warps=4,
    )  # fmt: skip
    finish_dq(acc, dq, scale)
    return dq, dk, dv
