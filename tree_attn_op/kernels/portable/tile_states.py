"""The states of tiles inside a Triton kernel: three-valued logic over the bounds of the values.

The device twin of ``Predicate.classify``: EMPTY and FULL are certain, PARTIAL is "not decided".
"""

from __future__ import annotations

import triton
import triton.language as tl

from tree_attn_op.kernels.opcodes import (
    AND,
    EQ,
    FALSE,
    GT,
    K_INDEX,
    K_ROW,
    LE,
    LT,
    NE,
    NONE,
    OR,
    Q_INDEX,
    Q_ROW,
    TRUE,
)

_INT32_MIN = tl.constexpr(-(2**31))
_INT32_MAX = tl.constexpr(2**31 - 1)


@triton.jit
def _term_bounds(
    KIND: tl.constexpr,
    NUMBER: tl.constexpr,
    q_low,
    q_high,
    k_low,
    k_high,
    q_bounds,
    k_bounds,
    q_tile,
    k_tile,
    q_inside,
    k_inside,
    num_q,
    num_k,
):
    if KIND == Q_INDEX:
        return q_low, q_high
    elif KIND == K_INDEX:
        return k_low, k_high
    elif KIND == Q_ROW:
        base = q_bounds + 2 * NUMBER * num_q + q_tile
        return tl.load(base, q_inside, other=0), tl.load(base + num_q, q_inside, other=0)
    elif KIND == K_ROW:
        base = k_bounds + 2 * NUMBER * num_k + k_tile
        return tl.load(base, k_inside, other=0), tl.load(base + num_k, k_inside, other=0)
    else:
        number = tl.full((1,), NUMBER, tl.int64)
        return number, number


@triton.jit
def _side_bounds(
    P: tl.constexpr,
    AT: tl.constexpr,
    WRAPS_AT_32: tl.constexpr,
    q_low,
    q_high,
    k_low,
    k_high,
    q_bounds,
    k_bounds,
    q_tile,
    k_tile,
    q_inside,
    k_inside,
    num_q,
    num_k,
):
    """(least, greatest, whether they hold) of the side at offset AT of the program."""
    # fmt: off
    low, high = _term_bounds(
        P[AT], P[AT + 1], q_low, q_high, k_low, k_high,
        q_bounds, k_bounds, q_tile, k_tile, q_inside, k_inside, num_q, num_k,
    )
    if P[AT + 2] == NONE:
        return low, high, low == low
    else:
        minus_low, minus_high = _term_bounds(
            P[AT + 2], P[AT + 3], q_low, q_high, k_low, k_high,
            q_bounds, k_bounds, q_tile, k_tile, q_inside, k_inside, num_q, num_k,
        )
        # fmt: on
        least = low - minus_high
        greatest = high - minus_low
        if WRAPS_AT_32:
            holds = (least >= _INT32_MIN) & (greatest <= _INT32_MAX)
        else:
            # x - y wrapped if x and y differ in sign and the result's sign is not x's.
            wrapped = ((low ^ minus_high) & (low ^ least)) | (
                (high ^ minus_low) & (high ^ greatest)
            )
            holds = wrapped >= 0
        return least, greatest, holds


@triton.jit
def _classify(
    P: tl.constexpr,
    AT: tl.constexpr,
    WRAPS_AT_32: tl.constexpr,
    q_low,
    q_high,
    k_low,
    k_high,
    q_bounds,
    k_bounds,
    q_tile,
    k_tile,
    q_inside,
    k_inside,
    num_q,
    num_k,
):
    """(some pair of the tile may satisfy the node at AT, every pair must)."""
    # fmt: off
    N: tl.constexpr = P[AT + 1]
    if P[AT] == AND or P[AT] == OR:
        may, must = _classify(
            P, P[AT + 2], WRAPS_AT_32, q_low, q_high, k_low, k_high,
            q_bounds, k_bounds, q_tile, k_tile, q_inside, k_inside, num_q, num_k,
        )
        for i in tl.static_range(1, N):
            part_may, part_must = _classify(
                P, P[AT + 2 + i], WRAPS_AT_32, q_low, q_high, k_low, k_high,
                q_bounds, k_bounds, q_tile, k_tile, q_inside, k_inside, num_q, num_k,
            )
            if P[AT] == AND:
                may = may & part_may
                must = must & part_must
            else:
                may = may | part_may
                must = must | part_must
        return may, must
    elif P[AT] == TRUE:
        return q_low + k_low == q_low + k_low, q_low + k_low == q_low + k_low
    elif P[AT] == FALSE:
        return q_low + k_low != q_low + k_low, q_low + k_low != q_low + k_low
    else:
        a, b, left_holds = _side_bounds(
            P, AT + 1, WRAPS_AT_32, q_low, q_high, k_low, k_high,
            q_bounds, k_bounds, q_tile, k_tile, q_inside, k_inside, num_q, num_k,
        )
        c, d, right_holds = _side_bounds(
            P, AT + 5, WRAPS_AT_32, q_low, q_high, k_low, k_high,
            q_bounds, k_bounds, q_tile, k_tile, q_inside, k_inside, num_q, num_k,
        )
        # fmt: on
        holds = left_holds & right_holds
        if P[AT] == LT:
            may = a < d
            must = b < c
        elif P[AT] == LE:
            may = a <= d
            must = b <= c
        elif P[AT] == GT:
            may = b > c
            must = a > d
        elif P[AT] == EQ:
            may = (a <= d) & (c <= b)
            must = (a == b) & (c == d) & (a == c)
        elif P[AT] == NE:
            may = ~((a == b) & (c == d) & (a == c))
            must = ~((a <= d) & (c <= b))
        else:
            may = b >= c
            must = a >= d
        return may | ~holds, must & holds


@triton.jit
def tile_states(
    P: tl.constexpr,
    WRAPS_AT_32: tl.constexpr,
    q_tile,
    k_tile,
    q_inside,
    k_inside,
    q_bounds,
    k_bounds,
    coarse,
    q_len,
    kv_len,
    num_q,
    num_k,
    num_coarse_k,
    Q_TILE: tl.constexpr,
    K_TILE: tl.constexpr,
    Q_RATIO: tl.constexpr,
    K_RATIO: tl.constexpr,
    HAS_COARSE: tl.constexpr,
    FULL_AT_ENDS: tl.constexpr,
):
    """0, 1 or 2 (EMPTY, PARTIAL, FULL) for a vector of tiles.

    Unless FULL_AT_ENDS, a tile that runs over an end is at most PARTIAL by the predicate.
    """
    q_low = q_tile.to(tl.int64) * Q_TILE
    q_high = tl.minimum(q_low + Q_TILE, q_len) - 1
    k_low = k_tile.to(tl.int64) * K_TILE
    k_high = tl.minimum(k_low + K_TILE, kv_len) - 1
    # fmt: off
    may, must = _classify(
        P, 0, WRAPS_AT_32, q_low, q_high, k_low, k_high,
        q_bounds, k_bounds, q_tile, k_tile, q_inside, k_inside, num_q, num_k,
    )
    # fmt: on
    if not FULL_AT_ENDS:
        whole = (q_low + Q_TILE <= q_len) & (k_low + K_TILE <= kv_len)
        must = must & whole
    state = may.to(tl.int32) + must.to(tl.int32)
    if HAS_COARSE:
        inside = q_inside & k_inside
        block = (q_tile // Q_RATIO).to(tl.int64) * num_coarse_k + k_tile // K_RATIO
        given = tl.load(coarse + block, inside, other=0).to(tl.int32)
        state = tl.where(given == 1, state, given)
    return state
