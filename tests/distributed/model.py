"""A small decoder that runs over a tree, in the shapes that parallelisms want."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.workloads import grpo
from tree_attn_op import PrefixTree, TreeMask
from tree_attn_op.integrations.dispatch import attention
from tree_attn_op.tree import LossTerms
from tree_attn_op.tree.training import term_logprobs

WIDTH, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY, LAYERS = 16, 4, 2, 8, 11, 2
STEPS = 20


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(WIDTH, HEADS * HEAD_DIM, bias=False)
        self.wk = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False)
        self.wv = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False)
        self.wo = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        # Tensor parallelism leaves this rank's heads: how many there are is for the data to say.
        query, key, value = (
            proj(x).unflatten(-1, (-1, HEAD_DIM)) for proj in (self.wq, self.wk, self.wv)
        )
        return self.wo(self.attend(query, key, value, mask).flatten(2))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
        return attention(query, key, value, mask, layout="BSHD")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(WIDTH)
        self.attention = Attention()
        self.mlp_norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        x = x + self.attention(self.attention_norm(x), mask)
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Model(nn.Module):
    """input_ids and position_ids [1, S] to logits [1, S, VOCABULARY]."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.depths = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor, mask: Any) -> Tensor:
        x = self.tokens(input_ids) + self.depths(position_ids)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


def model() -> Model:
    """The same weights on every rank, float64."""
    torch.manual_seed(7)
    return Model().double()


@cache
def tree(which: int) -> PrefixTree:
    """One of several trees of random tokens whose lengths nothing divides."""
    shape = grpo("tree", prompts=1, prompt_len=21 + which, n=3, completion_len=9 + which)
    found = shape.tree("cpu")
    generator = torch.Generator().manual_seed(which)
    input_ids = torch.randint(0, VOCABULARY, found.input_ids.shape, generator=generator)
    return replace(found, input_ids=input_ids)


def mask_of(given: PrefixTree) -> TreeMask:
    """Its mask in blocks so small that there are some for every rank."""
    whole = given.mask
    lengths = (given.num_tokens, given.num_tokens)
    return TreeMask.from_predicate(
        whole.predicate, whole.q_vals, whole.k_vals, *lengths, BLOCK_SIZE=16
    )


def loss_sum(logits: Tensor, terms: LossTerms) -> Tensor:
    """The summed loss of the predictions that these logits ``[1, S, V]`` make."""
    return -(term_logprobs(logits[0], terms, 1.0) * terms.multiplicity).sum()


def tree_loss(trained: nn.Module, given: PrefixTree) -> Tensor:
    """The mean loss over a whole tree."""
    logits = trained(given.input_ids[None], given.position_ids[None], mask_of(given))
    return loss_sum(logits, given.loss_terms) / given.loss_terms.multiplicity.sum()


def losses_of_one_process(trees: Callable[[int], list[PrefixTree]], steps: int) -> list[float]:
    """The losses of so many steps, each over the mean of some trees."""
    trained = model()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        loss = torch.stack([tree_loss(trained, one) for one in trees(step)]).mean()
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses
