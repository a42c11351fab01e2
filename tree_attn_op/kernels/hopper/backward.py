"""Launches of the backward: dK and dV, then dQ, or all three at once, or what pays.

The *deterministic* form takes seven products in two kernels and gives the same bits every time.
The *fast* form takes five in one kernel and adds dQ up in memory, in an order that may differ from
run to run (``dq_sums.py``). ``form.py`` chooses between them on the device.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from tree_attn_op.kernels.choice import tma_can_read
from tree_attn_op.layout import empty_like_layout

from .configs import DKDV, DQ, FAST, Config
from .dkdv_kernel import dkdv_kernel
from .dq_kernel import dq_kernel
from .dq_sums import finish_dq, sums_of
from .fast_backward_kernel import fast_backward_kernel
from .form import LONG_ROWS, choose_form, zero_if
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

Form = Literal["deterministic", "fast", "by length"]


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
    form: Form | None = None,
    dkdv_config: Config | None = None,
    dq_config: Config | None = None,
    fast_config: Config | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; arguments as of the op ``tree_attention_backward``.

    The call must be one that ``supports`` accepts; the configs override the choice by head dim.

    Args:
        form: None for the deterministic form if ``torch.use_deterministic_algorithms`` asks for
            it, else for the one that pays. dK and dV are the same bits every time in each form.

    Returns:
        ``(dq, dk, dv)`` in the dtypes and layouts of query, key and value.
    """
    batch, heads, q_len, width = query.shape
    kv_heads, kv_len, v_width = key.shape[1], key.shape[2], value.shape[3]
    group = heads // kv_heads
    packed = group % 2 == 0
    qk_chunks, v_chunks = chunks(width), chunks(v_width)
    wider = max(qk_chunks, v_chunks)
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
    long_rows = LONG_ROWS[wider]
    if form is None:
        # A causal mask lists half of the tiles on average, and few masks list more.
        short = q_tiles * step_tiles < 2 * long_rows
        exact = short or torch.are_deterministic_algorithms_enabled()
        form = "deterministic" if exact else "by length"
    conditional = form == "by length"
    active = choose_form(counts, step_tiles, long_rows) if conditional else counts
    common = {
        "CONDITIONAL": conditional,
        "GROUP": group,
        "PROGRAM": program_of(predicate),
        "Q_TAIL": q_len % q_block_size != 0,
        "KV_TAIL": kv_len % kv_block_size != 0,
        "QK_CHUNKS": qk_chunks,
        "V_CHUNKS": v_chunks,
        "num_warps": 4,
    }
    by_key = (
        q_desc, do_desc, k_desc, v_desc, boxes_of(dk), boxes_of(dv),
    )  # fmt: skip
    items = (
        q_rows, k_rows, heaviest_first(counts[..., 0], counts[..., 1]), counts, entries, active,
        *strides, key_pairs if list_batches > 1 else 0, key_pairs, q_tiles, batch, kv_heads, heads,
        q_len, kv_len, q_tiles * step_tiles, scale, scale * LOG2E,
    )  # fmt: skip
    grid = (min(key_pairs * batch * kv_heads, blocks),)
    if form != "deterministic":
        config = fast_config or FAST[wider]
        shape = (batch, heads, q_tiles * step_tiles, 8 * qk_chunks, 4, 8, 4, 2, 2)
        acc = torch.empty(shape, dtype=torch.float32, device=query.device)
        zero_if(acc, active) if conditional else acc.zero_()
        fast_backward_kernel[grid](
            *by_key, sums_of(acc, 8 * qk_chunks), statistics_of(stats), *items,
            STEP_TILES=step_tiles, STAGES=config.stages, REGISTERS=config.registers,
            PRODUCER_REGISTERS=config.producer_registers, **common,
        )  # fmt: skip
        finish_dq(acc, dq, scale, active if conditional else None)
        if form == "fast":
            return dq, dk, dv

    config = dkdv_config or DKDV[wider]
    dkdv_kernel[grid](
        *by_key, statistics_of(stats), *items, STEP_HEADS=config.step_heads,
        STEP_TILES=step_tiles, STAGES=config.stages, REGISTERS=config.registers,
        PRODUCER_REGISTERS=config.producer_registers, **common,
    )  # fmt: skip

    query_side = lists(kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices)
    list_batches, q_tiles = query_side[0].shape
    head_items = heads // 2 if packed else heads
    config = dq_config or DQ[wider]
    dq_kernel[(min(q_tiles * batch * head_items, blocks),)](
        q_desc, do_desc, k_desc, v_desc, boxes_of(dq), stats, q_rows, k_rows,
        row_schedule(*query_side), query_side[1], query_side[3], active, *strides,
        q_tiles if list_batches > 1 else 0, q_tiles, query_side[1].shape[2],
        batch, head_items, heads, q_len, kv_len, q_tiles * step_tiles, scale, scale * LOG2E,
        PACKED=packed, STAGES=config.stages, REGISTERS=config.registers,
        PRODUCER_REGISTERS=config.producer_registers, **common,
    )  # fmt: skip
    return dq, dk, dv
