"""Tensors on a GPU that is not the current one."""

from __future__ import annotations

import pytest
import torch

from tests.attention_cases import tree_case
from tree_attn_op import TreeMask, tree_attention
from tree_attn_op.reference import reference_attention

pytestmark = pytest.mark.gpu


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("dim", [64, 256], ids=["hopper on sm_90", "portable"])
def test_kernels_run_where_their_tensors_are(dim: int) -> None:
    made = tree_case(300)
    device = torch.device("cuda", 1)
    assert torch.cuda.current_device() == 0
    mask = TreeMask.from_predicate(
        made.predicate, made.q_vals.to(device), made.k_vals.to(device), 300, 300
    )
    query, key, value = (
        torch.randn(1, 2, 300, dim, device=device, dtype=torch.bfloat16).requires_grad_()
        for _ in range(3)
    )
    out = tree_attention(query, key, value, mask)
    grads = torch.autograd.grad(out.square().sum(), (query, key, value))
    exact = [x.detach().double().requires_grad_() for x in (query, key, value)]
    expected, _ = reference_attention(*exact, mask.to_dense().unsqueeze(1))
    wanted = torch.autograd.grad(expected.square().sum(), exact)
    for got, want in zip((out, *grads), (expected, *wanted), strict=True):
        error = (got.double() - want).norm() / want.norm()
        assert error < 1e-2
