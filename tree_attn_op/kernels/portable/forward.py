"""The forward kernel: one program owns a tile of queries and visits the listed key tiles.

Online softmax in base 2 (Milakov and Gimelshein 2018; Dao et al. 2022). The rows of a tile are
``PACK`` heads of one group times ``TOKENS`` tokens: heads that share keys share the loads of a key
tile, and a tile of a given height spans fewer tokens, so fewer masked pairs are computed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tree_attn_op.kernels.masking import evaluate
from tree_attn_op.kernels.portable.tiles import (
    LN_2,
    LOG2_E,
    head_source,
    list_row,
    load_packed_rows,
    load_rows,
    store_packed_rows,
    tile_start,
)


@triton.jit
def _visit(
    acc,
    row_max,
    row_sum,
    query_tile,
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
    """Adds the listed key tiles to the running softmax; ``MASKED`` evaluates the predicate."""
    start = tile_start(indices, 0, count, KV_BLOCK, BLOCK_N)
    for step in range(count * (KV_BLOCK // BLOCK_N)):
        key_tile = load_rows(
            key, batch, kv_head, start, key_strides, kv_len, BLOCK_N, DIM, BLOCK_DIM, EVEN_KV, TMA
        )
        scores = tl.dot(query_tile, tl.trans(key_tile), input_precision=PRECISION)
        key_index = (start + tl.arange(0, BLOCK_N))[None, :]
        if MASKED:
            # Values are read at clamped indices; what is out of bounds is masked or not stored.
            q = query_index if EVEN_Q else tl.minimum(query_index, q_len - 1)
            k = key_index if EVEN_KV else tl.minimum(key_index, kv_len - 1)
            visible = evaluate(PROGRAM, 0, q, k, q_vals, k_vals, q_row_stride, k_row_stride)
            if not EVEN_KV:
                visible = visible & (key_index < kv_len)
            scores = tl.where(visible, scores, -float("inf"))
        elif not EVEN_KV:
            scores = tl.where(key_index < kv_len, scores, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        if MASKED or not EVEN_KV:
            # A row that has seen nothing yet has maximum -inf: any finite offset gives zeros.
            offset = tl.where(new_max == -float("inf"), 0.0, new_max)
        else:
            offset = new_max
        weights = tl.math.exp2(scores * scale_log2 - offset[:, None])
        decay = tl.math.exp2(row_max - offset)
        row_sum = row_sum * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
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
        acc = tl.dot(weights.to(value_tile.dtype), value_tile, acc, input_precision=PRECISION)
        row_max = new_max
        start = tile_start(indices, step + 1, count, KV_BLOCK, BLOCK_N)
    return acc, row_max, row_sum


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
        "q_vals",
        "k_vals",
        "part_counts",
        "part_indices",
        "full_counts",
        "full_indices",
    ],
)
def forward_kernel(
    query,
    key,
    value,
    out,
    lse,
    q_vals,
    k_vals,
    part_counts,
    part_indices,
    full_counts,
    full_indices,
    query_strides,
    key_strides,
    value_strides,
    out_strides,
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
    """``out`` and ``lse`` of ``PACK`` heads x ``TOKENS`` queries.

    Grid: ``(B * num_tiles * num_heads // PACK,)``. Late tiles come first: in a packed tree they
    tend to see the most. Heads are innermost, so that programs that share keys run together.
    """
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
    key_source = head_source(key, batch, kv_head, key_strides, TMA)
    value_source = head_source(value, batch, kv_head, value_strides, TMA)
    q_batch_vals = q_vals + batch.to(tl.int64) * q_batch_stride
    k_batch_vals = k_vals + batch.to(tl.int64) * k_batch_stride
    scale_log2 = scale * LOG2_E
    block = first // Q_BLOCK

    acc = tl.zeros([ROWS, BLOCK_VALUE_DIM], tl.float32)
    row_max = tl.full([ROWS], -float("inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    for turn in tl.static_range(2 if HAS_FULL else 1):
        if turn == 0:
            count, indices = list_row(
                part_counts, part_indices, batch, head, block, list_strides, part_columns
            )
        else:
            count, indices = list_row(
                full_counts, full_indices, batch, head, block, list_strides, full_columns
            )
        acc, row_max, row_sum = _visit(
            acc,
            row_max,
            row_sum,
            query_tile,
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

    # Rows that saw nothing have row_sum 0 and acc 0: they give out 0 and lse -inf.
    acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    store_packed_rows(
        out, acc, batch, head, first, out_strides, q_len, PACK, TOKENS, VALUE_DIM, BLOCK_VALUE_DIM
    )
    lse_row = (batch * num_heads + head + row // TOKENS).to(tl.int64) * q_len + query_index
    row_lse = (row_max + tl.math.log2(row_sum)) * LN_2
    tl.store(lse + lse_row, row_lse, mask=query_index < q_len)
