"""Launch of the forward kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..launching import Launch, Output
from ..plans import Plan, copies, with_copies
from .configs import FORWARD, Config
from .form import LONG_LISTS
from .forward_kernel import forward_kernel
from .launch import LOG2E, boxes_of, chunks, multiprocessors, program_of, value_strides
from .prepare import Lists, RowSchedule


class ForwardPlan:
    """A forward call that is decided: see :func:`forward` for the arguments.

    Values must be dense in their last dimension, lists dense.
    """

    substitute = None

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        q_vals: Tensor,
        k_vals: Tensor,
        predicate: str,
        lists: Lists,
        q_block_size: int,
        kv_block_size: int,
        scale: float,
        config: Config | None = None,
    ):
        batch, heads, q_len, width = query.shape
        kv_heads, kv_len, v_width = key.shape[1], key.shape[2], value.shape[3]
        group = heads // kv_heads
        packed = group % 2 == 0
        self._out = Output.like(query, (batch, heads, q_len, v_width))
        self._lse = Output.dense((batch, heads, q_len), torch.float32, query.device)
        list_batches, _, q_tiles, kv_tiles = lists[1].shape
        head_items = heads // 2 if packed else heads
        blocks = multiprocessors(query.device)
        self._schedule = RowSchedule(lists, -(-blocks * kv_heads // head_items), LONG_LISTS)
        qk_chunks, v_chunks = chunks(width), chunks(v_width)
        config = config or FORWARD[max(qk_chunks, v_chunks)]
        fixed = {
            **value_strides(q_vals, k_vals),
            "list_batch_rows": q_tiles if list_batches > 1 else 0,
            "q_tiles": q_tiles, "kv_tiles": kv_tiles, "batches": batch, "head_items": head_items,
            "heads": heads, "q_len": q_len, "kv_len": kv_len, "scale_log2": scale * LOG2E,
            "GROUP": group, "PACKED": packed, "STAGES": config.stages,
            "PROGRAM": program_of(predicate), "Q_TAIL": q_len % q_block_size != 0,
            "KV_TAIL": kv_len % kv_block_size != 0, "QK_CHUNKS": qk_chunks, "V_CHUNKS": v_chunks,
            "REGISTERS": config.registers, "PRODUCER_REGISTERS": config.producer_registers,
        }  # fmt: skip
        blocks = min(q_tiles * batch * head_items, blocks)
        boxes = [boxes_of(tensor) for tensor in (query, key, value, self._out.sample())]
        self._attend = Launch(forward_kernel, (blocks,), boxes, fixed, {"num_warps": 4})

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        q_vals: Tensor,
        k_vals: Tensor,
        predicate: str,
        counts: Tensor,
        tiles: Tensor,
        full_counts: Tensor | None,
        full_tiles: Tensor | None,
        *planned: object,
    ) -> tuple[Tensor, Tensor]:
        out, lse = self._out(), self._lse()
        schedule = self._schedule((counts, tiles, full_counts, full_tiles))
        full_tiles = tiles if full_tiles is None else full_tiles
        self._attend(query, key, value, out, lse, q_vals, k_vals, schedule, tiles, full_tiles)
        return out, lse


def _copies(arguments: tuple[Any, ...]) -> tuple[int, ...]:
    """Places of the arguments that kernels can only read as dense copies."""
    strided = [at for at in (3, 4) if arguments[at].stride(-1) != 1]
    lists = [at for at in range(6, 10) if arguments[at] is not None]
    return (*strided, *(at for at in lists if not arguments[at].is_contiguous()))


def plan_forward(*arguments: Any) -> Plan:
    """What is to be done for a call of the op ``tree_attention``, given its arguments."""
    places = _copies(arguments)
    if places:
        return copies(places)
    return ForwardPlan(*(*arguments[:6], arguments[6:10], *arguments[-3:]))


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

    The call must be one that the Hopper kernels take. ``config`` overrides the choice by head dim.

    Returns:
        ``(out, lse)``: ``out`` ``[B, Hq, Q, Dv]`` in the query's dtype and layout, ``lse``
        float32 ``[B, Hq, Q]``, base e.
    """
    lists = (kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices)
    arguments: tuple[Any, ...] = (query, key, value, q_vals, k_vals, predicate, *lists)
    arguments = with_copies(arguments, _copies(arguments))
    sizes = (q_block_size, kv_block_size, scale)
    return ForwardPlan(*(*arguments[:6], arguments[6:], *sizes, config))(*arguments)
