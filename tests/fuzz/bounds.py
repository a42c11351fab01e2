"""The float64 oracle with a bound on the rounding error of each element of its results.

A fixed tolerance is too tight where scores are large and too loose where results cancel. The
bounds here follow from how the results are computed, whatever the implementation: each is a sum
of products, whose error is a few units of rounding of the sum of their magnitudes; and a weight
``exp(score - lse)`` is off by the relative error of ``exp``, the absolute error of its score.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .problems import Problem

NAMES = ("out", "lse", "grad_query", "grad_key", "grad_value")


@dataclass(frozen=True)
class Expected:
    """An exact result, how far a computed one may be from it, and where that can be said.

    Attributes:
        exact: float64.
        bound: the largest error, elementwise.
        decided: where the bound is of use: scores are known to a few percent of a weight, and the
            result is a number of the dtype.
    """

    exact: Tensor
    bound: Tensor
    decided: Tensor


def expected_results(problem: Problem) -> dict[str, Expected]:
    """All results of a problem, with their bounds."""
    query, grad_out = problem.query.double(), problem.grad_out.double()
    # Keys that are not read may hold anything.
    key, value = (tensor.double().nan_to_num() for tensor in (problem.key, problem.value))
    group = query.shape[1] // key.shape[1]
    keys, values = (tensor.repeat_interleave(group, 1) for tensor in (key, value))
    scale, allowed = problem.scale, problem.allowed
    sees = allowed.any(-1, keepdim=True).expand(*query.shape[:3], 1)
    scores = (query @ keys.mT * scale).masked_fill(~allowed, -torch.inf)
    lse = scores.masked_fill(~sees, 0.0).logsumexp(-1, keepdim=True)
    weights = (scores - lse).exp().masked_fill(~sees, 0.0)
    out = weights @ values
    grad_lse = torch.zeros_like(lse)
    if problem.grad_lse is not None:
        grad_lse = problem.grad_lse.double().unsqueeze(-1).masked_fill(~sees, 0.0)
    delta = (grad_out * out).sum(-1, keepdim=True) - grad_lse
    grad_scores = weights * (grad_out @ values.mT - delta)

    # Units of rounding: of results and of what is rounded between two products, and of sums.
    info = torch.finfo(problem.query.dtype)
    sums = torch.finfo(torch.float64 if info.bits == 64 else torch.float32).eps
    terms = 16 + query.shape[3] + value.shape[3] + query.shape[2] + key.shape[2]
    products = query.abs() @ keys.abs().mT * abs(scale)
    largest = products.masked_fill(~allowed, 0.0).amax(-1, keepdim=True)
    of_score = sums * query.shape[3] * largest
    of_weight = sums * terms + 4 * of_score + 2 * info.eps
    certain = of_score < 0.01
    # Weights below the least number of the dtypes that they pass through are lost.
    least = max(info.tiny * info.eps, torch.finfo(torch.float32).tiny if info.bits < 64 else 0.0)
    lost = least * allowed.expand_as(weights).double()
    size_out = weights @ values.abs()
    size_scores = weights * (
        grad_out.abs() @ values.abs().mT
        + (grad_out.abs() * size_out).sum(-1, keepdim=True)
        + grad_lse.abs()
    )

    def by_query(exact: Tensor, size: Tensor, factors: Tensor) -> Expected:
        bound = of_weight * size + lost @ factors + info.tiny
        return Expected(exact, bound, certain & _fits(size, info))

    def by_key(exact: Tensor, size: Tensor, bound: Tensor) -> Expected:
        # A key that no uncertain row sees is certain.
        unsure = (allowed & ~certain).any(-2).expand(*keys.shape[:3]).unsqueeze(-1).double()
        exact, size, bound, unsure = (
            tensor.unflatten(1, (key.shape[1], group)).sum(2)
            for tensor in (exact, size, bound, unsure)
        )
        return Expected(exact, bound + info.tiny, (unsure == 0) & _fits(size, info))

    found_lse = lse.masked_fill(~sees, -torch.inf).squeeze(-1)
    lse_bound = (sums * (terms + lse.abs()) + 4 * of_score).squeeze(-1)
    queries, grads = query.abs() * abs(scale), grad_out.abs()
    return {
        "out": by_query(out, size_out, values.abs()),
        "lse": Expected(found_lse, lse_bound, torch.ones_like(found_lse, dtype=torch.bool)),
        "grad_query": by_query(
            grad_scores @ keys * scale,
            size_scores @ keys.abs() * abs(scale),
            keys.abs() * abs(scale),
        ),
        "grad_key": by_key(
            grad_scores.mT @ query * scale,
            size_scores.mT @ queries,
            (of_weight * size_scores + lost).mT @ queries,
        ),
        "grad_value": by_key(
            weights.mT @ grad_out, weights.mT @ grads, (of_weight * weights + lost).mT @ grads
        ),
    }


def _fits(size: Tensor, info: torch.finfo) -> Tensor:
    return size < info.max / 4


def check_results(problem: Problem, results: dict[str, Tensor]) -> None:
    """Every result is within its bound, infinite where it must be, and of the right dtype."""
    for name, want in expected_results(problem).items():
        got = results[name]
        dtype = problem.query.dtype
        if name == "lse":
            dtype = torch.float64 if dtype == torch.float64 else torch.float32
        assert got.shape == want.exact.shape, f"{name}: {tuple(got.shape)}"
        assert got.dtype == dtype, f"{name}: {got.dtype}"
        infinite = torch.isneginf(want.exact)
        if name == "lse":
            assert torch.equal(torch.isneginf(got), infinite), f"{name}: -inf at other rows"
        judged = want.decided & ~infinite
        error = (got.double() - want.exact)[judged].abs()
        # Not within: a NaN is not either.
        wrong = ~(error <= want.bound.expand_as(want.exact)[judged])
        if wrong.any():
            at = int(wrong.nonzero()[0])
            raise AssertionError(
                f"{name}: {int(wrong.sum())} of {wrong.numel()} elements beyond their bounds, the "
                f"first by {float(error[at]):.2e}, its bound is "
                f"{float(want.bound.expand_as(want.exact)[judged][at]):.2e}"
            )


def run_op(problem: Problem) -> dict[str, Tensor]:
    """The op's results, gradients by autograd."""
    leaves = [
        tensor.detach().requires_grad_() for tensor in (problem.query, problem.key, problem.value)
    ]
    out, lse = torch.ops.tree_attn_op.tree_attention(*leaves, *problem.mask_arguments)
    outputs, grads = (out,), (problem.grad_out,)
    if problem.grad_lse is not None:
        outputs, grads = (out, lse), (problem.grad_out, problem.grad_lse)
    gradients = torch.autograd.grad(outputs, leaves, grads)
    return dict(zip(NAMES, (out.detach(), lse.detach(), *gradients), strict=True))
