"""Write the tables of the documentation from recorded measurements; no figure is typed by hand.

``python docs/tables.py`` fills what stands between ``<!-- begin NAME -->`` and
``<!-- end NAME -->`` in the pages: errors from the newest run of ``python -m bench.numerics``
for each GPU and dtype in ``bench/results/``, resources from the table of
``python -m tests.kernels.resources``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

DOCS = Path(__file__).parent
ROOT = DOCS.parent
RESULTS = ROOT / "bench" / "results"
RESOURCES = ROOT / "tests" / "kernels" / "resources.json"

_TENSORS = ("out", "dq", "dk", "dv")


def line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def header(titles: list[str]) -> list[str]:
    return [line(titles), line(["---"] * len(titles))]


class Run(NamedTuple):
    """The errors of one dtype in one recorded run; the rows are cells of the table."""

    environment: dict[str, str]
    dtype: str
    rows: list[list[str]]


def recorded_runs(folder: Path) -> Iterator[Run]:
    """For each GPU and dtype the newest run of ``python -m bench.numerics`` and of the benchmark.

    ``python -m bench`` records errors as well, of other workloads.
    """
    found = [
        (read is _of_numerics, run)
        for name, read in (("numerics", _of_numerics), ("results", _of_benchmark))
        for path in folder.glob(f"*/{name}.json")
        for run in read(json.loads(path.read_text()))
    ]
    found.sort(key=lambda one: (one[0], one[1].environment["date"]), reverse=True)
    shown = set()
    for kind, run in found:
        key = (kind, run.environment["GPU"], run.dtype)
        if key not in shown:
            shown.add(key)
            yield run


def _of_numerics(data: dict[str, Any]) -> Iterator[Run]:
    for dtype in dict.fromkeys(row["dtype"] for row in data["rows"]):
        rows = []
        for row in data["rows"]:
            if row["dtype"] != dtype:
                continue
            cells = [str(row["heads"]["dim"]), row["workload"], row["implementation"]]
            if row["status"] != "ok":
                rows.append([*cells, row["status"], *[""] * (len(_TENSORS) - 1)])
                continue
            errors = [row["errors"].get(name) for name in _TENSORS]
            rows.append(
                [*cells, *("" if e is None else _error(e["rms"], e["max"]) for e in errors)]
            )
        yield Run(data["environment"], dtype, rows)


def _of_benchmark(data: dict[str, Any]) -> Iterator[Run]:
    rows = [
        [
            str(case["heads"]["dim"]),
            case["workload"],
            outcome["name"],
            *(
                _error(*outcome["errors"][name]) if name in outcome["errors"] else ""
                for name in _TENSORS
            ),
        ]
        for case in data["cases"]
        for outcome in case["outcomes"]
        if outcome["errors"]
    ]
    yield Run(data["environment"], data["environment"]["dtype"], rows)


def _error(rms: float, largest: float) -> str:
    return f"{rms:.1e} ({largest:.1e})"


def numerics(folder: Path = RESULTS) -> str:
    """A table a run: RMS and largest difference, over the RMS of the exact tensor."""
    lines: list[str] = []
    for run in recorded_runs(folder):
        about = run.environment
        lines += [
            f"### {run.dtype}, {about['GPU']}",
            "",
            f"{about['versions']}; {about['date']}. RMS error (largest error).",
            "",
            *header(["D", "workload", "implementation", *_TENSORS]),
            *map(line, run.rows),
            "",
        ]
    return "\n".join(lines)


def resources(path: Path = RESOURCES) -> str:
    """A row a kernel, head dim and dtype; a column an architecture."""
    data = json.loads(path.read_text())
    table: dict[tuple[str, str, str, str], dict[str, dict[str, int]]] = {}
    for key, row in data["kernels"].items():
        family, kernel, architecture, dtype, dim = key.split()
        table.setdefault((family, kernel, dtype, dim), {})[architecture] = row
    lines = [f"Triton {data['triton']}: shared KiB / registers / stack bytes.", ""]
    for family in dict.fromkeys(key[0] for key in table):
        rows = {key: cells for key, cells in table.items() if key[0] == family}
        architectures = list(dict.fromkeys(name for cells in rows.values() for name in cells))
        lines += [f"**{family}**", "", *header(["kernel", "dtype", "D", *architectures])]
        for (_, kernel, dtype, dim), cells in rows.items():
            values = (
                f"{cell['shared'] / 1024:.0f} / {cell['registers']} / {cell['stack']}"
                for cell in (cells[name] for name in architectures)
            )
            lines.append(line([kernel, dtype, dim, *values]))
        lines.append("")
    return "\n".join(lines)


TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "numerics": ("numerics.md", numerics),
    "resources": ("portability.md", resources),
}


def filled(page: str, name: str, table: str) -> str:
    """``page`` with ``table`` between the marks of ``name``.

    Raises:
        ValueError: the page has no such marks, or several.
    """
    pattern = rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)"
    text, count = re.subn(
        pattern, lambda marks: f"{marks[1]}\n{table}\n{marks[2]}", page, flags=re.DOTALL
    )
    if count != 1:
        raise ValueError(f"the page has {count} places for {name}, not one")
    return text


def main() -> None:
    for name, (page, make) in TABLES.items():
        path = DOCS / page
        path.write_text(filled(path.read_text(), name, make()))


if __name__ == "__main__":
    main()
