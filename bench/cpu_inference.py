"""CPU inference: this project's op against compiled flex_attention on the same GRPO-shaped mask.

``python -m bench.cpu_inference [--threads N] [--runs N]`` checks both results against a float64
oracle, then times them interleaved and prints the median of each and the median of their ratio
(above 1: the op is faster). On a machine that is not idle, ``--clock process --threads 1`` counts
the time of this process instead.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tree_attn_op import TreeMask, tree_attention
from tree_attn_op.reference import reference_attention

HEADS, HEAD_DIM = 8, 64
TREES = {
    "2x(512 + 8x192)": (2, 512, [192] * 8),
    "2x(512 + 8x~192)": (2, 512, None),
    "1x(1024 + 16x192)": (1, 1024, [192] * 16),
    "4x(256 + 8x96)": (4, 256, [96] * 8),
}
"""Prompts, tokens of each, and tokens of each completion (None: eight of 96 to 288)."""


def subtree_ends(prompts: int, prompt_length: int, completions: list[int] | None) -> Tensor:
    """For each token of the pack, in DFS pre-order, where its subtree ends."""
    rng = random.Random(0)
    ends: list[int] = []
    for _ in range(prompts):
        lengths = completions or [rng.randint(96, 288) for _ in range(8)]
        ends += [len(ends) + prompt_length + sum(lengths)] * prompt_length
        for length in lengths:
            ends += [len(ends) + length] * length
    return torch.tensor(ends)


def interleaved(
    calls: dict[str, Callable[[], Tensor]], runs: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Seconds of each run of each call, taken in turn."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(runs):
        for name, call in calls.items():
            start = clock()
            call()
            times[name].append(clock() - start)
    return times


def measure(name: str, dtype: torch.dtype, kv_heads: int, runs: int, clock: Callable) -> None:
    end = subtree_ends(*TREES[name])
    length = len(end)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (q < end[k])

    block_mask = create_block_mask(mask_mod, 1, 1, length, length, device="cpu")
    mask = TreeMask.from_mask_mod(mask_mod, 1, length, length, device="cpu")
    query = torch.randn(1, HEADS, length, HEAD_DIM, dtype=dtype)
    key, value = torch.randn(2, 1, kv_heads, length, HEAD_DIM, dtype=dtype).unbind()
    torch._dynamo.reset()
    flex = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    calls: dict[str, Callable[[], Tensor]] = {
        "flex": lambda: flex(query, key, value, block_mask=block_mask, enable_gqa=True),
        "op": lambda: tree_attention(query, key, value, mask, enable_gqa=True),  # type: ignore[dict-item,return-value]
    }
    oracle, _ = reference_attention(query.double(), key.double(), value.double(), mask.to_dense())
    errors = {each: (call() - oracle).abs().max().item() for each, call in calls.items()}
    if errors["op"] > 2 * errors["flex"] + 1e-6:
        raise SystemExit(f"wrong result, no speed reported: {errors}")
    interleaved(calls, 2, clock)
    times = interleaved(calls, runs, clock)
    ratios = [flex / op for flex, op in zip(times["flex"], times["op"], strict=True)]
    medians = {each: statistics.median(taken) * 1e3 for each, taken in times.items()}
    print(
        f"{name:18} {length:5} tokens {str(dtype)[6:]:9} heads {HEADS}/{kv_heads}  "
        f"flex {medians['flex']:7.2f} ms  op {medians['op']:7.2f} ms  "
        f"flex/op {statistics.median(ratios):.3f}  "
        f"errors flex {errors['flex']:.1e} op {errors['op']:.1e}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=21)
    parser.add_argument("--clock", choices=("wall", "process"), default="wall")
    parser.add_argument("--tree", choices=TREES, action="append")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    clock = time.perf_counter if arguments.clock == "wall" else time.process_time
    with torch.inference_mode():
        for tree in arguments.tree or TREES:
            for dtype in (torch.float32, torch.bfloat16):
                for kv_heads in (HEADS, HEADS // 4):
                    measure(tree, dtype, kv_heads, arguments.runs, clock)


if __name__ == "__main__":
    main()
