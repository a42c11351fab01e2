"""How each Hopper kernel is shaped, by head dim."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """Compile-time choices of a kernel.

    Attributes:
        stages: tiles in the ring between the producer and the consumers.
        step_heads: query heads of a group in one step of dK and dV.
        registers: registers a thread of the consumers, of at most 240.
        producer_registers: the producer's; the two consumers' and it share 504.
    """

    stages: int
    step_heads: int = 1
    registers: int = 240
    producer_registers: int = 24


# With 128 columns two stages of 128 keys are all that fits beside the query tiles. 64 columns
# leave room for more, which short rows gain from in the forward, and nothing in the backward. Two
# heads a step of dK and dV make the products wider, but spill. Measured: bench/NOTES.md.
FORWARD = {1: Config(stages=4), 2: Config(stages=2)}
DQ = {1: Config(stages=2), 2: Config(stages=2)}
DKDV = {1: Config(stages=2), 2: Config(stages=2)}
FAST = {1: Config(stages=4), 2: Config(stages=2)}
"""By the number of 64-column chunks of the wider of the two head dims."""
