"""One case: check every implementation against the oracle, then time those that are right."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from tree_attn_op import TreeMask

from .base import Implementation
from .implementations import BASELINE, COMPARED, IMPLEMENTATIONS
from .oracle import Error, Results, compare, reference, select_head
from .peers import flex_block_mask
from .problem import Heads, Layout, Problem
from .timing import Percentiles, measure, peak_bytes, wall_milliseconds
from .workloads import Workload

# This project is wrong if its error is above this many times flex's, by either measure. Others,
# and this project without flex beside it, are wrong if their RMS error is above that of a few
# roundings of the dtype.
_ERROR_FACTOR = 2.0
_ROUNDINGS = 8.0


@dataclass
class Timing:
    """Of one direction.

    Attributes:
        milliseconds: of the rounds.
        tflops: useful TFLOP/s at the p50.
        ratios: by the name of each of COMPARED that was timed: its time over this one's.
    """

    milliseconds: Percentiles
    tflops: float
    ratios: dict[str, Percentiles]


@dataclass
class Outcome:
    """What came of one implementation in one case.

    Attributes:
        note: what it runs, where that depends on what is installed.
        same_bits: of how many further backward calls all gradients equal those of the first, bit
            for bit; None where that was not asked.
    """

    name: str
    note: str = ""
    status: str = "ok"
    errors: dict[str, Error] = field(default_factory=dict)
    forward: Timing | None = None
    backward: Timing | None = None
    peak_bytes: int | None = None
    same_bits: int | None = None


@dataclass
class Case:
    """A workload with one head layout, and what came of each implementation."""

    workload: str
    heads: Heads
    num_tokens: int
    num_trajectory_tokens: int
    pairs: int
    outcomes: list[Outcome]
    mask_building: dict[str, float]


def run_case(
    workload: Workload,
    heads: Heads,
    names: Sequence[str],
    *,
    dtype: torch.dtype,
    device: str,
    rounds: int,
    kv_head: int,
    layout: Layout = "bhsd",
    repeats: int = 0,
) -> Case:
    """Check and time the named implementations on one workload.

    Args:
        workload, heads, dtype, device: the problem.
        names: of IMPLEMENTATIONS.
        rounds: timed calls of each implementation and direction.
        kv_head: the key/value head, with its query heads, whose numbers are checked.
        layout: order of the inputs in memory.
        repeats: backward calls whose bits are compared with those of another.
    """
    # Compiled code of other shapes is of no use here, and each would count as a recompilation.
    torch._dynamo.reset()
    problem = Problem.make(workload, heads, dtype, device, layout=layout)
    outcomes = {name: Outcome(name) for name in names}
    ready: dict[str, Implementation] = {}
    expected = reference(problem, kv_head)
    for name, outcome in outcomes.items():
        reason = IMPLEMENTATIONS[name].unavailable(problem)
        if reason is not None:
            outcome.status = f"not run: {reason}"
            continue
        try:
            ready[name] = IMPLEMENTATIONS[name](problem)
            outcome.errors = errors(ready[name], expected, kv_head)
            outcome.note = ready[name].note
            outcome.peak_bytes = peak_bytes(_training_call(ready[name]), device)
            if repeats and ready[name].has_backward:
                outcome.same_bits = same_bits(ready[name], repeats)
        except Exception as error:  # an implementation that fails must not hide the others
            ready.pop(name, None)
            outcome.status = f"failed: {type(error).__name__}: {_first_line(error)}"
    _judge(outcomes, dtype)
    times = measure({n: r for n, r in ready.items() if outcomes[n].status == "ok"}, rounds, device)
    for direction, samples in times.items():
        for name, milliseconds in samples.items():
            flops = problem.flops(direction == "backward") * ready[name].pairs / problem.pairs
            timing = Timing(
                milliseconds=Percentiles.of(milliseconds),
                tflops=flops / float(Percentiles.of(milliseconds).p50) / 1e9,
                # A dense kernel does other work: its time says nothing next to the others'.
                ratios={
                    other: Percentiles.of(samples[other] / milliseconds)
                    for other in COMPARED
                    if other in samples and ready[name].pairs == problem.pairs
                },
            )
            setattr(outcomes[name], direction, timing)
    case = Case(
        workload=workload.name,
        heads=heads,
        num_tokens=problem.tree.num_tokens,
        num_trajectory_tokens=problem.tree.num_trajectory_tokens,
        pairs=problem.pairs,
        outcomes=list(outcomes.values()),
        mask_building=mask_building(problem, device),
    )
    del ready, problem, expected
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return case


def errors(implementation: Implementation, expected: Results, kv_head: int) -> dict[str, Error]:
    """The error of each tensor; none for an implementation that solves another problem."""
    results = implementation.packed_results()
    if results is None:
        return {}
    out, grads = results
    return compare(
        select_head(kv_head, implementation.problem.heads, out.detach(), grads), expected
    )


def same_bits(implementation: Implementation, repeats: int) -> int:
    """How many of `repeats` backward calls give the very gradients of another one."""
    out = implementation.forward()
    first = implementation.backward(out)
    return sum(
        all(torch.equal(x, y) for x, y in zip(first, implementation.backward(out), strict=True))
        for _ in range(repeats)
    )


def _judge(outcomes: dict[str, Outcome], dtype: torch.dtype) -> None:
    """Mark what is wrong."""
    baseline = outcomes[BASELINE].errors if BASELINE in outcomes else {}
    for outcome in outcomes.values():
        for tensor, error in outcome.errors.items():
            limit = baseline.get(tensor)
            if limit is None or not IMPLEMENTATIONS[outcome.name].ours:
                wrong = not error.rms <= _ROUNDINGS * torch.finfo(dtype).eps
            else:
                wrong = not (
                    error.rms <= _ERROR_FACTOR * limit.rms
                    and error.max <= _ERROR_FACTOR * limit.max
                )
            if wrong and outcome.status == "ok":
                outcome.status = f"wrong: {tensor} is off by {error.rms:.1e} (RMS)"


def _training_call(implementation: Implementation) -> Callable[[], object]:
    """Forward and, where there is one, backward."""

    def call() -> object:
        out = implementation.forward()
        return out, implementation.backward(out) if implementation.has_backward else None

    return call


def mask_building(problem: Problem, device: str) -> dict[str, float]:
    """Milliseconds to make each kind of mask of the tree's arrays, compilation not counted."""
    tree = problem.tree
    n = tree.num_tokens
    values = tree.mask

    def ours() -> object:
        mask = TreeMask.from_predicate(str(values.predicate), values.q_vals, values.k_vals, n, n)
        return mask.block_mask

    builders: dict[str, Callable[[], object]] = {"tree_attn_op": ours}
    builders["flex, eager"] = lambda: flex_block_mask(problem, compiled=False)
    if device == "cuda":
        builders["flex, compiled"] = lambda: flex_block_mask(problem, compiled=True)
    times = {}
    for name, build in builders.items():
        build()
        times[name] = wall_milliseconds(build, device)
    return times


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), "no message")
