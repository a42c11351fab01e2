"""Times candidate configurations of the portable kernels against each other and against flex.

    python -m bench.tune_portable --out tune.json

For each workload and head dim: every candidate is checked against the float64 oracle on one
key/value head, then all of them take turns, with compiled flex_attention in the same rounds. A
wrong or failing candidate is reported and not timed. Each gets lists as fine as its tiles;
with ``--list-blocks Q K`` all get the same lists, as in the op.

Figures are TFLOP/s of useful work: 4 D Hq pairs forward; of the backward's ten, six are dQ's
products and eight dK/dV's (the scores and dP are computed in both).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from tree_attn_op import blocks
from tree_attn_op.kernels.configs import CUDA_DEVICES, Kernel, KernelConfig, choose
from tree_attn_op.predicate import Predicate

from .oracle import Results, compare, reference, select_head
from .peers import flex_block_mask
from .problem import Heads, Problem
from .workloads import select

PREDICATE = "q >= k & q < k0"
WORKLOADS = ("chain_16k", "grpo_8x8_32k", "agentic_32k", "tinyleaf_16k")
KERNELS: tuple[Kernel, ...] = ("forward", "dq", "dkdv")
FLOPS_PER_PAIR = {"forward": 4, "dq": 6, "dkdv": 8, "flex forward": 4, "flex backward": 10}
ERROR_LIMIT = 1e-2
"""Root mean square error over the reference's root mean square; rounding alone gives 3e-3."""


def _c(block_m: int, block_n: int, warps: int, stages: int, **options: Any) -> KernelConfig:
    return KernelConfig(block_m, block_n, warps, stages, **{"tma": True, **options})


CANDIDATES: dict[tuple[Kernel, int], list[KernelConfig]] = {
    ("forward", 128): [
        _c(128, 64, 8, 3),
        _c(128, 64, 8, 3, pack=2),
        _c(128, 64, 8, 3, pack=2, tma=False),
        _c(128, 64, 8, 2, pack=2, maxnreg=128),
        _c(128, 64, 8, 2, pack=4, maxnreg=128),
        _c(64, 64, 4, 2),
        _c(64, 64, 4, 2, pack=2),
        _c(64, 64, 4, 2, pack=2, maxnreg=168),
        _c(128, 128, 8, 2),
        _c(128, 128, 8, 2, pack=2),
        _c(128, 32, 4, 3, pack=2),
        _c(64, 128, 4, 2),
    ],
    ("forward", 64): [
        _c(128, 64, 4, 3),
        _c(128, 64, 4, 3, pack=2),
        _c(128, 64, 4, 3, pack=2, tma=False),
        _c(128, 64, 4, 3, pack=4),
        _c(128, 64, 8, 3, pack=2, maxnreg=128),
        _c(64, 64, 4, 3),
        _c(64, 64, 4, 3, pack=2),
        _c(128, 128, 4, 2, pack=2),
        _c(128, 128, 4, 3, tma=False),
        _c(128, 128, 8, 3, pack=2),
        _c(64, 128, 4, 3),
        _c(64, 128, 4, 3, pack=2),
    ],
    ("dq", 128): [
        _c(128, 64, 8, 3),
        _c(128, 64, 8, 3, pack=2),
        _c(128, 64, 8, 2, pack=2),
        _c(128, 64, 8, 2, pack=2, tma=False),
        _c(128, 64, 8, 2, pack=4),
        _c(128, 32, 8, 3, pack=2, maxnreg=128),
        _c(128, 128, 8, 2, pack=2),
        _c(64, 64, 4, 2),
        _c(64, 64, 4, 2, pack=2),
        _c(64, 64, 4, 3, pack=2, tma=False),
    ],
    ("dq", 64): [
        _c(128, 64, 8, 3),
        _c(128, 64, 8, 3, pack=2),
        _c(128, 64, 8, 3, pack=2, maxnreg=128),
        _c(128, 64, 8, 3, pack=4, maxnreg=128),
        _c(128, 64, 4, 2, pack=2),
        _c(128, 128, 8, 2, pack=2),
        _c(64, 64, 4, 3),
        _c(64, 64, 4, 3, pack=2),
        _c(64, 64, 4, 3, pack=2, tma=False),
    ],
    ("dkdv", 128): [
        _c(64, 128, 8, 2),
        _c(64, 128, 8, 3),
        _c(64, 128, 8, 2, tma=False),
        _c(32, 128, 8, 3),
        _c(64, 64, 4, 2),
        _c(64, 64, 4, 2, tma=False),
        _c(64, 64, 4, 3),
        _c(32, 64, 4, 3),
        _c(64, 64, 8, 2),
    ],
    ("dkdv", 64): [
        _c(64, 128, 8, 2),
        _c(64, 128, 8, 3),
        _c(64, 128, 8, 3, tma=False),
        _c(32, 128, 8, 3),
        _c(64, 128, 8, 2, maxnreg=128),
        _c(64, 64, 4, 2),
        _c(64, 64, 4, 3),
        _c(64, 64, 4, 3, tma=False),
        _c(32, 64, 4, 3),
        _c(64, 64, 8, 2),
        _c(128, 64, 8, 2),
    ],
}


