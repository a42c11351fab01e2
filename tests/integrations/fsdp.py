"""Processes that train one model under FSDP2 on a CPU, and what they find."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tree_attn_op import PrefixTree
from tree_attn_op.integrations import transformers as tree_transformers

from .models import tiny
from .trajectories import multi_turn, next_token_loss

SEEDS = (5, 6)
"""The tree of each process."""

VARIANTS = ("plain", "checkpointed", "compiled by block")


def run_workers(folder: Path) -> dict[str, dict[str, Tensor]]:
    """For each variant and for mixed precision the mean loss and the whole gradients."""
    mp.spawn(_worker, (str(folder),), nprocs=len(SEEDS))
    return torch.load(folder / "results.pt")


def _worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=len(SEEDS)
    )
    tree_transformers.register()
    mesh = init_device_mesh("cpu", (len(SEEDS),))
    results = {}
    for variant in (*VARIANTS, "mixed precision"):
        model = tiny("gemma3")
        _prepare(model, variant, mesh)
        results[variant] = _step(model, multi_turn(SEEDS[rank]))
    if rank == 0:
        torch.save(results, f"{folder}/results.pt")
    dist.destroy_process_group()


def _prepare(model: Any, variant: str, mesh: Any) -> None:
    options: dict[str, Any] = {"mesh": mesh}
    if variant == "mixed precision":
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    if variant == "checkpointed":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in model.model.layers:
        if variant == "compiled by block":
            layer.compile(backend="aot_eager")
        fully_shard(layer, **options)
    fully_shard(model, **options)


def _step(model: Any, sequences: list[Tensor]) -> dict[str, Tensor]:
    tree = PrefixTree.from_sequences(sequences)
    logits = model(**tree_transformers.model_inputs(tree)).logits
    loss = next_token_loss(tree.unpack(logits[0].float(), dim=0), sequences)
    loss.backward()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return {
        "loss": mean / dist.get_world_size(),
        **{
            name: parameter.grad.full_tensor()
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        },
    }
