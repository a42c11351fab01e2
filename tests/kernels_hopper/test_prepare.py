"""The small kernels that prepare lists, in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy
import pytest

triton = pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon")

SCRIPT = """
import torch
from tree_attn_op.blocks import lists_of
from tests.kernels_hopper.simulating import _row_schedule
from tree_attn_op.kernels.hopper.dq_sums import finish_dq
from tree_attn_op.kernels.hopper.form import choose_form, zero_if
from tree_attn_op.kernels.hopper.prepare import (
    heaviest_first, merge_lists, row_schedule, row_statistics
)

torch.manual_seed(20261130)
for batch, q_tiles, key_tiles in ((1, 5, 4), (2, 300, 7), (1, 1, 1)):
    state = torch.randint(0, 3, (batch, 1, q_tiles, key_tiles), dtype=torch.int8)
    key_side = [x.squeeze(1) for x in lists_of(state)[4:]]
    counts, entries = merge_lists(*key_side)
    for b in range(batch):
        for pair in range((key_tiles + 1) // 2):
            columns = torch.zeros(q_tiles, 2, dtype=torch.int8)
            there = state[b, 0, :, 2 * pair : 2 * pair + 2]
            columns[:, : there.shape[1]] = there
            codes = [
                (16 * q + 4 * x + y, x == y == 2) for q, (x, y) in enumerate(columns.tolist())
                if x + y > 0
            ]
            mixed, full = counts[b, pair].tolist()
            codes.reverse()
            assert entries[b, pair, :mixed].tolist() == [c for c, is_full in codes if not is_full]
            back = entries[b, pair].flip(0)[:full].tolist()
            assert back == [c for c, is_full in codes if is_full]
    query_side = [x.squeeze(1) for x in lists_of(state)[:4]]
    found = row_schedule(*query_side)
    assert torch.equal(found[..., :5], _row_schedule(*query_side)[..., :5])
    cost = (counts[..., 0] + counts[..., 1]).float()
    order = heaviest_first(counts[..., 0], counts[..., 1])
    assert torch.equal(order.long(), cost.argsort(dim=1, descending=True, stable=True))

out, grad_out = torch.randn(2, 2, 3, 70, 24).unbind(0)
lse, grad_lse = torch.randn(2, 2, 3, 70).unbind(0)
lse[:, :, 3] = -torch.inf
for grad in (grad_lse.expand(2, 3, 70), None):
    stats = row_statistics(out, grad_out.mT.contiguous().mT, lse, grad, 2)
    delta = (out * grad_out).sum(-1) - (0.0 if grad is None else grad)
    found_lse, found_delta = stats.transpose(2, 3).flatten(3).unbind(2)
    log2 = torch.where(lse == -torch.inf, torch.inf, lse * 1.4426950408889634)
    torch.testing.assert_close(found_lse[..., :70], log2)
    torch.testing.assert_close(found_delta[..., :70], delta.where(lse > -torch.inf, 0.0))
    assert (found_lse[..., 70:] == torch.inf).all()
    assert (found_delta[..., 70:] == 0).all()

for width, columns in ((64, 24), (128, 128)):
    sums = torch.randn(2, 3, 128, width)
    # Rows 16 a + 8 b + c, columns 8 d + 2 e + f; found at [d, a, c, e, b, f].
    acc = sums.view(2, 3, 2, 4, 2, 8, width // 8, 4, 2).permute(0, 1, 2, 6, 3, 5, 7, 4, 8)
    dq = torch.full((2, 70, 3, columns), torch.nan).transpose(1, 2)
    finish_dq(acc.contiguous(), dq, 0.5)
    torch.testing.assert_close(dq, 0.5 * sums[:, :, :70, :columns])
    wanted, left = torch.tensor([1, 0], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    before = dq.clone()
    finish_dq(acc.contiguous(), dq, 2.0, left)
    assert torch.equal(dq, before)
    finish_dq(acc.contiguous(), dq, 2.0, wanted)
    torch.testing.assert_close(dq, 2.0 * sums[:, :, :70, :columns])

counts = torch.randint(0, 9, (2, 700, 2), dtype=torch.int32)
mean = counts.sum() / 1400
for tiles in (1, 2):
    for least in (0, int(mean * tiles), int(mean * tiles) + 1, 100):
        fast = int(mean * tiles >= least)
        assert choose_form(counts, tiles, least).tolist() == [fast, 1 - fast]
acc = torch.ones(5000)
zero_if(acc, left)
assert (acc == 1).all()
zero_if(acc[:4999], wanted)
assert (acc[:4999] == 0).all()
assert acc[4999] == 1
print("fine")
"""


def _version(module: object) -> tuple[int, int]:
    major, minor = module.__version__.split(".")[:2]  # type: ignore[attr-defined]
    return int(major), int(minor)


@pytest.mark.skipif(
    _version(triton) < (3, 7) and _version(numpy) >= (2, 4),
    reason="the interpreter of Triton before 3.7 reads no loop bound with numpy 2.4 or later",
)
def test_prepare() -> None:
    # In a process of its own: the interpreter is chosen when a kernel is defined.
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", SCRIPT]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "fine"
