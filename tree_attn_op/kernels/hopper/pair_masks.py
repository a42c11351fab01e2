"""Masks of the scores of 64 query tokens by a pair of key tiles.

``values`` is ``(q_vals, q_batch_stride, q_row_stride, k_vals, k_batch_stride, k_row_stride)``.
``Q_TAIL`` and ``KV_TAIL`` say that a length is no multiple of its tile.
"""

from __future__ import annotations

from .compat import gl, gluon
from .masking import evaluate
from .schedule import KEY_TILE, first_tile


@gluon.jit
def _evaluate_pair(
    q_token, tile_0, tile_1, batch, values, q_len, kv_len, PROGRAM: gl.constexpr,
    Q_TAIL: gl.constexpr, KV_TAIL: gl.constexpr, ROWS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """The predicate for 64 query tokens and a pair of key tiles."""
    q_vals, q_batch_stride, q_stride, k_vals, k_batch_stride, k_stride = values
    q = q_token + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    k = pair_keys(tile_0, tile_1, LAYOUT)
    if Q_TAIL:
        q = gl.minimum(q, q_len - 1)
    if KV_TAIL:
        k = gl.minimum(k, kv_len - 1)
    return evaluate(
        PROGRAM, 0, gl.expand_dims(q, 1), gl.expand_dims(k, 0),
        q_vals + batch.to(gl.int64) * q_batch_stride, k_vals + batch.to(gl.int64) * k_batch_stride,
        q_stride, k_stride,
    )  # fmt: skip


@gluon.jit
def pair_keys(tile_0, tile_1, LAYOUT: gl.constexpr):
    """Key tokens of the columns of a pair's scores."""
    column = gl.arange(0, 2 * KEY_TILE, gl.SliceLayout(0, LAYOUT))
    return column + gl.where(column < KEY_TILE, tile_0 * KEY_TILE, (tile_1 - 1) * KEY_TILE)


@gluon.jit
def mask_partial_pair(
    scores, q_token, tile_0, tile_1, batch, values, q_len, kv_len, PROGRAM: gl.constexpr,
    Q_TAIL: gl.constexpr, KV_TAIL: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Scores of two partial tiles, -inf where the predicate hides a key.
    ``q_token`` is the first query token of the rows.
    """
    seen = _evaluate_pair(
        q_token, tile_0, tile_1, batch, values, q_len, kv_len, PROGRAM, Q_TAIL, KV_TAIL,
        scores.shape[0], LAYOUT,
    )  # fmt: skip
    scores = gl.where(seen, scores, -float("inf"))
    if KV_TAIL:
        scores = mask_tail(scores, tile_0, tile_1, kv_len, LAYOUT)
    return scores


@gluon.jit
def mask_tail(scores, tile_0, tile_1, kv_len, LAYOUT: gl.constexpr):
    """Scores of two tiles, -inf behind the last key."""
    inside = pair_keys(tile_0, tile_1, LAYOUT) < kv_len
    return gl.where(gl.expand_dims(inside, 0), scores, -float("inf"))


@gluon.jit
def mask_first_pair(
    scores, q_token, first_0, first_1, batch, values, q_len, kv_len,
    PROGRAM: gl.constexpr, Q_TAIL: gl.constexpr, KV_TAIL: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Scores of a row's first pair, of any states: -inf for hidden keys and in dead tiles."""
    tile_0, state_0 = first_tile(first_0)
    tile_1, state_1 = first_tile(first_1)
    # A dead tile has number 0: its values are read too, and lie within the sequence.
    seen = _evaluate_pair(
        q_token, tile_0, tile_1, batch, values, q_len, kv_len, PROGRAM, Q_TAIL, KV_TAIL,
        scores.shape[0], LAYOUT,
    )  # fmt: skip
    column = gl.arange(0, 2 * KEY_TILE, gl.SliceLayout(0, LAYOUT))
    state = gl.expand_dims(gl.where(column < KEY_TILE, state_0, state_1), 0)
    scores = gl.where(seen | (state == 2), scores, -float("inf"))
    scores = gl.where(state == 0, -float("inf"), scores)
    if KV_TAIL:
        scores = mask_tail(scores, tile_0, tile_1, kv_len, LAYOUT)
    return scores
