"""Training steps on a tree and on its trajectories unpacked, which must do the same.

A batch holds what a step reads: tokens, positions, a mask, and the loss terms. The loss is the
mean over all trajectories' tokens but their first of -log p, so that on a tree each term counts
as often as trajectories run through it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from passes import TreeAttentionPass
from tree_attn_op import PrefixTree, tree_attention

from .model import Attend, Block, Model, RunBlock
from .peers import FlexFlash, tree_block_mask
from .varlen import Ragged, best_varlen, flash_attention_4_missing


@dataclass(frozen=True)
class Batch:
    """Tokens of one forward and backward, and their share of the loss.

    Attributes:
        input_ids, position_ids: int64 [N].
        mask: what the attention function takes.
        source, label, weight: [E], as for `Model.loss`; weights sum to 1 over the batches.
    """

    input_ids: Tensor
    position_ids: Tensor
    mask: Any
    source: Tensor
    label: Tensor
    weight: Tensor


@dataclass(frozen=True)
class Variant:
    """A way to run a training step.

    Attributes:
        name: for reports.
        attend: the attention function.
        batches: run one after another; their gradients add up.
        run_block: Block.forward, or what torch.compile made of it.
        note: what it runs, where that depends on what is installed.
        graph_pass: this project's pass, if it is to rewrite the calls.
    """

    name: str
    attend: Attend
    batches: list[Batch]
    run_block: RunBlock = Block.forward
    note: str = ""
    graph_pass: TreeAttentionPass | None = None


def attend_flex(query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
    """flex_attention with a BlockMask."""
    return flex_attention(query, key, value, block_mask=mask, enable_gqa=True)


def attend_flash(query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
    """flex_attention with a BlockMask and its FLASH backend."""
    options = FlexFlash.kernel_options
    return flex_attention(
        query, key, value, block_mask=mask, enable_gqa=True, kernel_options=options
    )


def attend_tree(query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
    """This project's op with a TreeMask."""
    out = tree_attention(query, key, value, mask, enable_gqa=True)
    assert isinstance(out, Tensor)
    return out


# FlashAttention-4 is no op that torch.compile could see: the block is compiled in two parts.
@torch.compiler.disable
def attend_unpacked(query: Tensor, key: Tensor, value: Tensor, mask: Ragged) -> Tensor:
    """Causal attention within each sequence, by the fastest varlen kernel that is installed."""
    device = query.device.type
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    _, varlen = best_varlen(device, query.dtype)
    return varlen(query, key, value, mask).transpose(0, 1)[None]


def tree_batch(tree: PrefixTree, mask: Any) -> Batch:
    """The whole tree as one batch."""
    terms = tree.loss_terms
    count = tree.num_trajectory_tokens - sum(n > 0 for n in tree.trajectory_lengths)
    weight = terms.multiplicity / count
    return Batch(tree.input_ids, tree.position_ids, mask, terms.source, terms.label, weight)


def unpacked_batches(
    sequences: Sequence[Tensor], max_tokens: int, order: Sequence[int] | None = None
) -> list[Batch]:
    """The trajectories one after another, in batches of at most `max_tokens` if one fits at all.

    Args:
        sequences: token ids of each trajectory, none empty.
        max_tokens: limit of a batch.
        order: in which the sequences come; None: as they are.
    """
    count = sum(len(s) - 1 for s in sequences)
    groups: list[list[Tensor]] = [[]]
    for index in order if order is not None else range(len(sequences)):
        sequence = sequences[index]
        if groups[-1] and sum(map(len, groups[-1])) + len(sequence) > max_tokens:
            groups.append([])
        groups[-1].append(sequence)
    return [_unpacked_batch(group, 1.0 / count) for group in groups]


def _unpacked_batch(sequences: list[Tensor], weight: float) -> Batch:
    device = sequences[0].device
    lengths = [len(s) for s in sequences]
    input_ids = torch.cat(sequences)
    position_ids = torch.cat([torch.arange(n, device=device) for n in lengths])
    predicts = torch.ones_like(input_ids, dtype=torch.bool)
    predicts[[end - 1 for end in accumulate(lengths)]] = False
    source = torch.nonzero(predicts).flatten()
    mask = Ragged.of(lengths, lengths, device)
    weights = torch.full(source.shape, weight, device=device)
    return Batch(input_ids, position_ids, mask, source, input_ids[source + 1], weights)


