"""Training on trees in bfloat16 against training on the same trajectories unpacked.

    python -m bench.bf16_training --out build/bf16_training.json

A tiny model of Qwen3's shape makes AdamW steps on random multi-turn trees, a new one each step,
from the same weights in several runs: on the trees, and on the trajectories unpacked, in ORDERS
orders, each cut into batches of at most BATCH_TOKENS whose gradients add up. In exact arithmetic
all have the same losses. In bfloat16 already the order changes them, the more so the longer
training goes on, since sums are rounded differently. How much is the largest difference between
any two of the unpacked runs, in the mean over the steps and in the worst step. The tree passes if
it differs from the unpacked runs, in the median over them, by no more than FACTOR times as much
plus MARGIN. Weights are kept in bfloat16 and, in a second trial, in float32 with autocast, where
there is less noise to hide in.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from tree_attn_op import PrefixTree

from . import training
from .model import Model, Shape
from .report import environment

FACTOR = 2.0
MARGIN = 2.0**-12
"""Of the loss: a sixteenth of a unit in the last place of bfloat16."""
ORDERS = 4
BATCH_TOKENS = 512
SHAPE = Shape(
    hidden=128,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=64,
    intermediate=256,
    vocabulary=512,
    rope_theta=1e4,
)
LEARNING_RATE = 1e-3

Weights = Literal["bfloat16", "float32"]


@dataclass(frozen=True)
class Difference:
    """Of the losses of two runs, step by step: absolute, and each as a share of the mean loss."""

    mean: float
    most: float

    @classmethod
    def of(cls, one: list[float], other: list[float]) -> Difference:
        distance = np.abs(np.array(one) - np.array(other)) / np.mean(one)
        return cls(float(distance.mean()), float(distance.max()))


@dataclass(frozen=True)
class Trial:
    """The losses of all runs, and what was made of them.

    Attributes:
        weights: dtype of the weights; float32 ones are used under autocast.
        unpacked: the losses of each unpacked run, by step.
        packed: those of the run on trees.
        order: what the order of the trajectories changes, the largest of all pairs.
        tree: what the tree changes, the median over the unpacked runs.
        passed: whether that is within FACTOR times the former plus MARGIN, mean and most.
    """

    weights: Weights
    unpacked: list[list[float]]
    packed: list[float]
    order: Difference
    tree: Difference
    passed: bool

    @classmethod
    def of(cls, weights: Weights, unpacked: list[list[float]], packed: list[float]) -> Trial:
        pairs = [Difference.of(*pair) for pair in itertools.combinations(unpacked, 2)]
        order = Difference(*(max(values) for values in zip(*map(astuple, pairs), strict=True)))
        to_each = [astuple(Difference.of(one, packed)) for one in unpacked]
        tree = Difference(*(float(np.median(values)) for values in zip(*to_each, strict=True)))
        passed = (
            tree.mean <= FACTOR * order.mean + MARGIN and tree.most <= FACTOR * order.most + MARGIN
        )
        return cls(weights, unpacked, packed, order, tree, passed)


def random_tree(seed: int, vocabulary: int, device: str) -> PrefixTree:
    """Two conversations under one system prompt that fork at several turns.

    Most tokens follow from the one before, so that there is something to learn.
    """
    choose = random.Random(seed)
    nodes: list[tuple[int, list[int]]] = []

    def grow(parent: int, turns_left: int) -> None:
        token = nodes[parent][1][-1] if parent >= 0 else choose.randrange(vocabulary)
        tokens = []
        for _ in range(choose.randint(12, 60)):
            usual = (3 * token + 7) % vocabulary
            token = usual if choose.random() < 0.7 else choose.randrange(vocabulary)
            tokens.append(token)
        nodes.append((parent, tokens))
        node = len(nodes) - 1
        if turns_left:
            for _ in range(choose.randint(1, 3) if parent >= 0 else 2):
                grow(node, turns_left - 1)

    grow(-1, 3)
    return PrefixTree.from_nodes(nodes, device=device)


def variant(tree: PrefixTree, order: int | None, step: int) -> training.Variant:
    """The step on a tree, or on its trajectories in one of the orders."""
    if order is None:
        return training.tree_variant("op", tree, SHAPE.head_dim, compiled=False)
    sequences = tree.unpack(tree.input_ids)
    places = list(range(len(sequences)))
    random.Random(ORDERS * step + order).shuffle(places)
    batches = training.unpacked_batches(sequences, BATCH_TOKENS, places)
    return training.Variant(training.UNPACKED, training.attend_unpacked, batches)


def train(order: int | None, weights: Weights, steps: int, device: str) -> list[float]:
    """The losses of one run: of an order of the trajectories, or of the trees for None."""
    with torch.device(device):
        model = Model(SHAPE).to(getattr(torch, weights)).initialise(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    autocast = torch.bfloat16 if weights == "float32" else None
    losses = []
    for step in range(steps):
        tree = random_tree(step, SHAPE.vocabulary, device)
        one = variant(tree, order, step)
        losses.append(training.step(model, optimizer, one, autocast=autocast))
    return torch.stack(losses).tolist()


def run_trial(weights: Weights, steps: int, device: str) -> Trial:
    """All runs with weights of one dtype."""
    unpacked = [train(order, weights, steps, device) for order in range(ORDERS)]
    return Trial.of(weights, unpacked, train(None, weights, steps, device))


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.bf16_training", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, default=Path("build/bf16_training.json"))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    options = parser.parse_args(args)
    trials = [
        run_trial(weights, options.steps, options.device) for weights in ("bfloat16", "float32")
    ]
    about = environment(options.device)
    about |= {"steps": str(options.steps), "orders": str(ORDERS)}
    about |= {"factor": str(FACTOR), "margin": str(MARGIN)}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    results = {"environment": about, "trials": [asdict(trial) for trial in trials]}
    options.out.write_text(json.dumps(results, indent=1) + "\n")
    print(
        "| weights | loss, first to last | order: mean, most | tree: mean, most | within noise |"
    )
    print("| --- | --- | --- | --- | --- |")
    for trial in trials:
        first, last = trial.packed[0], trial.packed[-1]
        cells = [trial.weights, f"{first:.3f} to {last:.3f}"]
        cells += [f"{one.mean:.1e}, {one.most:.1e}" for one in (trial.order, trial.tree)]
        print(f"| {' | '.join([*cells, 'yes' if trial.passed else 'NO'])} |")
    print(f"Written to {options.out}")


if __name__ == "__main__":
    main()
