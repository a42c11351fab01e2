"""The query gradient for sm_90: the second half of the deterministic backward.

Rows, pairs of key tiles and roles as in ``forward_kernel.py``. A step takes three products:
scores, dP = dO V^T, and dQ += dS K. The probabilities are recomputed while dP runs; the rest of a
consumer's arithmetic hides behind the other consumer's products.
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
from .loading import first_tokens, later_tokens, load_pair, load_query_rows
from .packing import hidden_from_assembler
from .pair_masks import mask_pair, mask_tail
from .queue import ROW_SLOTS, dispatch_rows, look_up, make_queue, release
from .schedule import KEY_TILE, head_of_item, load_tile, split_pairs


@gluon.jit
def _producer(
    q_desc, do_desc, k_desc, v_desc, q_boxes, do_boxes, k_boxes, v_boxes, bars, queue, lists,
    kv_len,
    GROUP: gl.constexpr, PACKED: gl.constexpr, STAGES: gl.constexpr,
    QK_CHUNKS: gl.constexpr, V_CHUNKS: gl.constexpr,
):  # fmt: skip
    q_full, k_full, k_empty, v_full, v_empty = bars
    step = 0
    q_tile, partials, fulls, first_0, first_1, batch, item, more = look_up(queue, 0, ROW_SLOTS)
    turn = 0
    while more != 0:
        release(queue, turn, ROW_SLOTS)
        head, kv_head = head_of_item(item, GROUP, PACKED)
        list_row = batch * lists[3] + q_tile
        partial_start, partial_pairs, full_start, full_pairs = split_pairs(partials, fulls)
        token_0, token_1 = first_tokens(first_0, first_1, kv_len)
        if step > 0:
            # Q and dO are read for the last time just before the row's last V is freed.
            last = step - 1
            mbarrier.wait(v_empty.index(last % STAGES), (last // STAGES) & 1)
        mbarrier.expect(q_full, 2 * (QK_CHUNKS + V_CHUNKS) * 64 * 64 * 2)
        load_query_rows(q_desc, batch, head, q_tile, q_full, q_boxes, 0, PACKED, QK_CHUNKS)
        load_query_rows(do_desc, batch, head, q_tile, q_full, do_boxes, 0, PACKED, V_CHUNKS)
        for pair in range(1 + partial_pairs + full_pairs):
            load_pair(
                k_desc, batch, kv_head, token_0, token_1, k_full, k_empty, k_boxes, step,
                STAGES, QK_CHUNKS,
            )  # fmt: skip
            load_pair(
                v_desc, batch, kv_head, token_0, token_1, v_full, v_empty, v_boxes, step,
                STAGES, V_CHUNKS,
            )  # fmt: skip
            token_0, token_1 = later_tokens(
                pair, partial_start, partial_pairs, full_start, list_row, lists
            )
            step += 1
        turn += 1
        q_tile, partials, fulls, first_0, first_1, batch, item, more = look_up(
            queue, turn, ROW_SLOTS
        )


@gluon.jit
def _products(
    q, do, step, k_smem, v_smem, k_full, v_full, STAGES: gl.constexpr, S_LAYOUT: gl.constexpr
):
    """Issue scores and dP of a pair; wait for the scores alone."""
    ROWS: gl.constexpr = q.shape[0]
    KEYS: gl.constexpr = k_smem.shape[1]
    stage = step % STAGES
    phase = (step // STAGES) & 1
    zero = gl.zeros([ROWS, KEYS], gl.float32, S_LAYOUT)
    mbarrier.wait(k_full.index(stage), phase)
    s = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(stage), phase)
    dp = warpgroup_mma(do, v_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    return s, dp


@gluon.jit
def _accumulate(
    s, dp, dq, step, lse_log2, delta, scale_log2, k_smem, k_empty, v_full, v_empty,
    STAGES: gl.constexpr, P_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Turn masked scores and dP into dS and add dS K to dQ; free the pair's stages."""
    stage = step % STAGES
    p = gl.exp2(s * scale_log2 - gl.expand_dims(lse_log2, 1))
    # Returns at once, but ends a basic block: the exponentials cannot move behind the next wait.
    mbarrier.wait(v_full.index(stage), (step // STAGES) & 1)
    dp = warpgroup_mma_wait(0, deps=[dp])
    mbarrier.arrive(v_empty.index(stage))
    ds = p * (dp - gl.expand_dims(delta, 1))
    ds = gl.convert_layout(ds.to(k_smem.dtype), P_LAYOUT)
    dq = warpgroup_mma(ds, k_smem.index(stage), dq, is_async=True)
    dq = warpgroup_mma_wait(0, deps=[dq])
    mbarrier.arrive(k_empty.index(stage))
    return dq


@gluon.jit
def _rows_of_consumer(
    batch, head, q_tile, stats, stats_tiles, heads, GROUP_INDEX: gl.constexpr,
    PACKED: gl.constexpr, ROW: gl.constexpr,
):  # fmt: skip
    """A consumer's half of a row: ``(head, first token, lse in base 2, delta)`` of its 64 rows."""
    q_token = q_tile * (64 if PACKED else 128)
    if PACKED:
        head += GROUP_INDEX
    else:
        q_token += GROUP_INDEX * 64
    stats_row = (batch * heads + head).to(gl.int64) * stats_tiles + q_token // 64
    row_stats = stats + stats_row * 128 + gl.arange(0, 64, ROW)
    return head, q_token, gl.load(row_stats), gl.load(row_stats + 64)


@gluon.jit
def _consumer(
    GROUP_INDEX: gl.constexpr, dq_desc, q_smem, do_smem, dq_smem, dq_boxes, k_smem, v_smem, bars,
    queue, lists, values, stats, stats_tiles, scale, scale_log2, q_len, kv_len, heads,
    GROUP: gl.constexpr, PACKED: gl.constexpr, STAGES: gl.constexpr, PROGRAM: gl.constexpr,
    Q_TAIL: gl.constexpr, KV_TAIL: gl.constexpr, QK_CHUNKS: gl.constexpr,
):  # fmt: skip
    q_full, k_full, k_empty, v_full, v_empty = bars
    ROWS: gl.constexpr = 64
    KEYS: gl.constexpr = 2 * KEY_TILE
    WIDTH: gl.constexpr = QK_CHUNKS * 64
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, DQ_LAYOUT, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    q = q_smem.index(GROUP_INDEX)
    do = do_smem.index(GROUP_INDEX)
    dq_tile = dq_smem.index(GROUP_INDEX)
    partial_tiles = lists[1]
    full_tiles = lists[2]
    kv_tiles = lists[5]
    # ``step`` counts pairs over all rows.
    step = 0
    q_tile, partials, fulls, first_0, first_1, batch, item, more = look_up(queue, 0, ROW_SLOTS)
    release(queue, 0, ROW_SLOTS)
    list_row = batch * lists[3] + q_tile
    head, _kv_head = head_of_item(item, GROUP, PACKED)
    head, q_token, row_lse, row_delta = _rows_of_consumer(
        batch, head, q_tile, stats, stats_tiles, heads, GROUP_INDEX, PACKED, ROW
    )
    turn = 0
    while more != 0:
        partial_start, partial_pairs, full_start, full_pairs = split_pairs(partials, fulls)
        dq = gl.zeros([ROWS, WIDTH], gl.float32, DQ_LAYOUT)
        mbarrier.wait(q_full, turn & 1)

        s, dp = _products(q, do, step, k_smem, v_smem, k_full, v_full, STAGES, S_LAYOUT)
        s = mask_pair(
            s, hidden_from_assembler(q_token), first_0, first_1, batch, values, q_len, kv_len,
            PROGRAM, Q_TAIL, KV_TAIL, S_LAYOUT,
        )  # fmt: skip
        dq = _accumulate(
            s, dp, dq, step, row_lse, row_delta, scale_log2, k_smem, k_empty, v_full, v_empty,
            STAGES, P_LAYOUT,
        )  # fmt: skip
        step += 1
        code_0 = load_tile(partial_tiles, partial_start, list_row, kv_tiles) * 4 + 1
        code_1 = load_tile(partial_tiles, partial_start + 1, list_row, kv_tiles) * 4 + 1
        for pair in range(partial_pairs):
            s, dp = _products(q, do, step, k_smem, v_smem, k_full, v_full, STAGES, S_LAYOUT)
            # The assembler would compare while it waits for the scores, and for want of predicates
            # pack what it finds into bits. Of tokens that it gets to know late it does less so.
            s = mask_pair(
                s, hidden_from_assembler(q_token), code_0, code_1, batch, values, q_len, kv_len,
                PROGRAM, Q_TAIL, KV_TAIL, S_LAYOUT,
            )  # fmt: skip
            index = partial_start + 2 * pair + 2
            code_0 = load_tile(partial_tiles, index, list_row, kv_tiles) * 4 + 1
            code_1 = load_tile(partial_tiles, index + 1, list_row, kv_tiles) * 4 + 1
            dq = _accumulate(
                s, dp, dq, step, row_lse, row_delta, scale_log2, k_smem, k_empty, v_full, v_empty,
                STAGES, P_LAYOUT,
            )  # fmt: skip
            step += 1
        for pair in range(full_pairs):
            s, dp = _products(q, do, step, k_smem, v_smem, k_full, v_full, STAGES, S_LAYOUT)
            if KV_TAIL:
                tile_0 = load_tile(full_tiles, full_start + 2 * pair, list_row, kv_tiles)
                tile_1 = load_tile(full_tiles, full_start + 2 * pair + 1, list_row, kv_tiles)
                if (gl.maximum(tile_0, tile_1) + 1) * KEY_TILE > kv_len:
                    s = mask_tail(s, tile_0, tile_1, kv_len, S_LAYOUT)
            dq = _accumulate(
                s, dp, dq, step, row_lse, row_delta, scale_log2, k_smem, k_empty, v_full, v_empty,
                STAGES, P_LAYOUT,
            )  # fmt: skip
            step += 1
        tma.store_wait(0)
        dq_tile.store((dq * scale).to(q_smem.dtype))
        fence_async_shared()
        for chunk in gl.static_range(QK_CHUNKS):
            tma.async_copy_shared_to_global(
                dq_desc, [batch, head, q_token, chunk * 64],
                dq_boxes.index(GROUP_INDEX * QK_CHUNKS + chunk),
            )  # fmt: skip
        turn += 1
        q_tile, partials, fulls, first_0, first_1, batch, item, more = look_up(
            queue, turn, ROW_SLOTS
        )
        release(queue, turn, ROW_SLOTS)
        head, _kv_head = head_of_item(item, GROUP, PACKED)
        head, q_token, row_lse, row_delta = _rows_of_consumer(
            batch, head, q_tile, stats, stats_tiles, heads, GROUP_INDEX, PACKED, ROW
        )
        list_row = batch * lists[3] + q_tile
    tma.store_wait(0)


# A length that happens to be 1 or a multiple of 16 shall not compile anew.
_SIZES = (
    "q_batch_stride", "q_stride", "k_batch_stride", "k_stride", "list_batch_rows",
    "q_tiles", "kv_tiles", "batches", "head_items", "heads",
    "q_len", "kv_len", "stats_tiles",
)  # fmt: skip


@gluon.jit(do_not_specialize=_SIZES)
def dq_kernel(
    q_desc, do_desc, k_desc, v_desc, dq_desc, stats, q_vals, k_vals,
    schedule, partial_tiles, full_tiles, active,
    q_batch_stride, q_stride, k_batch_stride, k_stride, list_batch_rows, q_tiles, kv_tiles,
    batches, head_items, heads, q_len, kv_len, stats_tiles, scale, scale_log2,
    CONDITIONAL: gl.constexpr, GROUP: gl.constexpr, PACKED: gl.constexpr, STAGES: gl.constexpr,
    PROGRAM: gl.constexpr, Q_TAIL: gl.constexpr, KV_TAIL: gl.constexpr,
    QK_CHUNKS: gl.constexpr, V_CHUNKS: gl.constexpr,
    REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """dQ of all rows; see ``backward.py`` for the arguments."""
    dtype: gl.constexpr = q_desc.dtype
    BOX: gl.constexpr = q_desc.layout
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    q_boxes = gl.allocate_shared_memory(dtype, [2 * QK_CHUNKS, 1, 1, 64, 64], BOX)
    do_boxes = gl.allocate_shared_memory(dtype, [2 * V_CHUNKS, 1, 1, 64, 64], BOX)
    dq_boxes = gl.allocate_shared_memory(dtype, [2 * QK_CHUNKS, 1, 1, 64, 64], BOX)
    k_boxes = gl.allocate_shared_memory(dtype, [STAGES * 2 * QK_CHUNKS, 1, 1, 64, 64], BOX)
    v_boxes = gl.allocate_shared_memory(dtype, [STAGES * 2 * V_CHUNKS, 1, 1, 64, 64], BOX)
    q_smem = q_boxes._reinterpret(dtype, [2, 64, QK_CHUNKS * 64], TILE)
    do_smem = do_boxes._reinterpret(dtype, [2, 64, V_CHUNKS * 64], TILE)
    dq_smem = dq_boxes._reinterpret(dtype, [2, 64, QK_CHUNKS * 64], TILE)
    k_smem = k_boxes._reinterpret(dtype, [STAGES, 128, QK_CHUNKS * 64], TILE)
    v_smem = v_boxes._reinterpret(dtype, [STAGES, 128, V_CHUNKS * 64], TILE)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    bars = (q_full, k_full, k_empty, v_full, v_empty)
    lists = (
        schedule, partial_tiles, full_tiles,
        list_batch_rows, q_tiles, kv_tiles, batches, head_items,
    )  # fmt: skip
    queue = make_queue(ROW_SLOTS)
    rows = q_tiles * batches * head_items
    if CONDITIONAL:
        rows = rows * gl.load(active + 1)
    values = (q_vals, q_batch_stride, q_stride, k_vals, k_batch_stride, k_stride)
    gl.warp_specialize([
        (_consumer, (0, dq_desc, q_smem, do_smem, dq_smem, dq_boxes, k_smem, v_smem, bars, queue,
                     lists, values, stats, stats_tiles, scale, scale_log2, q_len, kv_len, heads,
                     GROUP, PACKED, STAGES, PROGRAM, Q_TAIL, KV_TAIL, QK_CHUNKS)),
        (_consumer, (1, dq_desc, q_smem, do_smem, dq_smem, dq_boxes, k_smem, v_smem, bars, queue,
                     lists, values, stats, stats_tiles, scale, scale_log2, q_len, kv_len, heads,
                     GROUP, PACKED, STAGES, PROGRAM, Q_TAIL, KV_TAIL, QK_CHUNKS)),
        (_producer, (q_desc, do_desc, k_desc, v_desc, q_boxes, do_boxes, k_boxes, v_boxes, bars,
                     queue, lists, kv_len, GROUP, PACKED, STAGES, QK_CHUNKS, V_CHUNKS)),
        (dispatch_rows, (queue, lists, values, rows, kv_len, GROUP // 2 if PACKED else GROUP,
                         PROGRAM)),
    ], [4, 1, 1], [REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
