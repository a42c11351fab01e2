"""Interleaved timing: the implementations take turns in every round."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .base import Implementation

# Larger than any GPU's L2 cache: each call then starts with cold caches, as in a model.
_FLUSH_BYTES = 256 * 2**20
# About a millisecond in which the CPU queues the call's launches, so that its own work is no part
# of the GPU's time: what is compared here are kernels, in a model that keeps the GPU busy. Calls
# that take the CPU longer get longer; one that waits for the GPU in between keeps its waiting.
HEAD_START_CYCLES = 2_000_000
_LONGEST_HEAD_START_CYCLES = 32 * HEAD_START_CYCLES


@dataclass(frozen=True)
class Percentiles:
    """p20, p50 and p80 of the rounds."""

    p20: float
    p50: float
    p80: float

    @classmethod
    def of(cls, values: np.ndarray) -> Percentiles:
        return cls(*(float(v) for v in np.percentile(values, [20, 50, 80])))


def measure(
    implementations: Mapping[str, Implementation], rounds: int, device: str
) -> dict[str, dict[str, np.ndarray]]:
    """Milliseconds of each round: {"forward" or "backward": {name: [rounds]}}.

    One call of everything comes first and is not counted. The order moves on by one from round to
    round, so that nobody always runs behind the same neighbour.
    """
    timer = _CudaTimer() if device == "cuda" else _wall_clock_round
    outs = {name: one.forward() for name, one in implementations.items()}
    forward: dict[str, Callable[[], object]] = {
        name: one.forward for name, one in implementations.items()
    }
    backward: dict[str, Callable[[], object]] = {
        name: _backward_call(one, outs[name])
        for name, one in implementations.items()
        if one.has_backward
    }
    times: dict[str, dict[str, np.ndarray]] = {}
    for direction, calls in (("forward", forward), ("backward", backward)):
        timer(calls)
        samples = [timer(_rotated(calls, i)) for i in range(rounds)]
        times[direction] = {name: np.array([s[name] for s in samples]) for name in calls}
    return times


def _backward_call(implementation: Implementation, out: Tensor) -> Callable[[], object]:
    return lambda: implementation.backward(out)


def _rotated(
    calls: Mapping[str, Callable[[], object]], by: int
) -> dict[str, Callable[[], object]]:
    items = list(calls.items())
    first = by % max(len(items), 1)
    return dict(items[first:] + items[:first])


class _CudaTimer:
    """Times calls by events on the GPU; remembers the head start that each call needs."""

    def __init__(self) -> None:
        self._head_start: dict[Callable[[], object], int] = {}
        self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device="cuda")

    def __call__(self, calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        events = {name: self._record(call) for name, call in calls.items()}
        torch.cuda.synchronize()
        return {name: start.elapsed_time(end) for name, (start, end) in events.items()}

    def _record(self, call: Callable[[], object]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        head_start = self._head_start.get(call, HEAD_START_CYCLES)
        while True:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(head_start)
            self._flush.zero_()
            start.record()
            call()
            end.record()
            queued_in_time = not start.query()
            self._head_start[call] = head_start
            if queued_in_time or head_start >= _LONGEST_HEAD_START_CYCLES:
                return start, end
            head_start *= 2
            torch.cuda.synchronize()


def _wall_clock_round(calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    times = {}
    for name, call in calls.items():
        start = time.perf_counter()
        call()
        times[name] = (time.perf_counter() - start) * 1e3
    return times


def peak_bytes(call: Callable[[], object], device: str) -> int | None:
    """The most memory that a call allocates beyond what was there before; None on CPU."""
    if device != "cuda":
        call()
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


def wall_milliseconds(call: Callable[[], object], device: str, repeats: int = 3) -> float:
    """The median time of a call from start to finished on the device, in milliseconds."""
    times = []
    for _ in range(repeats):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return float(np.median(times))
