"""Masks of the scores of 64 query tokens by a pair of key tiles.

``values`` is ``(q_vals, q_batch_stride, q_row_stride, k_vals, k_batch_stride, k_row_stride)``.
``Q_TAIL`` and ``KV_TAIL`` say that a length is no multiple of its tile.
"""

from __future__ import annotations

from .compat import gl, gluon
from .masking import seen_scores
from .schedule import KEY_TILE, first_tile


@gluon.jit
def _mask_pair(
    scores, q_token, key, states, batch, values, q_len, kv_len, PROGRAM: gl.constexpr,
    Q_TAIL: gl.constexpr, KV_TAIL: gl.constexpr, STATES: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Scores of 64 query tokens and the keys ``key``, some perhaps behind the last; ``states`` as
    in ``seen_scores``, of columns."""
    q_vals, q_batch_stride, q_stride, k_vals, k_batch_stride, k_stride = values
    q = q_token + gl.arange(0, scores.shape[0], gl.SliceLayout(1, LAYOUT))
    if Q_TAIL:
        q = gl.minimum(q, q_len - 1)
    if KV_TAIL:
        states = gl.where(key < kv_len, states, 0)
        key = gl.minimum(key, kv_len - 1)
    return seen_scores(
        PROGRAM, scores, gl.expand_dims(q, 1), gl.expand_dims(key, 0), gl.expand_dims(states, 0),
        q_vals + batch.to(gl.int64) * q_batch_stride, k_vals + batch.to(gl.int64) * k_batch_stride,
        q_stride, k_stride, KV_TAIL or STATES,
    )  # fmt: skip


@gluon.jit
def _columns(number_0, number_1, LAYOUT: gl.constexpr):
    """A number of each tile of a pair, for its columns."""
    column = gl.arange(0, 2 * KEY_TILE, gl.SliceLayout(0, LAYOUT))
    return gl.where(column < KEY_TILE, number_0, number_1)


@gluon.jit
def _pair_keys(tile_0, tile_1, LAYOUT: gl.constexpr):
    """Key tokens of the columns of a pair's scores."""
    column = gl.arange(0, 2 * KEY_TILE, gl.SliceLayout(0, LAYOUT))
    return column + _columns(tile_0 * KEY_TILE, (tile_1 - 1) * KEY_TILE, LAYOUT)


@gluon.jit
def mask_partial_pair(
    scores, q_token, tile_0, tile_1, batch, values, q_len, kv_len, PROGRAM: gl.constexpr,
    Q_TAIL: gl.constexpr, KV_TAIL: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Scores of two partial tiles, -inf where the predicate hides a key.

    ``q_token`` is the first query token of the rows.
    """
    return _mask_pair(
        scores, q_token, _pair_keys(tile_0, tile_1, LAYOUT), _columns(1, 1, LAYOUT), batch,
        values, q_len, kv_len, PROGRAM, Q_TAIL, KV_TAIL, False, LAYOUT,
    )  # fmt: skip


@gluon.jit
def mask_tail(scores, tile_0, tile_1, kv_len, LAYOUT: gl.constexpr):
    """Scores of two tiles, -inf behind the last key."""
    inside = _pair_keys(tile_0, tile_1, LAYOUT) < kv_len
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
    return _mask_pair(
        scores, q_token, _pair_keys(tile_0, tile_1, LAYOUT), _columns(state_0, state_1, LAYOUT),
        batch, values, q_len, kv_len, PROGRAM, Q_TAIL, KV_TAIL, True, LAYOUT,
    )  # fmt: skip
