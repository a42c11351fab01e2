"""The Hopper kernels compile for sm_90, fit its shared memory, and keep the matrix units busy.

Runs without a GPU: the launches go through the host code with tensors in main memory, and stop
after the compilation.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon")

from .cases import Case, Problem  # noqa: E402
from .compiling import compile_only  # noqa: E402
from .descriptors import stale_descriptors  # noqa: E402

SHARED_MEMORY = 232448
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
CASES = [
    Case("tree", q_len=256, kv_len=256),
    Case("parents_tail", "q >= k & (q0 == k0 | q1 == k0)", 200, 200, heads=3, kv_heads=1),
    Case("dim_64_int64", q_len=256, kv_len=256, head_dim=64, index_dtype=torch.int64),
]


def sass_of(kernel: Any, folder: Path) -> list[str]:
    """The instructions of a compiled kernel, with its labels."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    command = [str(TOOLS / "nvdisasm"), "-c", str(cubin)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    matches = re.finditer(r"^(\.L_x_\d+):|^\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", text, re.MULTILINE)
    return [match.group(1) or match.group(2) for match in matches]


def loops_of(sass: list[str]) -> list[list[str]]:
    """The loops of a kernel that hold no other loop with matrix products."""
    labels = {line: at for at, line in enumerate(sass) if line.startswith(".L_x_")}
    loops = []
    for at, line in enumerate(sass):
        match = re.search(r"BRA `\((\.L_x_\d+)\)", line)
        if match and labels.get(match.group(1), at) < at:
            loops.append((labels[match.group(1)], at))
    products = [i for i, line in enumerate(sass) if "HGMMA" in line]
    busy = [(a, b) for a, b in loops if any(a < i < b for i in products)]
    inner = [
        (a, b) for a, b in busy if not any((c, d) != (a, b) and a <= c and d <= b for c, d in busy)
    ]
    return [sass[a:b] for a, b in inner]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_resources(case: Case, tmp_path: Path) -> None:
    problem = Problem(case, 0, device="cpu")
    with compile_only() as compiled:
        out, lse = problem.forward()
        # Kernels that may find nothing to do are compiled anew: one case has them.
        for form in ("by length",) if case is CASES[0] else ("deterministic", "fast"):
            problem.backward(out, lse, form)
    for name in ("forward_kernel", "dkdv_kernel", "dq_kernel", "fast_backward_kernel"):
        kernel = compiled[name]
        assert kernel.metadata.shared <= SHARED_MEMORY, name
        sass = sass_of(kernel, tmp_path)
        products = sum("HGMMA" in line for line in sass)
        assert products > 0, name
        assert stale_descriptors(sass) == [], name
        # One wait a product instead of one a matrix: the assembler has serialised them.
        waits = sum("WARPGROUP.DEPBAR" in line for line in sass)
        assert waits < products / 3, name
        loops = loops_of(sass)
        assert len(loops) >= 2, name
        fastest = min(loops, key=len)
        spills = [line for line in fastest if re.search(r"\b(LDL|STL)\b", line)]
        # A few addresses; accumulators would be dozens.
        assert len(spills) <= 12, (name, spills)


def test_softmax_overlaps_the_product(tmp_path: Path) -> None:
    with compile_only() as compiled:
        Problem(CASES[0], 0, device="cpu").forward()
    loop = min(loops_of(sass_of(compiled["forward_kernel"], tmp_path)), key=len)
    waits = [at for at, line in enumerate(loop) if "WARPGROUP.DEPBAR" in line]
    exponentials = [at for at, line in enumerate(loop) if "MUFU.EX2" in line]
    assert len(waits) == 2
    assert len(exponentials) >= 64
    assert sum(waits[0] < at < waits[1] for at in exponentials) >= 64


LOOPS = """
.L_x_0
UMOV UR6, 0x10
UMOV UR7, 0x40000040
UMOV UR5, 0x3
@!P0 BRA `(.L_x_1)
UIADD3 UR4, UP0, UR6, 0x2, URZ
UIADD3.X UR5, URZ, 0x40000040, URZ, UP0, !UPT
HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24, gsb0
.L_x_1
{}
HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24, gsb0
EXIT
"""


def test_stale_descriptors_are_seen() -> None:
    stale = LOOPS.format("NOP").strip().splitlines()
    assert len(stale_descriptors(stale)) == 1
    fresh = LOOPS.format("UMOV UR5, 0x40000040").strip().splitlines()
    assert stale_descriptors(fresh) == []
