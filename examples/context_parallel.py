"""One tree on several ranks: context parallelism for a Hugging Face model.

Runs on a CPU in seconds: ``python examples/context_parallel.py`` starts two processes. On GPUs, or
with more ranks: ``torchrun --nproc-per-node 4 examples/context_parallel.py``. A tiny Qwen3 with
random weights computes loss and gradients of a tree whose tokens are spread over the ranks; they
are compared with those of one rank that has the whole tree.
"""

from __future__ import annotations

import os
import subprocess
import sys

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import Qwen3Config, Qwen3ForCausalLM

from tree_attn_op import PrefixTree
from tree_attn_op.distributed import (
    context_parallel_loss_terms,
    context_parallel_mask,
    context_parallel_shard,
)
from tree_attn_op.integrations import transformers as tree_transformers
from tree_attn_op.tree import LossTerms

VOCABULARY = 64


def build_model(device: str) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    tree_transformers.register()
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        attn_implementation="tree_attention",
    )
    return Qwen3ForCausalLM(config).to(device)


def build_tree(device: str) -> PrefixTree:
    """A prompt with six completions; every rank has to make the same."""
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, VOCABULARY, (500,), generator=generator)
    completions = torch.randint(0, VOCABULARY, (6, 90), generator=generator)
    return PrefixTree.from_sequences(
        [torch.cat([prompt, one]) for one in completions], device=device
    )


def loss_sum(logits: Tensor, terms: LossTerms) -> Tensor:
    """The summed cross-entropy of the predictions that these logits [1, n, V] make."""
    losses = torch.nn.functional.cross_entropy(
        logits[0, terms.source].float(), terms.label, reduction="none"
    )
    return (losses * terms.multiplicity).sum()


def whole_step(tree: PrefixTree, device: str) -> list[Tensor]:
    """Loss and gradients of one rank that has the whole tree."""
    model = build_model(device)
    logits = model(**tree_transformers.model_inputs(tree)).logits
    loss = loss_sum(logits, tree.loss_terms) / tree.loss_terms.multiplicity.sum()
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def sharded_step(tree: PrefixTree, mesh: DeviceMesh, device: str) -> list[Tensor]:
    """The same with the tokens spread over the mesh."""
    model = build_model(device)
    mask = context_parallel_mask(mesh, tree.mask)
    input_ids, position_ids = context_parallel_shard(
        mesh, [tree.input_ids, tree.position_ids], [0, 0], mask.load_balancer
    )
    terms = context_parallel_loss_terms(tree.loss_terms, mask)
    if dist.get_rank() == 0:
        print(f"tokens of each rank: {mask.load_balancer.lengths}")
        print(f"attention work, most over average: {mask.load_balancer.imbalance:.3f}")
    logits = model(
        input_ids=input_ids[None],
        position_ids=position_ids[None],
        attention_mask=mask,
        use_cache=False,
    ).logits
    # The divisor is that of the whole tree, so that the ranks' losses add up.
    loss = loss_sum(logits, terms) / tree.loss_terms.multiplicity.sum()
    loss.backward()
    results = [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    # FSDP2 or DDP over these ranks does this for gradients, but averages where this adds up:
    # multiply the loss by the number of ranks there.
    for result in results:
        dist.all_reduce(result)
    return results


def run_rank() -> int:
    device = "cuda" if torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"]) else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("cp",))
    tree = build_tree(device)
    expected = whole_step(tree, device)
    actual = sharded_step(tree, mesh, device)
    worst = max(
        float((ours - theirs).norm() / theirs.norm())
        for ours, theirs in zip(actual, expected, strict=True)
    )
    if dist.get_rank() == 0:
        print(f"loss {float(actual[0]):.6f}, on one rank {float(expected[0]):.6f}")
        print(f"greatest relative difference of loss and gradients: {worst:.1e}")
    dist.destroy_process_group()
    if worst > 1e-4:
        print("the results differ", file=sys.stderr)
        return 1
    return 0


def main() -> int:
    if "RANK" in os.environ:
        return run_rank()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.call([*launcher, "--nproc-per-node", "2", __file__])


if __name__ == "__main__":
    sys.exit(main())
