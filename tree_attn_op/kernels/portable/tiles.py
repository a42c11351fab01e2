"""Device code that the portable kernels share: reading tiles of rows and lists of blocks."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def head_source(tensor, batch, head, strides, TMA: tl.constexpr):
    """What :func:`load_rows` reads from: a head's base pointer, or the descriptor itself."""
    if TMA:
        return tensor
    else:
        return tensor + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]


@triton.jit
def load_rows(
    source,
    batch,
    head,
    start,
    strides,
    length,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    EVEN: tl.constexpr,
    TMA: tl.constexpr,
):
    """Rows ``start`` to ``start + ROWS`` of one head, ``[ROWS, BLOCK_DIM]``, 0 out of bounds.

    ``EVEN`` says that every row is within ``length``.
    """
    if TMA:
        return source.load([batch, head, start, 0]).reshape(ROWS, BLOCK_DIM)
    else:
        row = tl.arange(0, ROWS)
        dim = tl.arange(0, BLOCK_DIM)
        offsets = row.to(tl.int64)[:, None] * strides[2] + dim[None, :]
        pointers = source + start.to(tl.int64) * strides[2] + offsets
        # Spelled out, because a mask that is always true still costs the load its vector width.
        if EVEN and DIM == BLOCK_DIM:
            return tl.load(pointers)
        elif EVEN:
            return tl.load(pointers, mask=dim[None, :] < DIM, other=0.0)
        elif DIM == BLOCK_DIM:
            return tl.load(pointers, mask=(start + row)[:, None] < length, other=0.0)
        else:
            inside = ((start + row)[:, None] < length) & (dim[None, :] < DIM)
            return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def packed_offsets(
    batch,
    head,
    start,
    strides,
    length,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Offsets of ``TOKENS`` rows of each of ``HEADS`` heads, heads outermost, and which exist.

    Returns:
        int64 and bool, both ``[HEADS * TOKENS, BLOCK_DIM]``.
    """
    row = tl.arange(0, HEADS * TOKENS)
    dim = tl.arange(0, BLOCK_DIM)
    token = start + row % TOKENS
    offsets = batch.to(tl.int64) * strides[0]
    offsets += (head + row // TOKENS).to(tl.int64) * strides[1]
    offsets += token.to(tl.int64) * strides[2]
    return offsets[:, None] + dim[None, :], (token[:, None] < length) & (dim[None, :] < DIM)


@triton.jit
def load_packed_rows(
    tensor,
    batch,
    head,
    start,
    strides,
    length,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """The rows of :func:`packed_offsets`, 0 out of bounds.

    Never through a descriptor: a tile of several heads would then stay in registers, where the
    accumulators need the room, instead of shared memory.
    """
    offsets, inside = packed_offsets(
        batch, head, start, strides, length, HEADS, TOKENS, DIM, BLOCK_DIM
    )
    return tl.load(tensor + offsets, mask=inside, other=0.0)


@triton.jit
def store_packed_rows(
    tensor,
    tile,
    batch,
    head,
    start,
    strides,
    length,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Writes to the rows of :func:`packed_offsets`, in the dtype of ``tensor``."""
    offsets, inside = packed_offsets(
        batch, head, start, strides, length, HEADS, TOKENS, DIM, BLOCK_DIM
    )
    tl.store(tensor + offsets, tile.to(tensor.dtype.element_ty), mask=inside)


@triton.jit
def tile_start(indices, step, count, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """First token of the ``step``-th tile of ``count`` listed blocks; past the end, some token.

    A listed block of ``BLOCK`` tokens is visited as ``BLOCK // TILE`` tiles.
    """
    SPLIT: tl.constexpr = BLOCK // TILE
    block = tl.load(indices + step // SPLIT, mask=step < count * SPLIT, other=0)
    return tl.multiple_of(block * BLOCK + (step % SPLIT) * TILE, TILE)


@triton.jit
def list_row(counts, indices, batch, head, block, strides, columns):
    """Length of one block's list and the pointer to its indices.

    Args:
        counts, indices: dense ``[B or 1, H or 1, blocks]`` and the same with ``columns`` columns.
        strides: elements of ``counts`` between batches and between heads; 0 where broadcast.
    """
    row = batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1] + block
    return tl.load(counts + row), indices + row * columns
