"""What each shipped kernel needs of each architecture: shared memory, registers, spilled bytes.

``python -m tests.kernels.resources`` compiles all of them, which takes minutes and needs no GPU,
and writes the table that ``test_resources.py`` compares with and that the documentation shows.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from tests.kernels.cases import Case
from tree_attn_op.kernels.configs import CUDA_DEVICES, HIP, Device, Kernel

TABLE = Path(__file__).with_name("resources.json")
REGENERATE = "python -m tests.kernels.resources"

KERNELS: tuple[Kernel, ...] = get_args(Kernel)
HOPPER_KERNELS = (*KERNELS, "fast_backward")
ARCHITECTURES: tuple[int | str, ...] = (80, 86, 89, 90, 100, 103, 120, "gfx942")
DTYPES = (torch.bfloat16, torch.float32)
DIMS = (64, 128, 256)
HOPPER_DIMS = (64, 128)


@dataclass(frozen=True)
class Entry:
    """One compilation: a kernel's configuration for an architecture, a dtype and a head dim."""

    family: str
    kernel: str
    architecture: int | str
    dtype: torch.dtype
    dim: int

    def __str__(self) -> str:
        architecture = self.architecture
        name = architecture if isinstance(architecture, str) else f"sm_{architecture}"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.family} {self.kernel} {name} {dtype} {self.dim}"

    @property
    def device(self) -> Device:
        return device_of(self.architecture)


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel asks for.

    Attributes:
        shared: bytes of shared memory a program.
        registers: 32-bit registers a thread.
        stack: bytes of local memory a thread. The kernels have no arrays of their own there, so
            that it holds what the assembler spilled.
    """

    shared: int
    registers: int
    stack: int


def device_of(architecture: int | str) -> Device:
    """The device class that the kernels' configurations are chosen for."""
    return HIP if isinstance(architecture, str) else CUDA_DEVICES[architecture]


def entries() -> list[Entry]:
    """All that the table holds."""
    portable = [
        Entry("portable", kernel, architecture, dtype, dim)
        for architecture in ARCHITECTURES
        for dtype in DTYPES
        for dim in DIMS
        for kernel in KERNELS
    ]
    hopper = [
        Entry("hopper", kernel, 90, torch.bfloat16, dim)
        for dim in HOPPER_DIMS
        for kernel in HOPPER_KERNELS
    ]
    return portable + hopper


def case_of(dtype: torch.dtype, dim: int) -> Case:
    """The call that is compiled: eight query heads on one key head, blocks of 128."""
    return Case(
        heads=8,
        kv_heads=1,
        q_len=256,
        kv_len=256,
        dim=dim,
        dtype=dtype,
        blocks=(128, 128),
        value_range=(0, 256),
    )


def compile_entry(entry: Entry) -> Any:
    """The compiled kernel of an entry."""
    if entry.family == "hopper":
        return _compile_hopper(entry)
    from tests.kernels.aot import compile_kernel, config_of

    case = case_of(entry.dtype, entry.dim)
    config = config_of(entry.kernel, entry.device, case)
    return compile_kernel(entry.kernel, case, config, entry.architecture)


def _compile_hopper(entry: Entry) -> Any:
    from tests.kernels_hopper.cases import Case as HopperCase
    from tests.kernels_hopper.cases import Problem
    from tests.kernels_hopper.compiling import compile_only

    case = HopperCase(
        "resources", q_len=256, kv_len=256, kv_heads=1, head_dim=entry.dim, dtype=entry.dtype
    )
    problem = Problem(case, 0, device="cpu")
    with compile_only() as compiled:
        out, lse = problem.forward()
        if entry.kernel != "forward":
            problem.backward(out, lse, "by length" if "fast" in entry.kernel else "deterministic")
    return compiled[f"{entry.kernel}_kernel"]


def resource_tool() -> Path:
    """The cuobjdump that Triton ships."""
    import triton

    return Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def resources_of(compiled: Any) -> Resources:
    """What a compiled kernel needs, read from its machine code."""
    if "amdgcn" in compiled.asm:
        text = compiled.asm["amdgcn"]
        registers, stack = (
            _number(rf"\.{name}:\s+(\d+)", text)
            for name in ("vgpr_count", "private_segment_fixed_size")
        )
    else:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
            cubin.write(compiled.asm["cubin"])
            cubin.flush()
            command = [resource_tool(), "-res-usage", cubin.name]
            text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        registers, stack = (_number(rf"{name}:(\d+)", text) for name in ("REG", "STACK"))
    return Resources(compiled.metadata.shared, registers, stack)


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"no {pattern} in {text[:500]!r}")
    return int(match[1])


def read_table() -> tuple[str, dict[str, Resources]]:
    """The version of Triton that made the committed table, and the table by entry."""
    data = json.loads(TABLE.read_text())
    return data["triton"], {key: Resources(**row) for key, row in data["kernels"].items()}


def table_text(triton_version: str, rows: Iterator[tuple[Entry, Resources]]) -> str:
    """The table as JSON, one line an entry, so that a difference is read in a glance."""
    lines = [f"    {json.dumps(str(key))}: {json.dumps(asdict(row))}" for key, row in rows]
    body = ",\n".join(lines)
    return f'{{\n  "triton": {json.dumps(triton_version)},\n  "kernels": {{\n{body}\n  }}\n}}\n'


def main() -> None:
    import triton

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=TABLE, help=f"default {TABLE.name}")
    out = parser.parse_args().out
    rows = ((entry, resources_of(compile_entry(entry))) for entry in entries())
    out.write_text(table_text(triton.__version__, rows))


if __name__ == "__main__":
    main()
