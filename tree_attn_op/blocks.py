"""Block lists: which tiles of the mask hold work, derived or refined on the device.

A list follows flex's BlockMask: for every row of blocks the number of listed blocks and their
indices, ascending, the unlisted ones after them. A *partial* block is listed with its mask still
to be evaluated, a *full* one without. All functions are plain torch: no host sync, no shape that
depends on data, memory linear in the lengths plus the number of tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from .arguments import check_type
from .predicate import EMPTY, FULL, PARTIAL, Bounds, Predicate

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Lists = tuple[Tensor, Tensor]
"""(num_blocks [B, H, rows], indices [B, H, rows, columns]), int32."""


def cdiv(length: int, block: int) -> int:
    """Number of blocks of size ``block`` that cover ``length``."""
    return (length + block - 1) // block


@dataclass(frozen=True, eq=False)
class BlockLists:
    """Block lists in both directions, as the op takes them.

    Attributes:
        kv_num_blocks, kv_indices: partial blocks of each row of query blocks, int32
            ``[Bm, Hm, cdiv(q_len, q_block_size)]`` and ``[..., cdiv(kv_len, kv_block_size)]``.
        full_kv_num_blocks, full_kv_indices: full blocks, likewise; None: there are none.
        q_num_blocks, q_indices, full_q_num_blocks, full_q_indices: the same blocks listed for each
            row of key blocks; None: not known.
        q_block_size, kv_block_size: tokens a block.
        q_len, kv_len: lengths that the lists were built for.
    """

    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor | None
    full_kv_indices: Tensor | None
    q_num_blocks: Tensor | None
    q_indices: Tensor | None
    full_q_num_blocks: Tensor | None
    full_q_indices: Tensor | None
    q_block_size: int
    kv_block_size: int
    q_len: int
    kv_len: int

    @staticmethod
    def of(
        tensors: Sequence[Tensor | None],
        q_block_size: int,
        kv_block_size: int,
        q_len: int,
        kv_len: int,
    ) -> BlockLists:
        """The lists of eight tensors in the op's order."""
        kv_num_blocks, kv_indices, *rest = tensors
        if kv_num_blocks is None or kv_indices is None or len(rest) != 6:
            raise ValueError("block lists are eight tensors, the first two of which are not None")
        sizes = (q_block_size, kv_block_size, q_len, kv_len)
        full_kv_num_blocks, full_kv_indices, q_num_blocks, q_indices, full_q_num, full_q = rest
        return BlockLists(
            kv_num_blocks,
            kv_indices,
            full_kv_num_blocks,
            full_kv_indices,
            q_num_blocks,
            q_indices,
            full_q_num,
            full_q,
            *sizes,
        )

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The eight lists in the order in which the op takes them."""
        return tuple(getattr(self, field.name) for field in fields(self)[:8])

    @property
    def key_side(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """The four lists of key blocks."""
        full = self.full_kv_num_blocks, self.full_kv_indices
        return self.kv_num_blocks, self.kv_indices, *full

    def map(self, fn: Callable[[Tensor], Tensor]) -> BlockLists:
        """The lists with ``fn`` applied to each tensor that is there."""
        tensors = [None if tensor is None else fn(tensor) for tensor in self.tensors]
        return BlockLists.of(tensors, *self.sizes)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """``(q_block_size, kv_block_size, q_len, kv_len)``."""
        return self.q_block_size, self.kv_block_size, self.q_len, self.kv_len

    @staticmethod
    def from_block_mask(block_mask: BlockMask) -> BlockLists:
        """The lists of a flex BlockMask; its mask_mod is not looked at.

        Raises:
            TypeError: it is no BlockMask.
        """
        # Not at the top: everything imports this module, and few need flex.
        from torch.nn.attention.flex_attention import BlockMask

        check_type("block_mask", block_mask, BlockMask, "a BlockMask")
        q_len, kv_len = block_mask.seq_lengths
        q_block, kv_block = block_mask.BLOCK_SIZE
        return BlockLists(
            block_mask.kv_num_blocks,
            block_mask.kv_indices,
            block_mask.full_kv_num_blocks,
            block_mask.full_kv_indices,
            block_mask.q_num_blocks,
            block_mask.q_indices,
            block_mask.full_q_num_blocks,
            block_mask.full_q_indices,
            q_block,
            kv_block,
            q_len,
            kv_len,
        )


def _tile_bounds(rows: Tensor, block: int) -> list[Bounds]:
    """Least and greatest value of each row over its tiles, int64 ``[B, tiles]``."""
    length = rows.shape[-1]
    block = min(block, length)
    tail = -length % block
    if tail:
        # Repeating the last token fills the tail tile without widening its bounds.
        rows = torch.cat([rows, rows[..., -1:].expand(*rows.shape[:-1], tail)], -1)
    tiles = rows.unflatten(-1, (-1, block))
    low, high = tiles.amin(-1).long(), tiles.amax(-1).long()
    return list(zip(low.unbind(1), high.unbind(1), strict=True))


def _index_bounds(length: int, block: int, device: torch.device) -> Bounds:
    low = torch.arange(cdiv(length, block), device=device) * block
    return low, (low + (block - 1)).clamp(max=length - 1)


def classify_tiles(
    predicate: Predicate,
    q_vals: Tensor,
    k_vals: Tensor,
    q_len: int,
    kv_len: int,
    q_block_size: int,
    kv_block_size: int,
) -> Tensor:
    """The state of every tile by the predicate alone.

    Returns:
        int8 ``[B, cdiv(q_len, q_block_size), cdiv(kv_len, kv_block_size)]`` of EMPTY, PARTIAL and
        FULL, where B is 1 unless the values have a batch.
    """
    shape = (
        max(q_vals.shape[0], k_vals.shape[0]) if min(q_vals.shape[0], k_vals.shape[0]) else 0,
        cdiv(q_len, q_block_size),
        cdiv(kv_len, kv_block_size),
    )
    device = q_vals.device
    if 0 in shape:
        return torch.empty(shape, dtype=torch.int8, device=device)

    def query(bounds: Bounds) -> Bounds:
        return bounds[0].unsqueeze(-1), bounds[1].unsqueeze(-1)

    def key(bounds: Bounds) -> Bounds:
        return bounds[0].unsqueeze(-2), bounds[1].unsqueeze(-2)

    state = predicate.classify(
        query(_index_bounds(q_len, q_block_size, device)),
        key(_index_bounds(kv_len, kv_block_size, device)),
        [query(bounds) for bounds in _tile_bounds(q_vals, q_block_size)],
        [key(bounds) for bounds in _tile_bounds(k_vals, kv_block_size)],
        q_vals.dtype,
    )
    return state.expand(shape)


def partial_at_ends(
    state: Tensor, q_len: int, kv_len: int, q_block_size: int, kv_block_size: int
) -> Tensor:
    """``state`` ``[..., rows, columns]`` with full blocks that run over an end called partial."""
    rows, columns = state.shape[-2:]
    over = torch.zeros(rows, columns, dtype=torch.bool, device=state.device)
    if q_len % q_block_size:
        over[-1] = True
    if kv_len % kv_block_size:
        over[:, -1] = True
    return torch.where(over & (state == FULL), PARTIAL, state)


def _mark(state: Tensor, num_blocks: Tensor, indices: Tensor, value: int) -> None:
    """Write ``value`` at the listed columns of ``state`` ``[B, H, rows, columns + 1]``."""
    columns = state.shape[-1] - 1
    rank = torch.arange(indices.shape[-1], device=indices.device, dtype=torch.int32)
    # Entries behind the count are of no meaning; they go to a column of their own.
    listed = (rank < num_blocks.unsqueeze(-1)) & (indices >= 0) & (indices < columns)
    state.scatter_(-1, torch.where(listed, indices, columns).long(), value)


def listed_states(
    kv_num_blocks: Tensor,
    kv_indices: Tensor,
    full_kv_num_blocks: Tensor | None,
    full_kv_indices: Tensor | None,
    columns: int,
) -> Tensor:
    """What the lists say of every block: int8 states ``[Bm, Hm, rows, columns]``."""
    state = kv_indices.new_full((*kv_indices.shape[:-1], columns + 1), EMPTY, dtype=torch.int8)
    _mark(state, kv_num_blocks, kv_indices, PARTIAL)
    if full_kv_num_blocks is not None and full_kv_indices is not None:
        _mark(state, full_kv_num_blocks, full_kv_indices, FULL)
    return state[..., :-1]


def refined_states(
    predicate: Predicate,
    q_vals: Tensor,
    k_vals: Tensor,
    q_len: int,
    kv_len: int,
    lists: Sequence[Tensor | None] | None,
    q_block_size: int,
    kv_block_size: int,
    new_q_block_size: int,
    new_kv_block_size: int,
) -> Tensor:
    """The state of every tile of the new size: what the lists say, refined by the predicate.

    A tile of a block that is not listed is EMPTY and one of a full block FULL; of a partial block
    it is what the predicate says. ``lists`` are the key-side lists (two or four; None: all blocks
    are partial). New sizes divide the old ones.

    Returns:
        int8 ``[B, H, cdiv(q_len, new_q_block_size), cdiv(kv_len, new_kv_block_size)]``.
    """
    state = classify_tiles(
        predicate, q_vals, k_vals, q_len, kv_len, new_q_block_size, new_kv_block_size
    ).unsqueeze(1)
    if lists is None or lists[0] is None or lists[1] is None:
        return state
    full = (lists[2], lists[3]) if len(lists) > 2 else (None, None)
    listed = listed_states(lists[0], lists[1], *full, cdiv(kv_len, kv_block_size))
    listed = _repeat(listed, -2, q_block_size // new_q_block_size, state.shape[-2])
    listed = _repeat(listed, -1, kv_block_size // new_kv_block_size, state.shape[-1])
    # EMPTY and FULL are absorbing; a partial block leaves the word to the predicate.
    return torch.where(listed == PARTIAL, state, listed)


def dense_meaning(
    predicate: Predicate, q_vals: Tensor, k_vals: Tensor, lists: BlockLists
) -> Tensor:
    """Pair by pair what lists and predicate allow: bool ``[B, H, q_len, kv_len]``. Quadratic."""
    listed = listed_states(*lists.key_side, cdiv(lists.kv_len, lists.kv_block_size))
    listed = _repeat(listed, -2, lists.q_block_size, lists.q_len)
    listed = _repeat(listed, -1, lists.kv_block_size, lists.kv_len)
    pairs = predicate.dense(q_vals, k_vals, lists.q_len, lists.kv_len).unsqueeze(1)
    return torch.where(listed == PARTIAL, pairs, listed == FULL)


def _repeat(state: Tensor, dim: int, times: int, size: int) -> Tensor:
    if times == 1:
        return state
    at = torch.arange(size, device=state.device) // times
    return state.index_select(dim, at)


def compact(chosen: Tensor) -> Lists:
    """Lists of the true columns of each row, ascending, the others after them in order.

    Args:
        chosen: bool ``[B, H, rows, columns]``.
    """
    columns = torch.arange(chosen.shape[-1], device=chosen.device, dtype=torch.int32)
    before = chosen.cumsum(-1, dtype=torch.int32)
    count = chosen.sum(-1, dtype=torch.int32)
    # A permutation of the columns, so no two writes meet.
    place = torch.where(chosen, before - 1, count.unsqueeze(-1) + columns - before)
    indices = torch.empty(chosen.shape, dtype=torch.int32, device=chosen.device)
    indices.scatter_(-1, place.long(), columns.expand(chosen.shape))
    return count, indices


def lists_of(state: Tensor) -> tuple[Tensor, ...]:
    """The eight lists of tile states ``[B, H, query tiles, key tiles]``, in the op's order."""
    lists: list[Tensor] = []
    for view in (state, state.mT):
        lists += compact(view == PARTIAL)
        lists += compact(view == FULL)
    return tuple(lists)


