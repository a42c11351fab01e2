"""What a call costs the host at 2k tokens: compiled flex_attention, rewritten and not.

`flex, rewritten` is rewritten however small it is, `flex, with the pass` as the pass does by
itself: it leaves a call alone that is too small to gain.

    python -m bench.launch_overhead --out build/launch_overhead.json

Many calls are made without waiting for the GPU. `host` is the time in which the CPU makes one of
them, as long as its queue has room; `wall` is that until the GPU has finished as well, over the
calls, which is what a loop of such calls takes; `device` is the time between events before and
after them, when the GPU is given a head start in which the CPU queues them all: what the GPU needs
where the host does not hold it up. Calls take turns; figures are medians over the rounds, ratios
medians of the rounds' ratios to flex.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from passes import TreeAttentionPass
from tree_attn_op import tree_attention

from .peers import FlexFlash, tree_block_mask
from .problem import Heads, Problem
from .report import environment
from .timing import Percentiles
from .varlen import flash_attention_4_missing
from .workloads import grpo

TREE = grpo("grpo_1x4_2k", prompts=1, prompt_len=512, n=4, completion_len=384)
MODES = ("forward, no grad", "forward", "forward and backward")
_HEAD_START_CYCLES_A_CALL = 2_000_000

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Cost:
    """Microseconds of one call; ratios are flex's over this one's.

    Attributes:
        host, wall, device: see above; device is None on a CPU.
        host_ratio, wall_ratio: by rounds.
    """

    name: str
    mode: str
    host: Percentiles
    wall: Percentiles
    device: float | None
    host_ratio: Percentiles
    wall_ratio: Percentiles


def attentions(problem: Problem) -> dict[str, Attention]:
    """The calls by name, flex first."""
    device = problem.query.device.type
    mask = problem.tree.mask
    block_mask = tree_block_mask(problem.tree, device != "cpu")

    def flex(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return flex_attention(query, key, value, block_mask=block_mask, enable_gqa=True)

    def flash(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        options: Any = FlexFlash.kernel_options
        return flex_attention(
            query, key, value, block_mask=block_mask, enable_gqa=True, kernel_options=options
        )

    def op(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = tree_attention(query, key, value, mask, enable_gqa=True)
        assert isinstance(out, Tensor)
        return out

    rewrite: Any = {"pre_grad_custom_pass": TreeAttentionPass(rewrite_small=True)}
    default: Any = {"pre_grad_custom_pass": TreeAttentionPass(rewrite_small=False)}
    found: dict[str, Attention] = {
        "flex": torch.compile(flex, dynamic=False, fullgraph=True),
        "flex, rewritten": torch.compile(flex, dynamic=False, fullgraph=True, options=rewrite),
        "flex, with the pass": torch.compile(flex, dynamic=False, fullgraph=True, options=default),
        "op, compiled": torch.compile(op, dynamic=False, fullgraph=True),
        "op": op,
    }
    if device != "cpu" and flash_attention_4_missing() is None:
        found["flex_flash"] = torch.compile(flash, dynamic=False, fullgraph=True)
    return found


def calls(problem: Problem, mode: str) -> dict[str, Callable[[], object]]:
    """Every attention in a mode, without arguments; the first call compiles."""
    trains = mode != MODES[0]
    inputs = tuple(
        x.detach().requires_grad_(trains) for x in (problem.query, problem.key, problem.value)
    )

    def call(attention: Attention) -> object:
        with contextlib.nullcontext() if trains else torch.no_grad():
            out = attention(*inputs)
        if mode == MODES[2]:
            return torch.autograd.grad(out, inputs, problem.grad_out)
        return out

    return {name: (lambda a=one: call(a)) for name, one in attentions(problem).items()}


def measure(problem: Problem, mode: str, repeats: int, rounds: int) -> list[Cost]:
    """The cost of every attention in a mode.

    Args:
        problem: what is computed.
        mode: of MODES.
        repeats: calls in a row.
        rounds: how often.
    """
    on_gpu = problem.query.device.type == "cuda"
    wait = torch.cuda.synchronize if on_gpu else (lambda: None)
    every = calls(problem, mode)
    for call in every.values():
        for _ in range(3):
            call()
    hosts: dict[str, list[float]] = {name: [] for name in every}
    walls: dict[str, list[float]] = {name: [] for name in every}
    for _ in range(rounds):
        for name, call in every.items():
            wait()
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            hosts[name].append((time.perf_counter() - start) / repeats * 1e6)
            wait()
            walls[name].append((time.perf_counter() - start) / repeats * 1e6)
    host, wall = ({n: np.array(v) for n, v in taken.items()} for taken in (hosts, walls))
    return [
        Cost(
            name=name,
            mode=mode,
            host=Percentiles.of(host[name]),
            wall=Percentiles.of(wall[name]),
            device=_device_microseconds(call) if on_gpu else None,
            host_ratio=Percentiles.of(host["flex"] / host[name]),
            wall_ratio=Percentiles.of(wall["flex"] / wall[name]),
        )
        for name, call in every.items()
    ]


def _device_microseconds(call: Callable[[], object], repeats: int = 20) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(_HEAD_START_CYCLES_A_CALL * repeats)
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats * 1e3


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.launch_overhead", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, default=Path("build/launch_overhead.json"))
    parser.add_argument("--repeats", type=int, default=100, help="calls in a row")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    options = parser.parse_args(args)
    heads = Heads(options.heads, options.kv_heads, options.head_dim)
    problem = Problem.make(TREE, heads, getattr(torch, options.dtype), options.device)
    # flex_attention does not train on a CPU.
    modes = MODES if options.device == "cuda" else MODES[:1]
    costs = [
        one for mode in modes for one in measure(problem, mode, options.repeats, options.rounds)
    ]
    about = environment(options.device) | {"tokens": str(problem.tree.num_tokens)}
    about |= {"heads": str(heads), "dtype": options.dtype}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    results = {"environment": about, "costs": [asdict(one) for one in costs]}
    options.out.write_text(json.dumps(results, indent=1) + "\n")
    print("| mode | call | host us | x flex | wall us | x flex | device us |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for one in costs:
        cells = [one.mode, one.name, f"{one.host.p50:.0f}", f"{one.host_ratio.p50:.2f}"]
        cells += [f"{one.wall.p50:.0f}", f"{one.wall_ratio.p50:.2f}"]
        cells.append("" if one.device is None else f"{one.device:.0f}")
        print(f"| {' | '.join(cells)} |")
    print(f"Written to {options.out}")


if __name__ == "__main__":
    main()
