"""One attention problem: a workload's tree with random inputs of one head layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tree_attn_op import PrefixTree

from .workloads import Workload

Layout = Literal["bhsd", "bshd"]


@dataclass(frozen=True)
class Heads:
    """Query heads, key/value heads and head dim."""

    query: int
    kv: int
    dim: int


@dataclass(frozen=True)
class Problem:
    """The inputs that every implementation gets.

    query and grad_out [1, Hq, N, D], key and value [1, Hkv, N, D]; `pairs` is the number of
    (token, ancestor or self) pairs.
    """

    workload: Workload
    tree: PrefixTree
    heads: Heads
    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor
    pairs: int

    @classmethod
    def make(
        cls,
        workload: Workload,
        heads: Heads,
        dtype: torch.dtype,
        device: str,
        seed: int = 0,
        layout: Layout = "bhsd",
    ) -> Problem:
        """Random inputs; in memory [1, H, N, D] ("bhsd"), or as a model's projections leave them,
        [1, N, H, D] ("bshd")."""
        tree = workload.tree(device)
        generator = torch.Generator(device).manual_seed(seed)

        def random(num_heads: int) -> Tensor:
            shape = (1, tree.num_tokens, num_heads, heads.dim)
            x = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
            x = x.to(dtype).transpose(1, 2)
            return x.contiguous() if layout == "bhsd" else x

        return cls(
            workload=workload,
            tree=tree,
            heads=heads,
            query=random(heads.query),
            key=random(heads.kv),
            value=random(heads.kv),
            grad_out=random(heads.query),
            pairs=int((tree.position_ids + 1).sum()),
        )

    def flops(self, backward: bool) -> float:
        """Useful work: two matrix products over the pairs forward, five backward."""
        return 4.0 * self.heads.dim * self.heads.query * self.pairs * (2.5 if backward else 1.0)
