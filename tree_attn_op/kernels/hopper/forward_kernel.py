"""The forward kernel for sm_90.

One persistent thread block a multiprocessor: a producer warp feeds a ring of K and V tiles through
TMA, and two consumer warpgroups hold 64 query rows each. Packed, the two hold two heads of one K/V
group over the same 64 tokens; otherwise 128 tokens of one head.

The consumers carry the probabilities of a tile from step to step: a step issues the Q K product of
the next tile and the P V product of this one, and turns the next tile's scores into probabilities
while P V runs. The next tile may belong to the next row, so the pipeline does not drain between
rows.

One loop body does for every step, with branches for masks and for the end of a row: short rows
wait for instructions where their code exceeds the instruction cache. Where rows are long, what
counts are the steps in their middle, and these have a loop of their own. The kernel holds the code
of both forms; the schedule says which one runs (``form.py``).
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
from .packing import hidden_from_assembler, pack_pairs, unpack_pairs
from .pair_masks import mask_pair, mask_tail
from .queue import ROW_SLOTS, dispatch_rows, look_up, make_queue, release
from .schedule import KEY_TILE, head_of_item, load_tile, split_pairs

_NOTHING_SEEN = gl.constexpr(-1e38)
"""Running maximum of a row that has seen no key: finite, so that no difference is NaN."""
_LONG_ROW = gl.constexpr(4)
"""Full pairs from which on a row of the long form goes to the loop for them."""
_LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def _producer(
    q_desc, k_desc, v_desc, q_boxes, k_boxes, v_boxes, bars, queue, lists, kv_len,
    GROUP: gl.constexpr, PACKED: gl.constexpr, STAGES: gl.constexpr,
    QK_CHUNKS: gl.constexpr, V_CHUNKS: gl.constexpr,
):  # fmt: skip
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    # V of a tile is loaded after K of the next one: the order in which the consumers wait.
    step = 0
    v_batch = 0
    v_head = 0
    v_token_0 = 0
    v_token_1 = 0
    q_tile, partials, fulls, first_0, first_1, batch, item, more = look_up(queue, 0, ROW_SLOTS)
    turn = 0
    while more != 0:
        release(queue, turn, ROW_SLOTS)
        head, kv_head = head_of_item(item, GROUP, PACKED)
        list_row = batch * lists[3] + q_tile
        partial_start, partial_pairs, full_start, full_pairs = split_pairs(partials, fulls)
        slot = turn & 1
        mbarrier.wait(q_empty.index(slot), ((turn >> 1) & 1) ^ 1)
        mbarrier.expect(q_full.index(slot), 2 * QK_CHUNKS * 64 * 64 * 2)
        load_query_rows(
            q_desc, batch, head, q_tile, q_full.index(slot), q_boxes, slot * (2 * QK_CHUNKS),
            PACKED, QK_CHUNKS,
        )  # fmt: skip
        token_0, token_1 = first_tokens(first_0, first_1, kv_len)
        for pair in range(1 + partial_pairs + full_pairs):
            load_pair(
                k_desc, batch, kv_head, token_0, token_1, k_full, k_empty, k_boxes, step,
                STAGES, QK_CHUNKS,
            )  # fmt: skip
            if step > 0:
                load_pair(
                    v_desc, v_batch, v_head, v_token_0, v_token_1, v_full, v_empty, v_boxes,
                    step - 1, STAGES, V_CHUNKS,
                )  # fmt: skip
            v_batch, v_head, v_token_0, v_token_1 = batch, kv_head, token_0, token_1
            token_0, token_1 = later_tokens(
                pair, partial_start, partial_pairs, full_start, list_row, lists
            )
            step += 1
        turn += 1
        q_tile, partials, fulls, first_0, first_1, batch, item, more = look_up(
            queue, turn, ROW_SLOTS
        )
    # The consumers run one tile ahead: a tile behind the last key, whose scores nobody uses.
    load_pair(
        k_desc, v_batch, v_head, kv_len, kv_len, k_full, k_empty, k_boxes, step,
        STAGES, QK_CHUNKS,
    )  # fmt: skip
    load_pair(
        v_desc, v_batch, v_head, v_token_0, v_token_1, v_full, v_empty, v_boxes, step - 1,
        STAGES, V_CHUNKS,
    )  # fmt: skip


@gluon.jit
def _sum_in_thread(p, KEYS: gl.constexpr):
    """Row sums over the columns that one thread holds: ``[rows, KEYS]`` to ``[rows, 8]``."""
    return gl.sum(gl.reshape(p, [p.shape[0], KEYS // 8, 8]), 1)


@gluon.jit
def _softmax(scores, peak, scale_log2):
    """Probabilities against the new running maximum, the maximum, the factor for the past."""
    new_peak = gl.maximum(peak, gl.max(scores, 1) * scale_log2)
    p = gl.exp2(scores * scale_log2 - gl.expand_dims(new_peak, 1))
    return p, new_peak, gl.exp2(peak - new_peak)


@gluon.jit
def _column(x, LAYOUT: gl.constexpr):
    """A value for each row as a column of a tile in ``LAYOUT``."""
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, LAYOUT)), 1)


@gluon.jit
def _scores_and_output(
    q, p, acc, fresh, step, k_smem, v_smem, k_full, v_full,
    STAGES: gl.constexpr, S_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Issue the scores of tile ``step`` and P V of the tile before.

    If ``fresh``, ``acc`` holds nothing yet.
    """
    ROWS: gl.constexpr = q.shape[0]
    KEYS: gl.constexpr = k_smem.shape[1]
    stage = step % STAGES
    v_stage = (step - 1) % STAGES
    zero = gl.zeros([ROWS, KEYS], gl.float32, S_LAYOUT)
    mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
    s = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(v_stage), ((step - 1) // STAGES) & 1)
    operand = unpack_pairs(p, q.dtype, P_LAYOUT)
    acc = warpgroup_mma(operand, v_smem.index(v_stage), acc, use_acc=fresh == 0, is_async=True)
    return s, acc


@gluon.jit
def _await_scores(s, step, k_empty, STAGES: gl.constexpr):
    """Wait for the scores of tile ``step``, not for P V behind them."""
    s = warpgroup_mma_wait(1, deps=[s])
    mbarrier.arrive(k_empty.index(step % STAGES))
    return s


@gluon.jit
def _await_output(acc, step, v_full, v_empty, STAGES: gl.constexpr):
    """Wait for P V of the tile before ``step``.

    V has been waited for already. The second wait returns at once, but it ends a basic block: so
    the assembler cannot move the softmax in front of it behind the wait for the product, which the
    softmax shall overlap.
    """
    stage = (step - 1) % STAGES
    mbarrier.wait(v_full.index(stage), ((step - 1) // STAGES) & 1)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_empty.index(stage))
    return acc


@gluon.jit
def _half_of_row(
    q_tile, item, GROUP_INDEX: gl.constexpr, GROUP: gl.constexpr, PACKED: gl.constexpr
):
    """Head and first query token of a consumer's 64 rows."""
    head, _kv_head = head_of_item(item, GROUP, PACKED)
    if PACKED:
        head += GROUP_INDEX
        token = q_tile * 64
    else:
        token = q_tile * 128 + GROUP_INDEX * 64
    return head, token


@gluon.jit
def _consumer(
    GROUP_INDEX: gl.constexpr, o_desc, q_smem, o_smem, o_boxes, k_smem, v_smem, bars, queue,
    lists, values, lse, scale_log2, q_len, kv_len, heads,
    GROUP: gl.constexpr, PACKED: gl.constexpr, STAGES: gl.constexpr, PROGRAM: gl.constexpr,
    Q_TAIL: gl.constexpr, KV_TAIL: gl.constexpr, V_CHUNKS: gl.constexpr, LONG: gl.constexpr,
):  # fmt: skip
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    ROWS: gl.constexpr = 64
    KEYS: gl.constexpr = 2 * KEY_TILE
    V_WIDTH: gl.constexpr = V_CHUNKS * 64
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V_WIDTH, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    dtype: gl.constexpr = q_smem.dtype
    o_tile = o_smem.index(GROUP_INDEX)
    no_peak = gl.full([ROWS], _NOTHING_SEEN, gl.float32, ROW)

    partial_tiles = lists[1]
    full_tiles = lists[2]
    kv_tiles = lists[5]
    q_tile, partials, fulls, first_0, first_1, batch, item, more = look_up(queue, 0, ROW_SLOTS)
    release(queue, 0, ROW_SLOTS)
    head, q_token = _half_of_row(q_tile, item, GROUP_INDEX, GROUP, PACKED)
    list_row = batch * lists[3] + q_tile
    mbarrier.wait(q_full.index(0), 0)
    mbarrier.wait(k_full.index(0), 0)
    s = warpgroup_mma(
        q_smem.index(GROUP_INDEX), k_smem.index(0).permute((1, 0)),
        gl.zeros([ROWS, KEYS], gl.float32, S_LAYOUT), use_acc=False, is_async=True,
    )  # fmt: skip
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_empty.index(0))
    s = mask_pair(
        s, q_token, first_0, first_1, batch, values, q_len, kv_len,
        PROGRAM, Q_TAIL, KV_TAIL, S_LAYOUT,
    )  # fmt: skip
    p, peak, decay = _softmax(s, no_peak, scale_log2)
    norm = _sum_in_thread(p, KEYS)
    NORM_LAYOUT: gl.constexpr = norm.type.layout
    no_norm = gl.zeros([ROWS, 8], gl.float32, NORM_LAYOUT)
    p = pack_pairs(p, dtype)
    partial_index, partial_left, full_index, full_left = split_pairs(partials, fulls)
    acc = gl.zeros([ROWS, V_WIDTH], gl.float32, O_LAYOUT)
    # ``step`` counts tiles over all rows; ``p`` holds the probabilities of the tile before it.
    # ``acc`` belongs to the row of that tile; where ``fresh``, it holds nothing yet.
    step = 1
    turn = 0
    fresh = more != 0
    while more != 0:
        if LONG and (partial_left == 0) & (full_left >= _LONG_ROW):
            for _pair in range(full_left):
                q = q_smem.index(hidden_from_assembler(turn & 1) * 2 + GROUP_INDEX)
                s, acc = _scores_and_output(
                    q, p, acc, fresh, step, k_smem, v_smem, k_full, v_full,
                    STAGES, S_LAYOUT, P_LAYOUT,
                )  # fmt: skip
                s = _await_scores(s, step, k_empty, STAGES)
                if KV_TAIL:
                    tile_0 = load_tile(full_tiles, full_index, list_row, kv_tiles)
                    tile_1 = load_tile(full_tiles, full_index + 1, list_row, kv_tiles)
                    full_index += 2
                    if (gl.maximum(tile_0, tile_1) + 1) * KEY_TILE > kv_len:
                        s = mask_tail(s, tile_0, tile_1, kv_len, S_LAYOUT)
                p, peak, decay = _softmax(s, peak, scale_log2)
                norm = norm * _column(decay, NORM_LAYOUT) + _sum_in_thread(p, KEYS)
                p = pack_pairs(p, dtype)
                acc = _await_output(acc, step, v_full, v_empty, STAGES)
                acc = acc * _column(decay, O_LAYOUT)
                step += 1
                fresh = more == 0
            full_left = 0

        # The next tile: the next row's first if this row ends with the tile before it.
        ends = partial_left + full_left == 0
        next_batch, next_head, next_token = batch, head, q_token
        if ends:
            mbarrier.arrive(q_empty.index(turn & 1))
            turn += 1
            masked = True
            next_tile, partials, fulls, code_0, code_1, next_batch, next_item, more = look_up(
                queue, turn, ROW_SLOTS
            )
            release(queue, turn, ROW_SLOTS)
            next_head, next_token = _half_of_row(next_tile, next_item, GROUP_INDEX, GROUP, PACKED)
            list_row = next_batch * lists[3] + next_tile
            partial_index, partial_left, full_index, full_left = split_pairs(partials, fulls)
            mbarrier.wait(q_full.index(turn & 1), (turn >> 1) & 1, pred=more != 0)
        elif partial_left > 0:
            code_0 = load_tile(partial_tiles, partial_index, list_row, kv_tiles) * 4 + 1
            code_1 = load_tile(partial_tiles, partial_index + 1, list_row, kv_tiles) * 4 + 1
            masked = True
            partial_index += 2
            partial_left -= 1
        else:
            code_0, code_1 = 2, 2
            masked = False
            if KV_TAIL:
                code_0 += load_tile(full_tiles, full_index, list_row, kv_tiles) * 4
                code_1 += load_tile(full_tiles, full_index + 1, list_row, kv_tiles) * 4
                masked = (gl.maximum(code_0, code_1) // 4 + 1) * KEY_TILE > kv_len
                full_index += 2
            full_left -= 1
        s, acc = _scores_and_output(
            q_smem.index((turn & 1) * 2 + GROUP_INDEX), p, acc, fresh, step, k_smem, v_smem,
            k_full, v_full, STAGES, S_LAYOUT, P_LAYOUT,
        )  # fmt: skip
        row_scale = peak
        if ends:
            row_sum = gl.convert_layout(gl.sum(norm, 1), ROW)
            seen = row_sum > 0.0
            row_scale = gl.where(seen, 1.0 / row_sum, 0.0)
            row = q_token + gl.arange(0, ROWS, ROW)
            row_lse = gl.where(seen, (peak + gl.log2(row_sum)) * _LN2, -float("inf"))
            lse_row = lse + (batch * heads + head).to(gl.int64) * q_len
            gl.store(lse_row + row, row_lse, mask=row < q_len)
            peak, norm = no_peak, no_norm
        s = _await_scores(s, step, k_empty, STAGES)
        if masked:
            s = mask_pair(
                s, next_token, code_0, code_1, next_batch, values, q_len, kv_len,
                PROGRAM, Q_TAIL, KV_TAIL, S_LAYOUT,
            )  # fmt: skip
        p, peak, decay = _softmax(s, peak, scale_log2)
        norm = norm * _column(decay, NORM_LAYOUT) + _sum_in_thread(p, KEYS)
        p = pack_pairs(p, dtype)
        if ends:
            decay = row_scale
        acc = _await_output(acc, step, v_full, v_empty, STAGES)
        acc = acc * _column(decay, O_LAYOUT)
        step += 1
        fresh = ends
        if ends:
            tma.store_wait(0)
            o_tile.store(acc.to(dtype))
            fence_async_shared()
            for chunk in gl.static_range(V_CHUNKS):
                tma.async_copy_shared_to_global(
                    o_desc, [batch, head, q_token, chunk * 64],
                    o_boxes.index(GROUP_INDEX * V_CHUNKS + chunk),
                )  # fmt: skip
        batch, head, q_token = next_batch, next_head, next_token
    tma.store_wait(0)


@gluon.jit
def _attend(
    q_desc, k_desc, v_desc, o_desc, q_boxes, k_boxes, v_boxes, o_boxes, q_smem, k_smem, v_smem,
    o_smem, bars, queue, lists, values, lse, scale_log2, rows, q_len, kv_len, heads,
    GROUP: gl.constexpr, PACKED: gl.constexpr, STAGES: gl.constexpr, PROGRAM: gl.constexpr,
    Q_TAIL: gl.constexpr, KV_TAIL: gl.constexpr, QK_CHUNKS: gl.constexpr, V_CHUNKS: gl.constexpr,
    REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, LONG: gl.constexpr,
):  # fmt: skip
    """All rows, by the warps of a block in their roles; ``LONG`` is the form for long rows."""
    gl.warp_specialize([
        (_consumer, (0, o_desc, q_smem, o_smem, o_boxes, k_smem, v_smem, bars, queue, lists,
                     values, lse, scale_log2, q_len, kv_len, heads, GROUP, PACKED, STAGES,
                     PROGRAM, Q_TAIL, KV_TAIL, V_CHUNKS, LONG)),
        (_consumer, (1, o_desc, q_smem, o_smem, o_boxes, k_smem, v_smem, bars, queue, lists,
                     values, lse, scale_log2, q_len, kv_len, heads, GROUP, PACKED, STAGES,
                     PROGRAM, Q_TAIL, KV_TAIL, V_CHUNKS, LONG)),
        (_producer, (q_desc, k_desc, v_desc, q_boxes, k_boxes, v_boxes, bars, queue, lists,
                     kv_len, GROUP, PACKED, STAGES, QK_CHUNKS, V_CHUNKS)),
        (dispatch_rows, (queue, lists, values, rows, kv_len, GROUP // 2 if PACKED else GROUP,
                         PROGRAM)),
    ], [4, 1, 1], [REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


# A length that happens to be 1 or a multiple of 16 shall not compile anew.
_SIZES = (
    "q_batch_stride", "q_stride", "k_batch_stride", "k_stride", "list_batch_rows",
    "q_tiles", "kv_tiles", "batches", "head_items", "heads",
    "q_len", "kv_len",
)  # fmt: skip


@gluon.jit(do_not_specialize=_SIZES)
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, lse, q_vals, k_vals,
    schedule, partial_tiles, full_tiles,
    q_batch_stride, q_stride, k_batch_stride, k_stride, list_batch_rows, q_tiles, kv_tiles,
    batches, head_items, heads, q_len, kv_len, scale_log2,
    GROUP: gl.constexpr, PACKED: gl.constexpr, STAGES: gl.constexpr, PROGRAM: gl.constexpr,
    Q_TAIL: gl.constexpr, KV_TAIL: gl.constexpr, QK_CHUNKS: gl.constexpr, V_CHUNKS: gl.constexpr,
    REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Attention output and log-sum-exp of all rows; see ``forward.py`` for the arguments."""
    dtype: gl.constexpr = q_desc.dtype
    BOX: gl.constexpr = q_desc.layout
    Q_TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    q_boxes = gl.allocate_shared_memory(dtype, [4 * QK_CHUNKS, 1, 1, 64, 64], BOX)
    o_boxes = gl.allocate_shared_memory(dtype, [2 * V_CHUNKS, 1, 1, 64, 64], BOX)
    k_boxes = gl.allocate_shared_memory(dtype, [STAGES * 2 * QK_CHUNKS, 1, 1, 64, 64], BOX)
    v_boxes = gl.allocate_shared_memory(dtype, [STAGES * 2 * V_CHUNKS, 1, 1, 64, 64], BOX)
    # The same memory as the matrix units see it: 64-column chunks, rows within them.
    q_smem = q_boxes._reinterpret(dtype, [4, 64, QK_CHUNKS * 64], Q_TILE)
    o_smem = o_boxes._reinterpret(dtype, [2, 64, V_CHUNKS * 64], Q_TILE)
    k_smem = k_boxes._reinterpret(dtype, [STAGES, 128, QK_CHUNKS * 64], Q_TILE)
    v_smem = v_boxes._reinterpret(dtype, [STAGES, 128, V_CHUNKS * 64], Q_TILE)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    bars = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    queue = make_queue(ROW_SLOTS)
    lists = (
        schedule, partial_tiles, full_tiles,
        list_batch_rows, q_tiles, kv_tiles, batches, head_items,
    )  # fmt: skip
    values = (q_vals, q_batch_stride, q_stride, k_vals, k_batch_stride, k_stride)
    rows = q_tiles * batches * head_items
    if gl.load(schedule + 7) != 0:
        _attend(
            q_desc, k_desc, v_desc, o_desc, q_boxes, k_boxes, v_boxes, o_boxes, q_smem, k_smem,
            v_smem, o_smem, bars, queue, lists, values, lse, scale_log2, rows, q_len, kv_len,
            heads, GROUP, PACKED, STAGES, PROGRAM, Q_TAIL, KV_TAIL, QK_CHUNKS, V_CHUNKS,
            REGISTERS, PRODUCER_REGISTERS, True,
        )  # fmt: skip
    else:
        _attend(
            q_desc, k_desc, v_desc, o_desc, q_boxes, k_boxes, v_boxes, o_boxes, q_smem, k_smem,
            v_smem, o_smem, bars, queue, lists, values, lse, scale_log2, rows, q_len, kv_len,
            heads, GROUP, PACKED, STAGES, PROGRAM, Q_TAIL, KV_TAIL, QK_CHUNKS, V_CHUNKS,
            REGISTERS, PRODUCER_REGISTERS, False,
        )  # fmt: skip
