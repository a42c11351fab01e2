"""Comparisons of intervals, in three-valued logic."""

from __future__ import annotations

import torch
from torch import Tensor

from .nodes import INT32_RANGE, Op

Bounds = tuple[Tensor, Tensor]
"""Least and greatest value over a tile, int64."""


def subtract_bounds(plus: Bounds, minus: Bounds, dtype: torch.dtype) -> tuple[Bounds, Tensor]:
    """Bounds of ``plus - minus``, and where they hold: where nothing wraps in ``dtype``."""
    low, high = plus[0] - minus[1], plus[1] - minus[0]
    if dtype is torch.int32:
        return (low, high), (low >= INT32_RANGE[0]) & (high <= INT32_RANGE[1])

    # x - y wrapped if x and y differ in sign and the result's sign is not that of x.
    def wrapped(x: Tensor, y: Tensor, result: Tensor) -> Tensor:
        return ((x ^ y) & (x ^ result)) < 0

    safe = ~(wrapped(plus[0], minus[1], low) | wrapped(plus[1], minus[0], high))
    return (low, high), safe


def compare_bounds(op: Op, lhs: Bounds, rhs: Bounds) -> tuple[Tensor, Tensor]:
    """(some pair may satisfy ``op``, every pair must satisfy it)."""
    (a, b), (c, d) = lhs, rhs
    if op is Op.LT:
        return a < d, b < c
    if op is Op.LE:
        return a <= d, b <= c
    if op is Op.GT:
        return b > c, a > d
    if op is Op.GE:
        return b >= c, a >= d
    same = (a == b) & (c == d) & (a == c)
    overlap = (a <= d) & (c <= b)
    return (overlap, same) if op is Op.EQ else (~same, ~overlap)