@dataclass(frozen=True)
class Candidate:
    """One kernel with one configuration and the block sizes of the lists that it is given."""

    kernel: Kernel
    dim: int
    config: KernelConfig
    list_blocks: tuple[int, int]

    @property
    def name(self) -> str:
        c = self.config
        options = [f"pack{c.pack}"] if self.kernel != "dkdv" else []
        options += ["tma"] * c.tma + [f"regs{c.maxnreg}"] * (c.maxnreg is not None)
        shape = f"{c.block_m}x{c.block_n} w{c.num_warps} s{c.num_stages}"
        return f"{shape} {' '.join(options)} lists {self.list_blocks[0]}x{self.list_blocks[1]}"


def candidates(
    kernel: Kernel, dim: int, list_blocks: tuple[int, int] | None, shipped_only: bool
) -> list[Candidate]:
    """What is to be timed; with fixed list blocks, those whose tiles divide them."""
    configs = CANDIDATES[kernel, dim]
    if shipped_only:
        sizes = list_blocks or (128, 128)
        configs = [choose(kernel, CUDA_DEVICES[90], 2, dim, dim, 4, True, *sizes)]
    found = []
    for config in configs:
        tile = (config.block_m // config.pack, config.block_n)
        own = list_blocks or tile
        if own[0] % tile[0] == 0 and own[1] % tile[1] == 0:
            found.append(Candidate(kernel, dim, config, own))
    return found


class Runner:
    """Launches the kernels of one problem; the outputs of the last launch are kept."""

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor, ends: Tensor
    ) -> None:
        self.query, self.key, self.value, self.grad_out = query, key, value, grad_out
        self.k_vals = ends.to(torch.int32).view(1, 1, -1)
        self.q_vals = self.k_vals.new_empty(1, 0, query.shape[2])
        self.out, self.grad_query = torch.empty_like(query), torch.empty_like(query)
        self.grad_key, self.grad_value = torch.empty_like(key), torch.empty_like(value)
        self.lse = torch.empty(query.shape[:3], device=query.device)
        self.delta = torch.empty_like(self.lse)
        self.lists: dict[tuple[int, int], tuple[Tensor, ...]] = {}

    def lists_of(self, sizes: tuple[int, int]) -> tuple[Tensor, ...]:
        if sizes not in self.lists:
            length = self.query.shape[2]
            state = blocks.classify_tiles(
                Predicate.parse(PREDICATE), self.q_vals, self.k_vals, length, length, *sizes
            )
            self.lists[sizes] = blocks.lists_of(state.unsqueeze(1))
        return self.lists[sizes]

    def launch(self, candidate: Candidate) -> Any:
        """The launch of a candidate."""
        from tree_attn_op.kernels.portable import launch

        lists = self.lists_of(candidate.list_blocks)
        problem = launch.Problem(
            self.query,
            self.key,
            self.value,
            self.q_vals,
            self.k_vals,
            PREDICATE,
            *candidate.list_blocks,
            candidate.dim**-0.5,
        )
        key_lists, query_lists = launch.Lists(*lists[:4]), launch.Lists(*lists[4:])
        if candidate.kernel == "forward":
            return launch.forward_launch(problem, key_lists, self.out, self.lse, candidate.config)
        given = (self.grad_out, self.lse, self.delta)
        if candidate.kernel == "dq":
            return launch.dq_launch(problem, key_lists, *given, self.grad_query, candidate.config)
        return launch.dkdv_launch(
            problem, query_lists, *given, self.grad_key, self.grad_value, candidate.config
        )

    def delta_launch(self) -> Any:
        from tree_attn_op.kernels.portable import launch

        return launch.delta_launch(self.out, self.grad_out, self.lse, None, self.delta)


