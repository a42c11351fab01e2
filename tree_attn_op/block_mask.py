"""flex BlockMasks in linear memory, from a TreeMask or from a mask_mod."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention
from torch.nn.attention.flex_attention import BlockMask

from .blocks import BlockLists, cdiv, classify_tiles, listed_states, lists_of
from .errors import UnsupportedMask
from .mask import DEFAULT_BLOCK_SIZE, TreeMask
from .mask_mod import MaskMod
from .predicate import FULL, PARTIAL
from .validation import BLOCK_MULTIPLE

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
    # With all lists given, flex has none to derive.
    return BlockMask(
        seq_lengths=(lists.q_len, lists.kv_len),
        kv_num_blocks=lists.kv_num_blocks,
        kv_indices=lists.kv_indices,
        full_kv_num_blocks=lists.full_kv_num_blocks,
        full_kv_indices=lists.full_kv_indices,
        q_num_blocks=lists.q_num_blocks,
        q_indices=lists.q_indices,
        full_q_num_blocks=lists.full_q_num_blocks,
        full_q_indices=lists.full_q_indices,
        BLOCK_SIZE=(lists.q_block_size, lists.kv_block_size),
        mask_mod=mask.mask_mod if mask_mod is None else mask_mod,
    )


def _expanded(tensor: Tensor, batch: int, heads: int) -> Tensor:
    return tensor.expand(batch, heads, *tensor.shape[2:]).contiguous()


def _without_full_ragged(mask: TreeMask) -> BlockLists:
    """The mask's lists as flex makes them: a block that runs over an end is never full.

    The meaning stays: a block that the lists call full but the predicate does not is left alone.
    """
    lists = mask.lists
    rows, columns = cdiv(lists.q_len, lists.q_block_size), cdiv(lists.kv_len, lists.kv_block_size)
    device = mask.device
    ragged = torch.zeros(rows, columns, dtype=torch.bool, device=device)
    if lists.q_len % lists.q_block_size:
        ragged[-1] = True
    if lists.kv_len % lists.kv_block_size:
        ragged[:, -1] = True
    listed = listed_states(*lists.key_side, columns)
    proven = classify_tiles(
        mask.predicate,
        mask.q_vals,
        mask.k_vals,
        lists.q_len,
        lists.kv_len,
        lists.q_block_size,
        lists.kv_block_size,
    ).unsqueeze(1)
    state = torch.where(ragged & (listed == FULL) & (proven == FULL), PARTIAL, listed)
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

    Args:
        mask_mod: ``(b, h, q_idx, kv_idx) -> bool``.
        B: batch size; None: 1.
        H: heads; None: 1. Only a mask that does not depend on the head is proven.
        Q_LEN, KV_LEN: lengths.
        device: of the mask; None: the default accelerator if there is one, else the CPU.
        BLOCK_SIZE: tokens a block; or one number for queries, one for keys.
        _compile, options: of flex's builder, in the versions of torch that have them; any option
            makes flex's builder build the mask.
    """
    if device is None:
        device = torch.accelerator.current_accelerator() or "cpu"
    try:
        if options:
            raise UnsupportedMask(f"has options of its own ({', '.join(options)})")
        q_block, kv_block = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else BLOCK_SIZE
        if q_block % BLOCK_MULTIPLE or kv_block % BLOCK_MULTIPLE:
            raise UnsupportedMask(f"block sizes {q_block} and {kv_block} are no multiples of 16")
        mask = TreeMask.from_mask_mod(
            mask_mod, B, Q_LEN, KV_LEN, device=device, BLOCK_SIZE=(q_block, kv_block)
        )
    except UnsupportedMask as error:
        logger.warning("create_block_mask: built by flex_attention's own builder: %s", error)
        return flex_attention.create_block_mask(
            mask_mod, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE, _compile, **options
        )
    return block_mask_of(mask, mask_mod, B or 1, H or 1)
