"""Runs the tests in ``interpreted/`` under Triton's interpreter, on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy
import pytest

triton = pytest.importorskip("triton")
HERE = Path(__file__).parent


def _version(module: ModuleType) -> tuple[int, ...]:
    return tuple(int(part) for part in module.__version__.split(".")[:2])


@pytest.mark.skipif(
    _version(triton) < (3, 7) and _version(numpy) >= (2, 4),
    reason="the interpreter of Triton before 3.7 reads no loop bound with numpy 2.4 or later",
)
def test_kernels_under_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider"]
    finished = subprocess.run(
        [*command, str(HERE / "interpreted")],
        cwd=HERE.parents[1],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    report = finished.stdout + finished.stderr
    assert finished.returncode == 0, report[-8000:]
    assert " passed" in report, report[-2000:]
