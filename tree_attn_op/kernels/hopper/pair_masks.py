"""Masks of the scores of 64 query tokens by a pair of key tiles.

``values`` is ``(q_vals, q_batch_stride, q_row_stride, k_vals, k_batch_stride, k_row_stride)``.
``Q_TAIL`` and ``KV_TAIL`` say that a length is no multiple of its tile.
"""

from __future__ import annotations

from .compat import gl, gluon
from .masking import seen_scores
from .schedule import KEY_TILE, coded_tile


@gluon.jit
def _mask_tile(
    scores, q_token, code, batch, values, q_len, kv_len, PROGRAM: gl.constexpr,
    Q_TAIL: gl.constexpr, KV_TAIL: gl.constexpr,
):  # fmt: skip
    """Scores of one key tile."""
    LAYOUT: gl.constexpr = scores.type.layout
    q_vals, q_batch_stride, q_stride, k_vals, k_batch_stride, k_stride = values
    tile, state = coded_tile(code)
    key = tile * KEY_TILE + gl.arange(0, KEY_TILE, gl.SliceLayout(0, LAYOUT))
    if state != 2:
        q = q_token + gl.arange(0, scores.shape[0], gl.SliceLayout(1, LAYOUT))
        k = key
        if Q_TAIL:
            q = gl.minimum(q, q_len - 1)
        if KV_TAIL:
            k = gl.minimum(key, kv_len - 1)
        scores = seen_scores(
            PROGRAM, scores, gl.expand_dims(q, 1), gl.expand_dims(k, 0), state,
            q_vals + batch.to(gl.int64) * q_batch_stride,
            k_vals + batch.to(gl.int64) * k_batch_stride, q_stride, k_stride, True,
        )  # fmt: skip
    if KV_TAIL:  # noqa: SIM102 - one is known to the compiler
        if (tile + 1) * KEY_TILE > kv_len:
            scores = gl.where(gl.expand_dims(key < kv_len, 0), scores, -float("inf"))
    return scores


@gluon.jit
def mask_pair(
    scores, q_token, code_0, code_1, batch, values, q_len, kv_len,
    PROGRAM: gl.constexpr, Q_TAIL: gl.constexpr, KV_TAIL: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Scores of a pair of key tiles, -inf for keys that are hidden, dead or behind the last.

    Args:
        scores: float32 ``[64, 128]`` in ``LAYOUT``.
        q_token: the first query token of the rows.
        code_0, code_1: both tiles with their states, see ``coded_tile``.
    """
    halves = gl.reshape(scores, [scores.shape[0], 2, KEY_TILE])
    low, high = gl.split(gl.permute(halves, (0, 2, 1)))
    low = _mask_tile(low, q_token, code_0, batch, values, q_len, kv_len, PROGRAM, Q_TAIL, KV_TAIL)
    high = _mask_tile(
        high, q_token, code_1, batch, values, q_len, kv_len, PROGRAM, Q_TAIL, KV_TAIL
    )
    joined = gl.reshape(gl.permute(gl.join(low, high), (0, 2, 1)), scores.shape)
    return gl.convert_layout(joined, LAYOUT, assert_trivial=True)


@gluon.jit
def mask_tail(scores, tile_0, tile_1, kv_len, LAYOUT: gl.constexpr):
    """Scores ``[64, 128]`` of two full tiles, -inf behind the last key."""
    column = gl.arange(0, 2 * KEY_TILE, gl.SliceLayout(0, LAYOUT))
    tile = gl.where(column < KEY_TILE, tile_0, tile_1)
    inside = tile * KEY_TILE + column % KEY_TILE < kv_len
    return gl.where(gl.expand_dims(inside, 0), scores, -float("inf"))
