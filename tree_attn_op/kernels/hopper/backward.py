"""Launch of the deterministic backward: dK and dV, then dQ."""

from __future__ import annotations

import torch
from torch import Tensor

from tree_attn_op.kernels.choice import tma_can_read
from tree_attn_op.layout import empty_like_layout

from .configs import DKDV, DQ, Config
from .dkdv_kernel import dkdv_kernel
from .dq_kernel import dq_kernel
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
from .prepare import heaviest_first, merge_lists, row_schedule, row_statistics


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
    dkdv_config: Config | None = None,
    dq_config: Config | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; arguments as of the op ``tree_attention_backward``.

    The call must be one that ``supports`` accepts; the configs override the choice by head dim.
    The same input gives the same bits: no atomics.

    Returns:
        ``(dq, dk, dv)`` in the dtypes and layouts of query, key and value.
    """
    batch, heads, q_len, width = query.shape
    kv_heads, kv_len, v_width = key.shape[1], key.shape[2], value.shape[3]
    group = heads // kv_heads
    packed = group % 2 == 0
    qk_chunks, v_chunks = chunks(width), chunks(v_width)
    dkdv_config = dkdv_config or DKDV[max(qk_chunks, v_chunks)]
    dq_config = dq_config or DQ[max(qk_chunks, v_chunks)]
    if not tma_can_read(grad_out):
        grad_out = grad_out.contiguous()
    dq = empty_like_layout(query, tuple(query.shape), query.dtype)
    dk = empty_like_layout(key, tuple(key.shape), key.dtype)
    dv = empty_like_layout(value, tuple(value.shape), value.dtype)

    def lists(
        counts: Tensor, tiles: Tensor, full_counts: Tensor | None, full_tiles: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        counts, tiles = dense_list(counts), dense_list(tiles)
        if full_counts is None or full_tiles is None:
            return counts, tiles, torch.zeros_like(counts), tiles
        return counts, tiles, dense_list(full_counts), dense_list(full_tiles)

    q_rows, q_batch_stride, q_stride = value_rows(q_vals)
    k_rows, k_batch_stride, k_stride = value_rows(k_vals)
    strides = (q_batch_stride, q_stride, k_batch_stride, k_stride)
    blocks = multiprocessors(query.device)
    q_desc, k_desc, v_desc, do_desc = map(boxes_of, (query, key, value, grad_out))
    key_side = lists(q_num_blocks, q_indices, full_q_num_blocks, full_q_indices)
    counts, entries = merge_lists(*key_side)
    list_batches, key_pairs, q_tiles = entries.shape
    step_tiles = q_block_size // 64
    stats = row_statistics(out, grad_out, lse, grad_lse, q_tiles * step_tiles)
    common = {
        "GROUP": group,
        "PROGRAM": program_of(predicate),
        "Q_TAIL": q_len % q_block_size != 0,
        "KV_TAIL": kv_len % kv_block_size != 0,
        "QK_CHUNKS": qk_chunks,
        "V_CHUNKS": v_chunks,
        "num_warps": 4,
    }
    dkdv_kernel[(min(key_pairs * batch * kv_heads, blocks),)](
        q_desc, do_desc, k_desc, v_desc, boxes_of(dk), boxes_of(dv), statistics_of(stats),
        q_rows, k_rows, heaviest_first(counts[..., 0], counts[..., 1]), counts, entries, *strides,
        key_pairs if list_batches > 1 else 0, key_pairs, q_tiles, batch, kv_heads, heads,
        q_len, kv_len, q_tiles * step_tiles, scale, scale * LOG2E,
        STEP_HEADS=dkdv_config.step_heads, STEP_TILES=step_tiles, STAGES=dkdv_config.stages,
        REGISTERS=dkdv_config.registers, PRODUCER_REGISTERS=dkdv_config.producer_registers,
        **common,
    )  # fmt: skip

    query_side = lists(kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices)
    list_batches, q_tiles = query_side[0].shape
    head_items = heads // 2 if packed else heads
    dq_kernel[(min(q_tiles * batch * head_items, blocks),)](
        q_desc, do_desc, k_desc, v_desc, boxes_of(dq), stats, q_rows, k_rows,
        row_schedule(*query_side), query_side[1], query_side[3], *strides,
        q_tiles if list_batches > 1 else 0, q_tiles, query_side[1].shape[2],
        batch, head_items, heads, q_len, kv_len, q_tiles * step_tiles, scale, scale * LOG2E,
        PACKED=packed, STAGES=dq_config.stages, REGISTERS=dq_config.registers,
        PRODUCER_REGISTERS=dq_config.producer_registers, **common,
    )  # fmt: skip
    return dq, dk, dv
