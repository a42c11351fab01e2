"""The token trees that are measured, read from workloads.json.

The file holds one entry a workload: `nodes`, a list of [parent node or -1, tokens] in DFS
pre-order, or `grpo`, [prompts, prompt_len, n, completion_len]: that many prompts, each with n
completions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tree_attn_op import PrefixTree

WORKLOADS_FILE = Path(__file__).with_name("workloads.json")


@dataclass(frozen=True)
class Workload:
    """A packed token tree.

    Attributes:
        name: how the command line and the reports call it.
        nodes: (parent node or -1, tokens) of each node, in DFS pre-order.
    """

    name: str
    nodes: tuple[tuple[int, int], ...]

    def tree(self, device: str) -> PrefixTree:
        """The tree of the trajectories from each root to each leaf, on `device`."""
        inner = {parent for parent, _ in self.nodes}
        paths: list[np.ndarray] = []
        for node, (parent, tokens) in enumerate(self.nodes):
            before = paths[parent] if parent >= 0 else np.empty(0, dtype=np.int64)
            # The node's number as the id of its tokens: siblings share none and keep their order.
            paths.append(np.concatenate([before, np.full(tokens, node)]))
        leaves = [path for node, path in enumerate(paths) if node not in inner]
        return PrefixTree.from_sequences(leaves, device=device)


def grpo(name: str, prompts: int, prompt_len: int, n: int, completion_len: int) -> Workload:
    """`prompts` prompts with `n` completions each."""
    nodes: list[tuple[int, int]] = []
    for _ in range(prompts):
        prompt = len(nodes)
        nodes.append((-1, prompt_len))
        nodes.extend((prompt, completion_len) for _ in range(n))
    return Workload(name, tuple(nodes))


def load(path: Path = WORKLOADS_FILE) -> dict[str, Workload]:
    """The workloads of a file, by name and in its order."""
    loaded = {}
    for name, entry in json.loads(path.read_text()).items():
        if name == "about":
            continue
        if "grpo" in entry:
            loaded[name] = grpo(name, *entry["grpo"])
        else:
            loaded[name] = Workload(name, tuple((parent, n) for parent, n in entry["nodes"]))
    return loaded


def select(names: Sequence[str] | None) -> list[Workload]:
    """The named workloads of workloads.json, all of them for None; an unknown name is an error."""
    known = load()
    unknown = sorted(set(names or ()) - known.keys())
    if unknown:
        raise ValueError(f"no workload named {', '.join(unknown)}; there are {', '.join(known)}")
    return [known[name] for name in (names or known)]


SMOKE = grpo("smoke", prompts=2, prompt_len=70, n=3, completion_len=33)
