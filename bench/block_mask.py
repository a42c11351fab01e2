"""Time and peak memory of block-mask building: ours against flex's eager and compiled builders.

``python -m bench.block_mask --out results.json``. Every builder gets the same mask_mod and length;
the lists are compared first, and a mask whose lists differ reports no time. Times are medians of
wall-clock intervals from the call to the end of its device work, since that is what a training
step waits for; builders take turns.
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

from tree_attn_op import create_block_mask

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
        samples: dict[str, list[tuple[float, int]]] = {builder: [] for builder in builders}
        for turn in range(rounds + 2):
            for builder, build in builders.items():
                sample = clock(build)
                if turn >= 2:
                    samples[builder].append(sample)
        for builder, taken in samples.items():
            ms = sorted(1e3 * seconds for seconds, _ in taken)
            rows.append(
                {
                    "mask": name,
                    "length": length,
                    "builder": builder,
                    "lists_equal_flex": right,
                    "ms": statistics.median(ms) if right else None,
                    "ms_p20_p80": [ms[len(ms) // 5], ms[(4 * len(ms)) // 5]],
                    "peak_mib": max(peak for _, peak in taken) / 2**20,
                }
            )
    return rows


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
    print("| mask | length | builder | lists equal | ms | peak MiB |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        ms = "-" if row["ms"] is None else f"{row['ms']:.3f}"
        print(
            f"| {row['mask']} | {row['length']} | {row['builder']} | {row['lists_equal_flex']}"
            f" | {ms} | {row['peak_mib']:.1f} |"
        )
    if options.out:
        with open(options.out, "w") as file:
            json.dump({"about": about, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
