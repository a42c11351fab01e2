"""The key side of the backward: one program owns a tile of keys and visits the listed queries.

Scores are computed transposed, keys by queries: the weights and the score gradients are then, as
they come, the left operands of the products that make dV and dK.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tree_attn_op.kernels.masking import evaluate
from tree_attn_op.kernels.portable.tiles import (
    LOG2_E,
    head_source,
    list_row,
    load_rows,
    store_packed_rows,
    tile_start,
)


@triton.jit
def _visit(
    grad_key_acc,
    grad_value_acc,
    key_tile,
    value_tile,
    key_index,
    query,
    grad_out,
    lse,
    delta,
    count,
    indices,
    batch,
    first_head,
    query_strides,
    grad_out_strides,
    num_heads,
    q_vals,
    k_vals,
    q_row_stride,
    k_row_stride,
    q_len,
    kv_len,
    scale_log2,
    PROGRAM: tl.constexpr,
    MASKED: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    EVEN_Q: tl.constexpr,
    EVEN_KV: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):
    """Adds what the listed query tiles of ``HEADS`` heads contribute to dK and dV.

    Heads are innermost in one flat loop: lists are often short, and a loop over heads around one
    over tiles would fill and drain the pipeline of loads for every head.
    """
    start = tile_start(indices, 0, count, Q_BLOCK, BLOCK_M)
    for step in range(count * (Q_BLOCK // BLOCK_M) * HEADS):
        head = first_head + step % HEADS
        query_tile = load_rows(
            head_source(query, batch, head, query_strides, TMA),
            batch,
            head,
            start,
            query_strides,
            q_len,
            BLOCK_M,
            DIM,
            BLOCK_DIM,
            EVEN_Q,
            TMA,
        )
        grad_tile = load_rows(
            head_source(grad_out, batch, head, grad_out_strides, TMA),
            batch,
            head,
            start,
            grad_out_strides,
            q_len,
            BLOCK_M,
            VALUE_DIM,
            BLOCK_VALUE_DIM,
            EVEN_Q,
            TMA,
        )
        query_index = start + tl.arange(0, BLOCK_M)
        row = (batch * num_heads + head).to(tl.int64) * q_len + start + tl.arange(0, BLOCK_M)
        if EVEN_Q:
            row_lse_log2 = tl.load(lse + row) * LOG2_E
            row_delta = tl.load(delta + row)
        else:
            # lse = inf makes the weights of rows out of bounds 0.
            inside = query_index < q_len
            row_lse_log2 = tl.load(lse + row, mask=inside, other=float("inf")) * LOG2_E
            row_delta = tl.load(delta + row, mask=inside, other=0.0)
        scores = tl.dot(key_tile, tl.trans(query_tile), input_precision=PRECISION)
        weights = tl.math.exp2(scores * scale_log2 - row_lse_log2[None, :])
        if MASKED:
            # Keys out of bounds need no mask: their rows of the result are not stored.
            q = query_index if EVEN_Q else tl.minimum(query_index, q_len - 1)
            k = key_index if EVEN_KV else tl.minimum(key_index, kv_len - 1)
            visible = evaluate(
                PROGRAM, 0, q[None, :], k[:, None], q_vals, k_vals, q_row_stride, k_row_stride
            )
            if not EVEN_Q:
                visible = visible & (query_index < q_len)[None, :]
            weights = tl.where(visible, weights, 0.0)
        grad_value_acc = tl.dot(
            weights.to(grad_tile.dtype), grad_tile, grad_value_acc, input_precision=PRECISION
        )
        grad_weights = tl.dot(value_tile, tl.trans(grad_tile), input_precision=PRECISION)
        grad_scores = weights * (grad_weights - row_delta[None, :])
        grad_key_acc = tl.dot(
            grad_scores.to(query_tile.dtype), query_tile, grad_key_acc, input_precision=PRECISION
        )
        start = tile_start(indices, (step + 1) // HEADS, count, Q_BLOCK, BLOCK_M)
    return grad_key_acc, grad_value_acc


@triton.jit(
    do_not_specialize=[
        "num_heads",
        "num_tiles",
        "q_len",
        "kv_len",
        "q_batch_stride",
        "k_batch_stride",
        "q_row_stride",
        "k_row_stride",
        "part_columns",
        "full_columns",
    ],
    do_not_specialize_on_alignment=[
        "lse",
        "delta",
        "q_vals",
        "k_vals",
        "part_counts",
        "part_indices",
        "full_counts",
        "full_indices",
    ],
)
def dkdv_kernel(
    query,
    key,
    value,
    grad_out,
    lse,
    delta,
    grad_key,
    grad_value,
    q_vals,
    k_vals,
    part_counts,
    part_indices,
    full_counts,
    full_indices,
    query_strides,
    key_strides,
    value_strides,
    grad_out_strides,
    grad_key_strides,
    grad_value_strides,
    list_strides,
    part_columns,
    full_columns,
    q_batch_stride,
    k_batch_stride,
    q_row_stride,
    k_row_stride,
    num_heads,
    num_tiles,
    q_len,
    kv_len,
    scale,
    PROGRAM: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    EVEN_Q: tl.constexpr,
    EVEN_KV: tl.constexpr,
    HAS_FULL: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):
    """``grad_key`` and ``grad_value`` of ``BLOCK_N`` keys of one key head.

    ``HEADS`` query heads share a list: the group, or 1 where each head has its own lists. Grid:
    ``(B * num_tiles * num_kv_heads,)``. Early tiles come first: more queries see them.
    """
    program = tl.program_id(0)
    kv_heads = num_heads // GROUP
    kv_head = program % kv_heads
    tile = (program // kv_heads) % num_tiles
    batch = program // kv_heads // num_tiles
    first = tile * BLOCK_N
    key_index = first + tl.arange(0, BLOCK_N)

    key_tile = load_rows(
        head_source(key, batch, kv_head, key_strides, TMA),
        batch,
        kv_head,
        first,
        key_strides,
        kv_len,
        BLOCK_N,
        DIM,
        BLOCK_DIM,
        EVEN_KV,
        TMA,
    )
    value_tile = load_rows(
        head_source(value, batch, kv_head, value_strides, TMA),
        batch,
        kv_head,
        first,
        value_strides,
        kv_len,
        BLOCK_N,
        VALUE_DIM,
        BLOCK_VALUE_DIM,
        EVEN_KV,
        TMA,
    )
    q_batch_vals = q_vals + batch.to(tl.int64) * q_batch_stride
    k_batch_vals = k_vals + batch.to(tl.int64) * k_batch_stride
    scale_log2 = scale * LOG2_E
    block = first // KV_BLOCK

    grad_key_acc = tl.zeros([BLOCK_N, BLOCK_DIM], tl.float32)
    grad_value_acc = tl.zeros([BLOCK_N, BLOCK_VALUE_DIM], tl.float32)
    for skipped in range(0, GROUP, HEADS):
        first_head = kv_head * GROUP + skipped
        for turn in tl.static_range(2 if HAS_FULL else 1):
            if turn == 0:
                count, indices = list_row(
                    part_counts, part_indices, batch, first_head, block, list_strides, part_columns
                )
            else:
                count, indices = list_row(
                    full_counts, full_indices, batch, first_head, block, list_strides, full_columns
                )
            grad_key_acc, grad_value_acc = _visit(
                grad_key_acc,
                grad_value_acc,
                key_tile,
                value_tile,
                key_index,
                query,
                grad_out,
                lse,
                delta,
                count,
                indices,
                batch,
                first_head,
                query_strides,
                grad_out_strides,
                num_heads,
                q_batch_vals,
                k_batch_vals,
                q_row_stride,
                k_row_stride,
                q_len,
                kv_len,
                scale_log2,
                PROGRAM,
                turn == 0,
                HEADS,
                BLOCK_M,
                Q_BLOCK,
                DIM,
                BLOCK_DIM,
                VALUE_DIM,
                BLOCK_VALUE_DIM,
                EVEN_Q,
                EVEN_KV,
                PRECISION,
                TMA,
            )
    store_packed_rows(
        grad_key,
        grad_key_acc * scale,
        batch,
        kv_head,
        first,
        grad_key_strides,
        kv_len,
        1,
        BLOCK_N,
        DIM,
        BLOCK_DIM,
    )
    store_packed_rows(
        grad_value,
        grad_value_acc,
        batch,
        kv_head,
        first,
        grad_value_strides,
        kv_len,
        1,
        BLOCK_N,
        VALUE_DIM,
        BLOCK_VALUE_DIM,
    )
