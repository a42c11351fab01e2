"""Cases of context parallelism over NCCL; each runs on every rank, rank r on GPU r."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest

from bench.workloads import grpo
from tests.distributed.attention_checks import cp_mesh
from tree_attn_op import tree_attention
from tree_attn_op.distributed import (
    TreeLoadBalancer,
    context_parallel_attention,
    context_parallel_mask,
    context_parallel_unshard,
)

TREE = grpo("tree", prompts=2, prompt_len=1000, n=5, completion_len=333)


def run(compiled: bool = False, **options: object) -> None:
    """Results of all ranks together against one GPU's, by their errors against float32."""
    mask = TREE.tree("cuda").mask
    length = mask.q_len
    generator = torch.Generator("cuda").manual_seed(0)

    def random(heads: int) -> Tensor:
        return torch.randn(1, heads, length, 128, device="cuda", generator=generator)

    exact_inputs = [random(heads).requires_grad_() for heads in (8, 2, 2)]
    grad_out, grad_lse = random(8), random(8)[..., 0]
    exact = results(tree_attention, exact_inputs, mask, grad_out, grad_lse)
    inputs = [x.detach().bfloat16() for x in exact_inputs]
    own = results(
        tree_attention, [x.clone().requires_grad_() for x in inputs], mask, grad_out, grad_lse
    )

    mesh = cp_mesh()
    balancer = TreeLoadBalancer.of_mask(mask, dist.get_world_size())
    local_mask = context_parallel_mask(mesh, mask, balancer)
    at = local_mask.positions
    here = [x[:, :, at].requires_grad_() for x in inputs]

    def attend(*arguments: object, **keywords: object) -> object:
        return context_parallel_attention(*arguments, **keywords, **options)

    call = torch.compile(attend, fullgraph=True) if compiled else attend
    parts = results(call, here, local_mask, grad_out[:, :, at], grad_lse[:, :, at])
    wholes = context_parallel_unshard(mesh, parts, [2] * 5, balancer)
    for ours, theirs, wanted in zip(wholes, own, exact, strict=True):
        error, error_of_one = ((x.float() - wanted).square().mean().sqrt() for x in (ours, theirs))
        # Gradients of key and value are rounded on each rank before they are summed.
        assert error <= 1.5 * error_of_one + 1e-6, (error, error_of_one)


def results(call, inputs, mask, grad_out: Tensor, grad_lse: Tensor) -> list[Tensor]:
    out, aux = call(*inputs, mask, enable_gqa=True, return_aux=AuxRequest(lse=True))
    grads = torch.autograd.grad((out, aux.lse), inputs, (grad_out.to(out.dtype), grad_lse))
    return [out.detach(), aux.lse.detach(), *grads]


def uncompiled() -> None:
    run()
    run(num_chunks=2)
    run(reshard_after_forward=True)
    run(reduce_dtype=torch.float32)


def compiled() -> None:
    run(compiled=True)
    torch._dynamo.reset()
    run(compiled=True, num_chunks=2, reshard_after_forward=True)


CASES = (uncompiled, compiled)
