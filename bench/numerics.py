"""Errors against float64 by workload, dtype and head dim, next to those of others.

    python -m bench.numerics --out build/numerics

The float64 oracle computes one key/value head with its query heads, of long contexts the gradients
of a sample of tokens only. An error is the root mean square and the largest of the differences,
over the root mean square of the exact tensor.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from .implementations import IMPLEMENTATIONS
from .oracle import Error, compare, reference, reference_sample, sample_of, select_head
from .problem import Heads, Problem
from .report import environment
from .workloads import SMOKE, Workload, grpo, load

LONG = grpo("long_256k", prompts=1, prompt_len=131072, n=8, completion_len=16384)
_SAMPLED_FROM = 65536
"""Tokens from which on only a sample of gradients is compared."""
_SAMPLE = 512


@dataclass(frozen=True)
class Setting:
    """One problem."""

    workload: Workload
    heads: Heads
    dtype: torch.dtype


@dataclass
class Row:
    """One implementation on one problem.

    Attributes:
        status: "ok", or why there are no errors.
        errors: of out, dq, dk and dv.
    """

    workload: str
    dtype: str
    heads: Heads
    implementation: str
    status: str = "ok"
    errors: dict[str, Error] = field(default_factory=dict)


def settings() -> list[Setting]:
    """What is looked at by default."""
    known = load()
    agentic, tinyleaf = known["agentic_32k"], known["tinyleaf_16k"]
    half = (torch.bfloat16, torch.float16)
    chosen = [
        Setting(workload, Heads(32, 8, dim), dtype)
        for workload in (agentic, tinyleaf)
        for dtype in half
        for dim in (64, 128)
    ]
    chosen += [Setting(agentic, Heads(32, 8, dim), torch.bfloat16) for dim in (96, 192, 256)]
    chosen += [Setting(agentic, Heads(32, 8, dim), torch.float32) for dim in (64, 128)]
    return [*chosen, Setting(LONG, Heads(8, 2, 128), torch.bfloat16)]


def measure(setting: Setting, names: Sequence[str], device: str) -> list[Row]:
    """The errors of the named implementations."""
    # Else flex's kernels of the last problem are compiled anew for any size, and it falls back to
    # its dense form after a few.
    torch._dynamo.reset()
    problem = Problem.make(setting.workload, setting.heads, setting.dtype, device)
    n = problem.tree.num_tokens
    sample = sample_of(n, _SAMPLE, device) if n >= _SAMPLED_FROM else None
    expected = reference(problem, 0) if sample is None else reference_sample(problem, 0, sample)
    rows = []
    for name in names:
        row = Row(setting.workload.name, str(setting.dtype)[6:], setting.heads, name)
        rows.append(row)
        reason = IMPLEMENTATIONS[name].unavailable(problem)
        if reason is not None:
            row.status = f"not run: {reason}"
            continue
        try:
            results = IMPLEMENTATIONS[name](problem).packed_results()
        except Exception as error:  # an implementation that fails must not hide the others
            message = next(iter(str(error).strip().splitlines()), "no message")
            row.status = f"failed: {type(error).__name__}: {message}"
            continue
        if results is None:
            row.status = "not run: it computes something else"
            continue
        own = select_head(0, setting.heads, results[0].detach(), results[1])
        row.errors = compare(own if sample is None else sample.of(own), expected)
        del results, own
    return rows


def markdown(about: dict[str, str], rows: Iterable[Row]) -> str:
    """The rows as one table."""
    lines = ["# Numerics", "", *(f"- {name}: {value}" for name, value in about.items()), ""]
    lines += [
        "Differences to float64, as root mean square and (largest), over the root mean square of "
        f"the exact tensor. From {_SAMPLED_FROM} tokens on of {_SAMPLE} random tokens.",
        "",
        "| workload | dtype | heads | D | implementation | out | dq | dk | dv |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        cells = [row.workload, row.dtype, f"{row.heads.query}/{row.heads.kv}", str(row.heads.dim)]
        shown = [f"{error.rms:.1e} ({error.max:.1e})" for error in row.errors.values()]
        if row.status != "ok":
            shown = [row.status]
        shown += [""] * (4 - len(shown))
        lines.append(f"| {' | '.join([*cells, row.implementation, *shown])} |")
    return "\n".join(lines) + "\n"


def parse_args(args: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.numerics", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, default=Path("build/numerics"))
    parser.add_argument(
        "--impls",
        nargs="+",
        choices=list(IMPLEMENTATIONS),
        default=["flex", "flex_flash", "gather", "tree_attn_op"],
    )
    parser.add_argument("--workloads", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--dtypes", nargs="+", help="only these")
    parser.add_argument("--head-dims", nargs="+", type=int, help="only these")
    parser.add_argument("--smoke", action="store_true", help="one tiny problem instead")
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    options = parser.parse_args(args)
    options.settings = [
        one
        for one in settings()
        if one.workload.name in (options.workloads or [one.workload.name])
        and str(one.dtype)[6:] in (options.dtypes or [str(one.dtype)[6:]])
        and one.heads.dim in (options.head_dims or [one.heads.dim])
    ]
    if options.smoke:
        options.settings = [Setting(SMOKE, Heads(4, 2, 16), torch.float32)]
    if not options.settings:
        parser.error("no problem has these workloads, dtypes and head dims")
    return options


def main(args: list[str] | None = None) -> None:
    options = parse_args(args)
    about = environment(options.device)
    rows: list[Row] = []
    for setting in options.settings:
        start = time.perf_counter()
        rows += measure(setting, options.impls, options.device)
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
        options.out.mkdir(parents=True, exist_ok=True)
        results = {
            "environment": about,
            "rows": [
                {**asdict(row), "errors": {n: e._asdict() for n, e in row.errors.items()}}
                for row in rows
            ],
        }
        (options.out / "numerics.json").write_text(json.dumps(results, indent=1) + "\n")
        (options.out / "numerics.md").write_text(markdown(about, rows))
        name = f"{setting.workload.name} {str(setting.dtype)[6:]} D={setting.heads.dim}"
        print(f"{name} [{time.perf_counter() - start:.0f} s]", flush=True)
    print(f"Written to {options.out / 'numerics.md'} and {options.out / 'numerics.json'}")


if __name__ == "__main__":
    main()
