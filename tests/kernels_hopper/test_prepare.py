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
from tests.kernels_hopper.simulating import _BackwardPreparation, _pair_order, _row_schedule
from tree_attn_op.kernels.hopper.dq_sums import finish_launch
from tree_attn_op.kernels.hopper.form import form_launch, zero_launch
from tree_attn_op.kernels.hopper.prepare import BackwardPreparation, RowSchedule

torch.manual_seed(20261130)
out, grad_out = torch.randn(2, 2, 3, 70, 24).unbind(0)
grad_out = grad_out.mT.contiguous().mT
lse, grad_lse = torch.randn(2, 2, 3, 70).unbind(0)
lse[:, :, 3] = -torch.inf
grad_lse = grad_lse[:, :1].expand(2, 3, 70)


def prepared(*arguments):
    prepare, stand_in = (
        kind(*arguments) for kind in (BackwardPreparation, _BackwardPreparation)
    )
    return prepare(*arguments[:-3]), stand_in(*arguments[:-3])


for batch, q_tiles, key_tiles in ((1, 5, 4), (2, 300, 7), (1, 1, 1), (2, 3, 291)):
    state = torch.randint(0, 3, (batch, 1, q_tiles, key_tiles), dtype=torch.int8)
    every = lists_of(state)
    by_key, by_query = every[:4], every[4:]
    given = out, grad_out, lse, grad_lse if batch > 1 else None
    found, want = prepared(*given, by_query, by_key, 2, 132, 33)
    pairs = (key_tiles + 1) // 2
    counts = found[1][: batch * pairs * 2].view(batch, pairs, 2)
    entries = found[2][: batch * pairs * q_tiles].view(batch, pairs, q_tiles)
    for b in range(batch):
        for pair in range(pairs):
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
    squeezed = [tensor.squeeze(1) for tensor in by_key]
    schedule = _row_schedule(*squeezed, 33, 0)
    assert (schedule[..., 7] == 1).all()
    for least in (0, 1, 2, 150, 1000):
        schedule[..., 7] = _row_schedule(*squeezed, 33, least)[..., 7]
        assert torch.equal(RowSchedule(by_key, 33, least)(by_key), schedule)
    schedule = schedule[..., :7]
    size = batch * q_tiles * 8
    assert torch.equal(found[3][:size].view(batch, q_tiles, 8)[..., :7], schedule)
    cost = (state.squeeze(1) > 0).sum(1)
    cost = torch.nn.functional.pad(cost, (0, key_tiles % 2)).unflatten(1, (-1, 2)).sum(-1)
    order = cost.argsort(dim=1, descending=True, stable=True)
    seen = torch.nn.functional.pad((state.squeeze(1) > 0).any(1), (0, key_tiles % 2))
    listed = seen.unflatten(1, (-1, 2)).long() @ torch.tensor([1, 2])
    order = 4 * order + listed.gather(1, order)
    # 132 blocks; what one head's items take together shall be 2/3 of the heaviest, or more.
    together = 1
    while 3 * together * cost[0].sum() < 2 * cost[0].max() * 132:
        together += 1
    for orders in (found[0], want[0]):
        assert orders[:2].tolist() == [together, 0]
        assert torch.equal(orders[2 : 2 + batch * pairs].view(batch, pairs).long(), order)

# No full lists, on one side or both; no schedule.
state = torch.randint(0, 2, (2, 1, 40, 9), dtype=torch.int8)
every = lists_of(state)
bare_key, bare_query = (*every[:2], None, None), (*every[4:6], None, None)
schedule = _row_schedule(*(tensor.squeeze(1) for tensor in every[:4]), 33, 4)
assert torch.equal(RowSchedule(bare_key, 33, 4)(bare_key), schedule)
schedule = schedule[..., :7]
for by_query in (every[4:], bare_query):
    for by_key in (every[:4], bare_key, None):
        found, want = prepared(out, grad_out, lse, None, by_query, by_key, 2, 132, 33)
        assert torch.equal(found[0][:12], want[0])
        assert torch.equal(found[1][:20].view(2, 5, 2), want[1])
        if by_key is not None:
            assert torch.equal(found[3].view(2, 40, 8)[..., :7], schedule)

for grad in (grad_lse, None):
    _, _, _, _, stats = prepared(out, grad_out, lse, grad, bare_query, None, 2, 132, 33)[0]
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
    acc = acc.contiguous()
    wanted, left = torch.tensor([1, 0], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    finish_launch(acc, dq, 0.5, False)(acc, dq, left)
    torch.testing.assert_close(dq, 0.5 * sums[:, :, :70, :columns])
    before = dq.clone()
    finish = finish_launch(acc, dq, 2.0, True)
    finish(acc, dq, left)
    assert torch.equal(dq, before)
    finish(acc, dq, wanted)
    torch.testing.assert_close(dq, 2.0 * sums[:, :, :70, :columns])

counts = torch.randint(0, 9, (2, 700, 2), dtype=torch.int32)
mean = counts.sum() / 1400
active = torch.empty(2, dtype=torch.int32)
for tiles in (1, 2):
    for least in (0, int(mean * tiles), int(mean * tiles) + 1, 100):
        fast = int(mean * tiles >= least)
        form_launch(1400, tiles, least)(counts, active)
        assert active.tolist() == [fast, 1 - fast]
acc = torch.ones(5000)
zero_launch(5000)(acc, left)
assert (acc == 1).all()
zero_launch(4999)(acc, wanted)
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
