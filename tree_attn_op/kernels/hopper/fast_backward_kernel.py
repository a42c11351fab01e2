"""The gradients of query, key and value in one kernel for sm_90: the fast backward.

Work items, lists and roles as in ``dkdv_kernel.py``. A step takes five products: the transposed
scores, dP = V dO^T, dV += P dO, dK += dS Q, and the step's share of dQ = dS^T K. The last one sums
over the keys of both consumers, so they exchange dS through shared memory; each takes half of
dQ's columns. The product of a step is issued in the
next one, by when the other consumer's dS has long been there: neither waits for the other, and
one's arithmetic runs beside the other's products.

dQ is summed over work items by bulk reductions of the TMA unit into a buffer of float32, in an
order that differs from run to run. What lies where in the buffer is the accumulators' own order
(see ``dq_sums.py``), so that it passes through shared memory in stores of 16 bytes without bank
conflicts.
"""

from __future__ import annotations

from .compat import (
    async_add_shared_to_global,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .loading import load_rows
from .masking import seen_scores
from .packing import hidden_from_assembler
from .queue import ITEM_SLOTS, dispatch_items, look_up, make_queue, release
from .schedule import entries_of, load_entry

DS_STAGES = gl.constexpr(2)
"""Buffers of dS: one is filled while the other is multiplied."""


@gluon.jit
def _place(step, STAGES: gl.constexpr):
    """Stage of a ring that a step uses, and how often it was used before, modulo 2.

    The compiler knows not that steps are positive: with divisions it would keep a variable for
    each multiple of a remainder.
    """
    if STAGES == 2:
        return step & 1, (step >> 1) & 1
    elif STAGES == 4:
        return step & 3, (step >> 2) & 1
    else:
        return step % STAGES, (step // STAGES) & 1


@gluon.jit
def _producer(
    q_desc, do_desc, k_desc, v_desc, stats_desc, q_boxes, do_boxes, k_boxes, v_boxes, stats_boxes,
    bars, queue, codes, kv_len, stats_tiles, heads,
    GROUP: gl.constexpr, SPLITS: gl.constexpr, STEP_TILES: gl.constexpr, STAGES: gl.constexpr,
    QK_CHUNKS: gl.constexpr, V_CHUNKS: gl.constexpr,
):  # fmt: skip
    kv_full, kv_empty, q_full, do_full, empty, _ds_full, _ds_empty = bars
    q_tiles = codes[5]
    step = 0
    item = 0
    batch, kv_head, key_pair, listed, mixed, total, _, more = look_up(queue, 0, ITEM_SLOTS)
    turn = 0
    while more != 0:
        entry_pointer = entries_of(codes, batch, key_pair)
        if total == 0:
            release(queue, turn, ITEM_SLOTS)
        else:
            shared_head = kv_head // SPLITS
            mbarrier.wait(kv_empty, (item & 1) ^ 1)
            item += 1
            mbarrier.expect(kv_full, 2 * (QK_CHUNKS + V_CHUNKS) * 64 * 64 * 2)
            for half in gl.static_range(2):
                token = key_pair * 128 + half * 64
                # dQ takes both tiles: one that nobody sees, which may hold anything, as zeros.
                if (listed >> half) & 1 == 0:
                    token = kv_len
                load_rows(k_desc, batch, shared_head, token, kv_full, k_boxes, half, QK_CHUNKS, 2)
                load_rows(v_desc, batch, shared_head, token, kv_full, v_boxes, half, V_CHUNKS, 2)
        code = load_entry(entry_pointer, 0, mixed, q_tiles)
        for entry in range(total):
            # Taking the next item takes a while; taking it early leaves less to share out.
            if entry == gl.maximum(total - 2, 0):
                release(queue, turn, ITEM_SLOTS)
            first_tile = (code // 16) * STEP_TILES
            code = load_entry(entry_pointer, entry + 1, mixed, q_tiles)
            for part in range(STEP_TILES * GROUP):
                q_tile = first_tile + part // GROUP
                head = kv_head * GROUP + part % GROUP
                stage, phase = _place(step, STAGES)
                mbarrier.wait(empty.index(stage), phase ^ 1)
                bar = q_full.index(stage)
                mbarrier.expect(bar, QK_CHUNKS * 64 * 64 * 2 + 2 * 64 * 4)
                load_rows(
                    q_desc, batch, head, q_tile * 64, bar, q_boxes, stage * QK_CHUNKS, QK_CHUNKS, 1
                )
                row = ((batch * heads + head) * stats_tiles + q_tile) * 2
                for kind in gl.static_range(2):
                    tma.async_copy_global_to_shared(
                        stats_desc, [row + kind, 0], bar, stats_boxes.index(stage * 2 + kind)
                    )
                do_bar = do_full.index(stage)
                mbarrier.expect(do_bar, V_CHUNKS * 64 * 64 * 2)
                load_rows(
                    do_desc, batch, head, q_tile * 64, do_bar, do_boxes, stage * V_CHUNKS,
                    V_CHUNKS, 1,
                )  # fmt: skip
                step += 1
        turn += 1
        batch, kv_head, key_pair, listed, mixed, total, _, more = look_up(queue, turn, ITEM_SLOTS)


@gluon.jit
def _start_scores(
    k_smem, step, q_smem, q_full, offset, GROUP_INDEX: gl.constexpr, STAGES: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Issue the transposed scores of a step, once its queries are there."""
    stage, phase = _place(step, STAGES)
    zero = gl.zeros([64, 64], gl.float32, LAYOUT)
    k = k_smem.index(offset).slice(GROUP_INDEX * 64, 64, 0)
    mbarrier.wait(q_full.index(stage), phase)
    return warpgroup_mma(
        k, q_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
    )


@gluon.jit
def _mask(
    s, state, q_token, key_token, batch, values, q_len, kv_len,
    PROGRAM: gl.constexpr, Q_TAIL: gl.constexpr, KV_TAIL: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Hide what the predicate hides of a partial tile, and keys behind the last.

    A full tile (``state`` 2) may come only with ``KV_TAIL``.
    """
    q_vals, q_batch_stride, q_stride, k_vals, k_batch_stride, k_stride = values
    q = q_token + gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))
    key = key_token + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    if state == 1:
        k = key
        if Q_TAIL:
            q = gl.minimum(q, q_len - 1)
        if KV_TAIL:
            k = gl.minimum(key, kv_len - 1)
        s = seen_scores(
            PROGRAM, s, gl.expand_dims(q, 0), gl.expand_dims(k, 1), 1,
            q_vals + batch.to(gl.int64) * q_batch_stride,
            k_vals + batch.to(gl.int64) * k_batch_stride, q_stride, k_stride, False,
        )  # fmt: skip
    if KV_TAIL:
        s = gl.where(gl.expand_dims(key < kv_len, 1), s, -float("inf"))
    return s


@gluon.jit
def _start_dq(
    step, ds_smem, k_smem, ds_full, offset, GROUP_INDEX: gl.constexpr, LAYOUT: gl.constexpr
):
    """Issue this consumer's half of a step's dQ, once dS is there from both."""
    WIDTH: gl.constexpr = k_smem.shape[2] // 2
    stage, phase = _place(step, DS_STAGES)
    zero = gl.zeros([64, WIDTH], gl.float32, LAYOUT)
    k = k_smem.index(offset).slice(GROUP_INDEX * WIDTH, WIDTH, 1)
    mbarrier.wait(ds_full.index(stage), phase)
    return warpgroup_mma(
        ds_smem.index(stage).permute((1, 0)), k, zero, use_acc=False, is_async=True
    )


@gluon.jit
def _add_dq(dq, acc_desc, acc_row, dq_tile):
    """Send a finished half of a step's dQ to be added to the buffer."""
    BLOCKS: gl.constexpr = dq.shape[1] // 8
    # Rows are (warp, upper or lower, 8), columns (block, 4, 2); the four numbers that a thread has
    # of a block come last.
    parts = gl.reshape(dq, [4, 2, 8, BLOCKS, 4, 2])
    parts = gl.permute(parts, (3, 0, 2, 4, 1, 5))
    tma.store_wait(0)
    dq_tile.store(gl.reshape(parts, [2 * BLOCKS, 256]))
    fence_async_shared()
    async_add_shared_to_global(acc_desc, [acc_row, 0], dq_tile)


@gluon.jit
def _publish(ds, step, ds_smem, ds_full, ds_empty, GROUP_INDEX: gl.constexpr):
    """Give a step's dS of this consumer's keys to both consumers' products."""
    stage, phase = _place(step, DS_STAGES)
    mbarrier.wait(ds_empty.index(stage), phase ^ 1)
    ds_smem.index(stage).slice(GROUP_INDEX * 64, 64, 0).store(ds)
    fence_async_shared()
    mbarrier.arrive(ds_full.index(stage))


@gluon.jit
def _step(
    s, dk, dv, step, acc_row, smem, dq_tile, acc_desc, bars, scale_log2,
    GROUP_INDEX: gl.constexpr, STAGES: gl.constexpr, FIRST: gl.constexpr, LAST: gl.constexpr,
    LAYOUT: gl.constexpr, DK_LAYOUT: gl.constexpr, DV_LAYOUT: gl.constexpr,
    DQ_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Add a step's masked scores to dV and dK, the step before's dS to dQ; get the next scores.

    Nothing is in flight before and after. No more than one product's accumulators are in flight
    next to dK and dV at a time, for want of registers.
    """
    q_smem, do_smem, k_smem, v_smem, stats_smem, ds_smem = smem
    _kv_full, _kv_empty, q_full, do_full, empty, ds_full, ds_empty = bars
    dtype: gl.constexpr = q_smem.dtype
    stage, phase = _place(step, STAGES)
    # As a number unknown to the assembler, which else keeps the descriptors of K and V in
    # registers, or rather in local memory.
    offset = hidden_from_assembler(0)
    zero = gl.zeros([64, 64], gl.float32, LAYOUT)
    v = v_smem.index(offset).slice(GROUP_INDEX * 64, 64, 0)
    mbarrier.wait(do_full.index(stage), phase)
    dp = warpgroup_mma(v, do_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    lse = stats_smem.index(stage * 2).load(gl.SliceLayout(0, LAYOUT))
    p = gl.exp2(s * scale_log2 - gl.expand_dims(lse, 0))
    operand = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, DV_LAYOUT, 2))
    dv = warpgroup_mma(operand, do_smem.index(stage), dv, is_async=True)
    delta = stats_smem.index(stage * 2 + 1).load(gl.SliceLayout(0, LAYOUT))
    dp = warpgroup_mma_wait(1, deps=[dp])
    ds = (p * (dp - gl.expand_dims(delta, 0))).to(dtype)
    _publish(ds, step, ds_smem, ds_full, ds_empty, GROUP_INDEX)
    operand = gl.convert_layout(ds, gl.DotOperandLayout(0, DK_LAYOUT, 2))
    if FIRST:
        dk = warpgroup_mma(operand, q_smem.index(stage), dk, is_async=True)
    else:
        dq = _start_dq(step - 1, ds_smem, k_smem, ds_full, offset, GROUP_INDEX, DQ_LAYOUT)
        dk = warpgroup_mma(operand, q_smem.index(stage), dk, is_async=True)
        dq = warpgroup_mma_wait(1, deps=[dq])
        mbarrier.arrive(ds_empty.index((step - 1) % DS_STAGES))
        _add_dq(dq, acc_desc, acc_row, dq_tile)
    if LAST:
        dk, dv = warpgroup_mma_wait(0, deps=[dk, dv])
    else:
        s = _start_scores(k_smem, step + 1, q_smem, q_full, offset, GROUP_INDEX, STAGES, LAYOUT)
        dk, dv, s = warpgroup_mma_wait(0, deps=[dk, dv, s])
    mbarrier.arrive(empty.index(stage))
    return s, dk, dv


@gluon.jit
def _hidden_step(
    s, step, acc_row, smem, dq_tile, acc_desc, bars,
    GROUP_INDEX: gl.constexpr, STAGES: gl.constexpr, FIRST: gl.constexpr, LAST: gl.constexpr,
    LAYOUT: gl.constexpr, DQ_LAYOUT: gl.constexpr,
):  # fmt: skip
    """As ``_step`` where none of this consumer's keys is seen: its dS is 0."""
    q_smem, _do_smem, k_smem, _v_smem, _stats_smem, ds_smem = smem
    _kv_full, _kv_empty, q_full, do_full, empty, ds_full, ds_empty = bars
    stage, phase = _place(step, STAGES)
    offset = hidden_from_assembler(0)
    zero = gl.zeros([64, 64], q_smem.dtype, LAYOUT)
    _publish(zero, step, ds_smem, ds_full, ds_empty, GROUP_INDEX)
    # A stage may be freed only when it is filled.
    mbarrier.wait(do_full.index(stage), phase)
    if not FIRST:
        dq = _start_dq(step - 1, ds_smem, k_smem, ds_full, offset, GROUP_INDEX, DQ_LAYOUT)
        dq = warpgroup_mma_wait(0, deps=[dq])
        mbarrier.arrive(ds_empty.index((step - 1) % DS_STAGES))
        _add_dq(dq, acc_desc, acc_row, dq_tile)
    if not LAST:
        s = _start_scores(k_smem, step + 1, q_smem, q_full, offset, GROUP_INDEX, STAGES, LAYOUT)
        s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(empty.index(stage))
    return s


@gluon.jit
def _masked_step(
    s, dk, dv, step, state, q_token, key_token, batch, always, acc_row, smem, dq_tile, acc_desc,
    bars, values, scale_log2, q_len, kv_len,
    GROUP_INDEX: gl.constexpr, STAGES: gl.constexpr, FIRST: gl.constexpr, LAST: gl.constexpr,
    PROGRAM: gl.constexpr, Q_TAIL: gl.constexpr, KV_TAIL: gl.constexpr,
    LAYOUT: gl.constexpr, DK_LAYOUT: gl.constexpr, DV_LAYOUT: gl.constexpr,
    DQ_LAYOUT: gl.constexpr,
):  # fmt: skip
    """A step of tiles of any state: 0 for hidden, 1 for partial, 2 for full.

    Args:
        always: whether keys behind the last have to be masked in full tiles, too.
    """
    if state == 0:
        s = _hidden_step(
            s, step, acc_row, smem, dq_tile, acc_desc, bars,
            GROUP_INDEX, STAGES, FIRST, LAST, LAYOUT, DQ_LAYOUT,
        )  # fmt: skip
    else:
        if (state == 1) | always:
            s = _mask(
                s, state, q_token, key_token, batch, values, q_len, kv_len,
                PROGRAM, Q_TAIL, KV_TAIL, LAYOUT,
            )  # fmt: skip
        s, dk, dv = _step(
            s, dk, dv, step, acc_row, smem, dq_tile, acc_desc, bars, scale_log2,
            GROUP_INDEX, STAGES, FIRST, LAST, LAYOUT, DK_LAYOUT, DV_LAYOUT, DQ_LAYOUT,
        )  # fmt: skip
    return s, dk, dv


@gluon.jit
def _load_part(
    part, entry_pointer, mixed, q_tiles, first_row, stats_tiles,
    GROUP_INDEX: gl.constexpr, GROUP: gl.constexpr, STEP_TILES: gl.constexpr,
    ACC_ROWS: gl.constexpr,
):  # fmt: skip
    """The ``part``-th step of an item.

    Args:
        first_row: row of the statistics' first tile of the K/V head's first query head.

    Returns:
        ``(state, q_tile, acc_row)``: of this consumer's keys, and the row in the buffer of its
        half of the step's dQ.
    """
    PARTS: gl.constexpr = GROUP * STEP_TILES
    code = load_entry(entry_pointer, part // PARTS, mixed, q_tiles)
    state = (code // (1 if GROUP_INDEX else 4)) % 4
    q_tile = (code // 16) * STEP_TILES + part % PARTS // GROUP
    tile = first_row + part % GROUP * stats_tiles + q_tile
    return state, q_tile, (2 * tile + GROUP_INDEX) * ACC_ROWS


@gluon.jit
def _consumer(
    GROUP_INDEX: gl.constexpr, dk_desc, dv_desc, acc_desc, smem, dq_smem, dk_smem, dv_smem,
    dk_boxes, dv_boxes, bars, queue, codes, values, scale, scale_log2, q_len, kv_len, stats_tiles,
    heads,
    GROUP: gl.constexpr, STEP_TILES: gl.constexpr, STAGES: gl.constexpr, PROGRAM: gl.constexpr,
    Q_TAIL: gl.constexpr, KV_TAIL: gl.constexpr, QK_CHUNKS: gl.constexpr, V_CHUNKS: gl.constexpr,
):  # fmt: skip
    q_smem, _do_smem, k_smem, v_smem, _stats_smem, ds_smem = smem
    kv_full, kv_empty, q_full, _do_full, _empty, ds_full, ds_empty = bars
    q_tiles = codes[5]
    KEYS: gl.constexpr = 64
    # An item has at least two steps: an odd group goes with query blocks of two tiles.
    PARTS: gl.constexpr = GROUP * STEP_TILES
    gl.static_assert(PARTS >= 2)
    WIDTH: gl.constexpr = QK_CHUNKS * 64
    ACC_ROWS: gl.constexpr = QK_CHUNKS * 8
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    DK_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    DV_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V_CHUNKS * 64, 16])
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH // 2, 16])
    dq_tile = dq_smem.index(GROUP_INDEX)
    dk_tile = dk_smem.index(GROUP_INDEX)
    dv_tile = dv_smem.index(GROUP_INDEX)
    # ``step`` counts steps, ``item`` items with any step, over all turns.
    step = 0
    item = 0
    batch, kv_head, key_pair, _, mixed, total, _, more = look_up(queue, 0, ITEM_SLOTS)
    release(queue, 0, ITEM_SLOTS)
    turn = 0
    while more != 0:
        entry_pointer = entries_of(codes, batch, key_pair)
        key_token = key_pair * 128 + GROUP_INDEX * KEYS
        dk = gl.zeros([KEYS, WIDTH], gl.float32, DK_LAYOUT)
        dv = gl.zeros([KEYS, V_CHUNKS * 64], gl.float32, DV_LAYOUT)
        if total > 0:
            # Keys behind the last would count in dQ.
            always = False
            masked = mixed * PARTS
            if KV_TAIL:  # noqa: SIM102 - known at compile time, unlike the other
                if key_pair * 128 + 128 > kv_len:
                    always = True
                    masked = total * PARTS
            first_row = (batch * heads + kv_head * GROUP) * stats_tiles
            last = total * PARTS - 1
            mbarrier.wait(kv_full, item & 1)
            item += 1
            s = _start_scores(
                k_smem, step, q_smem, q_full, hidden_from_assembler(0), GROUP_INDEX, STAGES, LAYOUT
            )
            state, q_tile, acc_row = _load_part(
                0, entry_pointer, mixed, q_tiles, first_row, stats_tiles,
                GROUP_INDEX, GROUP, STEP_TILES, ACC_ROWS,
            )  # fmt: skip
            s = warpgroup_mma_wait(0, deps=[s])
            s, dk, dv = _masked_step(
                s, dk, dv, step, state, q_tile * 64, key_token, batch, always, acc_row, smem,
                dq_tile, acc_desc, bars, values, scale_log2, q_len, kv_len,
                GROUP_INDEX, STAGES, True, False, PROGRAM, Q_TAIL, KV_TAIL,
                LAYOUT, DK_LAYOUT, DV_LAYOUT, DQ_LAYOUT,
            )  # fmt: skip
            step += 1
            for part in range(1, gl.minimum(masked, last)):
                state, q_tile, next_row = _load_part(
                    part, entry_pointer, mixed, q_tiles, first_row, stats_tiles,
                    GROUP_INDEX, GROUP, STEP_TILES, ACC_ROWS,
                )  # fmt: skip
                s, dk, dv = _masked_step(
                    s, dk, dv, step, state, q_tile * 64, key_token, batch, always, acc_row, smem,
                    dq_tile, acc_desc, bars, values, scale_log2, q_len, kv_len,
                    GROUP_INDEX, STAGES, False, False, PROGRAM, Q_TAIL, KV_TAIL,
                    LAYOUT, DK_LAYOUT, DV_LAYOUT, DQ_LAYOUT,
                )  # fmt: skip
                acc_row = next_row
                step += 1
            for part in range(gl.maximum(masked, 1), last):
                state, q_tile, next_row = _load_part(
                    part, entry_pointer, mixed, q_tiles, first_row, stats_tiles,
                    GROUP_INDEX, GROUP, STEP_TILES, ACC_ROWS,
                )  # fmt: skip
                s, dk, dv = _step(
                    s, dk, dv, step, acc_row, smem, dq_tile, acc_desc, bars, scale_log2,
                    GROUP_INDEX, STAGES, False, False, LAYOUT, DK_LAYOUT, DV_LAYOUT, DQ_LAYOUT,
                )  # fmt: skip
                acc_row = next_row
                step += 1
            state, q_tile, next_row = _load_part(
                last, entry_pointer, mixed, q_tiles, first_row, stats_tiles,
                GROUP_INDEX, GROUP, STEP_TILES, ACC_ROWS,
            )  # fmt: skip
            s, dk, dv = _masked_step(
                s, dk, dv, step, state, q_tile * 64, key_token, batch, always, acc_row, smem,
                dq_tile, acc_desc, bars, values, scale_log2, q_len, kv_len,
                GROUP_INDEX, STAGES, False, True, PROGRAM, Q_TAIL, KV_TAIL,
                LAYOUT, DK_LAYOUT, DV_LAYOUT, DQ_LAYOUT,
            )  # fmt: skip
            step += 1
            dq = _start_dq(
                step - 1, ds_smem, k_smem, ds_full, hidden_from_assembler(0), GROUP_INDEX,
                DQ_LAYOUT,
            )  # fmt: skip
            dq = warpgroup_mma_wait(0, deps=[dq])
            mbarrier.arrive(ds_empty.index((step - 1) % DS_STAGES))
            mbarrier.arrive(kv_empty)
            _add_dq(dq, acc_desc, next_row, dq_tile)
        tma.store_wait(0)
        dv_tile.store(dv.to(v_smem.dtype))
        fence_async_shared()
        for chunk in gl.static_range(V_CHUNKS):
            tma.async_copy_shared_to_global(
                dv_desc, [batch, kv_head, key_token, chunk * 64],
                dv_boxes.index(GROUP_INDEX * V_CHUNKS + chunk),
            )  # fmt: skip
        dk_tile.store((dk * scale).to(k_smem.dtype))
        fence_async_shared()
        for chunk in gl.static_range(QK_CHUNKS):
            tma.async_copy_shared_to_global(
                dk_desc, [batch, kv_head, key_token, chunk * 64],
                dk_boxes.index(GROUP_INDEX * QK_CHUNKS + chunk),
            )  # fmt: skip
        turn += 1
        batch, kv_head, key_pair, _, mixed, total, _, more = look_up(queue, turn, ITEM_SLOTS)
        release(queue, turn, ITEM_SLOTS)
    tma.store_wait(0)


# A length that happens to be 1 or a multiple of 16 shall not compile anew.
_SIZES = (
    "q_batch_stride", "q_stride", "k_batch_stride", "k_stride", "list_batch_rows",
    "key_pairs", "q_tiles", "batches", "kv_heads", "heads",
    "q_len", "kv_len", "stats_tiles",
)  # fmt: skip


@gluon.jit(do_not_specialize=_SIZES)
def fast_backward_kernel(
    q_desc, do_desc, k_desc, v_desc, dk_desc, dv_desc, acc_desc, stats_desc, q_vals, k_vals,
    order, counts, entries, active,
    q_batch_stride, q_stride, k_batch_stride, k_stride, list_batch_rows, key_pairs, q_tiles,
    batches, kv_heads, heads, q_len, kv_len, stats_tiles, scale, scale_log2,
    CONDITIONAL: gl.constexpr, GROUP: gl.constexpr, SPLITS: gl.constexpr,
    STEP_TILES: gl.constexpr, STAGES: gl.constexpr, PROGRAM: gl.constexpr,
    Q_TAIL: gl.constexpr, KV_TAIL: gl.constexpr, QK_CHUNKS: gl.constexpr, V_CHUNKS: gl.constexpr,
    REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """dK and dV of all keys, and their shares of dQ; see ``backward.py``."""
    if CONDITIONAL:
        key_pairs = key_pairs * gl.load(active)
    dtype: gl.constexpr = q_desc.dtype
    BOX: gl.constexpr = q_desc.layout
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    Q_BOXES: gl.constexpr = STAGES * QK_CHUNKS
    DO_BOXES: gl.constexpr = STAGES * V_CHUNKS
    q_boxes = gl.allocate_shared_memory(dtype, [Q_BOXES, 1, 1, 64, 64], BOX)
    do_boxes = gl.allocate_shared_memory(dtype, [DO_BOXES, 1, 1, 64, 64], BOX)
    k_boxes = gl.allocate_shared_memory(dtype, [2 * QK_CHUNKS, 1, 1, 64, 64], BOX)
    v_boxes = gl.allocate_shared_memory(dtype, [2 * V_CHUNKS, 1, 1, 64, 64], BOX)
    ds_boxes = gl.allocate_shared_memory(dtype, [DS_STAGES * 2, 1, 1, 64, 64], BOX)
    dv_boxes = gl.allocate_shared_memory(dtype, [2 * V_CHUNKS, 1, 1, 64, 64], BOX)
    # Each consumer's half of a step's dQ in float32, or its dK, which is as large.
    dk_boxes = gl.allocate_shared_memory(dtype, [2 * QK_CHUNKS, 1, 1, 64, 64], BOX)
    stats_boxes = gl.allocate_shared_memory(gl.float32, [STAGES * 2, 1, 64], stats_desc.layout)
    q_smem = q_boxes._reinterpret(dtype, [STAGES, 64, QK_CHUNKS * 64], TILE)
    do_smem = do_boxes._reinterpret(dtype, [STAGES, 64, V_CHUNKS * 64], TILE)
    k_smem = k_boxes._reinterpret(dtype, [1, 128, QK_CHUNKS * 64], TILE)
    v_smem = v_boxes._reinterpret(dtype, [1, 128, V_CHUNKS * 64], TILE)
    ds_smem = ds_boxes._reinterpret(dtype, [DS_STAGES, 128, 64], TILE)
    dv_smem = dv_boxes._reinterpret(dtype, [2, 64, V_CHUNKS * 64], TILE)
    dq_smem = dk_boxes._reinterpret(gl.float32, [2, QK_CHUNKS * 8, 256], acc_desc.layout)
    dk_smem = dk_boxes._reinterpret(dtype, [2, 64, QK_CHUNKS * 64], TILE)
    stats_smem = stats_boxes._reinterpret(
        gl.float32, [STAGES * 2, 64], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    kv_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ds_full = gl.allocate_shared_memory(gl.int64, [DS_STAGES, 1], mbarrier.MBarrierLayout())
    ds_empty = gl.allocate_shared_memory(gl.int64, [DS_STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full, count=1)
    mbarrier.init(kv_empty, count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(do_full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(DS_STAGES):
        mbarrier.init(ds_full.index(i), count=2)
        mbarrier.init(ds_empty.index(i), count=2)
    bars = (kv_full, kv_empty, q_full, do_full, empty, ds_full, ds_empty)
    queue = make_queue(ITEM_SLOTS)
    codes = (order, counts, entries, list_batch_rows, key_pairs, q_tiles, batches, kv_heads)
    values = (q_vals, q_batch_stride, q_stride, k_vals, k_batch_stride, k_stride)
    smem = (q_smem, do_smem, k_smem, v_smem, stats_smem, ds_smem)
    gl.warp_specialize([
        (_consumer, (0, dk_desc, dv_desc, acc_desc, smem, dq_smem, dk_smem, dv_smem, dk_boxes,
                     dv_boxes, bars, queue, codes, values, scale, scale_log2, q_len, kv_len,
                     stats_tiles, heads, GROUP, STEP_TILES, STAGES, PROGRAM, Q_TAIL, KV_TAIL,
                     QK_CHUNKS, V_CHUNKS)),
        (_consumer, (1, dk_desc, dv_desc, acc_desc, smem, dq_smem, dk_smem, dv_smem, dk_boxes,
                     dv_boxes, bars, queue, codes, values, scale, scale_log2, q_len, kv_len,
                     stats_tiles, heads, GROUP, STEP_TILES, STAGES, PROGRAM, Q_TAIL, KV_TAIL,
                     QK_CHUNKS, V_CHUNKS)),
        (_producer, (q_desc, do_desc, k_desc, v_desc, stats_desc, q_boxes, do_boxes, k_boxes,
                     v_boxes, stats_boxes, bars, queue, codes, kv_len, stats_tiles, heads, GROUP,
                     SPLITS, STEP_TILES, STAGES, QK_CHUNKS, V_CHUNKS)),
        (dispatch_items, (queue, codes)),
    ], [4, 1, 1], [REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
