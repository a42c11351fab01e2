"""Random multi-turn trajectories with forks, and their runs through a model."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from tree_attn_op import PrefixTree

VOCABULARY = 48


def multi_turn(seed: int, *, turns: int = 3, branches: int = 2, longest: int = 12) -> list[Tensor]:
    """Trajectories that share a system prompt, then fork at the end of turns; int64 ``[length]``.

    Some fork within a turn, one ends where others go on, and one shares nothing. Most tokens
    follow from the one before, so that a model has something to learn.
    """
    choose = random.Random(seed)

    def longer(prefix: list[int], least: int) -> list[int]:
        tokens = list(prefix) or [choose.randrange(1, VOCABULARY)]
        for _ in range(choose.randint(least, longest)):
            usual = 1 + (3 * tokens[-1] + 7) % (VOCABULARY - 1)
            tokens.append(usual if choose.random() < 0.7 else choose.randrange(1, VOCABULARY))
        return tokens

    def grow(prefix: list[int], left: int) -> list[list[int]]:
        if left == 0:
            return [prefix]
        return [
            sequence
            for _ in range(choose.randint(1, branches))
            for sequence in grow(longer(prefix, 1), left - 1)
        ]

    system = longer([], 6)
    sequences = [s for _ in range(2) for s in grow(longer(system, 3), turns)]
    stem = sequences[0]
    sequences += [stem[: len(stem) // 2], longer(stem[: len(stem) // 3], 1), longer([], 2)]
    return [torch.tensor(sequence) for sequence in sequences]


def unpacked_logits(model: nn.Module, sequences: list[Tensor]) -> list[Tensor]:
    """Logits ``[length, vocabulary]`` of each trajectory, from a padded batch."""
    # Padding is on the right, where causality hides it.
    rows = model(input_ids=pad_sequence(sequences, batch_first=True), use_cache=False).logits
    return [row[: len(sequence)] for row, sequence in zip(rows, sequences, strict=True)]


def next_token_loss(logits: list[Tensor], sequences: list[Tensor]) -> Tensor:
    """The mean over all trajectories' tokens but their first of the negative log-probability."""
    total = sum(
        F.cross_entropy(one[:-1], tokens[1:], reduction="sum")
        for one, tokens in zip(logits, sequences, strict=True)
    )
    return total / sum(len(tokens) - 1 for tokens in sequences)


def gradients(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    """The gradient by each parameter that has one."""
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {
        name: gradient
        for name, gradient in zip(parameters, found, strict=True)
        if gradient is not None
    }


def assert_equal_runs(
    model: nn.Module,
    tree: PrefixTree,
    packed: Tensor,
    sequences: list[Tensor],
    expected: list[Tensor],
) -> None:
    """Logits of a pack ``[1, N, vocabulary]``, and all gradients, equal those of trajectories."""
    logits = tree.unpack(packed[0], dim=0)
    for index, (one, other) in enumerate(zip(logits, expected, strict=True)):
        torch.testing.assert_close(
            one, other, atol=1e-5, rtol=1e-5, msg=lambda m, i=index: f"trajectory {i}: {m}"
        )
    wanted = gradients(next_token_loss(expected, sequences), model)
    got = gradients(next_token_loss(logits, sequences), model)
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(
            got[name], gradient, atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )
