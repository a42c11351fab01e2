"""Pictures of trees and of masks with their tiles; matplotlib is imported when one is drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..arguments import check_int, check_type
from ..blocks import BlockLists, cdiv, listed_states
from ..mask import TreeMask
from ..predicate import EMPTY, FULL, PARTIAL
from .arrays import Array
from .layout import branch_starts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = {"empty": "#f2f2f2", "partial": "#e69f00", "full": "#0072b2"}
_STATES = {"empty": EMPTY, "partial": PARTIAL, "full": FULL}
_PIXELS = 1024
"""Most pairs a side that the picture of a mask samples."""


def tile_states(lists: BlockLists, batch: int = 0, head: int = 0) -> Tensor:
    """EMPTY, PARTIAL or FULL for each tile, int8 [tile rows, tile columns] on the CPU."""
    states = listed_states(*lists.key_side, cdiv(lists.kv_len, lists.kv_block_size))
    return states[min(batch, states.shape[0] - 1), min(head, states.shape[1] - 1)].cpu()


def tile_counts(states: Tensor) -> dict[str, int]:
    """How many tiles are "empty", "partial" and "full"."""
    return {name: int((states == state).sum()) for name, state in _STATES.items()}


def plot_mask(mask: TreeMask, *, batch: int = 0) -> Figure:
    """Two pictures side by side: which keys each query sees, and the tiles that are listed.

    Of a long mask about a thousand queries and keys are sampled evenly, so that the memory does
    not grow with its square.

    Args:
        mask: the mask.
        batch: the batch row to draw.

    Returns:
        A figure that belongs to no window: `figure.savefig(path)` writes it, notebooks show it.

    Raises:
        ImportError: matplotlib is not installed.
        TypeError, ValueError: no mask, or no batch row of it.
    """
    check_type("mask", mask, TreeMask, "a TreeMask")
    check_int("batch", batch, least=0)
    if batch >= max(mask.shape[0], 1):
        raise ValueError(f"batch must be a row of the mask's {mask.shape[0]}, got {batch}")
    figure = _figure(14, 7.4)
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    left, right = figure.subplots(1, 2)
    states = tile_states(mask.lists, batch)
    frame = (0, max(mask.kv_len, 1), max(mask.q_len, 1), 0)
    pairs = _sampled_pairs(mask, batch)
    left.imshow(pairs.numpy(), cmap="Greys", extent=frame, vmin=0, vmax=1, interpolation="nearest")
    left.set_title(f"What each of {mask.q_len} tokens sees")
    q_block, kv_block = mask.lists.q_block_size, mask.lists.kv_block_size
    rows, columns = states.shape
    right.imshow(
        states.numpy(),
        cmap=ListedColormap(list(_COLORS.values())),
        vmin=EMPTY,
        vmax=FULL,
        extent=(0, max(columns, 1) * kv_block, max(rows, 1) * q_block, 0),
        interpolation="nearest",
    )
    right.set_title(f"Its tiles of {q_block} x {kv_block}")
    right.legend(
        handles=[
            Patch(color=_COLORS[name], label=f"{name}: {count}")
            for name, count in tile_counts(states).items()
        ],
        loc="upper right",
    )
    for axes in (left, right):
        axes.set(xlabel="key", ylabel="query", xlim=frame[:2], ylim=frame[2:])
    return figure


def plot_tree(
    parents: Array, depth: Array, subtree_end: Array, multiplicity: Array, axes: Axes | None
) -> Figure:
    """See PrefixTree.plot; all arrays are [N]."""
    if axes is None:
        axes = _figure(10, 6).subplots()
    from matplotlib.collections import LineCollection

    start = branch_starts(parents)
    length = np.diff(start, append=parents.size)
    leaf = subtree_end[start] == start + length
    # A stretch is drawn halfway between the first and the last leaf below it.
    leaves_before = np.append(0, np.cumsum(leaf))
    stop = np.searchsorted(start, subtree_end[start])
    height = (leaves_before[:-1] + leaves_before[stop] - 1) / 2
    left = depth[start]
    bars = np.stack([np.stack([left, height], 1), np.stack([left + length, height], 1)], 1)
    inner = parents[start] >= 0
    above = np.searchsorted(start, parents[start[inner]], side="right") - 1
    joints = np.stack(
        [np.stack([left[inner], height[above]], 1), np.stack([left[inner], height[inner]], 1)], 1
    )
    axes.add_collection(LineCollection(list(joints), colors="#999999", linewidths=0.8))
    collection = LineCollection(list(bars), cmap="viridis", linewidths=3.0)
    collection.set_array(multiplicity[start])
    axes.add_collection(collection)
    axes.set(
        xlabel="depth in tokens",
        ylabel="leaf",
        xlim=(0, max(int(depth.max(initial=0)) + 1, 1)),
        ylim=(max(int(leaf.sum()), 1) - 0.5, -0.5),
        title=f"{parents.size} tokens in {start.size} stretches, {int(leaf.sum())} leaves",
    )
    figure: Any = axes.figure
    figure.colorbar(collection, ax=axes, label="trajectories through a stretch")
    return figure


def _sampled_pairs(mask: TreeMask, batch: int) -> Tensor:
    """bool [at most about _PIXELS, likewise]: pairs of the mask, evenly spaced."""
    lists = mask.lists
    q, k = (
        torch.arange(0, size, cdiv(size, _PIXELS) or 1, device=mask.device)
        for size in (mask.q_len, mask.kv_len)
    )
    row, column = q[:, None], k[None, :]
    at = [min(batch, vals.shape[0] - 1) for vals in (mask.q_vals, mask.k_vals)]
    holds = mask.predicate.evaluate(
        row,
        column,
        [vals[row] for vals in mask.q_vals[at[0]]],
        [vals[column] for vals in mask.k_vals[at[1]]],
    ).cpu()
    listed = tile_states(lists, batch)[
        row.cpu() // lists.q_block_size, column.cpu() // lists.kv_block_size
    ]
    return torch.where(listed == PARTIAL, holds, listed == FULL)


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install tree-attn-op[plot]") from error
    # Not through pyplot, which would keep the figure and choose a window system.
    return Figure(figsize=(width, height), layout="constrained")
