"""What context-parallel attention must equal: one process on all tokens, and the oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.attention.flex_attention import AuxRequest

from tests.attention_cases import Case, operands
from tree_attn_op import Predicate, TreeMask, tree_attention
from tree_attn_op.distributed import (
    ContextParallelMask,
    TreeLoadBalancer,
    context_parallel_attention,
    context_parallel_mask,
)
from tree_attn_op.reference import reference_attention

TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}


def cp_mesh() -> DeviceMesh:
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    return init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("cp",))


def mask_of(case: Case) -> TreeMask:
    return TreeMask(Predicate.parse(case.predicate), case.q_vals, case.k_vals, case.lists)


def close(actual: Tensor, expected: Tensor, **tolerance: float) -> None:
    torch.testing.assert_close(actual, expected, **(tolerance or TOLERANCE))


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: ContextParallelMask, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """out and lse of this rank's queries; the mask is an argument, as it is of a model."""
    aux = AuxRequest(lse=True)
    out, found = context_parallel_attention(
        query, key, value, mask, enable_gqa=True, return_aux=aux, **options
    )
    return out, found.lse


def check_case(
    case: Case,
    load_balancer: TreeLoadBalancer | None = None,
    *,
    batch: int = 1,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (8, 12),
    run: Callable[..., Any] = attend,
    **options: Any,
) -> None:
    """Compare outputs, lse and gradients, through lse as well, with those of one process.

    ``run`` is :func:`attend`, or what torch.compile makes of it.
    """
    length = case.lists.q_len
    query, key, value = operands(batch, heads, (length, length), dims, requires_grad=True)
    grad_out, grad_lse = (
        torch.randn(batch, heads[0], length, dims[1] + 1).double().split([dims[1], 1], -1)
    )
    grad_lse = grad_lse.squeeze(-1)
    mask = mask_of(case)
    wanted = tree_attention(
        query, key, value, mask, enable_gqa=True, return_aux=AuxRequest(lse=True)
    )
    expected = results(wanted, (query, key, value), (grad_out, grad_lse))
    oracle = reference_attention(query, key, value, case.allowed)
    exact = results(oracle, (query, key, value), (grad_out, grad_lse))
    for ours, theirs in zip(expected, exact, strict=True):
        close(ours, theirs)

    local_mask = context_parallel_mask(cp_mesh(), mask, load_balancer)
    positions = local_mask.positions

    def own(tensor: Tensor) -> Tensor:
        return tensor.detach().index_select(2, positions)

    here = [own(tensor).requires_grad_() for tensor in (query, key, value)]

    actual = results(run(*here, local_mask, options), here, (own(grad_out), own(grad_lse)))
    for ours, theirs in zip(actual, expected, strict=True):
        close(ours, own(theirs))


def results(outputs: Any, inputs: Any, gradients: tuple[Tensor, Tensor]) -> list[Tensor]:
    """out, lse and the gradients of the inputs."""
    out, lse = outputs[0], outputs[1] if isinstance(outputs[1], Tensor) else outputs[1].lse
    # A row that sees nothing has lse -inf, through which no gradient may come.
    grads = torch.autograd.grad((out, lse), inputs, gradients)
    return [out.detach(), lse.detach(), *grads]
