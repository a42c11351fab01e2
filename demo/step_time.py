"""One training step on the tree and on the separate trajectories, timed on a GPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from tree_attn_op import PrefixTree

from . import batch as batches
from . import model as models

_ROUNDS = 10


def compare_steps(batch: batches.Batch, tree: PrefixTree) -> Iterator[str]:
    """Time forward, loss, backward and AdamW both ways, in turns; yields one line a way."""
    ways: dict[str, Callable[[], None]] = {
        f"tree, {tree.num_tokens} tokens, flex_attention rewritten by the pass": _step(
            "flex_attention", "tree_attn", batch, lambda model: models.packed_logits(model, tree)
        ),
        f"trajectories, {tree.num_trajectory_tokens} tokens, padded, causal SDPA": _step(
            "sdpa",
            "inductor",
            batch,
            lambda model: models.unpacked_logits(model, batch.sequences, "cuda"),
        ),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    peaks = {}
    for name, step in ways.items():
        step()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        peaks[name] = torch.cuda.max_memory_allocated() - before
    for _ in range(_ROUNDS):
        for name, step in ways.items():
            times[name].append(_milliseconds(step))
    for name in ways:
        yield (
            f"{name}: {statistics.median(times[name]):.1f} ms (median of {_ROUNDS}), "
            f"{peaks[name] / 2**20:.0f} MiB beyond weights and optimizer at the peak"
        )


def _step(
    attention: str,
    backend: str,
    batch: batches.Batch,
    run: Callable[[nn.Module], list[Tensor]],
) -> Callable[[], None]:
    """A training step of a model large enough to keep a GPU busy."""
    model = models.build("cuda", layers=8, hidden_size=1024).to(torch.bfloat16)
    model.set_attn_implementation(attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    options = {"tree_attn.rewrite_small": True} if backend == "tree_attn" else None
    compiled = torch.compile(model, backend=backend, options=options)

    def step() -> None:
        batches.policy_loss(run(compiled), batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _milliseconds(call: Callable[[], None]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)
