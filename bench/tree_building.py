"""Building and packing trees: PrefixTree against a trie that is built token by token.

``python -m bench.tree_building`` makes one batch of agentic trajectories (a system prompt, tasks,
turns that fork), checks that both build the same tree from it, and times them in turns on one
thread. ``--clock process`` counts the time of this process, for machines that are not idle.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date

import numpy as np
import torch

from tree_attn_op import PrefixTree

VOCABULARY = 150_000
TURNS = 3
BRANCHES = 2
"""Of each turn."""


@dataclass(slots=True)
class Node:
    """One token of a trie."""

    token: int
    children: dict[int, Node] = field(default_factory=dict)


def batch(trajectories: int, tokens: int, seed: int = 0) -> list[list[int]]:
    """Shuffled trajectories with about `tokens` tokens in all.

    All share a system prompt of an eighth of their length. Sixteen at a time share a task prompt
    of an eighth, and fork in two at each of three turns; the rest is a trajectory's own.
    """
    rng = np.random.default_rng(seed)
    length = tokens // trajectories
    piece = length // 8

    def some(mean: int) -> list[int]:
        return rng.integers(0, VOCABULARY, rng.integers(mean // 2, mean * 3 // 2 + 1)).tolist()

    system = some(piece)
    found: list[list[int]] = []
    while len(found) < trajectories:
        paths = [system + some(piece)]
        for _ in range(TURNS):
            paths = [path + some(piece) for path in paths for _ in range(BRANCHES)]
        found += [path + some(3 * piece) for path in paths for _ in range(2)]
    return [found[i] for i in rng.permutation(len(found))[:trajectories]]


def insert(root: Node, sequence: list[int]) -> Node:
    """Add one sequence to a trie; returns its last node."""
    node = root
    for token in sequence:
        child = node.children.get(token)
        if child is None:
            child = node.children[token] = Node(token)
        node = child
    return node


def new_tokens(root: Node, sequence: list[int]) -> int:
    """How many nodes a sequence would add."""
    node = root
    for depth, token in enumerate(sequence):
        child = node.children.get(token)
        if child is None:
            return len(sequence) - depth
        node = child
    return 0


def flatten(root: Node) -> dict[str, list[int]]:
    """Walk a trie depth first: what PrefixTree has as tensors."""
    ids: list[int] = []
    depths: list[int] = []
    parents: list[int] = []
    ends: list[int] = []
    stack = [(child, -1, 0) for _, child in sorted(root.children.items(), reverse=True)]
    leaving = -2
    while stack:
        node, parent, depth = stack.pop()
        if depth == leaving:
            ends[parent] = len(ids)
            continue
        here = len(ids)
        ids.append(node.token)
        parents.append(parent)
        depths.append(depth)
        ends.append(0)
        stack.append((node, here, leaving))
        for _, child in sorted(node.children.items(), reverse=True):
            stack.append((child, here, depth + 1))
    return {"input_ids": ids, "position_ids": depths, "parents": parents, "subtree_end": ends}


def build_trie(sequences: list[list[int]]) -> dict[str, list[int]]:
    root = Node(-1)
    for sequence in sequences:
        insert(root, sequence)
    return flatten(root)


def pack_greedily(sequences: list[list[int]], max_tokens: int) -> list[int]:
    """Sequence by sequence into the first bin with room; returns the tokens of each bin."""
    roots: list[Node] = []
    sizes: list[int] = []
    for sequence in sequences:
        for at, root in enumerate(roots):
            new = new_tokens(root, sequence)
            if sizes[at] + new <= max_tokens:
                break
        else:
            at, new = len(roots), len(sequence)
            roots.append(Node(-1))
            sizes.append(0)
        insert(roots[at], sequence)
        sizes[at] += new
    return sizes


def timed(
    calls: dict[str, Callable[[], object]], rounds: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Seconds of each call, taken in turn."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = clock()
            call()
            times[name].append(clock() - start)
    return times


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trajectories", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--max-tokens", type=int, default=65_536, help="budget of a packed tree")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clock", choices=("wall", "process"), default="wall")
    parser.add_argument("--out", help="write the figures as JSON to this file")
    options = parser.parse_args(args)
    torch.set_num_threads(1)
    lists = batch(options.trajectories, options.tokens)
    tensors = [torch.tensor(sequence) for sequence in lists]
    budget = options.max_tokens

    tree = PrefixTree.from_sequences(tensors)
    for name, values in build_trie(lists).items():
        if getattr(tree, name).tolist() != values:
            raise SystemExit(f"wrong result, no speed reported: {name} differs")
    packed = [one.num_tokens for one in PrefixTree.pack(tensors, budget)]
    greedy = pack_greedily(lists, budget)

    times = timed(
        {
            "PrefixTree.from_sequences, tensors": lambda: PrefixTree.from_sequences(tensors),
            "PrefixTree.from_sequences, lists": lambda: PrefixTree.from_sequences(lists),
            "trie, token by token, lists": lambda: build_trie(lists),
            "PrefixTree.pack, tensors": lambda: PrefixTree.pack(tensors, budget),
            "greedy first fit with tries, lists": lambda: pack_greedily(lists, budget),
        },
        options.rounds,
        time.perf_counter if options.clock == "wall" else time.process_time,
    )
    print(
        f"{len(lists)} trajectories, {sum(map(len, lists))} tokens, {tree.num_tokens} in one tree;"
        f" trees of at most {budget}: {sum(packed)} in {len(packed)}, greedy {sum(greedy)} in "
        f"{len(greedy)}"
    )
    print(f"\n| one thread, {options.clock} clock | median ms | least | most |")
    print("| --- | --- | --- | --- |")
    for name, taken in times.items():
        shown = (
            f"{value * 1e3:.1f}" for value in (statistics.median(taken), min(taken), max(taken))
        )
        print(f"| {name} | {' | '.join(shown)} |")
    if options.out:
        about = {"date": date.today().isoformat(), "torch": torch.__version__, **vars(options)}
        figures = {"about": about, "packed": packed, "greedy": greedy, "seconds": times}
        with open(options.out, "w") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()
