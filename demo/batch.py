"""A GRPO-shaped batch from the text files in demo/data, one token a byte."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

DATA = Path(__file__).with_name("data")
END_OF_TEXT = 256
VOCABULARY = 257


@dataclass(frozen=True)
class Batch:
    """The trajectories of one GRPO step.

    Attributes:
        sequences: int64 token ids of each trajectory: system prompt, problem, completion.
        prompt_lengths: how many tokens of each trajectory are its prompt.
        advantages: float32 [trajectories], the reward less its mean over the problem's group.
        groups: how many problems there are.
    """

    sequences: list[Tensor]
    prompt_lengths: list[int]
    advantages: Tensor
    groups: int


def load(folder: Path = DATA) -> Batch:
    """Read system.txt and, for each problem, prompt.txt, answer.txt and completion_*.txt.

    The reward of a completion is 1 if its last line gives the answer, else 0.
    """
    system = (folder / "system.txt").read_bytes()
    sequences, prompt_lengths, advantages = [], [], []
    problems = sorted(path.parent for path in folder.glob("*/prompt.txt"))
    for problem in problems:
        prompt = system + (problem / "prompt.txt").read_bytes()
        last_line = b"Answer: " + (problem / "answer.txt").read_bytes()
        completions = [path.read_bytes() for path in sorted(problem.glob("completion_*.txt"))]
        for completion in completions:
            sequences.append(torch.tensor([*prompt, *completion, END_OF_TEXT]))
            prompt_lengths.append(len(prompt))
        rewards = torch.tensor([float(text.endswith(last_line)) for text in completions])
        advantages.append(rewards - rewards.mean())
    return Batch(sequences, prompt_lengths, torch.cat(advantages), len(problems))


def policy_loss(logits: list[Tensor], batch: Batch) -> Tensor:
    """The policy-gradient loss: the advantage-weighted log-probability of all completion tokens.

    Args:
        logits: one tensor [length, vocabulary] a trajectory, in the batch's order. Where a prompt
            is stored once, the logits of its last token serve every completion.
        batch: the trajectories.

    Returns:
        A scalar, the mean over completion tokens.
    """
    total = logits[0].new_zeros(())
    count = 0
    for one, tokens, prompt, advantage in zip(
        logits, batch.sequences, batch.prompt_lengths, batch.advantages.tolist(), strict=True
    ):
        targets = tokens[prompt:].to(one.device)
        nll = F.cross_entropy(one[prompt - 1 : -1].float(), targets, reduction="sum")
        total = total + advantage * nll
        count += targets.numel()
    return total / count
