"""Launch of the forward kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from tree_attn_op.layout import empty_like_layout

from .configs import FORWARD, Config
from .forward_kernel import forward_kernel
from .launch import (
    LOG2E,
    boxes_of,
    chunks,
    dense_list,
    multiprocessors,
    program_of,
    value_rows,
)
from .prepare import row_schedule


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
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention output and log-sum-exp; arguments as of the op ``tree_attention``.

    The call must be one that ``supports`` accepts. ``config`` overrides the choice by head dim.

    Returns:
        ``(out, lse)``: ``out`` ``[B, Hq, Q, Dv]`` in the query's dtype and layout, ``lse``
        float32 ``[B, Hq, Q]``, base e.
    """
    batch, heads, q_len, width = query.shape
    kv_heads, kv_len, v_width = key.shape[1], key.shape[2], value.shape[3]
    group = heads // kv_heads
    packed = group % 2 == 0
    out = empty_like_layout(query, (batch, heads, q_len, v_width), query.dtype)
    lse = torch.empty((batch, heads, q_len), dtype=torch.float32, device=query.device)

    partial_counts, partial_tiles = dense_list(kv_num_blocks), dense_list(kv_indices)
    if full_kv_num_blocks is None or full_kv_indices is None:
        full_counts, full_tiles = torch.zeros_like(partial_counts), partial_tiles
    else:
        full_counts, full_tiles = dense_list(full_kv_num_blocks), dense_list(full_kv_indices)
    list_batches, q_tiles = partial_counts.shape
    head_items = heads // 2 if packed else heads
    rows = q_tiles * batch * head_items
    q_rows, q_batch_stride, q_stride = value_rows(q_vals)
    k_rows, k_batch_stride, k_stride = value_rows(k_vals)
    qk_chunks, v_chunks = chunks(width), chunks(v_width)
    config = config or FORWARD[max(qk_chunks, v_chunks)]
    forward_kernel[(min(rows, multiprocessors(query.device)),)](
        boxes_of(query), boxes_of(key), boxes_of(value), boxes_of(out), lse, q_rows, k_rows,
        row_schedule(partial_counts, partial_tiles, full_counts, full_tiles),
        partial_tiles, full_tiles,
        q_batch_stride, q_stride, k_batch_stride, k_stride,
        q_tiles if list_batches > 1 else 0, q_tiles, partial_tiles.shape[2],
        batch, head_items, heads, q_len, kv_len, scale * LOG2E,
        GROUP=group, PACKED=packed, STAGES=config.stages,
        PROGRAM=program_of(predicate), Q_TAIL=q_len % q_block_size != 0,
        KV_TAIL=kv_len % kv_block_size != 0, QK_CHUNKS=qk_chunks, V_CHUNKS=v_chunks,
        REGISTERS=config.registers, PRODUCER_REGISTERS=config.producer_registers, num_warps=4,
    )  # fmt: skip
    return out, lse
