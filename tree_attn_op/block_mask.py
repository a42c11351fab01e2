"""flex BlockMasks in linear memory, from a TreeMask or from a mask_mod."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention
from torch.nn.attention.flex_attention import BlockMask

from . import ops
from .arguments import as_device, check_callable
from .blocks import BlockLists, cdiv, classify_tiles, listed_states, lists_of, partial_at_ends
from .errors import UnsupportedMask
from .lowering.cache import prove
from .mask import DEFAULT_BLOCK_SIZE, TreeMask
from .mask_mod import MaskMod
from .predicate import FULL, Predicate
from .validation import BLOCK_MULTIPLE, block_sizes, check_counts

logger = logging.getLogger(__name__)


def block_mask_of(
    mask: TreeMask, mask_mod: MaskMod | None = None, batch: int = 1, heads: int = 1
) -> BlockMask:
    """The flex BlockMask that means what ``mask`` means.

    Args:
        mask: the mask.
        mask_mod: what the BlockMask evaluates on partial blocks; None: the mask's own.
        batch, heads: to expand the lists to, where they are not larger already.
    """
    lists = mask.lists
    batch = max(batch, mask.batch_size, lists.kv_num_blocks.shape[0])
    heads = max(heads, lists.kv_num_blocks.shape[1])
    if lists.q_len % lists.q_block_size or lists.kv_len % lists.kv_block_size:
        lists = _without_full_ragged(mask)
    lists = lists.map(lambda tensor: _expanded(tensor, batch, heads))
    return _block_mask(
        lists.tensors,
        (lists.q_len, lists.kv_len),
        (lists.q_block_size, lists.kv_block_size),
        mask.mask_mod if mask_mod is None else mask_mod,
    )


def _block_mask(
    lists: Sequence[Tensor | None],
    lengths: tuple[int, int],
    block_size: tuple[int, int],
    mask_mod: MaskMod,
) -> BlockMask:
    """The BlockMask of eight lists in the op's order: all of them, so that flex derives none."""
    kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices = lists[:4]
    q_num_blocks, q_indices, full_q_num_blocks, full_q_indices = lists[4:]
    assert kv_num_blocks is not None
    assert kv_indices is not None
    return BlockMask(
        lengths,
        kv_num_blocks,
        kv_indices,
        full_kv_num_blocks,
        full_kv_indices,
        q_num_blocks,
        q_indices,
        full_q_num_blocks,
        full_q_indices,
        block_size,
        mask_mod,
    )


def _expanded(tensor: Tensor, batch: int, heads: int) -> Tensor:
    return tensor.expand(batch, heads, *tensor.shape[2:]).contiguous()


def _without_full_ragged(mask: TreeMask) -> BlockLists:
    """The mask's lists as flex makes them: a block that runs over an end is never full.

    The meaning stays: a block that the lists call full but the predicate does not is left alone.
    """
    lists = mask.lists
    sizes = (lists.q_len, lists.kv_len, lists.q_block_size, lists.kv_block_size)
    listed = listed_states(*lists.key_side, cdiv(lists.kv_len, lists.kv_block_size))
    proven = classify_tiles(mask.predicate, mask.q_vals, mask.k_vals, *sizes).unsqueeze(1)
    state = torch.where(proven == FULL, partial_at_ends(listed, *sizes), listed)
    return BlockLists.of(lists_of(state), *lists.sizes)


def create_block_mask(
    mask_mod: MaskMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
    BLOCK_SIZE: int | tuple[int, int] = DEFAULT_BLOCK_SIZE,
    _compile: bool = False,
    **options: Any,
) -> BlockMask:
    """flex's ``create_block_mask`` in memory and time linear in the lengths plus the blocks.

    The result means the same and holds the mask_mod that was given. A block is listed as full
    where that can be proven from the values' bounds, which on trees laid out in order is wherever
    it is full; else as partial, never the reverse. A mask that is no separable predicate, and
    block sizes that are no multiple of 16, go to flex's builder, with a warning that says why.

    In a region that torch.compile traces it breaks no graph. There it is the pass that proves the
    mask (``backend="tree_attn"``); without it, the blocks come from the mask of all pairs, as in
    flex's builder.

    Args:
        mask_mod: ``(b, h, q_idx, kv_idx) -> bool``.
        B: batch size; None: 1.
        H: heads; None: 1. Only a mask that does not depend on the head is proven.
        Q_LEN, KV_LEN: lengths.
        device: of the mask; None: the default accelerator if there is one, else the CPU.
        BLOCK_SIZE: tokens a block; or one number for queries, one for keys.
        _compile, options: of flex's builder, in the versions of torch that have them; any option
            makes flex's builder build the mask.

    Raises:
        ValueError: a size that is no count, a block size that is not positive.
    """
    batch, heads = 1 if B is None else B, 1 if H is None else H
    q_block, kv_block = block_sizes(BLOCK_SIZE)
    check_callable("mask_mod", mask_mod)
    check_counts(B=batch, H=heads, Q_LEN=Q_LEN, KV_LEN=KV_LEN)
    if device is None:
        device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    device = as_device(device)
    refused = _not_for_our_builder(q_block, kv_block, options)
    if torch.compiler.is_compiling() and refused is None:
        # Dynamo can't trace a proof: it records the mask itself, and the pass proves it later.
        dense = flex_attention.create_mask(mask_mod, B, H, Q_LEN, KV_LEN, device)
        lists = torch.ops.tree_attn_op.block_lists_of_mask.default(dense, q_block, kv_block)
        return _block_mask(lists, (Q_LEN, KV_LEN), (q_block, kv_block), mask_mod)
    try:
        if refused is not None:
            raise refused
        predicate, q_vals, k_vals = _meaning(mask_mod, batch, Q_LEN, KV_LEN, device)
    except UnsupportedMask as error:
        logger.warning("create_block_mask: built by flex_attention's own builder: %s", error)
        return flex_attention.create_block_mask(
            mask_mod, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE, _compile, **options
        )
    # Straight to the lists: a TreeMask, its checks and the op's dispatch would take more time.
    lists = ops.flex_lists(
        predicate, q_vals, k_vals, Q_LEN, KV_LEN, q_block, kv_block, batch, heads
    )
    return _block_mask(lists, (Q_LEN, KV_LEN), (q_block, kv_block), mask_mod)


def _meaning(
    mask_mod: MaskMod, batch: int, q_len: int, kv_len: int, device: torch.device
) -> tuple[Predicate, Tensor, Tensor]:
    """The predicate and its values, for who reads them at once and keeps none.

    Raises:
        UnsupportedMask: the mask_mod is no separable predicate.
    """
    if q_len == 0 or kv_len == 0:
        # Whatever the mask says, it says it of no pair.
        none = torch.empty((1, 0, 0), dtype=torch.int32, device=device)
        return Predicate.parse("False"), none, none
    proven = prove(mask_mod, batch, q_len, kv_len, device)
    q_vals, k_vals = proven.borrowed_values()
    return proven.predicate, q_vals, k_vals


def _not_for_our_builder(
    q_block: int, kv_block: int, options: dict[str, Any]
) -> UnsupportedMask | None:
    if options:
        return UnsupportedMask(f"has options of its own ({', '.join(options)})")
    if q_block % BLOCK_MULTIPLE or kv_block % BLOCK_MULTIPLE:
        return UnsupportedMask(f"block sizes {q_block} and {kv_block} are no multiples of 16")
    return None