def lists_of_mask(mask: Tensor, q_block_size: int, kv_block_size: int) -> tuple[Tensor, ...]:
    """The eight lists that flex's builder makes of a dense mask, bool ``[B, H, q_len, kv_len]``.

    Quadratic in the length; a block that runs over an end is partial.
    """
    q_len, kv_len = mask.shape[-2:]
    padded = F.pad(mask, (0, -kv_len % kv_block_size, 0, -q_len % q_block_size))
    tiles = padded.unflatten(-1, (-1, kv_block_size)).unflatten(-3, (-1, q_block_size))
    pairs = tiles.sum((-3, -1))
    full = pairs == q_block_size * kv_block_size
    # EMPTY, PARTIAL and FULL are 0, 1 and 2.
    return lists_of((pairs > 0).to(torch.int8) + full.to(torch.int8))


def transpose_lists(num_blocks: Tensor, indices: Tensor, columns: int) -> Lists:
    """The same blocks listed the other way: for each column, its rows.

    Args:
        num_blocks, indices: lists of ``rows`` rows over ``columns`` columns.
        columns: number of columns.

    Returns:
        ``[B, H, columns]`` and ``[B, H, columns, rows]``.
    """
    return compact((listed_states(num_blocks, indices, None, None, columns) == PARTIAL).mT)


def refine(
    predicate: Predicate,
    q_vals: Tensor,
    k_vals: Tensor,
    q_len: int,
    kv_len: int,
    lists: Sequence[Tensor | None] | None,
    q_block_size: int,
    kv_block_size: int,
    new_q_block_size: int,
    new_kv_block_size: int,
) -> BlockLists:
    """Lists of finer tiles that mean exactly what ``lists`` mean; see :func:`refined_states`."""
    state = refined_states(
        predicate,
        q_vals,
        k_vals,
        q_len,
        kv_len,
        lists,
        q_block_size,
        kv_block_size,
        new_q_block_size,
        new_kv_block_size,
    )
    return BlockLists.of(lists_of(state), new_q_block_size, new_kv_block_size, q_len, kv_len)


def build(
    predicate: Predicate,
    q_vals: Tensor,
    k_vals: Tensor,
    q_len: int,
    kv_len: int,
    q_block_size: int,
    kv_block_size: int,
) -> BlockLists:
    """Lists derived from the predicate alone."""
    return refine(
        predicate,
        q_vals,
        k_vals,
        q_len,
        kv_len,
        None,
        q_block_size,
        kv_block_size,
        q_block_size,
        kv_block_size,
    )
