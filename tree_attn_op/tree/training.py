"""Next-token prediction on a tree, where the token before a fork predicts several children."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..arguments import check_positive, check_tensor
from ..lasting import lasting
from .indexing import add_at, take

_CHUNK_ELEMENTS = 1 << 24
"""Logits that are held in float32 at a time: 64 MiB, a few rows of a large vocabulary."""


@dataclass(frozen=True, eq=False)
class LossTerms:
    """All next-token predictions of a tree: one for each token that has a parent.

    E is the number of packed tokens less the roots. Terms are in ascending order of `source`,
    then of `token`; a source that is a fork has one term for each of its children.

    Attributes:
        source: int64 [E], the pack position whose logits predict.
        token: int64 [E], the pack position of the token that is predicted.
        label: int64 [E], the id of that token.
        multiplicity: int64 [E], how many trajectories run through that token, that is how often
            the term occurs in the unpacked batch.
        num_tokens: N, the packed tokens of the whole tree; None: not known.
    """

    source: Tensor
    token: Tensor
    label: Tensor
    multiplicity: Tensor
    num_tokens: int | None = None

    @classmethod
    def of(cls, parents: Tensor, input_ids: Tensor, multiplicity: Tensor) -> LossTerms:
        """The terms of a tree from its per-token tensors [N]."""
        token = torch.nonzero(parents >= 0).squeeze(1)
        token = token[torch.argsort(parents[token], stable=True)]
        source, label = parents[token], input_ids[token]
        tensors = (source, token, label, multiplicity[token])
        source, token, label, multiplicity = map(lasting, tensors)
        return cls(source, token, label, multiplicity, parents.shape[0])

    def __len__(self) -> int:
        return self.source.numel()

    @cached_property
    def rows(self) -> _Rows:
        """The terms by source; computed once, with a transfer to the host."""
        source, counts = torch.unique_consecutive(self.source, return_counts=True)
        first = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).cpu()
        labels = (self.label.amin(), self.label.amax()) if len(self) else ()
        return _Rows(
            lasting(source),
            lasting(torch.repeat_interleave(counts)),
            lasting(first),
            tuple(int(one) for one in labels),
        )


@dataclass(frozen=True)
class _Rows:
    """The R different sources of the terms.

    Attributes:
        source: int64 [R], their pack positions, ascending.
        row_of_term: int64 [E], which of them each term has.
        first_term: int64 [R + 1], where the terms of each begin and the last end, on the CPU.
        labels: the least and the greatest label; empty where there are no terms.
    """

    source: Tensor
    row_of_term: Tensor
    first_term: Tensor
    labels: tuple[int, ...]


def term_logprobs(logits: Tensor, terms: LossTerms, temperature: float) -> Tensor:
    """log p of the label of each term: [E], float32 (float64 for float64), differentiable."""
    logits = _checked(logits, terms, temperature)
    return _LogProbs.apply(logits, terms, 1.0 / temperature)


def term_entropy(logits: Tensor, terms: LossTerms, temperature: float) -> Tensor:
    """The entropy, in nats, of the distribution of each term: [E], differentiable."""
    logits = _checked(logits, terms, temperature)
    return take(_Entropy.apply(logits, terms, 1.0 / temperature), terms.rows.row_of_term)


def check_logits(logits: Tensor, num_tokens: int) -> Tensor:
    """`logits` as [N, V], or an error.

    Raises:
        TypeError: not a floating-point tensor.
        ValueError: not of shape [N, V] or [1, N, V].
    """
    check_tensor("logits", logits)
    if not logits.is_floating_point():
        raise TypeError(f"logits must be of a floating-point dtype, got {logits.dtype}")
    if logits.ndim == 3 and logits.shape[0] == 1:
        logits = logits.squeeze(0)
    if logits.ndim != 2 or logits.shape[0] != num_tokens:
        raise ValueError(
            f"logits must be [{num_tokens}, V] or [1, {num_tokens}, V] for this tree, got "
            f"{list(logits.shape)}"
        )
    return logits


def _checked(logits: Tensor, terms: LossTerms, temperature: float) -> Tensor:
    check_positive("temperature", temperature)
    if logits.device != terms.source.device:
        raise ValueError(
            f"the tree is on {terms.source.device} and logits on {logits.device}: use tree.to(...)"
        )
    labels = terms.rows.labels
    if labels and not (labels[0] >= 0 and labels[1] < logits.shape[1]):
        raise ValueError(
            f"the tree has token ids from {labels[0]} to {labels[1]}, and logits only "
            f"{logits.shape[1]} columns"
        )
    return logits


def _chunks(
    logits: Tensor, terms: LossTerms, scale: float
) -> Iterator[tuple[slice, slice, Tensor]]:
    """(rows, terms, scaled logits of the rows in float32 or float64), a bounded part at a time."""
    rows = terms.rows
    size = max(1, _CHUNK_ELEMENTS // max(logits.shape[1], 1))
    for start in range(0, rows.source.numel(), size):
        stop = min(start + size, rows.source.numel())
        chunk = logits.index_select(0, rows.source[start:stop]).to(_accumulation(logits.dtype))
        yield (
            slice(start, stop),
            slice(*rows.first_term[[start, stop]].tolist()),
            chunk if scale == 1.0 else chunk * scale,
        )


def _accumulation(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class _LogProbs(torch.autograd.Function):
    """Log-probabilities with one log-sum-exp a row, and a backward that holds one gradient only.

    What autograd would keep of each chunk is as large as the logits in float32; this keeps the
    logits themselves and one number a row.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, terms: LossTerms, scale: float) -> Tensor:
        rows = terms.rows
        dtype = _accumulation(logits.dtype)
        out = logits.new_empty(len(terms), dtype=dtype)
        lse = logits.new_empty(rows.source.numel(), dtype=dtype)
        for at, span, chunk in _chunks(logits, terms, scale):
            lse[at] = chunk.logsumexp(1)
            picked = chunk[rows.row_of_term[span] - at.start, terms.label[span]]
            out[span] = picked - lse[rows.row_of_term[span]]
        ctx.save_for_backward(logits, lse)
        ctx.terms, ctx.scale = terms, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, lse = ctx.saved_tensors
        terms, rows = ctx.terms, ctx.terms.rows
        row_grad = add_at(rows.source.numel(), rows.row_of_term, grad)
        out = torch.zeros_like(logits)
        for at, span, chunk in _chunks(logits, terms, ctx.scale):
            chunk = chunk.sub_(lse[at, None]).exp_().mul_(-row_grad[at, None])
            place = (rows.row_of_term[span] - at.start, terms.label[span])
            chunk.index_put_(place, grad[span], accumulate=True)
            out[rows.source[at]] = chunk.mul_(ctx.scale).to(out.dtype)
        return out, None, None


class _Entropy(torch.autograd.Function):
    """The entropy of each row, likewise."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, terms: LossTerms, scale: float) -> Tensor:
        out = logits.new_empty(terms.rows.source.numel(), dtype=_accumulation(logits.dtype))
        for at, _, chunk in _chunks(logits, terms, scale):
            # entr(0) is 0, so that tokens masked with -inf add nothing.
            out[at] = torch.special.entr(chunk.softmax(1)).sum(1)
        ctx.save_for_backward(logits, out)
        ctx.terms, ctx.scale = terms, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, entropy = ctx.saved_tensors
        out = torch.zeros_like(logits)
        for at, _, chunk in _chunks(logits, ctx.terms, ctx.scale):
            p = chunk.softmax(1)
            chunk = torch.special.entr(p).sub_(p.mul_(entropy[at, None]))
            chunk = chunk.mul_(grad[at, None] * ctx.scale)
            out[ctx.terms.rows.source[at]] = chunk.to(out.dtype)
        return out, None, None
