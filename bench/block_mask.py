"""Time and peak memory of block-mask building: ours against flex's eager and compiled builders.

``python -m bench.block_mask --out results.json``. Every builder gets the same mask_mod and length;
the lists are compared first, and a mask whose lists differ reports no time. Times are medians of
wall-clock intervals from the call to the end of its device work, since that is what a training
step waits for. Builders take turns, two calls each: the first follows other work, which leaves the
host's caches cold ("after other work"), the second its own kind ("ms"). Behind the table stands
where our builder's time goes: what the host takes for each part of a call, and the device for what
a call launches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from datetime import date

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.attention.flex_attention import create_block_mask as flex_create_block_mask

from tree_attn_op import create_block_mask, ops
from tree_attn_op.lowering.cache import prove

EAGER_LIMIT = 64 * 1024
COMPILED_LIMIT = 128 * 1024


def tree_ends(length: int, prompts: int, completions: int, device: torch.device) -> Tensor:
    """End of the subtree of each token of a GRPO pack in DFS pre-order, int32 [length]."""
    group = length // prompts
    prompt = group // 4
    leaf = (group - prompt) // completions
    index = torch.arange(length, device=device)
    within = index % group
    start = index - within
    leaf_end = start + prompt + ((within - prompt) // leaf + 1) * leaf
    end = torch.where(within < prompt, start + group, torch.minimum(leaf_end, start + group))
    return end.to(torch.int32)


def masks(length: int, device: torch.device) -> dict[str, Callable]:
    """The mask_mods to build, by name."""
    end = tree_ends(length, 8, 16, device)
    document = (torch.arange(length, device=device) // 2048).to(torch.int32)
    parent = torch.where(document % 4 == 0, document, document - document % 4)

    def tree(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (q < end[k])

    def parents(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & ((document[q] == document[k]) | (parent[q] == document[k]))

    return {"tree": tree, "parents": parents}


def lists(block_mask: BlockMask) -> list[tuple[Tensor, Tensor]]:
    """Counts and, up to the counts, indices."""
    result = []
    for counts, indices in (
        (block_mask.kv_num_blocks, block_mask.kv_indices),
        (block_mask.full_kv_num_blocks, block_mask.full_kv_indices),
        (block_mask.q_num_blocks, block_mask.q_indices),
        (block_mask.full_q_num_blocks, block_mask.full_q_indices),
    ):
        assert counts is not None
        listed = torch.arange(indices.shape[-1], device=indices.device) < counts.unsqueeze(-1)
        result.append((counts, torch.where(listed, indices, -1)))
    return result


def same_lists(left: BlockMask, right: BlockMask) -> bool:
    return all(
        torch.equal(a, b)
        for pair in zip(lists(left), lists(right), strict=True)
        for a, b in zip(*pair, strict=True)
    )


class Clock:
    """Wall-clock seconds and peak memory of one call, synchronised where there is a GPU."""

    def __init__(self, device: torch.device):
        self.on_gpu = device.type == "cuda"

    def __call__(self, build: Callable[[], BlockMask]) -> tuple[float, int]:
        before = 0
        if self.on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        result = build()
        if self.on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        peak = torch.cuda.max_memory_allocated() - before if self.on_gpu else 0
        del result
        return seconds, peak


def measure(length: int, device: torch.device, rounds: int) -> list[dict]:
    compiled = torch.compile(flex_create_block_mask)
    clock = Clock(device)
    rows = []
    for name, mask_mod in masks(length, device).items():
        args = (mask_mod, None, None, length, length)
        builders: dict[str, Callable[[], BlockMask]] = {
            "tree_attn_op": lambda args=args: create_block_mask(*args, device=device)
        }
        if length <= EAGER_LIMIT:
            builders["flex eager"] = lambda args=args: flex_create_block_mask(*args, device=device)
        if length <= COMPILED_LIMIT:
            builders["flex compiled"] = lambda args=args: compiled(*args, device=device)
        reference = next((b() for n, b in builders.items() if n != "tree_attn_op"), None)
        right = reference is None or same_lists(builders["tree_attn_op"](), reference)
        del reference
        first: dict[str, list[tuple[float, int]]] = {builder: [] for builder in builders}
        samples: dict[str, list[tuple[float, int]]] = {builder: [] for builder in builders}
        for turn in range(rounds + 2):
            for builder, build in builders.items():
                pair = clock(build), clock(build)
                if turn >= 2:
                    first[builder].append(pair[0])
                    samples[builder].append(pair[1])
        for builder, taken in samples.items():
            ms = sorted(1e3 * seconds for seconds, _ in taken)
            after_work = statistics.median(1e3 * seconds for seconds, _ in first[builder])
            rows.append(
                {
                    "mask": name,
                    "length": length,
                    "builder": builder,
                    "lists_equal_flex": right,
                    "ms": statistics.median(ms) if right else None,
                    "ms_after_other_work": after_work if right else None,
                    "ms_p20_p80": [ms[len(ms) // 5], ms[(4 * len(ms)) // 5]],
                    "peak_mib": max(peak for _, peak in taken) / 2**20,
                }
            )
    return rows


def host_times(length: int, device: torch.device, calls: int = 200) -> list[dict]:
    """Microseconds of the host a call of our builder and of its parts, without waiting.

    ``prove`` finds the proof in the cache, ``values`` computes the value rows, ``lists`` launches
    the kernels; the rest of ``all`` is the BlockMask. ``device_us`` is what the device takes for
    one call, by events around calls that it already has in its queue; None without a GPU.
    """
    rows = []
    sizes = (length, length, 128, 128, 1, 1)
    for name, mask_mod in masks(length, device).items():
        proven = prove(mask_mod, 1, length, length, device)
        values = proven.borrowed_values()
        parts: dict[str, Callable[[], object]] = {
            "prove": lambda m=mask_mod: prove(m, 1, length, length, device),
            "values": proven.borrowed_values,
            "lists": lambda p=proven, v=values: ops.flex_lists(p.predicate, *v, *sizes),
            "all": lambda m=mask_mod: create_block_mask(m, None, None, length, length, device),
        }
        row: dict[str, object] = {"mask": name, "length": length}
        for part, call in parts.items():
            row[f"{part}_us"] = 1e6 * host_seconds(call, device, calls)
        row["device_us"] = device_microseconds(parts["all"], device)
        rows.append(row)
    return rows


def host_seconds(call: Callable[[], object], device: torch.device, calls: int) -> float:
    """Seconds of the host a call: the least of five runs of ``calls`` calls each."""
    taken = []
    for _ in range(5):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        taken.append((time.perf_counter() - start) / calls)
    return min(taken)


def device_microseconds(call: Callable[[], object], device: torch.device) -> float | None:
    """Microseconds of the device a call, while the host is far enough ahead."""
    if device.type != "cuda":
        return None
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    calls = 20
    torch.cuda.synchronize()
    torch.cuda._sleep(50_000_000)  # clocks: keeps the device busy until all is queued
    start.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * start.elapsed_time(end) / calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[32768, 65536, 131072, 1048576])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", help="write the rows as JSON to this file")
    options = parser.parse_args()
    device = torch.device(options.device)
    rows = [row for length in options.lengths for row in measure(length, device, options.rounds)]
    about = {
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
    }
    print("| mask | length | builder | lists equal | ms | ms after other work | peak MiB |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        times = (row["ms"], row["ms_after_other_work"])
        shown = " | ".join("-" if ms is None else f"{ms:.3f}" for ms in times)
        print(
            f"| {row['mask']} | {row['length']} | {row['builder']} | {row['lists_equal_flex']}"
            f" | {shown} | {row['peak_mib']:.1f} |"
        )
    host = [row for length in options.lengths for row in host_times(length, device)]
    print("\n| mask | length | prove us | values us | lists us | all us | device us |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in host:
        figures = [row[f"{part}_us"] for part in ("prove", "values", "lists", "all", "device")]
        shown = ["-" if us is None else f"{us:.1f}" for us in figures]
        print(f"| {row['mask']} | {row['length']} | {' | '.join(shown)} |")
    if options.out:
        with open(options.out, "w") as file:
            json.dump({"about": about, "rows": rows, "host": host}, file, indent=1)


if __name__ == "__main__":
    main()
