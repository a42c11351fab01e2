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
