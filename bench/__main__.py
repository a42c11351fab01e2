"""`python -m bench`: measure, and write results.json and results.md."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import platform
import time
from pathlib import Path

import torch

from .implementations import IMPLEMENTATIONS
from .problem import Heads
from .report import Report
from .runner import run_case
from .workloads import SMOKE, select

_PACKAGES = ("torch", "triton", "tree-attn-op", "flash-attn-4", "flash-attn")


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


def environment(options: argparse.Namespace) -> dict[str, str]:
    """Where and how the run was made."""
    installed = {d.metadata["Name"].lower(): d.version for d in importlib.metadata.distributions()}
    versions = [f"{name} {installed[name]}" for name in _PACKAGES if name in installed]
    gpu = torch.cuda.get_device_name() if options.device == "cuda" else "none"
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "GPU": gpu,
        "CPU": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "versions": ", ".join([f"Python {platform.python_version()}", *versions]),
        "dtype": options.dtype,
        "layout": options.layout,
        "rounds": str(options.rounds),
    }


def main(args: list[str] | None = None) -> None:
    options = parse_args(args)
    report = Report(environment(options), [])
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
            )
            report.cases.append(case)
            report.write(options.out)
            line = Report({}, [case]).summary()
            print(f"{line}  [{time.perf_counter() - start:.0f} s]", flush=True)
    print(f"Written to {options.out / 'results.md'} and {options.out / 'results.json'}")


if __name__ == "__main__":
    main()
