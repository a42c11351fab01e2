"""The buffer in which the fast backward adds up dQ."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..launching import Launch
from .compat import TensorDescriptor, gl


@triton.jit
def _finish_kernel(
    acc, dq, active, dq_batch, dq_head, dq_row, dq_column, batches, heads, q_len, width, tiles,
    scale,
    CONDITIONAL: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    count = batches * heads * tiles
    if CONDITIONAL:
        count *= tl.load(active)
    for item in range(tl.program_id(0), count, tl.num_programs(0)):
        tile = item % tiles
        batch = tl.cast(item // tiles // heads, tl.int64)
        head = tl.cast(item // tiles % heads, tl.int64)
        parts = tl.load(acc + tl.cast(item, tl.int64) * (64 * WIDTH) + tl.arange(0, 64 * WIDTH))
        # Blocks of eight columns; in one (warp, 8 rows, 4 columns, upper or lower, 2 columns).
        parts = tl.reshape(parts, [WIDTH // 8, 4, 8, 4, 2, 2])
        rows = tl.reshape(tl.permute(parts, (1, 4, 2, 0, 3, 5)), [64, WIDTH])
        row = tile * 64 + tl.arange(0, 64)
        column = tl.arange(0, WIDTH)
        mask = (row < q_len)[:, None] & (column < width)[None, :]
        offset = row.to(tl.int64)[:, None] * dq_row + column[None, :] * dq_column
        tl.store(dq + batch * dq_batch + head * dq_head + offset, rows * scale, mask)


def finish_launch(acc: Tensor, dq: Tensor, scale: float, conditional: bool) -> Launch:
    """Write the summed query gradient, scaled, in its final order and dtype.

    Args:
        acc: float32 ``[B, H, tiles, WIDTH / 8, 4, 8, 4, 2, 2]``, dense. A tile is 64 query rows;
            what belongs to row ``16 a + 8 b + c`` and column ``8 d + 2 e + f`` of it lies at
            ``[d, a, c, e, b, f]``, the order in which a warpgroup's threads hold a product.
        dq: ``[B, H, Q, D]`` with ``D <= WIDTH``, any strides.
        scale: factor of the scores.
        conditional: whether nothing is read or written if the first number of ``active`` is 0.

    Returns:
        Launches on tensors like ``acc`` and ``dq``, and int32 ``active``.
    """
    batch, heads, q_len, width = dq.shape
    tiles = acc.shape[2]
    names = ("dq_batch", "dq_head", "dq_row", "dq_column")
    fixed = {
        **dict(zip(names, dq.stride(), strict=True)),
        "batches": batch, "heads": heads, "q_len": q_len, "width": width, "tiles": tiles,
        "scale": scale, "CONDITIONAL": conditional,
        "WIDTH": 8 * acc.shape[3],
    }  # fmt: skip
    # No more programs than run at once: they may have nothing to do.
    grid = (min(tiles * batch * heads, 2048),)
    return Launch(_finish_kernel, grid, (), fixed, {"num_warps": 4})


def sums_of(acc: Tensor, rows: int) -> TensorDescriptor:
    """A TMA descriptor of boxes of ``rows`` times 256 numbers of the dQ buffer."""
    layout = gl.NVMMASharedLayout(0, 32, rank=2)
    shape = [acc.numel() // 256, 256]
    return TensorDescriptor(acc, shape, [256, 1], [rows, 256], layout)
