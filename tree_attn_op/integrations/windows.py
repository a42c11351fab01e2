"""Sliding windows on tree positions: a token sees its last ancestors only.

On a tree the distance of two tokens is the difference of their depths, not of their places in the
pack. As depth is a value of each token, a window is one more comparison of a query row with a key
row, ``q1 - k1 < W``, and stays exact.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..arguments import check_tensor, check_type
from ..blocks import BlockLists, cdiv, classify_tiles, compact, listed_states
from ..mask import TreeMask
from ..predicate import (
    EMPTY,
    FULL,
    And,
    Compare,
    Op,
    Predicate,
    difference,
    k_row,
    literal,
    q_row,
)
from .snapshot import Snapshot

_NOT_PROVEN = (
    "the mask lists blocks as full that its predicate does not prove to be full, so that a window "
    "cannot be added to it: derive its lists with TreeMask.from_predicate or from_mask_mod"
)


class PositionedMask:
    """A mask with the depth of each token, for layers that put a sliding window on it.

    Args and attributes:
        mask: the mask, for as many queries as keys.
        position_ids: integer ``[S]`` or ``[B or 1, S]``, the depth of each token: its position in
            its trajectories, as of ``PrefixTree.position_ids``.
    """

    def __init__(self, mask: TreeMask, position_ids: Tensor) -> None:
        self.mask = mask
        self.position_ids = position_ids

    def windowed(self, window: int | None) -> TreeMask:
        """The mask with a window of so many positions, the token's own included; None: no window.

        Raises:
            ValueError: see :func:`windowed`.
        """
        return self.mask if window is None else windowed(self.mask, self.position_ids, window)


def windowed(mask: TreeMask, position_ids: Tensor, window: int) -> TreeMask:
    """``mask`` without the pairs that are ``window`` or more positions apart.

    A pair stays visible if also ``position_ids[q] - position_ids[k] < window``. The result is kept
    while the mask lives, so that all layers of a forward share it.

    Args:
        mask: any mask for as many queries as keys.
        position_ids: integer ``[S]`` or ``[B or 1, S]``.
        window: positions that a token sees, its own included; at least 1.

    Raises:
        TypeError: position_ids are no integers.
        ValueError: sizes that do not fit, a window below 1, or a mask with hand-made lists of full
            blocks that the predicate does not bear out.
    """
    check_type("mask", mask, TreeMask, "a TreeMask")
    check_tensor("position_ids", position_ids)
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise ValueError(f"window must be a number of positions of at least 1, got {window!r}")
    if torch.compiler.is_compiling():
        return _windowed(mask, position_ids, window)
    known = _made.setdefault(mask, {})
    snapshot, made = known.get(window, (None, None))
    if snapshot is None or made is None or not snapshot.is_current([position_ids]):
        made = _windowed(mask, position_ids, window)
        known[window] = Snapshot([position_ids]), made
    return made


_made: WeakKeyDictionary[TreeMask, dict[int, tuple[Snapshot, TreeMask]]] = WeakKeyDictionary()


def _windowed(mask: TreeMask, position_ids: Tensor, window: int) -> TreeMask:
    positions = _rows(mask, position_ids, window)
    lists = mask.lists
    _check_full_blocks(mask)
    distance = difference(q_row(int(mask.q_vals.shape[1])), k_row(int(mask.k_vals.shape[1])))
    near = Compare(Op.LT, distance, literal(min(window, 2**31 - 1)))
    predicate = Predicate(And((mask.predicate.root, near)))
    q_vals, k_vals = (_with_row(values, positions) for values in (mask.q_vals, mask.k_vals))
    # All listed blocks are looked at anew: the window may cut a full one.
    listed = listed_states(*lists.key_side, cdiv(lists.kv_len, lists.kv_block_size))
    tensors = torch.ops.tree_attn_op.block_lists(
        q_vals,
        k_vals,
        str(predicate),
        *(lists.q_len, lists.kv_len),
        *compact(listed != EMPTY),
        *(None, None),
        *(lists.q_block_size, lists.kv_block_size),
        *(lists.q_block_size, lists.kv_block_size),
    )
    made = BlockLists.of(tensors, *lists.sizes)
    return TreeMask.of_op_lists(predicate, q_vals, k_vals, made)


def _rows(mask: TreeMask, position_ids: Tensor, window: int) -> Tensor:
    """The positions as a row of values, ``[B or 1, 1, S]``."""
    if mask.q_len != mask.kv_len:
        raise ValueError(
            f"a window needs as many queries as keys, the mask has {mask.q_len} and {mask.kv_len}"
        )
    if position_ids.is_floating_point() or position_ids.dtype == torch.bool:
        raise TypeError(f"position_ids must be integers, got {position_ids.dtype}")
    rows = position_ids.unsqueeze(0) if position_ids.dim() == 1 else position_ids
    if rows.dim() != 2 or rows.shape[1] != mask.q_len:
        raise ValueError(
            f"position_ids must be [{mask.q_len}] or [B, {mask.q_len}], got "
            f"{tuple(position_ids.shape)}"
        )
    batch = mask.shape[0]
    if not rows.shape[0] or (batch > 1 and rows.shape[0] not in (1, batch)):
        raise ValueError(
            f"position_ids must be of batch 1 or {batch}, that of the mask, got {rows.shape[0]}"
        )
    if position_ids.is_meta and mask.device.type != "meta":
        raise TypeError("position_ids must hold numbers, got a Tensor on the meta device")
    # Differences are right in the dtype of the values, in which they wrap, for any positions that
    # are less than 2^31 apart.
    return rows.to(mask.device, mask.q_vals.dtype).unsqueeze(1)


def _with_row(values: Tensor, row: Tensor) -> Tensor:
    batch = max(values.shape[0], row.shape[0])
    return torch.cat([part.expand(batch, -1, -1) for part in (values, row)], 1)


def _check_full_blocks(mask: TreeMask) -> None:
    """Refuse lists of full blocks that the predicate does not bear out.

    Such a block is visible although the predicate says otherwise. With a window it is neither full
    nor what the predicate says, and no list can tell.
    """
    lists = mask.lists
    if lists.full_kv_num_blocks is None:
        return
    listed = listed_states(*lists.key_side, cdiv(lists.kv_len, lists.kv_block_size))
    proven = classify_tiles(
        mask.predicate,
        mask.q_vals,
        mask.k_vals,
        *(lists.q_len, lists.kv_len),
        *(lists.q_block_size, lists.kv_block_size),
    ).unsqueeze(1)
    contradiction = ((listed == FULL) & (proven != FULL)).any()
    if torch.compiler.is_compiling():
        torch._assert_async(~contradiction, _NOT_PROVEN)
    elif bool(contradiction):
        raise ValueError(_NOT_PROVEN)
