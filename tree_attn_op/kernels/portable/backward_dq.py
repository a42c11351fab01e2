"""The query side of the backward: the row constant of the softmax gradient, and dQ.

With P the softmax weights and dP = dO V^T, the gradient of the scores is dS = P * (dP - delta),
delta = rowsum(dO * O) - d(lse). dQ needs a pass over the keys of each query and dK, dV a pass over
the queries of each key, so each has its own kernel that owns its result: nothing is added from two
programs, and equal inputs give equal bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tree_attn_op.kernels.masking import evaluate
from tree_attn_op.kernels.portable.tiles import (
    LOG2_E,
    head_source,
    list_row,
    load_packed_rows,
    load_rows,
    store_packed_rows,
    tile_start,
)


@triton.jit(
    do_not_specialize=["num_heads", "q_len"],
    do_not_specialize_on_alignment=["lse", "grad_lse", "delta"],
)
def delta_kernel(
    out,
    grad_out,
    lse,
    grad_lse,
    delta,
    out_strides,
    grad_out_strides,
    grad_lse_strides,
    num_heads,
    q_len,
    ROWS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    HAS_GRAD_LSE: tl.constexpr,
):
    """``delta``, float32 ``[B, Hq, Q]``. Grid: ``(cdiv(Q, ROWS) * B * Hq,)``."""
    program = tl.program_id(0)
    tiles = tl.cdiv(q_len, ROWS)
    start = (program % tiles) * ROWS
    head = (program // tiles) % num_heads
    batch = program // tiles // num_heads
    out_tile = load_packed_rows(
        out,
        batch,
        head,
        start,
        out_strides,
        q_len,
        1,
        ROWS,
        VALUE_DIM,
        BLOCK_VALUE_DIM,
    )
    grad_tile = load_packed_rows(
        grad_out,
        batch,
        head,
        start,
        grad_out_strides,
        q_len,
        1,
        ROWS,
        VALUE_DIM,
        BLOCK_VALUE_DIM,
    )
    row_delta = tl.sum(out_tile.to(tl.float32) * grad_tile.to(tl.float32), 1)
    token = start + tl.arange(0, ROWS)
    inside = token < q_len
    base = (batch * num_heads + head).to(tl.int64) * q_len
    if HAS_GRAD_LSE:
        grad_base = (
            batch.to(tl.int64) * grad_lse_strides[0] + head.to(tl.int64) * grad_lse_strides[1]
        )
        grad_row = grad_lse + grad_base + token.to(tl.int64) * grad_lse_strides[2]
        row_delta -= tl.load(grad_row, mask=inside, other=0.0)
    # A row that saw nothing has gradients 0 even where that of its lse of -inf is no number.
    row_lse = tl.load(lse + base + token, mask=inside, other=0.0)
    row_delta = tl.where(row_lse == -float("inf"), 0.0, row_delta)
    tl.store(delta + base + token, row_delta, mask=inside)


@triton.jit
def _visit(
    acc,
    query_tile,
    grad_tile,
    row_lse_log2,
    row_delta,
    query_index,
    key,
    value,
    count,
    indices,
    batch,
    kv_head,
    key_strides,
    value_strides,
    q_vals,
    k_vals,
    q_row_stride,
    k_row_stride,
    q_len,
    kv_len,
    scale_log2,
    PROGRAM: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_VALUE_DIM: tl.constexpr,
    EVEN_Q: tl.constexpr,
    EVEN_KV: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):
    """Adds dS K of the listed key tiles; ``MASKED`` evaluates the predicate."""
    start = tile_start(indices, 0, count, KV_BLOCK, BLOCK_N)
    for step in range(count * (KV_BLOCK // BLOCK_N)):
        key_tile = load_rows(
            key, batch, kv_head, start, key_strides, kv_len, BLOCK_N, DIM, BLOCK_DIM, EVEN_KV, TMA
        )
        value_tile = load_rows(
            value,
            batch,
            kv_head,
            start,
            value_strides,
            kv_len,
            BLOCK_N,
            VALUE_DIM,
            BLOCK_VALUE_DIM,
            EVEN_KV,
            TMA,
        )
        scores = tl.dot(query_tile, tl.trans(key_tile), input_precision=PRECISION)
        grad_weights = tl.dot(grad_tile, tl.trans(value_tile), input_precision=PRECISION)
        weights = tl.math.exp2(scores * scale_log2 - row_lse_log2[:, None])
        key_index = (start + tl.arange(0, BLOCK_N))[None, :]
        if MASKED:
            q = query_index if EVEN_Q else tl.minimum(query_index, q_len - 1)
            k = key_index if EVEN_KV else tl.minimum(key_index, kv_len - 1)
            visible = evaluate(PROGRAM, 0, q, k, q_vals, k_vals, q_row_stride, k_row_stride)
            if not EVEN_KV:
                visible = visible & (key_index < kv_len)
            # Masked after exp2: a masked score may lie above the lse of its row by any amount.
            weights = tl.where(visible, weights, 0.0)
        elif not EVEN_KV:
            weights = tl.where(key_index < kv_len, weights, 0.0)
        grad_scores = weights * (grad_weights - row_delta[:, None])
        acc = tl.dot(grad_scores.to(key_tile.dtype), key_tile, acc, input_precision=PRECISION)
        start = tile_start(indices, step + 1, count, KV_BLOCK, BLOCK_N)
    return acc


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
def dq_kernel(
    query,
    key,
    value,
    grad_out,
    lse,
    delta,
    grad_query,
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
    grad_query_strides,
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
    PACK: tl.constexpr,
    TOKENS: tl.constexpr,
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
    """``grad_query`` of ``PACK`` heads x ``TOKENS`` queries; grid and order as in the forward."""
    ROWS: tl.constexpr = PACK * TOKENS
    program = tl.program_id(0)
    packs = num_heads // PACK
    head = (program % packs) * PACK
    tile = num_tiles - 1 - (program // packs) % num_tiles
    batch = program // packs // num_tiles
    kv_head = head // GROUP
    first = tile * TOKENS
    row = tl.arange(0, ROWS)
    query_index = first + row % TOKENS

    query_tile = load_packed_rows(
        query, batch, head, first, query_strides, q_len, PACK, TOKENS, DIM, BLOCK_DIM
    )
    grad_tile = load_packed_rows(
        grad_out,
        batch,
        head,
        first,
        grad_out_strides,
        q_len,
        PACK,
        TOKENS,
        VALUE_DIM,
        BLOCK_VALUE_DIM,
    )
    row_offset = (batch * num_heads + head + row // TOKENS).to(tl.int64) * q_len + query_index
    inside = query_index < q_len
    row_lse_log2 = tl.load(lse + row_offset, mask=inside, other=0.0) * LOG2_E
    row_delta = tl.load(delta + row_offset, mask=inside, other=0.0)
    key_source = head_source(key, batch, kv_head, key_strides, TMA)
    value_source = head_source(value, batch, kv_head, value_strides, TMA)
    q_batch_vals = q_vals + batch.to(tl.int64) * q_batch_stride
    k_batch_vals = k_vals + batch.to(tl.int64) * k_batch_stride
    scale_log2 = scale * LOG2_E
    block = first // Q_BLOCK

    acc = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    for turn in tl.static_range(2 if HAS_FULL else 1):
        if turn == 0:
            count, indices = list_row(
                part_counts, part_indices, batch, head, block, list_strides, part_columns
            )
        else:
            count, indices = list_row(
                full_counts, full_indices, batch, head, block, list_strides, full_columns
            )
        acc = _visit(
            acc,
            query_tile,
            grad_tile,
            row_lse_log2,
            row_delta,
            query_index[:, None],
            key_source,
            value_source,
            count,
            indices,
            batch,
            kv_head,
            key_strides,
            value_strides,
            q_batch_vals,
            k_batch_vals,
            q_row_stride,
            k_row_stride,
            q_len,
            kv_len,
            scale_log2,
            PROGRAM,
            turn == 0,
            BLOCK_N,
            KV_BLOCK,
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
        grad_query,
        acc * scale,
        batch,
        head,
        first,
        grad_query_strides,
        q_len,
        PACK,
        TOKENS,
        DIM,
        BLOCK_DIM,
    )