class _Hopper:
    """As much of a Triton driver as a compilation in a process without a GPU asks for."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: object = None) -> int:
        return 0


def _compile(candidate: Candidate) -> str | None:
    """Puts a candidate into Triton's cache on disk; the error where it does not compile."""
    from triton.runtime.driver import driver

    torch.set_num_threads(1)
    driver.set_active(_Hopper())
    length = 256
    heads = [
        torch.empty(1, length, n, candidate.dim, dtype=torch.bfloat16) for n in (32, 8, 8, 32)
    ]
    query, key, value, grad_out = (tensor.transpose(1, 2) for tensor in heads)
    planned = Runner(query, key, value, grad_out, torch.full((length,), length)).launch(candidate)
    try:
        planned.kernel.warmup(grid=planned.grid, **planned.arguments, **planned.options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    return None


def compile_all(work: list[Candidate], processes: int) -> dict[Candidate, str]:
    """Compiles in parallel, before this process touches the GPU; returns the failures."""
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        results = pool.map(_compile, work, chunksize=1)
    return {c: error for c, error in zip(work, results, strict=True) if error is not None}


def time_interleaved(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each call, all of them taking turns."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        pairs = {}
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            pairs[name] = (start, end)
        torch.cuda.synchronize()
        for name, (start, end) in pairs.items():
            samples[name].append(start.elapsed_time(end))
    return {name: float(np.median(values[1:] or values)) for name, values in samples.items()}


def check(runner: Runner, candidate: Candidate, heads: Heads, expected: Results) -> float:
    """The worst relative error of what the candidate writes, on key/value head 0."""
    outputs = {
        "forward": (runner.out,),
        "dq": (runner.grad_query,),
        "dkdv": (runner.grad_key, runner.grad_value),
    }[candidate.kernel]
    for output in outputs:
        output.fill_(float("nan"))
    runner.launch(candidate).run()
    grads = (runner.grad_query, runner.grad_key, runner.grad_value)
    errors = compare(select_head(0, heads, runner.out, grads), expected)
    names = {"forward": ("out",), "dq": ("dq",), "dkdv": ("dk", "dv")}[candidate.kernel]
    worst = max(errors[name].rms for name in names)
    return float("inf") if np.isnan(worst) else worst


def flex_calls(
    problem: Problem, expected: Results
) -> tuple[dict[str, Callable[[], Any]], dict[str, float]]:
    """Compiled flex forward and backward, and their errors."""
    mask = flex_block_mask(problem, compiled=True)
    compiled = torch.compile(flex_attention, dynamic=False)
    inputs = [
        t.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        for t in (problem.query, problem.key, problem.value)
    ]

    query, key, value = inputs

    def attend() -> Any:
        return compiled(query, key, value, block_mask=mask, enable_gqa=True)

    def forward() -> Any:
        with torch.no_grad():
            return attend()

    out = attend()

    def backward() -> Any:
        return torch.autograd.grad(out, inputs, problem.grad_out, retain_graph=True)

    errors = compare(select_head(0, problem.heads, out.detach(), backward()), expected)
    return {"flex forward": forward, "flex backward": backward}, {
        name: error.rms for name, error in errors.items()
    }


def tune(
    problem: Problem, work: list[Candidate], failed: dict[Candidate, str], rounds: int
) -> list[dict[str, Any]]:
    """Rows of the report for one workload and head dim."""
    heads = problem.heads
    runner = Runner(
        problem.query, problem.key, problem.value, problem.grad_out, problem.tree.subtree_end
    )
    expected = reference(problem, 0)
    flex, flex_errors = flex_calls(problem, expected)
    calls: dict[str, Callable[[], Any]] = dict(flex)
    rows: list[dict[str, Any]] = [
        {"kernel": name, "name": "flex", "error": max(flex_errors.values())} for name in flex
    ]
    for candidate in work:
        row: dict[str, Any] = {
            "kernel": candidate.kernel,
            "name": candidate.name,
            "config": asdict(candidate.config),
            "lists": candidate.list_blocks,
        }
        rows.append(row)
        if candidate in failed:
            row["failed"] = failed[candidate]
            continue
        try:
            row["error"] = check(runner, candidate, heads, expected)
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {error}"[:300]
            continue
        if candidate.kernel == "forward" and row["error"] < ERROR_LIMIT:
            runner.delta_launch().run()
        if row["error"] < ERROR_LIMIT:
            calls[f"{candidate.kernel} {candidate.name}"] = runner.launch(candidate).run
    calls["delta"] = runner.delta_launch().run
    times = time_interleaved(calls, rounds)
    rows.append({"kernel": "delta", "name": "delta", "error": 0.0})
    for row in rows:
        keys = (row["kernel"], f"{row['kernel']} {row['name']}")
        row["ms"] = next((times[key] for key in keys if key in times), None)
        if row["ms"] and row["kernel"] in FLOPS_PER_PAIR:
            work_done = FLOPS_PER_PAIR[row["kernel"]] * heads.dim * heads.query * problem.pairs
            row["tflops"] = work_done / row["ms"] / 1e9
    return rows


def print_table(workload: str, dim: int, rows: list[dict[str, Any]]) -> None:
    """One line a row, and the best backward in flex's terms."""
    print(f"\n== {workload} D={dim}")
    for row in sorted(rows, key=lambda r: (r["kernel"], r.get("ms") or 1e9)):
        if row.get("ms") is None:
            print(f"{row['kernel']:14s} {row['name']:50s} {row.get('failed') or row['error']}")
            continue
        print(
            f"{row['kernel']:14s} {row['name']:50s} {row['ms']:8.3f} ms "
            f"{row.get('tflops', 0):6.0f} TFLOP/s  error {row['error']:.1e}"
        )
    best = {
        kernel: min((r["ms"] for r in rows if r["kernel"] == kernel and r.get("ms")), default=None)
        for kernel in (*KERNELS, "delta", "flex forward", "flex backward")
    }
    if all(best.values()):
        backward = best["dq"] + best["dkdv"] + best["delta"]  # type: ignore[operator]
        print(
            f"best / flex: forward {best['flex forward'] / best['forward']:.2f}x, "  # type: ignore[operator]
            f"backward {best['flex backward'] / backward:.2f}x"
        )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON report")
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS))
    parser.add_argument("--dims", nargs="+", type=int, default=[128, 64])
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS), choices=KERNELS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--list-blocks", nargs=2, type=int, help="the same lists for all")
    parser.add_argument("--shipped", action="store_true", help="only the table's configurations")
    parser.add_argument("--compile-only", action="store_true", help="no GPU is used")
    options = parser.parse_args(arguments)

    begin = time.perf_counter()
    sizes = tuple(options.list_blocks) if options.list_blocks else None
    work = {
        dim: [
            candidate
            for kernel in options.kernels
            for candidate in candidates(kernel, dim, sizes, options.shipped)
        ]
        for dim in options.dims
    }
    flat = [candidate for of_dim in work.values() for candidate in of_dim]
    failed = compile_all(flat, options.processes)
    print(f"compiled {len(flat)} candidates in {time.perf_counter() - begin:.0f} s")
    for candidate, error in failed.items():
        print(f"does not compile: {candidate.kernel} D={candidate.dim} {candidate.name}: {error}")
    if options.compile_only:
        return
    report = []
    for dim in options.dims:
        for workload in select(options.workloads):
            problem = Problem.make(workload, Heads(32, 8, dim), torch.bfloat16, "cuda")
            rows = tune(problem, work[dim], failed, options.rounds)
            report.append({"workload": workload.name, "dim": dim, "rows": rows})
            print_table(workload.name, dim, rows)
            options.out.write_text(json.dumps(report, indent=1))
            torch._dynamo.reset()
    print(f"\ntotal {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
