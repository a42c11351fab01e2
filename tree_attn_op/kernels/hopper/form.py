"""Which form of the backward runs, decided on the device: the fast one pays where rows are long.

The fast form adds dQ up in memory. Where a key tile is seen by few queries, that costs more than
the two products that the deterministic form does again (measured: bench/NOTES.md). How many see it
only the lists know, which lie on the device, and asking would make the host wait. So both forms
are launched, and one of them finds that it has nothing to do.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LONG_ROWS = {1: 10, 2: 36}
"""Query tiles of 64 that a pair of key tiles must list on average for the fast form to pay, by the
number of 64-column chunks of the wider of the two head dims."""


@triton.jit
def _form_kernel(counts, active, count, tiles, least, BLOCK: tl.constexpr):
    listed = tl.zeros([BLOCK], tl.int64)
    for start in range(0, count, BLOCK):
        index = start + tl.arange(0, BLOCK)
        listed += tl.load(counts + index, index < count, 0)
    fast = (tl.sum(listed, 0) * tiles >= least).to(tl.int32)
    tl.store(active, fast)
    tl.store(active + 1, 1 - fast)


def choose_form(counts: Tensor, step_tiles: int, least: int) -> Tensor:
    """Which form runs, as the two numbers that the kernels multiply their work by.

    Args:
        counts: int32 ``[batch, key_pairs, 2]``, what ``merge_lists`` returns.
        step_tiles: query tiles of 64 in a listed query block.
        least: query tiles that a pair must list on average for the fast form.

    Returns:
        int32 ``[2]``: 1 and 0 for the fast form, 0 and 1 for the deterministic one.
    """
    active = torch.empty(2, dtype=torch.int32, device=counts.device)
    _form_kernel[(1,)](
        counts, active, counts.numel(), step_tiles, least * (counts.numel() // 2), BLOCK=1024
    )
    return active


@triton.jit
def _zero_kernel(acc, active, count, BLOCK: tl.constexpr):
    if tl.load(active) != 0:
        index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        tl.store(acc + index, tl.zeros([BLOCK], tl.float32), index < count)


def zero_if(acc: Tensor, active: Tensor) -> None:
    """Fill float32 ``acc`` with zeros if ``active[0]`` is not 0; else leave it as it is."""
    block = 4096
    _zero_kernel[(triton.cdiv(acc.numel(), block),)](acc, active, acc.numel(), BLOCK=block)
