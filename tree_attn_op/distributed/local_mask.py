"""The rows of a mask that a rank computes: its query tiles against all keys, meaning unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..blocks import BlockLists, cdiv, transpose_lists
from ..mask import TreeMask
from ..predicate import MAX_ROWS, And, Compare, Const, Kind, Node, Predicate, Side, Term

if TYPE_CHECKING:
    from .balance import TreeLoadBalancer


def shard_mask(mask: TreeMask, load_balancer: TreeLoadBalancer, rank: int) -> TreeMask:
    """The mask of one rank: its query tokens, in its order, against all keys in theirs.

    Block lists are those of the given mask at the rank's rows, so hand-made ones are honoured.

    Args:
        mask: for ``load_balancer.seq_length`` queries.
        load_balancer: whose tiles are of whole query blocks of the mask.
        rank: whose mask it is.
    """
    tile_size = load_balancer.tile_size
    predicate, q_vals, key_side = rows_of_mask(mask, load_balancer.tiles[rank], tile_size)
    own = mask.lists
    columns = cdiv(mask.kv_len, own.kv_block_size)
    by_query: list[Tensor | None] = []
    for number, indices in (key_side[:2], key_side[2:]):
        if number is None or indices is None:
            by_query += [None, None]
        else:
            by_query += transpose_lists(number, indices, columns)
    sizes = (own.q_block_size, own.kv_block_size, q_vals.shape[2], mask.kv_len)
    lists = BlockLists.of((*key_side, *by_query), *sizes)
    return TreeMask(predicate, q_vals, mask.k_vals, lists)


def rows_of_mask(
    mask: TreeMask, tiles: Sequence[int], tile_size: int
) -> tuple[Predicate, Tensor, tuple[Tensor | None, ...]]:
    """Predicate, query values and key-side lists of some query tiles, one after another.

    Args:
        mask: any mask.
        tiles: ascending.
        tile_size: tokens a tile, a multiple of the mask's query block size.

    Returns:
        A predicate that does not read the query index, the values that it reads, and the four
        key-side lists at the blocks of the tiles.
    """
    own = mask.lists
    device = mask.device
    positions = _members(tiles, tile_size, mask.q_len, device)
    predicate, row = without_query_index(mask.predicate, mask.q_vals.shape[1])
    q_vals = mask.q_vals.index_select(2, positions)
    if row is not None:
        index = positions.to(q_vals.dtype).expand(q_vals.shape[0], 1, -1)
        q_vals = torch.cat([q_vals[:, :row], index, q_vals[:, row + 1 :]], 1)
    blocks = _members(
        tiles, tile_size // own.q_block_size, cdiv(mask.q_len, own.q_block_size), device
    )
    lists = tuple(
        None if tensor is None else tensor.index_select(2, blocks) for tensor in own.key_side
    )
    return predicate, q_vals, lists


def _members(tiles: Sequence[int], size: int, length: int, device: torch.device) -> Tensor:
    """The numbers below ``length`` that ascending tiles of ``size`` consecutive ones hold."""
    first = torch.tensor(tiles, dtype=torch.int64).unsqueeze(1) * size
    members = (first + torch.arange(size)).flatten()
    # Before the transfer: which of them are too large is known without waiting for a device.
    return members[members < length].to(device)


def without_query_index(predicate: Predicate, num_rows: int) -> tuple[Predicate, int | None]:
    """The predicate with a row of values in the place of the query's index.

    The meaning is the same if that row holds the index, in the dtype of the values: a predicate's
    arithmetic on an index is done in that dtype, as on a row.

    Args:
        predicate: any predicate.
        num_rows: rows of ``q_vals``.

    Returns:
        The predicate and the number of the new row: ``num_rows``, or one that is not read where
        there is no room for more. None: the predicate does not read the index.

    Raises:
        ValueError: all rows that a predicate can have are read.
    """
    if all(term.kind is not Kind.Q_INDEX for term in predicate.terms):
        return predicate, None
    row = num_rows
    if row >= MAX_ROWS:
        read = {term.number for term in predicate.terms if term.kind is Kind.Q_ROW}
        unread = sorted(set(range(MAX_ROWS)) - read)
        if not unread:
            raise ValueError(
                f"the predicate reads {MAX_ROWS} query rows, the most that there can be, and the "
                "query's index, which needs a row of its own where tokens are sharded"
            )
        row = unread[0]
    return Predicate(_substituted(predicate.root, Term(Kind.Q_ROW, row))), row


def _substituted(node: Node, row: Term) -> Node:
    def side(old: Side) -> Side:
        plus, minus = (row if t is not None and t.kind is Kind.Q_INDEX else t for t in old)
        assert plus is not None
        return Side(plus, minus)

    if isinstance(node, Compare):
        return Compare(node.op, side(node.lhs), side(node.rhs))
    if isinstance(node, Const):
        return node
    parts = tuple(_substituted(part, row) for part in node.parts)
    return And(parts) if isinstance(node, And) else type(node)(parts)
