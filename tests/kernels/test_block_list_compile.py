"""The block-list kernels compiled for every supported architecture, without a GPU."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from tests.kernels.aot import compiling_for, target_of  # noqa: E402
from tree_attn_op.kernels.portable import block_lists  # noqa: E402
from tree_attn_op.predicate import Predicate  # noqa: E402

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter does not compile"
)

PARENTS = "q >= k & (q0 == k0 | q1 == k0)"


class _Compiling:
    """Stands for a kernel: a launch compiles it and leaves what came of it in ``compiled``."""

    def __init__(self, kernel: Any, compiled: list[Any]) -> None:
        self.kernel, self.compiled = kernel, compiled

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            self.compiled.append(self.kernel.warmup(*args, grid=grid, **options))

        return launch


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the launches of the test have compiled, in order."""
    found: list[Any] = []
    for name in ("prepare_tiles", "list_tiles"):
        kernel = getattr(block_lists, name)
        monkeypatch.setattr(block_lists, name, _Compiling(kernel, found))
    return found


def build(
    length: int = 300,
    text: str = PARENTS,
    dtype: torch.dtype = torch.int32,
    batch: int = 1,
    refine: bool = False,
) -> None:
    predicate = Predicate.parse(text)
    q_vals = torch.zeros(batch, predicate.num_q_rows, length, dtype=dtype)
    k_vals = torch.zeros(1, predicate.num_k_rows, length, dtype=dtype)
    blocks = -(-length // 128)
    given: tuple[torch.Tensor | None, ...] = (None,) * 4
    if refine:
        counts = torch.zeros(batch, 2, blocks, dtype=torch.int32)
        indices = torch.zeros(batch, 2, blocks, blocks, dtype=torch.int32)
        given = (counts, indices) * 2
    sizes = (128, 128, 64, 64)
    block_lists.block_lists(q_vals, k_vals, predicate, length, length, *given, *sizes)


@pytest.mark.parametrize("architecture", [80, 86, 90, 100, 120, "gfx942"])
def test_every_architecture(architecture: int | str, compiled: list[Any]) -> None:
    with compiling_for(target_of(architecture)):
        build(batch=2, refine=True)
    assert [kernel.name for kernel in compiled] == ["prepare_tiles", "list_tiles"]


def test_more_blocks_than_one_program_looks_at(compiled: list[Any]) -> None:
    with compiling_for(target_of(90)):
        build(length=128 * 1024, text="q >= k & q - k < 999 & q0 - k0 < 5", dtype=torch.int64)
    assert [kernel.name for kernel in compiled] == ["prepare_tiles", "list_tiles"]


def test_another_length_is_no_other_kernel(compiled: list[Any]) -> None:
    with compiling_for(target_of(90)):
        for length in (1100, 1101, 1104, 1536, 2048):
            build(length=length)
    assert {kernel.name for kernel in compiled} == {"prepare_tiles", "list_tiles"}
    assert len({kernel.hash for kernel in compiled}) == 2
