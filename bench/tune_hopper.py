"""Checks the Hopper kernels, then times their variants in turns.

    python -m bench.tune_hopper --out tune_hopper

Every stage runs in a process of its own with a time limit, since a kernel that waits for ever
takes its process with it. First all is compiled, on all cores. Then every case is checked against
float64 on fresh random inputs, outputs poisoned with NaN; after a case that hangs or breaks the
CUDA context a new process goes on with the next. A head dim is timed if its tree-like cases are
right: for each workload, all variants of the forward and of the backward take turns; figures are
medians, in TFLOP/s of useful work (the backward counts 2.5 times the forward, as in the other
benches). Each of the backward's two kernels is also timed with the other left out, preparation
included; their figures count the products that they do, dQ's 1.5 and dK/dV's 2 times the
forward's, and so are rates of the matrix units on useful pairs.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

WORKLOADS = (
    "chain_16k",
    "grpo_1x16_32k",
    "grpo_8x8_32k",
    "longprompt_32k",
    "agentic_32k",
    "tinyleaf_16k",
)
PREDICATE = "q >= k & q < k0"
PARTS = ("forward", "deterministic", "fast")
"""The forward, the deterministic backward, and the one that is not."""
TREES = {
    128: ("tree", "tree_long", "tree_tail", "causal", "many_rows"),
    64: ("dim_64", "dim_64_causal"),
}
"""Cases by head dim that must be right for the workloads to be timed."""
CASE_LIMIT = 15.0
CHECK_LIMIT = 100.0
COMPILE_LIMIT = 75.0
TIMING_LIMIT = 40.0
"""Seconds for a case, all cases, the compilation, and all workloads of a head dim."""
HUNG, BROKEN = 3, 4
"""Exit statuses of a check that ended early."""
TIMED_MS = 250.0
"""Device time a variant gets in the timed rounds of a workload."""


class _Left:
    """A kernel whose launches do nothing."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def forward_variants(dim: int) -> dict[str, Any]:
    """Configurations of the forward to time, the default first."""
    from tree_attn_op.kernels.hopper.configs import FORWARD

    default = FORWARD[-(-dim // 64)]
    if dim == 64:
        fewer = replace(default, stages=2)
        less = replace(default, registers=232, producer_registers=40)
        return {
            "forward": default,
            "forward 2 stages": fewer,
            "forward 232 registers": less,
            "forward 2 stages 232 registers": replace(less, stages=2),
        }
    more = replace(default, registers=232, producer_registers=40)
    return {"forward": default, "forward 232 registers": more}


def backward_variants(dim: int) -> dict[str, Any]:
    """Configurations of the deterministic backward to time, the default first."""
    from tree_attn_op.kernels.hopper.configs import DKDV, DQ

    dkdv, dq = DKDV[-(-dim // 64)], DQ[-(-dim // 64)]

    def pair(dkdv: Any, dq: Any = dq) -> dict[str, Any]:
        return {"dkdv_config": dkdv, "dq_config": dq}

    if dim == 64:
        return {
            "backward": pair(dkdv),
            "backward 2 heads": pair(replace(dkdv, step_heads=2, stages=3)),
            "backward 4 stages": pair(replace(dkdv, stages=4), replace(dq, stages=4)),
        }
    return {"backward": pair(dkdv), "backward 3 stages": pair(replace(dkdv, stages=3))}


def fast_variants(dim: int) -> dict[str, Any]:
    """Configurations of the fast backward to time, the default first."""
    from tree_attn_op.kernels.hopper.configs import FAST

    default = FAST[-(-dim // 64)]
    if dim == 64:
        fewer = replace(default, stages=2)
        return {"fast": {"fast_config": default}, "fast 2 stages": {"fast_config": fewer}}
    return {"fast": {"fast_config": default}}


def _compile(job: tuple[str, Any, dict[str, Any]]) -> None:
    from tests.kernels_hopper.cases import Problem
    from tests.kernels_hopper.compiling import compile_only

    parts, case, configs = job
    torch.set_num_threads(1)
    problem = Problem(case, 0, device="cpu")
    out, lse = torch.empty_like(problem.grad_out), problem.query.new_empty(problem.query.shape[:3])
    with compile_only():
        if parts == "forward":
            problem.forward(**configs)
        else:
            problem.backward(out, lse.float(), parts, **configs)


def compile_all(wanted: list[str]) -> None:
    """Compiles all that is checked and timed into Triton's cache, on all cores."""
    from tests.kernels_hopper.cases import CASES, Case

    def kernels_of(case: Any) -> tuple[Any, ...]:
        """What two cases have in common if they run the same kernels."""
        group = case.heads // case.kv_heads
        q_tail = case.q_len % (64 if group % 2 == 0 else 128) != 0
        dims = case.head_dim, case.v_head_dim or case.head_dim
        kinds = case.predicate, case.dtype, case.index_dtype
        return kinds, group, q_tail, case.kv_len % 64 != 0, dims, case.grad_lse

    cases = {kernels_of(case): case for case in CASES}.values()
    jobs: list[tuple[str, Any, dict[str, Any]]] = []
    for dim in (128, 64):
        case = Case("timed", PREDICATE, 256, 256, head_dim=dim, grad_lse=False)
        forwards = forward_variants(dim).values()
        jobs += [("forward", case, {"config": config}) for config in forwards]
        for form, variants in (("deterministic", backward_variants), ("fast", fast_variants)):
            if form in wanted:
                jobs += [(form, case, configs) for configs in variants(dim).values()]
    jobs += [(parts, case, {}) for case in cases for parts in wanted]
    with multiprocessing.get_context("fork").Pool() as pool:
        pool.map(_compile, jobs, chunksize=1)


class _Noted:
    """A kernel that is waited for, so that what hangs or breaks is known by its name."""

    last = "none"

    def __init__(self, kernel: Any):
        self.kernel = kernel

    def __getitem__(self, grid: object) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            name = self.kernel.__name__
            _Noted.last = f"{name}, compiling or launching"
            self.kernel[grid](*args, **kwargs)
            _Noted.last = f"{name}, running"
            torch.cuda.synchronize()
            _Noted.last = f"{name}, done"

        return launch


def _note_kernels() -> None:
    for host, *names in (
        ("forward", "forward_kernel"),
        ("backward", "dkdv_kernel", "dq_kernel", "fast_backward_kernel"),
    ):
        module = sys.modules[f"tree_attn_op.kernels.hopper.{host}"]
        for name in names:
            setattr(module, name, _Noted(getattr(module, name)))


class _Watch:
    """Ends the process if what it watches takes too long: nothing stops a kernel that hangs."""

    def __init__(self, seconds: float, before: Callable[[], None]):
        self.timer = threading.Timer(seconds, self._end)
        self.timer.daemon = True
        self.before = before

    def _end(self) -> None:
        self.before()
        print(f"the last of the large kernels: {_Noted.last}", flush=True)
        faulthandler.dump_traceback(all_threads=True)
        sys.stderr.flush()
        os._exit(HUNG)

    def __enter__(self) -> None:
        self.timer.start()

    def __exit__(self, *error: object) -> None:
        self.timer.cancel()


def check(save: Callable[[dict[str, Any]], None], parts: str, *names: str) -> dict[str, Any]:
    """Relative errors of the named cases.

    A case over its limit, or raising, is reported; one that breaks the CUDA context or does not
    end takes the process with it, and what was found before is saved.
    """
    from tests.kernels_hopper.cases import CASES, LIMITS, errors

    _note_kernels()
    seed = time.time_ns() % 2**31
    results: dict[str, Any] = {}

    def report(name: str, result: Any, text: str, begin: float) -> None:
        results[name] = result
        save(results)
        seconds = time.monotonic() - begin
        print(f"{parts} {name} (seed {seed}, {seconds:.1f} s): {text}", flush=True)

    for case in CASES:
        if case.name not in names:
            continue
        begin = time.monotonic()
        late = f"no end within {CASE_LIMIT} s"
        with _Watch(CASE_LIMIT, functools.partial(report, case.name, late, late, begin)):
            try:
                found = errors(case, seed, parts)
                torch.cuda.synchronize()
            except Exception as error:
                text = f"{type(error).__name__}: {error}"[:300]
                report(case.name, text, text, begin)
                if isinstance(error, torch.AcceleratorError):
                    print(f"the last of the large kernels: {_Noted.last}", flush=True)
                    os._exit(BROKEN)
                continue
        wrong = any(not value < LIMITS[case.dtype] for value in found.values())
        text = " ".join(f"{name} {value:.1e}" for name, value in found.items())
        result = {"errors": found, "wrong": wrong}
        report(case.name, result, text + ("  WRONG" if wrong else ""), begin)
    return results


def check_all(parts: str, out: Path, deadline: float) -> dict[str, Any]:
    """Checks every case, in a new process after each one that broke or hung."""
    from tests.kernels_hopper.cases import CASES

    results: dict[str, Any] = {}
    left = [case.name for case in CASES]
    while left and time.monotonic() < deadline - 8:
        file = out / f"check_{parts}.json"
        file.unlink(missing_ok=True)
        stage(["check", parts, *left], out, file, deadline)
        found = json.loads(file.read_text()) if file.exists() else {}
        if not found:
            break
        results |= found
        left = [name for name in left if name not in found]
    results |= dict.fromkeys(left, "not run")
    (out / f"checked_{parts}.json").write_text(json.dumps(results, indent=1))
    bad = [name for name, result in results.items() if not right(result)]
    print(f"{parts}: {len(results) - len(bad)} of {len(results)} right; not: {bad}", flush=True)
    return results


def right(result: Any) -> bool:
    """Whether a case's result is there and within its limit."""
    return isinstance(result, dict) and not result["wrong"]


def repeat() -> dict[str, Any]:
    """Whether twenty runs give the same bits."""
    from tests.kernels_hopper.cases import Case, Problem

    problem = Problem(Case("repeat", q_len=4096, kv_len=4096), 1)
    out, lse = problem.forward()
    first = (out, lse, *problem.backward(out, lse))
    same = True
    for _ in range(20):
        again = (*problem.forward(), *problem.backward(out, lse))
        same = same and all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    print(f"the same bits in 20 runs: {same}", flush=True)
    return {"same": same}


def time_in_turns(calls: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Milliseconds of each call in each round, first rounds left out."""
    from .timing import HEAD_START_CYCLES

    samples: dict[str, list[float]] = {name: [] for name in calls}
    rounds, index = 3, 0
    while index < rounds:
        pairs = {}
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(HEAD_START_CYCLES)
            start.record()
            call()
            end.record()
            pairs[name] = (start, end)
        torch.cuda.synchronize()
        for name, (start, end) in pairs.items():
            samples[name].append(start.elapsed_time(end))
        index += 1
        if index == 3:
            slowest = max(values[-1] for values in samples.values())
            rounds += int(min(max(TIMED_MS / slowest, 7), 60))
    return {name: values[3:] for name, values in samples.items()}


def timed(dim: int, workload: str, wanted: list[str]) -> dict[str, Any]:
    """Times of all variants on one workload, 32 query heads over 8 key/value heads, bf16."""
    from tree_attn_op.blocks import build
    from tree_attn_op.kernels.choice import hopper_list_blocks
    from tree_attn_op.kernels.hopper import backward, forward
    from tree_attn_op.predicate import Predicate

    from .problem import Heads, Problem
    from .workloads import select

    problem = Problem.make(select([workload])[0], Heads(32, 8, dim), torch.bfloat16, "cuda")
    tokens = problem.query.shape[2]
    ends = problem.tree.subtree_end.to("cuda", torch.int32).view(1, 1, tokens)
    q_blocks = hopper_list_blocks(4)
    lists = build(Predicate.parse(PREDICATE), ends, ends, tokens, tokens, *q_blocks)
    inputs = (problem.query, problem.key, problem.value)
    mask = (ends, ends, PREDICATE)
    scale = dim**-0.5

    def forward_call(config: Any) -> Callable[[], Any]:
        return lambda: forward(*inputs, *mask, *lists.tensors[:4], *q_blocks, scale, config=config)

    out, lse = forward_call(None)()

    def backward_call(form: Any, configs: dict[str, Any]) -> Callable[[], Any]:
        return lambda: backward(
            problem.grad_out, None, *inputs, out, lse, *mask, *lists.tensors, *q_blocks, scale,
            form, **configs,
        )  # fmt: skip

    def without(kernel: str, call: Callable[[], Any]) -> Callable[[], Any]:
        module = sys.modules["tree_attn_op.kernels.hopper.backward"]

        def skipping() -> None:
            original = getattr(module, kernel)
            setattr(module, kernel, _Left())
            try:
                call()
            finally:
                setattr(module, kernel, original)

        return skipping

    calls: dict[str, Callable[[], Any]] = {}
    if "forward" in wanted:
        calls |= {name: forward_call(config) for name, config in forward_variants(dim).items()}
    if "fast" in wanted:
        for name, configs in fast_variants(dim).items():
            calls[name] = backward_call("fast", configs)
        calls["by length"] = backward_call("by length", {})
    if "deterministic" in wanted:
        for name, configs in backward_variants(dim).items():
            calls[name] = backward_call("deterministic", configs)
            calls[f"{name}: dq"] = without("dkdv_kernel", calls[name])
            calls[f"{name}: dkdv"] = without("dq_kernel", calls[name])
    times = time_in_turns(calls)
    work = problem.flops(backward=False) / 1e9
    share = {"": 2.5, ": dq": 1.5, ": dkdv": 2.0}
    results = {}
    for name, values in times.items():
        suffix = name[name.find(":") :] if ":" in name else ""
        factor = 1.0 if name.startswith("forward") else share[suffix]
        median = float(np.median(values))
        results[name] = {
            "ms": median,
            "tflops": factor * work / median,
            "spread": float(np.percentile(values, 90) / np.percentile(values, 10)),
            "rounds": len(values),
        }
    line = "  ".join(f"{name} {entry['tflops']:.0f}" for name, entry in results.items())
    print(f"D={dim} {workload}: {line}", flush=True)
    return results


def stage(arguments: list[str], out: Path, file: Path, deadline: float) -> bool:
    """Runs one stage in a process of its own, which writes its results to ``file``."""
    name = " ".join(arguments[:2])
    command = [sys.executable, "-u", "-m", "bench.tune_hopper", "--stage", *arguments]
    begin = time.monotonic()
    problem = ""
    try:
        limit = max(deadline - begin, 1.0)
        subprocess.run(
            [*command, "--file", str(file), "--out", str(out)], check=True, timeout=limit
        )
    except subprocess.TimeoutExpired:
        problem = "no end in time; "
    except subprocess.CalledProcessError as error:
        problem = f"exit status {error.returncode}; "
    print(f"[{name}: {problem}{time.monotonic() - begin:.0f} s]", flush=True)
    return not problem


def _run_stage(arguments: list[str], file: Path) -> None:
    def save(results: dict[str, Any]) -> None:
        file.write_text(json.dumps(results, indent=1))

    kind, *rest = arguments
    if kind == "compile":
        compile_all(rest)
    elif kind == "check":
        check(save, *rest)
    elif kind == "repeat":
        save(repeat())
    else:
        dim, parts, *workloads = rest
        results = {}
        for name in workloads:
            results[name] = timed(int(dim), name, parts.split("+"))
            save(results)


def main() -> None:
    begin = time.monotonic()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("tune_hopper"))
    parser.add_argument("--stage", nargs="+", help="run one stage in this process")
    parser.add_argument("--file", type=Path, help="where that stage writes its results")
    parser.add_argument("--dims", type=int, nargs="+", default=[128, 64])
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS))
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--anyway", action="store_true", help="time what failed its checks, too")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds in all")
    options = parser.parse_args()
    if options.stage:
        _run_stage(options.stage, options.file)
        return
    out = options.out
    out.mkdir(parents=True, exist_ok=True)
    end = begin + options.limit
    wanted = options.only
    stage(["compile", *wanted], out, out / "compile.json", min(end, begin + COMPILE_LIMIT))
    checks_end = min(end, time.monotonic() + CHECK_LIMIT)
    # All at once: most of a check is the definition in float64 and the start of a process.
    with ThreadPoolExecutor(len(wanted)) as pool:
        running = {x: pool.submit(check_all, x, out, checks_end) for x in wanted}
        checked = {x: future.result() for x, future in running.items()}
    for dim in options.dims:
        times = [
            x for x in wanted if options.anyway or all(right(checked[x][y]) for y in TREES[dim])
        ]
        if times:
            file = out / f"time_{dim}.json"
            limit = min(end, time.monotonic() + TIMING_LIMIT)
            stage(["time", str(dim), "+".join(times), *options.workloads], out, file, limit)
    if {"forward", "deterministic"} <= set(wanted) and time.monotonic() < end - 8:
        stage(["repeat"], out, out / "repeat.json", end)


if __name__ == "__main__":
    main()
