"""The float64 oracle: attention of one key/value head over the whole tree, and its gradients."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .problem import Heads, Problem

_CHUNK_ROWS = 1024


class Results(NamedTuple):
    """out and dq [G, N, D] of a group's query heads; dk and dv [N, D] of its key/value head."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


class Error(NamedTuple):
    """Of one tensor: root mean square and largest difference, each over the reference's RMS."""

    rms: float
    max: float


def select_head(
    kv_head: int, heads: Heads, out: Tensor, grads: tuple[Tensor, Tensor, Tensor] | None
) -> Results:
    """What an implementation computed for one key/value head; no gradients where it has none."""
    group = heads.query // heads.kv
    query_heads = slice(kv_head * group, (kv_head + 1) * group)
    empty = out.new_empty(0)
    if grads is None:
        return Results(out[0, query_heads], empty, empty, empty)
    dq, dk, dv = grads
    return Results(out[0, query_heads], dq[0, query_heads], dk[0, kv_head], dv[0, kv_head])


def reference(problem: Problem, kv_head: int) -> Results:
    """Dense attention from the definition, in chunks of query rows.

    The mask is written out here from the tree's arrays, so that nothing of what is measured takes
    part in judging it.
    """
    inputs = select_head(
        kv_head, problem.heads, problem.query, (problem.query, problem.key, problem.value)
    )
    query, _, key, value = (tensor.double() for tensor in inputs)
    grad_out = select_head(kv_head, problem.heads, problem.grad_out, None).out.double()
    scale = problem.heads.dim**-0.5
    index = torch.arange(problem.tree.num_tokens, device=query.device)
    end = problem.tree.subtree_end
    out, dq = torch.empty_like(query), torch.empty_like(query)
    dk, dv = torch.zeros_like(key), torch.zeros_like(value)
    for start in range(0, index.numel(), _CHUNK_ROWS):
        rows = index[start : start + _CHUNK_ROWS]
        stop = start + rows.numel()
        # Later keys are invisible to all of the chunk.
        visible = (rows[:, None] >= index[:stop]) & (rows[:, None] < end[:stop])
        for head in range(query.shape[0]):
            scores = (query[head, rows] @ key[:stop].T * scale).masked_fill(~visible, -torch.inf)
            p = scores.softmax(-1)
            g = grad_out[head, rows]
            out[head, rows] = p @ value[:stop]
            dv[:stop] += p.T @ g
            dp = g @ value[:stop].T
            ds = p * (dp - (g * out[head, rows]).sum(-1, keepdim=True)) * scale
            dq[head, rows] = ds @ key[:stop]
            dk[:stop] += ds.T @ query[head, rows]
    return Results(out, dq, dk, dv)


class Sample(NamedTuple):
    """Token indices [R] whose out and dq, and [C] whose dk and dv are looked at."""

    queries: Tensor
    keys: Tensor

    def of(self, results: Results) -> Results:
        """Those rows of full results; what is not there stays so."""
        rows = (self.queries, self.queries, self.keys, self.keys)
        picked = [
            x if x.numel() == 0 else x.index_select(-2, at)
            for x, at in zip(results, rows, strict=True)
        ]
        return Results(*picked)


def sample_of(num_tokens: int, count: int, device: str, seed: int = 0) -> Sample:
    """Up to `count` random queries and keys each, the first and the last token among them."""
    generator = torch.Generator().manual_seed(seed)

    def some() -> Tensor:
        inner = torch.randperm(num_tokens, generator=generator)[: max(count - 2, 0)]
        ends = torch.tensor([0, num_tokens - 1])
        return torch.cat([ends, inner]).unique().to(device)

    return Sample(some(), some())


def reference_sample(problem: Problem, kv_head: int, sample: Sample) -> Results:
    """`sample.of(reference(...))` for problems whose whole reference would take too long.

    The gradient of a key needs the softmax of every query that sees it, so scores and outputs are
    computed for all queries, but the three products of the gradients for the sample only.
    """
    inputs = select_head(
        kv_head, problem.heads, problem.query, (problem.query, problem.key, problem.value)
    )
    query, _, key, value = (tensor.double() for tensor in inputs)
    grad_out = select_head(kv_head, problem.heads, problem.grad_out, None).out.double()
    scale = problem.heads.dim**-0.5
    index = torch.arange(problem.tree.num_tokens, device=query.device)
    end = problem.tree.subtree_end
    dk, dv = (torch.zeros_like(x[sample.keys]) for x in (key, value))
    found: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in query]
    for start in range(0, index.numel(), _CHUNK_ROWS):
        rows = index[start : start + _CHUNK_ROWS]
        stop = start + rows.numel()
        visible = (rows[:, None] >= index[:stop]) & (rows[:, None] < end[:stop])
        keys = sample.keys < stop
        at = sample.keys[keys]
        looked_at = sample.queries[(sample.queries >= start) & (sample.queries < stop)] - start
        for head, (outs, dqs) in enumerate(found):
            q, g = query[head, rows], grad_out[head, rows]
            p = (q @ key[:stop].T * scale).masked_fill_(~visible, -torch.inf).softmax(-1)
            out = p @ value[:stop]
            delta = (g * out).sum(-1, keepdim=True)
            ds = p[:, at] * (g @ value[at].T - delta) * scale
            dv[keys] += p[:, at].T @ g
            dk[keys] += ds.T @ q
            ds = p[looked_at] * (g[looked_at] @ value[:stop].T - delta[looked_at]) * scale
            outs.append(out[looked_at])
            dqs.append(ds @ key[:stop])
    out, dq = (torch.stack([torch.cat(parts[i]) for parts in found]) for i in range(2))
    return Results(out, dq, dk, dv)


def compare(actual: Results, expected: Results) -> dict[str, Error]:
    """The error of each tensor that `actual` has, relative to the reference's RMS."""
    errors = {}
    for name, x, reference_x in zip(Results._fields, actual, expected, strict=True):
        if x.numel() == 0 and reference_x.numel() > 0:
            continue
        difference = x.double() - reference_x
        size = reference_x.square().mean().sqrt()
        errors[name] = Error(
            rms=float(difference.square().mean().sqrt() / size),
            max=float(difference.abs().max() / size),
        )
    return errors
