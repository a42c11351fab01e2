"""Context parallelism on several GPUs: time and memory of attention against one GPU.

    torchrun --nproc-per-node 2 -m bench.context_parallel --out build/context_parallel

Each rank holds some of a tree's tokens; keys and values are gathered, their gradients summed.
First the results of every variant are set against a float64 oracle, next to those of one GPU: one
with more than twice as much error as that gets no time. Then the variants take turns, and a round
counts for its slowest rank. Variants:

- one GPU: the whole sequence through ``tree_attention``, on rank 0 alone;
- balanced: tiles dealt out by ``TreeLoadBalancer.of_mask``;
- contiguous: consecutive tokens, as many for each rank;
- balanced, N chunks: heads exchanged in N parts, so that exchange and computation overlap;
- balanced, resharded: keys and values gathered again in the backward;
- balanced, computation: its kernels alone, on keys and values that are there already;
- balanced, exchange: its gather and its reduce-scatter alone.

Memory is the most that a rank holds in a forward and backward, its inputs included.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tree_attn_op import TreeMask, tree_attention
from tree_attn_op.distributed import (
    ContextParallelMask,
    TreeLoadBalancer,
    context_parallel_attention,
    context_parallel_mask,
    context_parallel_shard,
    context_parallel_unshard,
)
from tree_attn_op.distributed.attention import end_gather, rows_of, start_gathers
from tree_attn_op.distributed.balance import tile_work
from tree_attn_op.distributed.collectives import padded, start_reduce_scatter, wait

from .oracle import compare, reference, select_head
from .problem import Heads, Problem
from .report import environment
from .timing import Percentiles, peak_bytes, wall_milliseconds
from .workloads import SMOKE, Workload, grpo, load

ONE_GPU, BALANCED, CONTIGUOUS = "one GPU", "balanced", "contiguous"
COMPUTATION, EXCHANGE = "balanced, computation", "balanced, exchange"

LONGPROMPT_128K = grpo("longprompt_128k", prompts=1, prompt_len=98304, n=16, completion_len=2048)
"""longprompt_32k with every node four times as long."""

# Enough for the CPU to queue a forward and backward, so that its own work is no part of the time.
_HEAD_START_CYCLES = 20_000_000
_MAX_ERROR_RATIO = 2.0


@dataclass
class Outcome:
    """A variant on one workload.

    Attributes:
        name: of the variant.
        lengths: tokens of each rank; one entry for one GPU.
        work_imbalance: attention work of the most loaded rank over the average.
        errors: RMS errors against float64 of out, dq, dk and dv, relative to the exact RMS.
        status: "ok", or why it has no times.
        forward, step: milliseconds of the slowest rank, forward alone and with the backward.
        speedup: one GPU's step over this one's.
        peak_bytes: of each rank.
    """

    name: str
    lengths: list[int]
    work_imbalance: float
    errors: dict[str, float] = field(default_factory=dict)
    status: str = "ok"
    forward: Percentiles | None = None
    step: Percentiles | None = None
    speedup: float | None = None
    peak_bytes: list[int | None] = field(default_factory=list)


@dataclass
class Variant:
    """One way to compute a problem's attention on this rank.

    Attributes:
        outcome: what is known of it.
        inputs: query, key and value of this rank.
        grad_out: of this rank.
        attend: out of query, key and value; None: this rank takes no part.
        balancer: which tokens each rank has; None: all.
    """

    outcome: Outcome
    inputs: tuple[Tensor, Tensor, Tensor]
    grad_out: Tensor
    attend: Callable[..., Tensor] | None
    balancer: TreeLoadBalancer | None = None

    def forward(self) -> Any:
        """The forward alone."""
        return None if self.attend is None else self.attend(*self.inputs)

    def step(self) -> Any:
        """Forward and backward: out and the gradients of query, key and value."""
        if self.attend is None:
            return None
        out = self.attend(*self.inputs)
        return out.detach(), *torch.autograd.grad(out, self.inputs, self.grad_out)

    @property
    def input_bytes(self) -> int:
        if self.attend is None:
            return 0
        return sum(x.numel() * x.element_size() for x in (*self.inputs, self.grad_out))


class _Exchange(torch.autograd.Function):
    """The collectives of a context-parallel call with next to no computation between them."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: ContextParallelMask
    ) -> Tensor:
        longest = max(mask.load_balancer.lengths)
        (pending,) = start_gathers(
            padded(key, 2, longest), padded(value, 2, longest), mask.group, 1
        )
        ctx.save_for_backward(*end_gather(pending, key.shape[3], mask.places))
        ctx.mask = mask
        return query.view_as(query)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        rows = rows_of(*ctx.saved_tensors)
        sums = wait(start_reduce_scatter(rows, ctx.mask.tokens, ctx.mask.group))
        both = sums[: grad_out.shape[2]].permute(1, 2, 0, 3)
        dim = ctx.saved_tensors[0].shape[3]
        return grad_out, both[..., :dim], both[..., dim:], None


