"""The results as JSON and as Markdown tables."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from .implementations import BASELINE
from .runner import Case, Outcome, Timing
from .timing import Percentiles


@dataclass
class Report:
    """All cases of one run and where it ran.

    Attributes:
        environment: date, device, versions and the options of the run.
        cases: in the order in which they ran.
    """

    environment: dict[str, str]
    cases: list[Case]

    def write(self, folder: Path) -> None:
        """Write results.json and results.md, also halfway through a run."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "results.json").write_text(json.dumps(asdict(self), indent=1) + "\n")
        (folder / "results.md").write_text(self.markdown())

    def markdown(self) -> str:
        return "\n".join([*self._header(), *self._tables()]) + "\n"

    def _header(self) -> Iterator[str]:
        yield "# Benchmark"
        yield ""
        for name, value in self.environment.items():
            yield f"- {name}: {value}"
        yield ""
        yield (
            "Times are milliseconds as p50 (p20 to p80) of rounds in which the implementations "
            "take turns. TFLOP/s count the attention of each token to itself and its ancestors, "
            "4 D Hq flops a pair forward and 2.5 times that backward, at the p50. `x flex` is "
            "flex's time over the implementation's, as the median (p20 to p80) of the rounds' "
            "ratios. Errors are RMS errors against float64, relative to the RMS of the exact "
            "tensor."
        )

    def _tables(self) -> Iterator[str]:
        for case in self.cases:
            heads = case.heads
            yield ""
            yield f"## {case.workload}, D={heads.dim}"
            yield ""
            yield (
                f"{heads.query} query heads, {heads.kv} key/value heads; {case.num_tokens} tokens "
                f"packed, {case.num_trajectory_tokens} unpacked."
            )
            yield ""
            yield (
                "| implementation | forward ms | TFLOP/s | x flex | backward ms | TFLOP/s "
                "| x flex | peak MiB | error out / dq / dk / dv |"
            )
            yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
            for outcome in case.outcomes:
                yield _row(outcome)
            yield ""
            building = ", ".join(f"{n} {ms:.2f} ms" for n, ms in case.mask_building.items())
            yield f"Building the mask: {building}."

    def summary(self) -> str:
        """One line a case for the terminal."""
        return "\n".join(
            f"{case.workload:>16} D={case.heads.dim:<4}"
            + "; ".join(f"{o.name} {_summary(o)}" for o in case.outcomes)
            for case in self.cases
        )


def _row(outcome: Outcome) -> str:
    if outcome.status != "ok":
        cells = [outcome.status, *[""] * 6]
    else:
        cells = [*_timing_cells(outcome.forward), *_timing_cells(outcome.backward)]
        peak = outcome.peak_bytes
        cells.append("" if peak is None else f"{peak / 2**20:.0f}")
    errors = " / ".join(f"{error.rms:.1e}" for error in outcome.errors.values())
    return f"| {' | '.join([outcome.name, *cells, errors])} |"


def _timing_cells(timing: Timing | None) -> list[str]:
    if timing is None:
        return ["", "", ""]
    speedup = "" if timing.speedup is None else _spread(timing.speedup, 2)
    return [_spread(timing.milliseconds, 3), f"{timing.tflops:.3g}", speedup]


def _spread(values: Percentiles, digits: int) -> str:
    return f"{values.p50:.{digits}f} ({values.p20:.{digits}f} to {values.p80:.{digits}f})"


def _summary(outcome: Outcome) -> str:
    if outcome.status != "ok":
        return outcome.status.split(":")[0]
    parts = []
    for timing in (outcome.forward, outcome.backward):
        if timing is None:
            continue
        ratio = (
            ""
            if timing.speedup is None or outcome.name == BASELINE
            else (f" x{timing.speedup.p50:.2f}")
        )
        parts.append(f"{timing.tflops:.3g}{ratio}")
    return " / ".join(parts)
