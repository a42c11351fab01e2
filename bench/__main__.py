"""`python -m bench`: measure, and write results.json and results.md."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from .implementations import IMPLEMENTATIONS
from .problem import Heads
from .report import Report, environment
from .runner import run_case
from .workloads import SMOKE, select

_REPORTED = ("dtype", "layout", "rounds", "repeats")
"""Options that the report names."""


def parse_args(args: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("build/bench"), help="folder of the results"
    )
    parser.add_argument(
        "--workloads", nargs="+", metavar="NAME", help="of workloads.json; default all"
    )
    parser.add_argument(
        "--impls", nargs="+", choices=list(IMPLEMENTATIONS), default=list(IMPLEMENTATIONS)
    )
    parser.add_argument("--head-dims", nargs="+", type=int, default=[128, 64])
    parser.add_argument("--heads", type=int, default=32, help="query heads")
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument(
        "--layout", choices=["bhsd", "bshd"], default="bhsd", help="inputs in memory"
    )
    parser.add_argument(
        "--rounds", type=int, default=20, help="timed calls of each implementation"
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=0,
        help="backward calls of each implementation whose bits are compared with another's",
    )
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--check-head", type=int, default=0, help="key/value head that is checked")
    parser.add_argument(
        "--smoke", action="store_true", help="one tiny workload: shows that the bench works"
    )
    options = parser.parse_args(args)
    if options.heads % options.kv_heads:
        parser.error(f"--heads {options.heads} is no multiple of --kv-heads {options.kv_heads}")
    if not 0 <= options.check_head < options.kv_heads:
        parser.error(f"--check-head {options.check_head} is none of {options.kv_heads} heads")
    try:
        options.workloads = [SMOKE] if options.smoke else select(options.workloads)
    except ValueError as error:
        parser.error(str(error))
    return options


def main(args: list[str] | None = None) -> None:
    options = parse_args(args)
    about = environment(options.device)
    about |= {name: str(getattr(options, name)) for name in _REPORTED}
    report = Report(about, [])
    for dim in options.head_dims:
        for workload in options.workloads:
            start = time.perf_counter()
            case = run_case(
                workload,
                Heads(options.heads, options.kv_heads, dim),
                options.impls,
                dtype=getattr(torch, options.dtype),
                device=options.device,
                rounds=options.rounds,
                kv_head=options.check_head,
                layout=options.layout,
                repeats=options.repeats,
            )
            report.cases.append(case)
            report.write(options.out)
            line = Report({}, [case]).summary()
            print(f"{line}  [{time.perf_counter() - start:.0f} s]", flush=True)
    print(f"Written to {options.out / 'results.md'} and {options.out / 'results.json'}")


if __name__ == "__main__":
    main()