@dataclass
class Case:
    """All variants on one workload.

    Attributes:
        workload: its name.
        num_tokens: of the tree.
        heads: query heads, key/value heads and head dim.
        sharding_ms: time to plan the balance and to make a rank's mask, once a batch.
        outcomes: of the variants.
    """

    workload: str
    num_tokens: int
    heads: Heads
    sharding_ms: float
    outcomes: list[Outcome]


def whole_variant(problem: Problem, mask: TreeMask, rank: int) -> Variant:
    """The whole sequence, on rank 0."""
    outcome = Outcome(ONE_GPU, [mask.q_len], 1.0)
    attend = _attention(mask) if rank == 0 else None
    return Variant(outcome, _leaves(problem), problem.grad_out, attend)


def sharded_variants(
    problem: Problem, mask: TreeMask, mesh: DeviceMesh, chunks: Sequence[int]
) -> Iterator[Variant]:
    """The variants of which each rank computes its part."""
    balanced = TreeLoadBalancer.of_mask(mask, mesh.size())
    work = tile_work(mask, balanced.tile_size)
    contiguous = TreeLoadBalancer.contiguous(mask.q_len, mesh.size(), balanced.tile_size, work)
    kinds: list[tuple[str, TreeLoadBalancer, dict[str, Any]]] = [
        (BALANCED, balanced, {}),
        (CONTIGUOUS, contiguous, {}),
        *((f"{BALANCED}, {n} chunks", balanced, {"num_chunks": n}) for n in chunks),
        (f"{BALANCED}, resharded", balanced, {"reshard_after_forward": True}),
    ]
    for name, balancer, options in kinds:
        local_mask = context_parallel_mask(mesh, mask, balancer)
        attend = partial(context_parallel_attention, mask=local_mask, enable_gqa=True, **options)
        yield _of_shard(name, problem, mesh, balancer, attend)
    local_mask = context_parallel_mask(mesh, mask, balanced)
    part = _of_shard(COMPUTATION, problem, mesh, balanced, _attention(local_mask.local))
    part.inputs = (part.inputs[0], *_leaves(problem)[1:])
    yield part
    part = _of_shard(EXCHANGE, problem, mesh, balanced, lambda *x: _Exchange.apply(*x, local_mask))
    # Its result is the query.
    part.grad_out = torch.zeros_like(part.inputs[0])
    yield part


def _attention(mask: TreeMask) -> Callable[..., Any]:
    return partial(tree_attention, mask=mask, enable_gqa=True)


