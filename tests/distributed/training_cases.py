"""Cases of training under tensor, data and context parallelism; each runs on every rank."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.attention.flex_attention import flex_attention

import passes
from tests.distributed.attention_checks import close
from tests.distributed.model import (
    LAYERS,
    STEPS,
    Attention,
    Model,
    loss_sum,
    losses_of_one_process,
    mask_of,
    model,
    tree,
    tree_loss,
)
from tree_attn_op import PrefixTree
from tree_attn_op.distributed import (
    TreeLoadBalancer,
    context_parallel_loss_terms,
    context_parallel_mask,
    context_parallel_shard,
)


def tensor_parallel(trained: Model, mesh: DeviceMesh, dtensors: bool = False) -> None:
    """Heads and hidden units over a mesh; attention of plain tensors, or of DTensors."""
    column = partial(ColwiseParallel, use_local_output=not dtensors)
    for block in trained.blocks:
        plan = {
            "attention.wq": column(),
            "attention.wk": column(),
            "attention.wv": column(),
            "attention.wo": RowwiseParallel(),
            "up": ColwiseParallel(),
            "down": RowwiseParallel(),
        }
        parallelize_module(block, mesh, plan)


def train(
    trained: nn.Module,
    loss_of: Callable[[nn.Module, PrefixTree], tuple[Tensor, Tensor]],
    trees: Callable[[int], PrefixTree],
    steps: int,
) -> list[float]:
    """Losses of so many steps; ``loss_of`` gives what to differentiate and what to report."""
    # One tensor at a time: parameters of different meshes cannot be updated together.
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2, foreach=False)
    losses = []
    for step in range(steps):
        loss, reported = loss_of(trained, trees(step))
        losses.append(float(reported))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def whole_loss(trained: nn.Module, given: PrefixTree) -> tuple[Tensor, Tensor]:
    loss = tree_loss(trained, given)
    return loss, loss.detach()


def mean_over(mesh: DeviceMesh, trained: nn.Module, given: PrefixTree) -> tuple[Tensor, Tensor]:
    loss, mean = whole_loss(trained, given)
    dist.all_reduce(mean, group=mesh.get_group())
    return loss, mean / mesh.size()


def same(losses: list[float], expected: list[float], tolerance: float = 1e-10) -> None:
    both = (torch.tensor(one, dtype=torch.float64) for one in (losses, expected))
    close(*both, rtol=tolerance, atol=tolerance)
    # The steps did something.
    assert len(set(expected)) == len(expected)


def tensor_parallelism() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    expected = losses_of_one_process(lambda step: [tree(step)], STEPS)
    for dtensors in (False, True):
        trained = model()
        tensor_parallel(trained, mesh, dtensors)
        seen = attention_inputs(trained)
        same(train(trained, whole_loss, tree, STEPS), expected)
        assert {type(query) for query in seen} == {DTensor if dtensors else Tensor}


def attention_inputs(trained: Model) -> list[Tensor]:
    """Collects the queries that the first block's attention gets."""
    first = trained.blocks[0].attention
    seen: list[Tensor] = []
    attend = first.attend

    def watched(query: Tensor, *others: Any) -> Tensor:
        seen.append(query)
        return attend(query, *others)

    first.attend = watched
    return seen


def data_and_tensor_parallelism() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def trees(step: int) -> list[PrefixTree]:
        return [tree(2 * step % 12), tree(2 * step % 12 + 1)]

    expected = losses_of_one_process(trees, STEPS)
    which = mesh["dp"].get_local_rank()

    def prepared(kind: str) -> Model:
        trained = model()
        tensor_parallel(trained, mesh["tp"])
        for at, block in enumerate(trained.blocks):
            if kind == "checkpointed":
                trained.blocks[at] = block = checkpoint_wrapper(block)
            if kind == "compiled":
                torch._dynamo.reset()
                # torch 2.13 and 2.14 cannot trace DTensors' linear layers for dynamic lengths.
                block.compile(backend="aot_eager", dynamic=False)
            fully_shard(block, mesh=mesh["dp"])
        return fully_shard(trained, mesh=mesh["dp"])

    loss_of = partial(mean_over, mesh["dp"])
    for kind, steps in (("plain", STEPS), ("checkpointed", 3), ("compiled", 3)):
        losses = train(prepared(kind), loss_of, lambda step: trees(step)[which], steps)
        same(losses, expected[:steps])


def context_loss(
    mesh: DeviceMesh, data: int, trained: nn.Module, given: PrefixTree
) -> tuple[Tensor, Tensor]:
    """The loss of one tree whose tokens are sharded, for gradients averaged over all ranks."""
    mask = context_parallel_mask(mesh, mask_of(given))
    input_ids, position_ids = context_parallel_shard(
        mesh, [given.input_ids, given.position_ids], [0, 0], mask.load_balancer
    )
    terms = context_parallel_loss_terms(given.loss_terms, mask)
    logits = trained(input_ids[None], position_ids[None], mask)
    part = loss_sum(logits, terms) / given.loss_terms.multiplicity.sum()
    reported = part.detach().clone()
    dist.all_reduce(reported)
    # FSDP averages gradients over its ranks; those of this mesh have a part of the loss each.
    return part * mesh.size(), reported / data


