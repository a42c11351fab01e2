"""The key and value gradients for sm_90: the first half of the deterministic backward.

A work item is a pair of adjacent key tiles (128 keys) of one K/V head: each of two consumer
warpgroups keeps 64 keys and their dK and dV in registers, and walks over the query tiles that see
any of them, with all heads of the group; or with a part of them, where there are too few items for
all blocks (``SPLITS`` parts, whose dK and dV are summed afterwards). The lists (see
``BackwardPreparation`` in ``prepare.py``) say for each of the two key tiles whether it is hidden,
masked or fully seen by a query tile, so a consumer skips what its own keys do not need.

A step takes ``STEP_HEADS`` heads by 64 query tokens, transposed, keys in rows: scores,
dP = V dO^T, dV += P dO, dK += dS Q.
"""

from __future__ import annotations

from .compat import (
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
from .queue import ITEM_SLOTS, dispatch_items, look_up, make_queue, release
from .schedule import entries_of, load_entry


@gluon.jit
def _producer(
    q_desc, do_desc, k_desc, v_desc, stats_desc, q_boxes, do_boxes, k_boxes, v_boxes, stats_boxes,
    bars, queue, codes, stats_tiles, heads,
    GROUP: gl.constexpr, SPLITS: gl.constexpr, STEP_HEADS: gl.constexpr, STEP_TILES: gl.constexpr,
    STAGES: gl.constexpr, QK_CHUNKS: gl.constexpr, V_CHUNKS: gl.constexpr,
):  # fmt: skip
    kv_full, q_full, do_full, empty = bars
    q_tiles = codes[5]
    STEPS: gl.constexpr = GROUP // STEP_HEADS
    step = 0
    batch, kv_head, key_pair, _, mixed, total, _, more = look_up(queue, 0, ITEM_SLOTS)
    turn = 0
    while more != 0:
        entry_pointer = entries_of(codes, batch, key_pair)
        if total == 0:
            release(queue, turn, ITEM_SLOTS)
        else:
            shared_head = kv_head // SPLITS
            if step > 0:
                # K and V are read for the last time before the item's last step is freed.
                last = step - 1
                mbarrier.wait(empty.index(last % STAGES), (last // STAGES) & 1)
            mbarrier.expect(kv_full, 2 * (QK_CHUNKS + V_CHUNKS) * 64 * 64 * 2)
            for half in gl.static_range(2):
                token = key_pair * 128 + half * 64
                load_rows(k_desc, batch, shared_head, token, kv_full, k_boxes, half, QK_CHUNKS, 2)
                load_rows(v_desc, batch, shared_head, token, kv_full, v_boxes, half, V_CHUNKS, 2)
        code = load_entry(entry_pointer, 0, mixed, q_tiles)
        for entry in range(total):
            # Taking the next item takes a while; taking it early leaves less to share out.
            if entry == gl.maximum(total - 2, 0):
                release(queue, turn, ITEM_SLOTS)
            first_tile = (code // 16) * STEP_TILES
            code = load_entry(entry_pointer, entry + 1, mixed, q_tiles)
            for part in range(STEP_TILES * STEPS):
                q_tile = first_tile + part // STEPS
                head = kv_head * GROUP + (part % STEPS) * STEP_HEADS
                stage = step % STAGES
                mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
                bar = q_full.index(stage)
                mbarrier.expect(bar, STEP_HEADS * (QK_CHUNKS * 64 * 64 * 2 + 2 * 64 * 4))
                do_bar = do_full.index(stage)
                for i in gl.static_range(STEP_HEADS):
                    load_rows(
                        q_desc, batch, head + i, q_tile * 64, bar, q_boxes,
                        stage * (STEP_HEADS * QK_CHUNKS) + i, QK_CHUNKS, STEP_HEADS,
                    )  # fmt: skip
                    row = ((batch * heads + head + i) * stats_tiles + q_tile) * 2
                    for kind in gl.static_range(2):
                        tma.async_copy_global_to_shared(
                            stats_desc, [row + kind, 0], bar,
                            stats_boxes.index((stage * 2 + kind) * STEP_HEADS + i),
                        )  # fmt: skip
                mbarrier.expect(do_bar, STEP_HEADS * V_CHUNKS * 64 * 64 * 2)
                for i in gl.static_range(STEP_HEADS):
                    load_rows(
                        do_desc, batch, head + i, q_tile * 64, do_bar, do_boxes,
                        stage * (STEP_HEADS * V_CHUNKS) + i, V_CHUNKS, STEP_HEADS,
                    )  # fmt: skip
                step += 1
        turn += 1
        batch, kv_head, key_pair, _, mixed, total, _, more = look_up(queue, turn, ITEM_SLOTS)


@gluon.jit
def _scores(
    k, v, step, q_smem, do_smem, q_full, do_full, STAGES: gl.constexpr, LAYOUT: gl.constexpr
):
    """Issue the transposed scores and dP of a step; wait for the scores alone."""
    KEYS: gl.constexpr = k.shape[0]
    COLUMNS: gl.constexpr = q_smem.shape[1]
    stage = step % STAGES
    phase = (step // STAGES) & 1
    zero = gl.zeros([KEYS, COLUMNS], gl.float32, LAYOUT)
    mbarrier.wait(q_full.index(stage), phase)
    s = warpgroup_mma(k, q_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(do_full.index(stage), phase)
    dp = warpgroup_mma(v, do_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    return s, dp


@gluon.jit
def _accumulate(
    s, dp, dk, dv, step, q_smem, do_smem, stats_smem, empty, scale_log2,
    STAGES: gl.constexpr, LAYOUT: gl.constexpr, DK_LAYOUT: gl.constexpr, DV_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Add a step's masked scores and dP to dV and dK; free its stage."""
    dtype: gl.constexpr = q_smem.dtype
    stage = step % STAGES
    lse = stats_smem.index(stage * 2).load(gl.SliceLayout(0, LAYOUT))
    p = gl.exp2(s * scale_log2 - gl.expand_dims(lse, 0))
    operand = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, DV_LAYOUT, 2))
    dv = warpgroup_mma(operand, do_smem.index(stage), dv, is_async=True)
    delta = stats_smem.index(stage * 2 + 1).load(gl.SliceLayout(0, LAYOUT))
    dp = warpgroup_mma_wait(1, deps=[dp])
    ds = p * (dp - gl.expand_dims(delta, 0))
    operand = gl.convert_layout(ds.to(dtype), gl.DotOperandLayout(0, DK_LAYOUT, 2))
    dk = warpgroup_mma(operand, q_smem.index(stage), dk, is_async=True)
    dk, dv = warpgroup_mma_wait(0, deps=[dk, dv])
    mbarrier.arrive(empty.index(stage))
    return dk, dv


@gluon.jit
def _consumer(
    GROUP_INDEX: gl.constexpr, dk_desc, dv_desc, q_smem, do_smem, k_smem, v_smem, stats_smem,
    dk_smem, dv_smem, dk_boxes, dv_boxes, bars, queue, codes, values, scale, scale_log2, q_len,
    kv_len,
    GROUP: gl.constexpr, STEP_HEADS: gl.constexpr, STEP_TILES: gl.constexpr, STAGES: gl.constexpr,
    PROGRAM: gl.constexpr, Q_TAIL: gl.constexpr, KV_TAIL: gl.constexpr,
    QK_CHUNKS: gl.constexpr, V_CHUNKS: gl.constexpr,
):  # fmt: skip
    kv_full, q_full, do_full, empty = bars
    q_vals, q_batch_stride, q_stride, k_vals, k_batch_stride, k_stride = values
    q_tiles = codes[5]
    KEYS: gl.constexpr = 64
    COLUMNS: gl.constexpr = STEP_HEADS * 64
    STEPS: gl.constexpr = GROUP // STEP_HEADS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    DK_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QK_CHUNKS * 64, 16])
    DV_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V_CHUNKS * 64, 16])
    k = k_smem.slice(GROUP_INDEX * KEYS, KEYS, 0)
    v = v_smem.slice(GROUP_INDEX * KEYS, KEYS, 0)
    dk_tile = dk_smem.index(GROUP_INDEX)
    dv_tile = dv_smem.index(GROUP_INDEX)
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT)) % 64
    # ``step`` counts steps, ``item`` items with any step, over all turns.
    step = 0
    item = 0
    batch, kv_head, key_pair, _, mixed, total, _, more = look_up(queue, 0, ITEM_SLOTS)
    release(queue, 0, ITEM_SLOTS)
    turn = 0
    while more != 0:
        entry_pointer = entries_of(codes, batch, key_pair)
        key_token = key_pair * 128 + GROUP_INDEX * KEYS
        dk = gl.zeros([KEYS, QK_CHUNKS * 64], gl.float32, DK_LAYOUT)
        dv = gl.zeros([KEYS, V_CHUNKS * 64], gl.float32, DV_LAYOUT)
        if total > 0:
            mbarrier.wait(kv_full, item & 1)
            item += 1
        code = load_entry(entry_pointer, 0, mixed, q_tiles)
        for entry in range(mixed):
            state = (code // (1 if GROUP_INDEX else 4)) % 4
            first_tile = (code // 16) * STEP_TILES
            code = load_entry(entry_pointer, entry + 1, mixed, q_tiles)
            for part in range(STEP_TILES * STEPS):
                if state == 0:
                    # The stage may be freed only when it is filled.
                    stage = step % STAGES
                    mbarrier.wait(q_full.index(stage), (step // STAGES) & 1)
                    mbarrier.wait(do_full.index(stage), (step // STAGES) & 1)
                    mbarrier.arrive(empty.index(stage))
                else:
                    s, dp = _scores(k, v, step, q_smem, do_smem, q_full, do_full, STAGES, LAYOUT)
                    if state == 1:
                        q = (first_tile + part // STEPS) * 64 + column
                        key = key_token + gl.arange(0, KEYS, gl.SliceLayout(1, LAYOUT))
                        if Q_TAIL:
                            q = gl.minimum(q, q_len - 1)
                        if KV_TAIL:
                            key = gl.minimum(key, kv_len - 1)
                        s = seen_scores(
                            PROGRAM, s, gl.expand_dims(q, 0), gl.expand_dims(key, 1), 1,
                            q_vals + batch.to(gl.int64) * q_batch_stride,
                            k_vals + batch.to(gl.int64) * k_batch_stride, q_stride, k_stride,
                            False,
                        )  # fmt: skip
                    dk, dv = _accumulate(
                        s, dp, dk, dv, step, q_smem, do_smem, stats_smem, empty, scale_log2,
                        STAGES, LAYOUT, DK_LAYOUT, DV_LAYOUT,
                    )  # fmt: skip
                step += 1
        for _ in range((total - mixed) * (STEP_TILES * STEPS)):
            s, dp = _scores(k, v, step, q_smem, do_smem, q_full, do_full, STAGES, LAYOUT)
            dk, dv = _accumulate(
                s, dp, dk, dv, step, q_smem, do_smem, stats_smem, empty, scale_log2,
                STAGES, LAYOUT, DK_LAYOUT, DV_LAYOUT,
            )  # fmt: skip
            step += 1
        tma.store_wait(0)
        dk_tile.store((dk * scale).to(k_smem.dtype))
        dv_tile.store(dv.to(v_smem.dtype))
        fence_async_shared()
        for chunk in gl.static_range(QK_CHUNKS):
            tma.async_copy_shared_to_global(
                dk_desc, [batch, kv_head, key_token, chunk * 64],
                dk_boxes.index(GROUP_INDEX * QK_CHUNKS + chunk),
            )  # fmt: skip
        for chunk in gl.static_range(V_CHUNKS):
            tma.async_copy_shared_to_global(
                dv_desc, [batch, kv_head, key_token, chunk * 64],
                dv_boxes.index(GROUP_INDEX * V_CHUNKS + chunk),
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
def dkdv_kernel(
    q_desc, do_desc, k_desc, v_desc, dk_desc, dv_desc, stats_desc, q_vals, k_vals,
    order, counts, entries, active,
    q_batch_stride, q_stride, k_batch_stride, k_stride, list_batch_rows, key_pairs, q_tiles,
    batches, kv_heads, heads, q_len, kv_len, stats_tiles, scale, scale_log2,
    CONDITIONAL: gl.constexpr, GROUP: gl.constexpr, SPLITS: gl.constexpr,
    STEP_HEADS: gl.constexpr, STEP_TILES: gl.constexpr, STAGES: gl.constexpr,
    PROGRAM: gl.constexpr, Q_TAIL: gl.constexpr, KV_TAIL: gl.constexpr,
    QK_CHUNKS: gl.constexpr, V_CHUNKS: gl.constexpr,
    REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """dK and dV of all keys; see ``backward.py`` for the arguments."""
    if CONDITIONAL:
        key_pairs = key_pairs * gl.load(active + 1)
    dtype: gl.constexpr = q_desc.dtype
    BOX: gl.constexpr = q_desc.layout
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    COLUMNS: gl.constexpr = STEP_HEADS * 64
    Q_BOXES: gl.constexpr = STAGES * STEP_HEADS * QK_CHUNKS
    DO_BOXES: gl.constexpr = STAGES * STEP_HEADS * V_CHUNKS
    q_boxes = gl.allocate_shared_memory(dtype, [Q_BOXES, 1, 1, 64, 64], BOX)
    do_boxes = gl.allocate_shared_memory(dtype, [DO_BOXES, 1, 1, 64, 64], BOX)
    k_boxes = gl.allocate_shared_memory(dtype, [2 * QK_CHUNKS, 1, 1, 64, 64], BOX)
    v_boxes = gl.allocate_shared_memory(dtype, [2 * V_CHUNKS, 1, 1, 64, 64], BOX)
    dk_boxes = gl.allocate_shared_memory(dtype, [2 * QK_CHUNKS, 1, 1, 64, 64], BOX)
    dv_boxes = gl.allocate_shared_memory(dtype, [2 * V_CHUNKS, 1, 1, 64, 64], BOX)
    stats_boxes = gl.allocate_shared_memory(
        gl.float32, [STAGES * 2 * STEP_HEADS, 1, 64], stats_desc.layout
    )
    q_smem = q_boxes._reinterpret(dtype, [STAGES, COLUMNS, QK_CHUNKS * 64], TILE)
    do_smem = do_boxes._reinterpret(dtype, [STAGES, COLUMNS, V_CHUNKS * 64], TILE)
    k_smem = k_boxes._reinterpret(dtype, [128, QK_CHUNKS * 64], TILE)
    v_smem = v_boxes._reinterpret(dtype, [128, V_CHUNKS * 64], TILE)
    dk_smem = dk_boxes._reinterpret(dtype, [2, 64, QK_CHUNKS * 64], TILE)
    dv_smem = dv_boxes._reinterpret(dtype, [2, 64, V_CHUNKS * 64], TILE)
    stats_smem = stats_boxes._reinterpret(
        gl.float32, [STAGES * 2, COLUMNS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(do_full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    bars = (kv_full, q_full, do_full, empty)
    queue = make_queue(ITEM_SLOTS)
    codes = (order, counts, entries, list_batch_rows, key_pairs, q_tiles, batches, kv_heads)
    values = (q_vals, q_batch_stride, q_stride, k_vals, k_batch_stride, k_stride)
    gl.warp_specialize([
        (_consumer, (0, dk_desc, dv_desc, q_smem, do_smem, k_smem, v_smem, stats_smem, dk_smem,
                     dv_smem, dk_boxes, dv_boxes, bars, queue, codes, values, scale, scale_log2,
                     q_len, kv_len, GROUP, STEP_HEADS, STEP_TILES, STAGES, PROGRAM, Q_TAIL,
                     KV_TAIL, QK_CHUNKS, V_CHUNKS)),
        (_consumer, (1, dk_desc, dv_desc, q_smem, do_smem, k_smem, v_smem, stats_smem, dk_smem,
                     dv_smem, dk_boxes, dv_boxes, bars, queue, codes, values, scale, scale_log2,
                     q_len, kv_len, GROUP, STEP_HEADS, STEP_TILES, STAGES, PROGRAM, Q_TAIL,
                     KV_TAIL, QK_CHUNKS, V_CHUNKS)),
        (_producer, (q_desc, do_desc, k_desc, v_desc, stats_desc, q_boxes, do_boxes, k_boxes,
                     v_boxes, stats_boxes, bars, queue, codes, stats_tiles, heads, GROUP,
                     SPLITS, STEP_HEADS, STEP_TILES, STAGES, QK_CHUNKS, V_CHUNKS)),
        (dispatch_items, (queue, codes)),
    ], [4, 1, 1], [REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
