"""The package in a fresh process: without Triton, without a GPU, without side effects."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

WITHOUT_TRITON = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
"""

CALL = """
import torch, tree_attn_op
tree = tree_attn_op.PrefixTree.from_sequences([[1, 2, 3], [1, 2, 4]])
query = torch.randn(1, 2, 4, 8, requires_grad=True)
out = tree_attn_op.tree_attention(query, query, query, tree.mask)
out.sum().backward()
assert query.grad.isfinite().all()
"""


def run(code: str) -> subprocess.CompletedProcess:
    environment = {"PATH": "", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("setup", ["", WITHOUT_TRITON], ids=["as it is", "without triton"])
def test_import_and_call(setup: str) -> None:
    done = run(setup + CALL)
    assert done.returncode == 0, done.stderr


def test_import_leaves_triton_and_dynamo_alone() -> None:
    code = """
import sys, torch
before = set(sys.modules)
import tree_attn_op
new = {name.partition(".")[0] for name in set(sys.modules) - before}
assert "triton" not in new, "triton was imported"
assert "torch._inductor.compile_fx" not in sys.modules, "inductor was imported"
assert "passes" not in new, "the op imports the pass"
"""
    done = run(code)
    assert done.returncode == 0, done.stderr


def test_a_gpu_call_without_triton_is_a_clear_error() -> None:
    code = (
        WITHOUT_TRITON
        + """
from tree_attn_op.implementations import gpu_kernels
try:
    gpu_kernels("portable")
except RuntimeError as error:
    assert "install triton" in str(error), error
else:
    raise AssertionError("no error")
"""
    )
    done = run(code)
    assert done.returncode == 0, done.stderr