def _leaves(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (
        x.detach().requires_grad_() for x in (problem.query, problem.key, problem.value)
    )
    return query, key, value


def _of_shard(
    name: str,
    problem: Problem,
    mesh: DeviceMesh,
    balancer: TreeLoadBalancer,
    attend: Callable[..., Any],
) -> Variant:
    tensors = [problem.query, problem.key, problem.value, problem.grad_out]
    query, key, value, grad_out = context_parallel_shard(mesh, tensors, [2] * 4, balancer)
    inputs = (query.requires_grad_(), key.requires_grad_(), value.requires_grad_())
    outcome = Outcome(name, list(balancer.lengths), balancer.imbalance)
    return Variant(outcome, inputs, grad_out, attend, balancer)


def run_case(workload: Workload, options: argparse.Namespace, mesh: DeviceMesh) -> Case:
    """Check all variants of a workload, then time those that are right."""
    heads = Heads(options.heads, options.kv_heads, options.head_dim)
    device, rank = options.device, mesh.get_rank()
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    problem = Problem.make(workload, heads, dtype, device, layout="bshd")
    mask = problem.tree.mask
    sharding_ms = wall_milliseconds(lambda: context_parallel_mask(mesh, mask), device)
    exact = reference(problem, 0) if rank == 0 else None
    variants = [
        whole_variant(problem, mask, rank),
        *sharded_variants(problem, mask, mesh, options.chunks),
    ]
    for variant in variants:
        if variant.outcome.name in (COMPUTATION, EXCHANGE):
            continue
        whole = variant.step() or ()
        if variant.balancer is not None:
            whole = context_parallel_unshard(mesh, whole, [2] * 4, variant.balancer)
        if exact is not None:
            out, dq, dk, dv = whole
            errors = compare(select_head(0, heads, out, (dq, dk, dv)), exact)
            variant.outcome.errors = {name: error.rms for name, error in errors.items()}
    del exact
    outcomes = [variant.outcome for variant in variants]
    _judge(outcomes)
    timed = [variant for variant in variants if variant.outcome.status == "ok"]
    for variant in timed:
        beyond = peak_bytes(variant.step, device)
        held = None if beyond is None else beyond + variant.input_bytes
        variant.outcome.peak_bytes = _from_all_ranks(held if variant.attend else None)
    _time(timed, options.rounds, device)
    return Case(workload.name, mask.q_len, heads, sharding_ms, outcomes)


def _from_all_ranks(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _judge(outcomes: Sequence[Outcome]) -> None:
    """A variant that is wrong gets no time. Rank 0, which has the errors, decides for all."""
    own = outcomes[0].errors
    for outcome in outcomes:
        wrong = [
            f"{name} {error:.2e}, one GPU {own[name]:.2e}"
            for name, error in outcome.errors.items()
            if not error <= _MAX_ERROR_RATIO * own[name]
        ]
        if wrong:
            outcome.status = f"wrong: {'; '.join(wrong)}"
    statuses = [[outcome.status for outcome in outcomes]]
    dist.broadcast_object_list(statuses, src=0)
    for outcome, status in zip(outcomes, statuses[0], strict=True):
        outcome.status = status


def _time(variants: Sequence[Variant], rounds: int, device: str) -> None:
    """Give each variant its times; the order moves on by one from round to round."""
    for direction in ("forward", "step"):
        calls = [getattr(variant, direction) for variant in variants]
        for call in calls:
            _milliseconds(call, device)
        samples = np.zeros((rounds, len(calls)))
        for at in range(rounds):
            for place in range(len(calls)):
                which = (place + at) % len(calls)
                samples[at, which] = _milliseconds(calls[which], device)
        slowest = np.max(_from_all_ranks(samples), axis=0)
        for variant, times in zip(variants, slowest.T, strict=True):
            setattr(variant.outcome, direction, Percentiles.of(times))
    whole = variants[0].outcome.step
    for variant in variants:
        step = variant.outcome.step
        if whole is not None and step is not None:
            variant.outcome.speedup = whole.p50 / step.p50


def _milliseconds(call: Callable[[], object], device: str) -> float:
    """The time of a call that all ranks begin together."""
    dist.barrier()
    if device == "cpu":
        started = time.perf_counter()
        call()
        return (time.perf_counter() - started) * 1e3
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_HEAD_START_CYCLES)
    # On the GPU as well: behind this, all ranks' streams are at the same place.
    dist.all_reduce(torch.zeros(1, device=device))
    start.record()
    result = call()
    end.record()
    torch.cuda.synchronize()
    del result
    return start.elapsed_time(end)


def markdown(about: dict[str, str], cases: Sequence[Case]) -> str:
    """The results as a page."""
    lines = ["# Context parallelism", ""]
    lines += [f"- {name}: {value}" for name, value in about.items()]
    lines += [
        "",
        "Milliseconds as p50 (p20 to p80) of rounds in which the variants take turns, each round "
        "that of its slowest rank. `x one GPU` is one GPU's forward and backward over the "
        f"variant's; ideal is {about['GPUs']}. Work is the attention work of the most loaded rank "
        "over the average. Memory is the most that a rank holds in a forward and backward. Errors "
        "are RMS errors against float64, relative to the RMS of the exact tensor.",
    ]
    for case in cases:
        heads = case.heads
        lines += [
            "",
            f"## {case.workload}",
            "",
            f"{case.num_tokens} tokens, {heads.query} query heads, {heads.kv} key/value heads, "
            f"D={heads.dim}. Planning the balance and making a rank's mask: "
            f"{case.sharding_ms:.1f} ms.",
            "",
            "| variant | forward | forward and backward | x one GPU | work | tokens a rank "
            "| memory a rank, MiB | error out / dq / dk / dv |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |",
            *map(_row, case.outcomes),
        ]
    return "\n".join(lines) + "\n"


def _row(outcome: Outcome) -> str:
    lengths = sorted(set(outcome.lengths))
    tokens = " to ".join(map(str, lengths[:1] + lengths[1:][-1:]))
    errors = " / ".join(f"{error:.1e}" for error in outcome.errors.values())
    if outcome.status != "ok":
        cells = [outcome.status, "", ""]
    else:
        cells = [_spread(outcome.forward), _spread(outcome.step), f"{outcome.speedup:.2f}"]
    memory = " ".join("-" if n is None else f"{n / 2**20:.0f}" for n in outcome.peak_bytes)
    work = f"{outcome.work_imbalance:.3f}"
    return f"| {' | '.join([outcome.name, *cells, work, tokens, memory, errors])} |"


def _spread(times: Percentiles | None) -> str:
    return "" if times is None else f"{times.p50:.3f} ({times.p20:.3f} to {times.p80:.3f})"


def parse_args(args: list[str] | None) -> argparse.Namespace:
    known = {**load(), LONGPROMPT_128K.name: LONGPROMPT_128K, SMOKE.name: SMOKE}
    parser = argparse.ArgumentParser(prog="python -m bench.context_parallel")
    parser.add_argument("--out", type=Path, default=Path("build/context_parallel"))
    parser.add_argument(
        "--workloads",
        nargs="+",
        choices=list(known),
        metavar="NAME",
        default=["agentic_32k", LONGPROMPT_128K.name],
    )
    parser.add_argument("--heads", type=int, default=32, help="query heads")
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--chunks", type=int, nargs="*", default=[2, 4], help="of the heads")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    options = parser.parse_args(args)
    for chunks in options.chunks:
        if options.kv_heads % chunks:
            parser.error(f"--chunks {chunks} does not divide --kv-heads {options.kv_heads}")
    options.workloads = [known[name] for name in options.workloads]
    return options


def main(args: list[str] | None = None) -> None:
    options = parse_args(args)
    # NVLink multicast needs set-up that containers often lack, and is not what is measured.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    mesh = init_device_mesh(options.device, (dist.get_world_size(),), mesh_dim_names=("cp",))
    about = {
        **environment(options.device),
        "GPUs": str(dist.get_world_size()),
        "rounds": str(options.rounds),
        "NCCL_NVLS_ENABLE": os.environ["NCCL_NVLS_ENABLE"],
    }
    cases: list[Case] = []
    for workload in options.workloads:
        cases.append(run_case(workload, options, mesh))
        if dist.get_rank() == 0:
            options.out.mkdir(parents=True, exist_ok=True)
            results = {"environment": about, "cases": [asdict(case) for case in cases]}
            (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
            (options.out / "results.md").write_text(markdown(about, cases))
            for outcome in cases[-1].outcomes:
                print(workload.name, _row(outcome), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
