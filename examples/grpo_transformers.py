"""GRPO on token trees with Hugging Face transformers: sample, score, pack, train.

Runs on a CPU in seconds: ``python examples/grpo_transformers.py``. A tiny Qwen3 with random
weights learns to answer in even digits. Each step samples groups of completions, packs all
trajectories into trees, and updates the policy on the trees. The first step's loss and gradients
are compared with those of the same trajectories unpacked.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3Config, Qwen3ForCausalLM

from tree_attn_op import PrefixTree
from tree_attn_op.integrations import transformers as tree_transformers

# Tokens: the digits 0 to 9, then these.
SEPARATOR, END, PADDING = 10, 11, 12
VOCABULARY = 13
SYSTEM_PROMPT = [SEPARATOR, 3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, SEPARATOR]

PROBLEMS, GROUP_SIZE, MAX_NEW_TOKENS = 4, 8, 8
MAX_TOKENS_PER_TREE = 160
UPDATES_PER_STEP, CLIP = 2, 0.2


@dataclass
class Rollouts:
    """What one sampling phase gives; lists have one entry a trajectory.

    Attributes:
        sequences: int64 ``[length]``, prompt and completion.
        prompt_lengths: how many tokens of each are its prompt.
        advantages: the reward, centred and scaled within the group of its prompt.
        reward: the mean reward.
    """

    sequences: list[Tensor]
    prompt_lengths: list[int]
    advantages: list[float]
    reward: float


def build_model() -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        eos_token_id=END,
        pad_token_id=PADDING,
    )
    return Qwen3ForCausalLM(config)


def sample(model: Qwen3ForCausalLM) -> Rollouts:
    """Sample a group of completions for each of a few prompts, and score them."""
    prompts = [
        torch.tensor([*SYSTEM_PROMPT, *torch.randint(10, (4,)).tolist(), SEPARATOR])
        for _ in range(PROBLEMS)
    ]
    model.eval()
    # Generation has a cache and no tree; it keeps the attention that serves it best.
    model.set_attn_implementation("sdpa")
    generated = model.generate(
        torch.stack(prompts),
        attention_mask=torch.ones(PROBLEMS, len(prompts[0]), dtype=torch.long),
        do_sample=True,
        num_return_sequences=GROUP_SIZE,
        max_new_tokens=MAX_NEW_TOKENS,
    )
    model.set_attn_implementation("tree_attention")
    start = len(prompts[0])
    sequences = [row[row != PADDING] for row in generated]
    rewards = torch.tensor([reward(sequence[start:]) for sequence in sequences])
    groups = rewards.view(PROBLEMS, GROUP_SIZE)
    spread = groups.std(1, keepdim=True) + 1e-4
    advantages = (groups - groups.mean(1, keepdim=True)) / spread
    return Rollouts(
        sequences, [start] * len(sequences), advantages.flatten().tolist(), rewards.mean().item()
    )


def reward(completion: Tensor) -> float:
    """The share of even digits among the tokens of a completion."""
    return ((completion < 10) & (completion % 2 == 0)).float().mean().item()


def tree_logprobs(model: nn.Module, tree: PrefixTree) -> list[Tensor]:
    """The log-probability of each token of each trajectory; one run over the tree."""
    logits = model(**tree_transformers.model_inputs(tree)).logits
    return tree.gather_logprobs(logits)


def unpacked_logprobs(model: nn.Module, sequences: list[Tensor]) -> list[Tensor]:
    """The same from a padded batch of all trajectories; entry 0 of each is 0."""
    padded = pad_sequence(sequences, batch_first=True, padding_value=PADDING)
    logits = model(input_ids=padded, use_cache=False).logits
    following = logits[:, :-1].log_softmax(-1).gather(-1, padded[:, 1:, None]).squeeze(-1)
    aligned = nn.functional.pad(following, (1, 0))
    return [row[: len(one)] for row, one in zip(aligned, sequences, strict=True)]


def policy_loss(
    new: list[Tensor], old: list[Tensor], rollouts: Rollouts, chosen: tuple[int, ...]
) -> Tensor:
    """The clipped policy loss of some trajectories, a part of the mean over all completions.

    Args:
        new, old: log-probabilities of these trajectories' tokens, now and when they were sampled.
        rollouts: all trajectories of the step.
        chosen: which of them these are.
    """
    total = new[0].new_zeros(())
    for now, before, index in zip(new, old, chosen, strict=True):
        completion = slice(rollouts.prompt_lengths[index], None)
        ratio = (now[completion] - before[completion]).exp()
        advantage = rollouts.advantages[index]
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP) * advantage
        total = total - torch.minimum(ratio * advantage, clipped).sum()
    completion_tokens = sum(
        len(sequence) - prompt
        for sequence, prompt in zip(rollouts.sequences, rollouts.prompt_lengths, strict=True)
    )
    return total / completion_tokens


def train_step(
    model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, rollouts: Rollouts
) -> list[PrefixTree]:
    """Update the policy on the trees of a step, one micro-batch a tree."""
    trees = PrefixTree.pack(rollouts.sequences, MAX_TOKENS_PER_TREE)
    model.train()
    with torch.no_grad():
        old = [tree_logprobs(model, tree) for tree in trees]
    for _ in range(UPDATES_PER_STEP):
        optimizer.zero_grad()
        for tree, before in zip(trees, old, strict=True):
            loss = policy_loss(tree_logprobs(model, tree), before, rollouts, tree.trajectory_ids)
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return trees


def largest_difference(model: Qwen3ForCausalLM, rollouts: Rollouts) -> float:
    """How far loss and gradients on the tree are from the unpacked ones, relative to these."""
    tree = PrefixTree.from_sequences(rollouts.sequences)
    on_tree = loss_and_gradients(model, tree_logprobs(model, tree), rollouts)
    model.set_attn_implementation("sdpa")
    unpacked = loss_and_gradients(model, unpacked_logprobs(model, rollouts.sequences), rollouts)
    model.set_attn_implementation("tree_attention")
    return max(
        float((one - other).abs().max() / other.abs().max().clamp(min=1e-3))
        for one, other in zip(on_tree, unpacked, strict=True)
    )


def loss_and_gradients(
    model: nn.Module, logprobs: list[Tensor], rollouts: Rollouts
) -> list[Tensor]:
    """The loss of all trajectories, and its gradient by each parameter."""
    old = [one.detach() for one in logprobs]
    loss = policy_loss(logprobs, old, rollouts, tuple(range(len(old))))
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=15)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    tree_transformers.register()
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    rewards = []
    for step in range(options.steps):
        rollouts = sample(model)
        rewards.append(rollouts.reward)
        if step == 0:
            difference = largest_difference(model, rollouts)
            print(f"tree against unpacked, loss and gradients: at most {difference:.1e} apart")
            if difference > 1e-4:
                print("the tree and the unpacked run differ", file=sys.stderr)
                return 1
        trees = train_step(model, optimizer, rollouts)
        packed = sum(tree.num_tokens for tree in trees)
        unpacked = sum(tree.num_trajectory_tokens for tree in trees)
        print(
            f"step {step:2}: reward {rollouts.reward:.2f}, {len(trees)} trees, "
            f"{packed} tokens instead of {unpacked}"
        )
    return 0 if rewards[-1] > rewards[0] or options.steps < 10 else 1


if __name__ == "__main__":
    sys.exit(main())