def backward(
    model: Model,
    variant: Variant,
    *,
    checkpointing: bool = False,
    chunk: int = 4096,
    chunk_loss: Callable[..., Tensor] | None = None,
    autocast: torch.dtype | None = None,
) -> Tensor:
    """Adds the gradients of the loss to the parameters'; returns the loss, a scalar.

    Args:
        model, variant: what is run.
        checkpointing: whether blocks are recomputed.
        chunk, chunk_loss: as for `Model.loss`.
        autocast: the forward runs under torch.autocast to this dtype; None: without.
    """
    losses = []
    device = model.embedding.weight.device.type
    for batch in variant.batches:
        with torch.autocast(device, autocast, enabled=autocast is not None):
            hidden = model.hidden(
                batch.input_ids,
                batch.position_ids,
                batch.mask,
                variant.attend,
                variant.run_block,
                checkpointing,
            )
            terms = (batch.source, batch.label, batch.weight)
            loss = model.loss(hidden, *terms, chunk=chunk, chunk_loss=chunk_loss)
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def step(
    model: Model, optimizer: torch.optim.Optimizer, variant: Variant, **options: Any
) -> Tensor:
    """One optimizer step; returns the loss before it."""
    optimizer.zero_grad(set_to_none=True)
    loss = backward(model, variant, **options)
    optimizer.step()
    return loss


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients, taken from the model."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[name], parameter.grad = parameter.grad, None
    return found


TREE_VARIANTS = ("flex", "flex_flash", "pass", "op")
UNPACKED = "unpacked"
VARIANTS = (UNPACKED, *TREE_VARIANTS)


def unavailable(name: str, device: str, dtype: torch.dtype) -> str | None:
    """Why a variant cannot train here, None where it can."""
    if name in (UNPACKED, "op"):
        return None
    if device == "cpu":
        return "flex_attention does not train on a CPU"
    if name == "flex_flash":
        if dtype not in (torch.bfloat16, torch.float16):
            return f"takes bfloat16 and float16, not {dtype}"
        return flash_attention_4_missing()
    return None


def tree_variant(name: str, tree: PrefixTree, head_dim: int, compiled: bool) -> Variant:
    """One of TREE_VARIANTS.

    Args:
        name: "flex" and "flex_flash", flex_attention with its two backends; "pass", flex_attention
            rewritten by this project's pass; "op", this project's op called by the model.
        tree: the trajectories.
        head_dim: of the model.
        compiled: whether blocks are compiled; all but "op" must be.
    """
    if name == "op":
        run_block = torch.compile(Block.forward, dynamic=False) if compiled else Block.forward
        return Variant(name, attend_tree, [tree_batch(tree, tree.mask)], run_block)
    if not compiled:
        raise ValueError(f"{name} is flex_attention, which must be compiled")
    graph_pass = TreeAttentionPass() if name == "pass" else None
    options: Any = {"pre_grad_custom_pass": graph_pass} if graph_pass is not None else None
    flash = name == "flex_flash"
    blocks = FlexFlash.block_size(head_dim) if flash else (128, 128)
    mask = tree_block_mask(tree, tree.device.type != "cpu", blocks)
    run_block = torch.compile(Block.forward, dynamic=False, fullgraph=True, options=options)
    attend = attend_flash if flash else attend_flex
    return Variant(name, attend, [tree_batch(tree, mask)], run_block, graph_pass=graph_pass)


def check_rewritten(variant: Variant) -> None:
    """Checks that the pass rewrote what it was given; from torch 2.12 a warm cache hides it.

    Raises:
        RuntimeError: it kept a call, so that the variant is not what its name says.
    """
    if variant.graph_pass is not None and len(variant.graph_pass.report.kept):
        raise RuntimeError(f"the pass kept a call: {variant.graph_pass.report.kept[0].reason}")


def unpacked_variant(
    tree: PrefixTree, max_tokens: int, dtype: torch.dtype, compiled: bool, backwards: bool = False
) -> Variant:
    """The trajectories unpacked, in batches of at most `max_tokens`, the last first if asked."""
    sequences = tree.unpack(tree.input_ids)
    order = range(len(sequences))[::-1] if backwards else None
    # Batches differ in size: one code for all of them.
    run_block = torch.compile(Block.forward, dynamic=True) if compiled else Block.forward
    note, _ = best_varlen(tree.device.type, dtype)
    batches = unpacked_batches(sequences, max_tokens, order)
    return Variant(UNPACKED, attend_unpacked, batches, run_block, note)
