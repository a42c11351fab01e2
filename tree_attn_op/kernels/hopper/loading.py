"""TMA loads and the state of a pair of key tiles, for the producer warps.

Every load is a box of 64 tokens by 64 columns (128 bytes, the widest swizzle), out of a
``[B, H, S, D]`` tensor of any strides. Boxes beyond the tensor's end are filled with zeros.
"""

from __future__ import annotations

from .compat import gl, gluon, mbarrier, tma
from .schedule import KEY_TILE, coded_tile, load_tile


@gluon.jit
def load_rows(
    desc, batch, head, token, bar, boxes, first_box, CHUNKS: gl.constexpr, STRIDE: gl.constexpr
):
    """Issue the TMA loads of 64 tokens: one 64 x 64 box for each 64 columns of the head."""
    for chunk in gl.static_range(CHUNKS):
        tma.async_copy_global_to_shared(
            desc, [batch, head, token, chunk * 64], bar, boxes.index(first_box + chunk * STRIDE)
        )


@gluon.jit
def load_pair(
    desc, batch, head, token_0, token_1, full, empty, boxes, step,
    STAGES: gl.constexpr, CHUNKS: gl.constexpr,
):  # fmt: skip
    """Load two key tiles as the ``step``-th entry of a ring, once its stage is free."""
    stage = step % STAGES
    bar = full.index(stage)
    mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
    mbarrier.expect(bar, 2 * CHUNKS * 64 * 64 * 2)
    first_box = stage * (2 * CHUNKS)
    load_rows(desc, batch, head, token_0, bar, boxes, first_box, CHUNKS, 2)
    load_rows(desc, batch, head, token_1, bar, boxes, first_box + 1, CHUNKS, 2)


@gluon.jit
def load_query_rows(
    desc, batch, head, q_tile, bar, boxes, first_box, PACKED: gl.constexpr, CHUNKS: gl.constexpr
):
    """Load the query-side rows of both consumers: 64 tokens of two heads, or 128 of one."""
    for group in gl.static_range(2):
        if PACKED:
            load_rows(
                desc, batch, head + group, q_tile * 64, bar, boxes, first_box + group * CHUNKS,
                CHUNKS, 1,
            )  # fmt: skip
        else:
            load_rows(
                desc, batch, head, q_tile * 128 + group * 64, bar, boxes,
                first_box + group * CHUNKS, CHUNKS, 1,
            )  # fmt: skip


@gluon.jit
def first_tokens(first_0, first_1, kv_len):
    """First key tokens of a row's first pair; a dead tile's lies behind the last key."""
    tile_0, state_0 = coded_tile(first_0)
    tile_1, state_1 = coded_tile(first_1)
    token_0 = tile_0 * KEY_TILE
    token_1 = tile_1 * KEY_TILE
    if state_0 == 0:
        token_0 = kv_len
    if state_1 == 0:
        token_1 = kv_len
    return token_0, token_1


@gluon.jit
def later_tokens(pair, partial_start, partial_pairs, full_start, list_row, lists):
    """First key tokens of a row's ``pair``-th pair after the first one."""
    tiles = lists[1]
    index = partial_start + 2 * pair
    if pair >= partial_pairs:
        tiles = lists[2]
        index = full_start + 2 * (pair - partial_pairs)
    token_0 = load_tile(tiles, index, list_row, lists[5]) * KEY_TILE
    token_1 = load_tile(tiles, index + 1, list_row, lists[5]) * KEY_TILE
    return token_0, token_1
