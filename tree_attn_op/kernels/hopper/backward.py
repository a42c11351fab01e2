"""Launches of the backward: dK and dV, then dQ, or all three at once, or what pays.

The *deterministic* form takes seven products in two kernels and gives the same bits every time.
The *fast* form takes five in one kernel and adds dQ up in memory, in an order that may differ from
run to run (``dq_sums.py``). ``form.py`` chooses between them on the device.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from tree_attn_op.kernels.choice import tma_can_read

from ..launching import Launch, Output
from ..plans import Plan, copies, with_copies
from .configs import DKDV, DQ, FAST, Config
from .dkdv_kernel import dkdv_kernel
from .dq_kernel import dq_kernel
from .dq_sums import finish_launch, sums_of
from .fast_backward_kernel import fast_backward_kernel
from .form import FEW_TILES, LONG_ROWS, form_launch, zero_launch
from .launch import (
    LOG2E,
    boxes_of,
    chunks,
    multiprocessors,
    program_of,
    statistics_of,
    value_strides,
)
from .prepare import BackwardPreparation, Lists

Form = Literal["deterministic", "fast", "by length"]


class BackwardPlan:
    """A backward call that is decided: see :func:`backward` for the arguments.

    Values must be dense in their last dimension; lists and lse dense; grad_out such that TMA can
    read it.
    """

    substitute = None

    def __init__(
        self,
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
        by_key: Lists,
        by_query: Lists,
        q_block_size: int,
        kv_block_size: int,
        scale: float,
        form: Form | None = None,
        dkdv_config: Config | None = None,
        dq_config: Config | None = None,
        fast_config: Config | None = None,
    ):
        batch, heads, q_len, width = query.shape
        kv_heads, kv_len, v_width = key.shape[1], key.shape[2], value.shape[3]
        group = heads // kv_heads
        packed = group % 2 == 0
        qk_chunks, v_chunks = chunks(width), chunks(v_width)
        wider = max(qk_chunks, v_chunks)
        self._grads = [Output.like(tensor, tensor.shape) for tensor in (query, key, value)]
        self._parts = self._grads[1:]
        list_batches, _, q_tiles, kv_tiles = by_key[1].shape
        key_pairs = (kv_tiles + 1) // 2
        step_tiles = q_block_size // 64
        stats_tiles = q_tiles * step_tiles
        head_items = heads // 2 if packed else heads
        blocks = multiprocessors(query.device)
        self._prepare = BackwardPreparation(
            out, grad_out, lse, grad_lse, by_query, by_key, stats_tiles,
            blocks, -(-blocks * kv_heads // head_items),
        )  # fmt: skip
        long_rows = LONG_ROWS[wider]
        if form is None:
            # A causal mask lists half of the tiles on average, and few masks list more.
            short = stats_tiles < max(2 * long_rows, FEW_TILES)
            exact = short or torch.are_deterministic_algorithms_enabled()
            form = "deterministic" if exact else "by length"
        self._form = form
        config = dkdv_config or DKDV[wider]
        # The fast form needs two steps an item.
        most = group * step_tiles // 2
        if form == "deterministic":
            most = group // config.step_heads
        splits = head_splits(group, key_pairs * batch * kv_heads, blocks, most)
        self._splits = splits
        if splits > 1:
            self._parts = [
                Output.dense((batch, kv_heads * splits, *x.shape[2:]), x.dtype, x.device)
                for x in (key, value)
            ]
        by_length = form == "by length"
        common = {
            **value_strides(q_vals, k_vals),
            "q_tiles": q_tiles, "batches": batch, "heads": heads, "q_len": q_len,
            "kv_len": kv_len, "stats_tiles": stats_tiles, "scale": scale,
            "scale_log2": scale * LOG2E, "CONDITIONAL": by_length,
            "PROGRAM": program_of(predicate), "Q_TAIL": q_len % q_block_size != 0,
            "KV_TAIL": kv_len % kv_block_size != 0, "QK_CHUNKS": qk_chunks, "V_CHUNKS": v_chunks,
        }  # fmt: skip
        by_pairs = {
            **common, "list_batch_rows": key_pairs if list_batches > 1 else 0,
            "key_pairs": key_pairs, "kv_heads": kv_heads * splits, "GROUP": group // splits,
            "SPLITS": splits, "STEP_TILES": step_tiles,
        }  # fmt: skip
        read = [boxes_of(tensor) for tensor in (query, grad_out, key, value)]
        outputs = (self._grads[0], *self._parts)
        dq, dk, dv = (boxes_of(output.sample()) for output in outputs)
        stats = statistics_of(self._prepare.stats.sample())
        grid = (min(key_pairs * batch * kv_heads * splits, blocks),)
        options = {"num_warps": 4}
        if form != "deterministic":
            self._active = Output.dense((2,), torch.int32, query.device)
            self._choose = form_launch(list_batches * key_pairs, step_tiles, long_rows)
            shape = (batch, heads, stats_tiles, 8 * qk_chunks, 4, 8, 4, 2, 2)
            self._sums = Output.dense(shape, torch.float32, query.device)
            sums = self._sums.sample()
            self._zero = zero_launch(sums.numel())
            self._finish = finish_launch(sums, self._grads[0].sample(), scale, by_length)
            self._fast = Launch(
                fast_backward_kernel,
                grid,
                [*read, dk, dv, sums_of(sums, 8 * qk_chunks), stats],
                {**by_pairs, **_shaped(fast_config or FAST[wider])},
                options,
            )
        self._dkdv = Launch(
            dkdv_kernel,
            grid,
            [*read, dk, dv, stats],
            {**by_pairs, **_shaped(config), "STEP_HEADS": config.step_heads},
            options,
        )
        self._dq = Launch(
            dq_kernel,
            (min(q_tiles * batch * head_items, blocks),),
            [*read, dq],
            {
                **common, **_shaped(dq_config or DQ[wider]), "kv_tiles": kv_tiles,
                "list_batch_rows": q_tiles if list_batches > 1 else 0,
                "head_items": head_items, "GROUP": group, "PACKED": packed,
            },
            options,
        )  # fmt: skip

    def __call__(
        self,
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
        counts: Tensor,
        tiles: Tensor,
        full_counts: Tensor | None,
        full_tiles: Tensor | None,
        q_counts: Tensor,
        q_indices: Tensor,
        full_q_counts: Tensor | None,
        full_q_indices: Tensor | None,
        *planned: object,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, *grads = (output() for output in self._grads)
        parts = grads if self._splits == 1 else [output() for output in self._parts]
        dk, dv = parts
        order, merged_counts, entries, schedule, stats = self._prepare(
            out, grad_out, lse, grad_lse,
            (q_counts, q_indices, full_q_counts, full_q_indices),
            (counts, tiles, full_counts, full_tiles),
        )  # fmt: skip
        form = self._form
        by_length = form == "by length"
        active = merged_counts
        if by_length:
            active = self._active()
            self._choose(merged_counts, active)
        inputs = (query, grad_out, key, value)
        items = (q_vals, k_vals, order, merged_counts, entries, active)
        if form != "deterministic":
            sums = self._sums()
            if by_length:
                self._zero(sums, active)
            else:
                sums.zero_()
            self._fast(*inputs, dk, dv, sums, stats, *items)
            self._finish(sums, dq, active)
        if form != "fast":
            self._dkdv(*inputs, dk, dv, stats, *items)
            full_tiles = tiles if full_tiles is None else full_tiles
            self._dq(*inputs, dq, stats, q_vals, k_vals, schedule, tiles, full_tiles, active)
        if self._splits > 1:
            for part, grad in zip(parts, grads, strict=True):
                torch.sum(part.unflatten(1, (-1, self._splits)), 2, out=grad)
        return dq, grads[0], grads[1]


def head_splits(group: int, items: int, blocks: int, most: int) -> int:
    """Into how many parts the query heads of a K/V head are split in dK and dV.

    Key tiles near the root are seen by all, those of leaves by few: with few items a block, the
    longest of them would be worked on while most blocks are done. Each part rounds its sum over
    its heads; they are added in float32, in a fixed order.

    Args:
        group: query heads of a K/V head.
        items: pairs of key tiles of all K/V heads.
        blocks: thread blocks.
        most: parts that there may be.

    Returns:
        The smallest divisor of the group that makes six items a block, or else the largest.
    """
    divisors = [parts for parts in range(1, min(group, most) + 1) if group % parts == 0]
    return next((parts for parts in divisors if items * parts >= 6 * blocks), divisors[-1])


def _shaped(config: Config) -> dict[str, int]:
    return {
        "STAGES": config.stages,
        "REGISTERS": config.registers,
        "PRODUCER_REGISTERS": config.producer_registers,
    }


def copies_of(arguments: tuple[Any, ...]) -> tuple[int, ...]:
    """Places of the arguments that kernels can only read as dense copies."""
    strided = [at for at in (7, 8) if arguments[at].stride(-1) != 1]
    if not tma_can_read(arguments[0]):
        strided.append(0)
    dense = [at for at in (6, *range(10, 18)) if arguments[at] is not None]
    return (*strided, *(at for at in dense if not arguments[at].is_contiguous()))


def plan_backward(*arguments: Any) -> Plan:
    """What is to be done for a call of the op ``tree_attention_backward``, given its arguments.

    Query-side lists must be among them.
    """
    places = copies_of(arguments)
    if places:
        return copies(places)
    lists = (arguments[10:14], arguments[14:18])
    return BackwardPlan(*(*arguments[:10], *lists, *arguments[18:]))


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

    The call must be one that the Hopper kernels take; the configs override the choice by head dim.

    Args:
        form: None for the deterministic form if ``torch.use_deterministic_algorithms`` asks for
            it, else for the one that pays. dK and dV are the same bits every time in each form.

    Returns:
        ``(dq, dk, dv)`` in the dtypes and layouts of query, key and value.
    """
    arguments: tuple[Any, ...] = (
        grad_out, grad_lse, query, key, value, out, lse, q_vals, k_vals, predicate,
        kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices,
        q_num_blocks, q_indices, full_q_num_blocks, full_q_indices,
    )  # fmt: skip
    arguments = with_copies(arguments, copies_of(arguments))
    sizes = (q_block_size, kv_block_size, scale)
    lists = (arguments[10:14], arguments[14:18])
    configs = (dkdv_config, dq_config, fast_config)
    plan = BackwardPlan(*(*arguments[:10], *lists, *sizes, form, *configs))
    return plan(*arguments)
