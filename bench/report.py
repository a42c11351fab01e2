"""The results as JSON and as Markdown tables."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from .implementations import COMPARED, IMPLEMENTATIONS
from .runner import Case, Outcome, Timing
from .timing import Percentiles

_PACKAGES = ("torch", "triton", "tree-attn-op", "flash-attn-4", "flash-attn")


def environment(device: str) -> dict[str, str]:
    """Where and with what a run is made."""
    installed = {d.metadata["Name"].lower(): d.version for d in importlib.metadata.distributions()}
    versions = [f"{name} {installed[name]}" for name in _PACKAGES if name in installed]
    now = datetime.datetime.now(datetime.timezone.utc)
    return {
        "date": now.strftime("%Y-%m-%d %H:%M UTC"),
        "GPU": torch.cuda.get_device_name() if device == "cuda" else "none",
        "CPU": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "versions": ", ".join([f"Python {platform.python_version()}", *versions]),
    }


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
        parts = [*self._header(), *self._overview(), *self._tables()]
        return "\n".join(parts) + "\n"

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
            "ratios, and so for the others. Errors are RMS errors against float64, relative to "
            "the RMS of the exact tensor. Same bits: of how many repeated backward calls the "
            "gradients were the same, bit for bit."
        )

    def _overview(self) -> Iterator[str]:
        """A row a case for each implementation of this project."""
        names = dict.fromkeys(o.name for case in self.cases for o in case.outcomes)
        for name in names:
            if not IMPLEMENTATIONS[name].ours:
                continue
            yield ""
            yield f"## {name}"
            yield ""
            columns = ["TFLOP/s", *(f"x {other}" for other in COMPARED)]
            titles = [f"{way} {one}" for way in ("forward", "backward") for one in columns]
            yield _line(["D", "workload", *titles])
            yield _line(["---"] * (2 + len(titles)))
            for case in self.cases:
                for outcome in case.outcomes:
                    if outcome.name == name:
                        cells = _ratio_cells(outcome.forward) + _ratio_cells(outcome.backward)
                        if outcome.status != "ok":
                            cells[0] = outcome.status
                        yield _line([str(case.heads.dim), case.workload, *cells])

    def _tables(self) -> Iterator[str]:
        ratios = [f"x {other}" for other in COMPARED]
        titles = [
            "implementation",
            *("forward ms", "TFLOP/s", *ratios),
            *("backward ms", "TFLOP/s", *ratios),
            *("same bits", "peak MiB", "error out / dq / dk / dv"),
        ]
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
            yield _line(titles)
            yield _line(["---"] * len(titles))
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


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _row(outcome: Outcome) -> str:
    name = f"{outcome.name} ({outcome.note})" if outcome.note else outcome.name
    cells = []
    for timing in (outcome.forward, outcome.backward):
        cells += ["" if timing is None else _spread(timing.milliseconds, 3)]
        cells += _ratio_cells(timing)
    if outcome.status != "ok":
        cells[0] = outcome.status
    cells.append("" if outcome.same_bits is None else str(outcome.same_bits))
    peak = outcome.peak_bytes
    cells.append("" if peak is None else f"{peak / 2**20:.0f}")
    cells.append(" / ".join(f"{error.rms:.1e}" for error in outcome.errors.values()))
    return _line([name, *cells])


def _ratio_cells(timing: Timing | None) -> list[str]:
    """TFLOP/s and the ratio to each of COMPARED."""
    if timing is None:
        return [""] * (1 + len(COMPARED))
    ratios = [_spread(timing.ratios[n], 2) if n in timing.ratios else "" for n in COMPARED]
    return [f"{timing.tflops:.3g}", *ratios]


def _spread(values: Percentiles, digits: int) -> str:
    return f"{values.p50:.{digits}f} ({values.p20:.{digits}f} to {values.p80:.{digits}f})"


def _summary(outcome: Outcome) -> str:
    if outcome.status != "ok":
        return outcome.status
    parts = []
    for timing in (outcome.forward, outcome.backward):
        if timing is None:
            continue
        ratios = "".join(f" x{timing.ratios[n].p50:.2f}" for n in COMPARED if n in timing.ratios)
        parts.append(f"{timing.tflops:.3g}{ratios}")
    return " / ".join(parts)
