"""The mask of a tree and its tiles as a PNG."""

from __future__ import annotations

from pathlib import Path

from tree_attn_op import PrefixTree
from tree_attn_op.tree.plot import tile_counts, tile_states


def draw(tree: PrefixTree, path: Path) -> dict[str, int]:
    """Draw the mask and its tiles with matplotlib; returns the number of tiles of each kind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tree.plot_mask().savefig(path, dpi=110)
    return tile_counts(tile_states(tree.mask.lists))