def context_parallelism() -> None:
    """Weights sharded over the same ranks as tokens, as is usual: no rank is spent on either."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    expected = losses_of_one_process(lambda step: [tree(step)], STEPS)
    trained = model()
    for block in trained.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(trained, mesh=mesh)
    same(train(trained, partial(context_loss, mesh, 1), tree, STEPS), expected)


def context_and_data_parallelism_compiled() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))

    def trees(step: int) -> list[PrefixTree]:
        return [tree(2 * step), tree(2 * step + 1)]

    steps = 4
    expected = losses_of_one_process(trees, steps)
    everyone = mesh["dp", "cp"]._flatten("dp_cp")
    trained = model()
    torch._dynamo.reset()
    for at, block in enumerate(trained.blocks):
        trained.blocks[at] = block = checkpoint_wrapper(block)
        block.compile(backend="aot_eager", fullgraph=True)
        fully_shard(block, mesh=everyone)
    fully_shard(trained, mesh=everyone)
    which = mesh["dp"].get_local_rank()
    loss_of = partial(context_loss, mesh["cp"], 2)
    same(train(trained, loss_of, lambda step: trees(step)[which], steps), expected)


def context_and_tensor_parallelism() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    expected = losses_of_one_process(lambda step: [tree(step)], 1)
    trained = model()
    tensor_parallel(trained, mesh["tp"])
    loss, _ = context_loss(mesh["cp"], 1, trained, tree(0))
    part = loss.detach() / 2
    dist.all_reduce(part, group=mesh["cp"].get_group())
    close(part, torch.tensor(expected[0], dtype=torch.float64))
    loss.backward()
    whole = model()
    tree_loss(whole, tree(0)).backward()
    for (name, ours), theirs in zip(trained.named_parameters(), whole.parameters(), strict=True):
        grad = ours.grad / 2
        grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
        dist.all_reduce(grad, group=mesh["cp"].get_group())
        assert torch.allclose(grad, theirs.grad, rtol=1e-10, atol=1e-10), name


def mixed_precision() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    trained = model().float()
    seen = attention_inputs(trained)
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    for block in trained.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(trained, mesh=mesh, mp_policy=policy)
    losses = train(trained, partial(context_loss, mesh, 1), tree, 5)
    assert {query.dtype for query in seen} == {torch.bfloat16}
    same(losses, losses_of_one_process(lambda step: [tree(step)], 5), tolerance=2e-2)


def rewritten(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    """The graph as the backend tree_attn has it, without the time that Inductor takes."""
    passes.TreeAttentionPass()(graph.graph)
    graph.recompile()
    return graph.forward


def the_pass_under_tensor_parallelism() -> None:
    """flex_attention calls of this rank's heads are rewritten as any others."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    given = tree(3)
    block_mask = given.block_mask

    def flex(self: Attention, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        return flex_attention(query, key, value, block_mask=mask, enable_gqa=True).transpose(1, 2)

    trained = model().float()
    with torch.no_grad():
        expected = trained(given.input_ids[None], given.position_ids[None], given.mask)
        tensor_parallel(trained, mesh)
        for block in trained.blocks:
            block.attention.attend = flex.__get__(block.attention)
        inputs = (given.input_ids[None], given.position_ids[None], block_mask)
        report = passes.explain(trained, *inputs)
        assert [call.rewritten for call in report] == [True] * LAYERS, report
        logits = torch.compile(trained, backend=rewritten, fullgraph=True)(*inputs)
    close(logits, expected, rtol=1e-4, atol=1e-4)


def a_hugging_face_model_on_sharded_tokens() -> None:
    if importlib.util.find_spec("transformers") is None:
        return
    from tests.integrations.models import tiny
    from tree_attn_op.integrations import transformers as tree_transformers

    tree_transformers.register()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    given = tree(3)
    grads = []
    for sharded in (False, True):
        trained = tiny("qwen3").double()
        inputs = tree_transformers.model_inputs(given)
        terms = given.loss_terms
        if sharded:
            mask = context_parallel_mask(mesh, mask_of(given))
            inputs["input_ids"], inputs["position_ids"] = context_parallel_shard(
                mesh, [inputs["input_ids"], inputs["position_ids"]], [1, 1], mask.load_balancer
            )
            inputs["attention_mask"] = mask
            terms = context_parallel_loss_terms(terms, mask)
        loss_sum(trained(**inputs).logits, terms).backward()
        own = [x.grad for x in trained.parameters() if x.grad is not None]
        for grad in own if sharded else ():
            dist.all_reduce(grad)
        grads.append(own)
    for ours, theirs in zip(*grads, strict=True):
        close(ours, theirs)


def a_hugging_face_model_on_a_rank_without_tokens() -> None:
    """All ranks hear of it before any waits for the other."""
    if importlib.util.find_spec("transformers") is None:
        return
    from tests.integrations.models import tiny
    from tree_attn_op.integrations import transformers as tree_transformers

    tree_transformers.register()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    given = tree(3)
    length = given.num_tokens
    plan = TreeLoadBalancer([range(-(-length // 16)), []], length, 16)
    mask = context_parallel_mask(mesh, mask_of(given), plan)
    ids = [given.input_ids[None], given.position_ids[None]]
    input_ids, position_ids = context_parallel_shard(mesh, ids, [1, 1], plan)
    trained = tiny("qwen3")
    inputs = {"input_ids": input_ids, "position_ids": position_ids, "use_cache": False}
    message = rf"every rank must hold tokens, got \({length}, 0\)"
    with pytest.raises(ValueError, match=message):
        trained(attention_mask=mask, **inputs)


TWO = (
    a_hugging_face_model_on_a_rank_without_tokens,
    a_hugging_face_model_on_sharded_tokens,
    tensor_parallelism,
    context_parallelism,
    mixed_precision,
    the_pass_under_tensor_parallelism,
)
FOUR = (
    data_and_tensor_parallelism,
    context_and_data_parallelism_compiled,
    context_and_tensor_parallelism,
)
