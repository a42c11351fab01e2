"""Which form of a kernel pays where rows are long, decided on the device, where the lists lie.

The fast form of the backward adds dQ up in memory. Where a key tile is seen by few queries, that
costs more than the two products that the deterministic form does again (measured: bench/NOTES.md).
How many see it only the lists know, and asking would make the host wait. So both forms are
launched, and one of them finds that it has nothing to do.

The forward kernel has code for both kinds of rows (``forward_kernel.py``); the launch before it,
which orders the rows, says which runs for all of them: that of the first batch, where batches have
lists of their own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..launching import Launch

LONG_ROWS = {1: 12, 2: 66}
"""Query tiles of 64 that a pair of key tiles must list on average for the fast form to be faster
by more than 10%, by the number of 64-column chunks of the wider of the two head dims."""

FEW_TILES = 64
"""Query tiles of 64 below which only the deterministic form is launched: there calls wait for the
host, which launches four kernels more for both. Where that ends is an estimate, not measured."""

LONG_LISTS = 10
"""Key tiles of 64 that a row must list on average for the forward to take it as long."""


@triton.jit
def _form_kernel(counts, active, count, tiles, least, BLOCK: tl.constexpr):
    listed = tl.zeros([BLOCK], tl.int64)
    for start in range(0, count, BLOCK):
        index = start + tl.arange(0, BLOCK)
        listed += tl.load(counts + index, index < count, 0)
    fast = (tl.sum(listed, 0) * tiles >= least).to(tl.int32)
    tl.store(active, fast)
    tl.store(active + 1, 1 - fast)


def form_launch(count: int, step_tiles: int, least: int) -> Launch:
    """Which form runs, as the two numbers that the kernels multiply their work by.

    Args:
        count: key pairs of all batches.
        step_tiles: query tiles of 64 in a listed query block.
        least: query tiles that a pair must list on average for the fast form.

    Returns:
        Launches on ``counts``, int32 ``[count, 2]`` (see ``BackwardPreparation``), that fill
        ``active``, int32 ``[2]``: 1 and 0 for the fast form, 0 and 1 for the deterministic one.
    """
    fixed = {"count": 2 * count, "tiles": step_tiles, "least": least * count, "BLOCK": 1024}
    return Launch(_form_kernel, (1,), (), fixed, {})


@triton.jit
def _zero_kernel(acc, active, count, BLOCK: tl.constexpr):
    if tl.load(active) != 0:
        for block in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
            index = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            tl.store(acc + index, tl.zeros([BLOCK], tl.float32), index < count)


def zero_launch(count: int) -> Launch:
    """Launches on float32 ``[count]`` and ``active``: zeros if ``active[0]`` is not 0."""
    block = 4096
    fixed = {"count": count, "BLOCK": block}
    # No more programs than run at once: they may have nothing to do.
    return Launch(_zero_kernel, (min(triton.cdiv(count, block), 2048),), (), fixed, {})
