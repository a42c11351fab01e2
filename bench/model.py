"""A decoder of Qwen3's shape in plain PyTorch, whose attention is a function that it is given.

RMS norms before each half of a block, and of queries and keys by head; rotary embeddings from
given positions; grouped key/value heads; a SwiGLU; embeddings tied to the output. No dropout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Attend = Callable[[Tensor, Tensor, Tensor, Any], Tensor]
"""(query [1, Hq, N, D], key [1, Hkv, N, D], value [1, Hkv, N, D], mask) -> out [1, Hq, N, D]."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a model; the defaults are those of Qwen3-1.7B."""

    hidden: int = 2048
    layers: int = 28
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    intermediate: int = 6144
    vocabulary: int = 151936
    rope_theta: float = 1e6


class Block(nn.Module):
    """One decoder block."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        q_width, kv_width = (n * shape.head_dim for n in (shape.heads, shape.kv_heads))
        self.attention_norm = nn.RMSNorm(shape.hidden, eps=1e-6)
        self.q = nn.Linear(shape.hidden, q_width, bias=False)
        self.k = nn.Linear(shape.hidden, kv_width, bias=False)
        self.v = nn.Linear(shape.hidden, kv_width, bias=False)
        self.q_norm = nn.RMSNorm(shape.head_dim, eps=1e-6)
        self.k_norm = nn.RMSNorm(shape.head_dim, eps=1e-6)
        self.o = nn.Linear(q_width, shape.hidden, bias=False)
        self.mlp_norm = nn.RMSNorm(shape.hidden, eps=1e-6)
        self.gate = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Any, attend: Attend) -> Tensor:
        """x [1, N, hidden]; cos and sin [N, head_dim / 2]."""
        normed = self.attention_norm(x)

        def by_head(projected: Tensor) -> Tensor:
            return projected.unflatten(2, (-1, self.shape.head_dim))

        query = rotate(self.q_norm(by_head(self.q(normed))), cos, sin)
        key = rotate(self.k_norm(by_head(self.k(normed))), cos, sin)
        value = by_head(self.v(normed))
        out = attend(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), mask)
        x = x + self.o(out.transpose(1, 2).flatten(2))
        normed = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


RunBlock = Callable[[Block, Tensor, Tensor, Tensor, Any, Attend], Tensor]
"""Block.forward, or what torch.compile made of it."""


class Model(nn.Module):
    """A decoder and the loss of its predictions."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-6)

    @torch.no_grad()
    def initialise(self, seed: int) -> Model:
        """Normal weights of standard deviation 0.02, norms one."""
        device = self.embedding.weight.device
        generator = torch.Generator(device).manual_seed(seed)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                parameter.fill_(1.0)
        return self

    def hidden(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        mask: Any,
        attend: Attend,
        run_block: RunBlock = Block.forward,
        checkpointing: bool = False,
    ) -> Tensor:
        """The last hidden states [N, hidden] of the tokens [N] at the positions [N]."""
        cos, sin = rotary(position_ids, self.shape)
        x = self.embedding(input_ids)[None]
        for block in self.blocks:
            arguments = (block, x, cos, sin, mask, attend)
            if checkpointing:
                x = checkpoint(run_block, *arguments, use_reentrant=False)
            else:
                x = run_block(*arguments)  # type: ignore[arg-type]
        return self.norm(x)[0]

    def loss(
        self,
        hidden: Tensor,
        source: Tensor,
        label: Tensor,
        weight: Tensor,
        *,
        chunk: int = 4096,
        chunk_loss: Callable[..., Tensor] | None = None,
    ) -> Tensor:
        """The sum over terms of weight * -log p(label | hidden[source]); float32 or float64.

        Args:
            hidden: [N, hidden].
            source, label, weight: [E]; rows of `hidden`, token ids, numbers.
            chunk: terms whose logits exist at a time, forward and backward.
            chunk_loss: `weighted_cross_entropy`, or what torch.compile made of it.
        """
        chunk_loss = chunk_loss or weighted_cross_entropy
        rows = hidden.index_select(0, source)
        parts = [
            checkpoint(chunk_loss, *terms, self.embedding.weight, use_reentrant=False)
            for terms in zip(*(x.split(chunk) for x in (rows, label, weight)), strict=True)
        ]
        return torch.stack(parts).sum()


def weighted_cross_entropy(
    rows: Tensor, label: Tensor, weight: Tensor, embedding: Tensor
) -> Tensor:
    """The weighted sum of the cross entropies of rows [E, hidden] with labels [E]."""
    logits = F.linear(rows, embedding)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return (F.cross_entropy(logits, label, reduction="none") * weight).sum()


def rotary(position_ids: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary embedding, float32 [N, head_dim / 2] each."""
    half = shape.head_dim // 2
    exponent = torch.arange(half, dtype=torch.float32, device=position_ids.device) / half
    angle = position_ids[:, None].float() * shape.rope_theta**-exponent
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [1, N, H, D], halves as in GPT-NeoX; computed in float32 or float64."""
    cos, sin = cos[None, :, None], sin[None, :, None]
    first, second = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
