"""How much a tree saves, and its shape."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .arrays import Array


@dataclass(frozen=True)
class TreeStatistics:
    """Figures of a tree, for logs.

    Attributes:
        trajectories: their number.
        tokens: N, the tokens of the pack.
        trajectory_tokens: T, the tokens of all trajectories unpacked.
        tree_token_ratio: N / T, the share of tokens that is left to compute; 1.0 for T = 0.
        attention_pairs: (token, ancestor or self) pairs of the pack: its useful attention work.
        trajectory_attention_pairs: the pairs of causal attention over all trajectories unpacked.
        roots, leaves, forks: tokens without a parent, without a child, with several children.
        max_depth: the tokens of the longest path from a root.
    """

    trajectories: int
    tokens: int
    trajectory_tokens: int
    tree_token_ratio: float
    attention_pairs: int
    trajectory_attention_pairs: int
    roots: int
    leaves: int
    forks: int
    max_depth: int

    @classmethod
    def of(cls, parents: Array, depth: Array, lengths: Array) -> TreeStatistics:
        """Of a tree with these `parents` [N], `depth` [N] and trajectory `lengths` [M]."""
        children = np.bincount(parents[parents >= 0], minlength=parents.size)
        total = int(lengths.sum())
        return cls(
            trajectories=lengths.size,
            tokens=parents.size,
            trajectory_tokens=total,
            tree_token_ratio=parents.size / total if total else 1.0,
            attention_pairs=int((depth + 1).sum()),
            trajectory_attention_pairs=int((lengths * (lengths + 1) // 2).sum()),
            roots=int((parents < 0).sum()),
            leaves=int((children == 0).sum()),
            forks=int((children > 1).sum()),
            max_depth=int(depth.max(initial=-1)) + 1,
        )
