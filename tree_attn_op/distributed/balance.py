"""Which rank holds which query tiles, so that all have the same attention work.

On a tree, contiguous chunks of the pack are far from equal: a token late in a long prompt attends
to all of it, the first token of a chain to nothing. Tiles of consecutive tokens are dealt out
instead. Every rank gets as many tiles as any other (give or take one), which balances all that a
model does token by token, and among such deals one whose attention work is close to equal.
"""

from __future__ import annotations

import heapq
import operator
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise

import torch
from torch import Tensor

from ..arguments import check_int, check_iterable, check_type
from ..blocks import cdiv, refined_states
from ..mask import TreeMask, finest_common
from .local_mask import rows_of_mask

WORK_BLOCK = 64
"""Work is counted in blocks of so many queries by so many keys, as fine as the kernels' lists."""

_MAX_STATES = 1 << 24
"""Block states that are held at a time while work is counted."""


class TreeLoadBalancer:
    """A partition of the query tiles among the ranks of a mesh dimension. Immutable.

    Equal on all ranks if it is made of equal masks: it is computed from integers only. It has the
    method that PyTorch's own ``_context_parallel_shard`` asks of a load balancer, which can use it
    where all shards are of one length.

    Args:
        tiles: for each rank the tiles that it holds, any order; each tile belongs to one rank.
        seq_length: tokens in all.
        tile_size: tokens a tile; the last one may be shorter.
        work: attention work of each tile, in any unit; None: not known.

    Ints may be of any type that is one, such as those of numpy and of tensors.

    Raises:
        TypeError: what is no int.
        ValueError: the tiles are no partition.
    """

    tiles: tuple[tuple[int, ...], ...]
    seq_length: int
    tile_size: int
    work: tuple[int, ...] | None
    """Attention work of each rank, or None."""

    def __init__(
        self,
        tiles: Sequence[Sequence[int]],
        seq_length: int,
        tile_size: int,
        work: Sequence[int] | None = None,
    ) -> None:
        seq_length = as_int("seq_length", seq_length, least=0)
        tile_size = as_int("tile_size", tile_size, least=1)
        check_iterable("tiles", tiles, "sequences of ints, one a rank")
        hands = []
        for rank, one in enumerate(tiles):
            check_iterable(f"tiles[{rank}]", one, "ints")
            # Ascending, so that a short last tile is the last of its rank and blocks stay aligned.
            hands.append(tuple(sorted(as_int(f"a tile of rank {rank}", tile) for tile in one)))
        if not hands:
            raise ValueError("tiles must have one entry a rank, got none")
        num_tiles = cdiv(seq_length, tile_size)
        if sorted(tile for one in hands for tile in one) != list(range(num_tiles)):
            raise ValueError(
                f"each of the {num_tiles} tiles of {seq_length} tokens must belong to one rank, "
                f"got {[list(one) for one in hands]}"
            )
        sums = None
        if work is not None:
            check_iterable("work", work, "ints")
            of_tile = [as_int("work of a tile", one) for one in work]
            if len(of_tile) != num_tiles:
                raise ValueError(
                    f"work must have one number for each of {num_tiles} tiles, got {len(of_tile)}"
                )
            sums = tuple(sum(of_tile[tile] for tile in one) for one in hands)
        for name, given in (
            ("tiles", tuple(hands)),
            ("seq_length", seq_length),
            ("tile_size", tile_size),
            ("work", sums),
        ):
            object.__setattr__(self, name, given)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a TreeLoadBalancer is immutable")

    def __delattr__(self, name: str) -> None:
        raise AttributeError("a TreeLoadBalancer is immutable")

    @staticmethod
    def of_mask(
        mask: TreeMask, world_size: int, *, tile_size: int | None = None
    ) -> TreeLoadBalancer:
        """The tiles of a mask dealt out so that attention work and tokens are close to equal.

        Longest-processing-time-first over the tiles' work with a limit on the tiles of a rank
        (Graham, 1969; with the limit: Dell'Amico and Martello, 2001), then exchanges of single
        tiles between the most loaded rank and others while they help. Waits for the device once.

        Args:
            mask: for as many queries as keys.
            world_size: number of ranks.
            tile_size: tokens a tile, a multiple of the mask's query block size; None: that size.

        Raises:
            TypeError: no TreeMask, or sizes that are no ints.
            ValueError: a mask for other queries than keys, or a tile size that does not fit it.
        """
        check_type("mask", mask, TreeMask, "a TreeMask")
        world_size = as_int("world_size", world_size, least=1)
        if mask.q_len != mask.kv_len:
            raise ValueError(
                "context parallelism is for self-attention: the mask must be for as many queries "
                f"as keys, got {mask.q_len} and {mask.kv_len}"
            )
        tile_size = checked_tile_size(mask, tile_size)
        work = tile_work(mask, tile_size)
        return TreeLoadBalancer(deal(work, world_size), mask.q_len, tile_size, work)

    @staticmethod
    def contiguous(
        seq_length: int, world_size: int, tile_size: int, work: Sequence[int] | None = None
    ) -> TreeLoadBalancer:
        """Consecutive tiles, as many for each rank: balanced in tokens only.

        Args:
            seq_length: tokens of the whole sequence.
            world_size: number of ranks.
            tile_size: tokens a tile.
            work: of each tile, as of the class.

        Raises:
            TypeError, ValueError: sizes that are no ints, or too small.
        """
        seq_length = as_int("seq_length", seq_length, least=0)
        world_size = as_int("world_size", world_size, least=1)
        tile_size = as_int("tile_size", tile_size, least=1)
        num_tiles = cdiv(seq_length, tile_size)
        cuts = [rank * num_tiles // world_size for rank in range(world_size + 1)]
        tiles = [range(*pair) for pair in pairwise(cuts)]
        return TreeLoadBalancer(tiles, seq_length, tile_size, work)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.tiles)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each rank; may be 0."""
        last = cdiv(self.seq_length, self.tile_size) - 1
        missing = (last + 1) * self.tile_size - self.seq_length
        return tuple(
            len(one) * self.tile_size - (missing if last in one else 0) for one in self.tiles
        )

    @property
    def imbalance(self) -> float:
        """Work of the most loaded rank over the average; 1 where the work is not known."""
        if self.work is None or not any(self.work):
            return 1.0
        return max(self.work) * self.world_size / sum(self.work)

    def positions(self, rank: int, device: torch.device | str = "cpu") -> Tensor:
        """The tokens of a rank in the order in which it holds them.

        Args:
            rank: 0 to ``world_size - 1``.
            device: of the result.

        Returns:
            int64 ``[lengths[rank]]``, ascending.

        Raises:
            TypeError, ValueError: there is no such rank.
        """
        rank = as_int("rank", rank, least=0)
        if rank >= self.world_size:
            raise ValueError(f"rank must be below {self.world_size}, got {rank}")
        tiles = torch.tensor(self.tiles[rank], dtype=torch.int64)
        tokens = (tiles.unsqueeze(1) * self.tile_size + torch.arange(self.tile_size)).flatten()
        return tokens[: self.lengths[rank]].to(device)

    def padded_tokens(self, device: torch.device | str = "cpu") -> Tensor:
        """The token of each row once shards, padded to the longest, stand one after another.

        Returns:
            int64 ``[world_size * max(lengths)]``; rows that are padding have token 0.
        """
        longest = max(self.lengths)
        # Not a view of something else, whose sizes torch.compile would look at too.
        tokens = torch.zeros(self.world_size * longest, dtype=torch.int64)
        for rank, length in enumerate(self.lengths):
            tokens[rank * longest :][:length] = self.positions(rank)
        return tokens.to(device)

    def places(self, device: torch.device | str = "cpu") -> Tensor:
        """The row of each token among those padded shards, int64 ``[seq_length]``."""
        longest = max(self.lengths)
        places = torch.empty(self.seq_length, dtype=torch.int64)
        for rank, length in enumerate(self.lengths):
            places[self.positions(rank)] = torch.arange(length) + rank * longest
        return places.to(device)

    def _generate_indices(self, restore: bool = False) -> Tensor:
        """PyTorch's protocol: the order of the tokens shard after shard, or its inverse."""
        order = torch.cat([self.positions(rank) for rank in range(self.world_size)])
        return (torch.argsort(order) if restore else order).unsqueeze(0)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TreeLoadBalancer):
            return NotImplemented
        return self.identity == other.identity

    def __hash__(self) -> int:
        return hash(self.identity)

    @property
    def identity(self) -> bytes:
        """What makes two partitions equal."""
        return repr((self.tiles, self.seq_length, self.tile_size)).encode()

    def __repr__(self) -> str:
        return (
            f"TreeLoadBalancer(world_size={self.world_size}, lengths={self.lengths}, "
            f"imbalance={self.imbalance:.4f})"
        )


def as_int(name: str, value: object, least: int | None = None) -> int:
    """A value of any integer type as Python's int, so that equal ones are equal in all respects.

    Raises:
        TypeError, ValueError: it is no int, or below ``least``.
    """
    if isinstance(value, torch.SymInt):
        # Of torch.compile: stays symbolic.
        check_int(name, value, least)
        return value  # type: ignore[return-value]
    if not isinstance(value, int):
        with suppress(TypeError):
            value = operator.index(value)  # type: ignore[arg-type]
    check_int(name, value, least)
    # Of a subclass of int the plain one.
    return operator.index(value)  # type: ignore[arg-type]


def checked_tile_size(mask: TreeMask, tile_size: int | None) -> int:
    """The tile size, by default the mask's query block size.

    Raises:
        ValueError: it is no multiple of that size.
    """
    block = mask.lists.q_block_size
    if tile_size is None:
        return block
    tile_size = as_int("tile_size", tile_size)
    if tile_size < 1 or tile_size % block:
        raise ValueError(
            f"tile_size must be a multiple of the mask's query block size {block}, got {tile_size}"
        )
    return tile_size


def tile_work(mask: TreeMask, tile_size: int) -> list[int]:
    """Blocks of :data:`WORK_BLOCK` tokens with any work, of each query tile, over batch and heads.

    Memory is linear in the length: the states of a bounded number of blocks are held at a time.
    """
    lists = mask.lists
    q_block = finest_common(lists.q_block_size, WORK_BLOCK)
    kv_block = finest_common(lists.kv_block_size, WORK_BLOCK)
    num_tiles = cdiv(mask.q_len, tile_size)
    columns = max(1, cdiv(mask.kv_len, kv_block))
    at_a_time = max(1, _MAX_STATES // (columns * (tile_size // q_block)))
    counts = []
    for first in range(0, num_tiles, at_a_time):
        tiles = range(first, min(first + at_a_time, num_tiles))
        predicate, q_vals, some_lists = rows_of_mask(mask, tiles, tile_size)
        q_len = q_vals.shape[2]
        states = refined_states(
            predicate,
            q_vals,
            mask.k_vals,
            *(q_len, mask.kv_len),
            some_lists,
            *(lists.q_block_size, lists.kv_block_size, q_block, kv_block),
        )
        rows = (states != 0).sum((0, 1, 3))
        missing = -rows.numel() % (tile_size // q_block)
        rows = torch.cat([rows, rows.new_zeros(missing)])
        counts.append(rows.view(-1, tile_size // q_block).sum(1))
    return torch.cat(counts).tolist() if counts else []


def deal(work: Sequence[int], world_size: int) -> list[list[int]]:
    """Tiles for each rank: counts that differ by at most one, sums that are close to equal.

    Deterministic: ties go to the tile and to the rank with the lower number.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    small, num_large = divmod(len(work), world_size)
    hands: list[list[int]] = [[] for _ in range(world_size)]
    loads = [0] * world_size
    heap = [(0, rank) for rank in range(world_size)]
    for tile in sorted(range(len(work)), key=lambda one: (-work[one], one)):
        while True:
            _, rank = heapq.heappop(heap)
            if len(hands[rank]) < small:
                break
            # One more than the others get, for as many ranks as there are tiles over.
            if len(hands[rank]) == small and num_large:
                num_large -= 1
                break
        hands[rank].append(tile)
        loads[rank] += work[tile]
        heapq.heappush(heap, (loads[rank], rank))
    _exchange(hands, loads, work)
    return [sorted(hand) for hand in hands]


def _exchange(hands: list[list[int]], loads: list[int], work: Sequence[int]) -> None:
    """Exchange single tiles between the most loaded rank and others while its load shrinks."""
    for _ in range(8 * len(hands)):
        most = max(range(len(hands)), key=lambda rank: (loads[rank], -rank))
        if loads[most] * len(hands) * 1000 <= sum(loads) * 1001:
            # Within a thousandth of equal, which no kernel's time would show.
            return
        best: tuple[int, int, int, int] | None = None
        for other, hand in enumerate(hands):
            by_work = sorted(hand, key=lambda tile: (work[tile], tile))
            sizes = [work[tile] for tile in by_work]
            gap = loads[most] - loads[other]
            for mine in hands[most]:
                # The two loads are closest if half of the gap changes hands.
                at = bisect_left(sizes, work[mine] - gap / 2)
                for place in (at - 1, at):
                    if not 0 <= place < len(sizes):
                        continue
                    moved = work[mine] - sizes[place]
                    height = max(loads[most] - moved, loads[other] + moved)
                    if height < loads[most] and (best is None or height < best[0]):
                        best = height, other, mine, by_work[place]
        if best is None:
            return
        _, other, mine, theirs = best
        hands[most][hands[most].index(mine)] = theirs
        hands[other][hands[other].index(theirs)] = mine
        moved = work[mine] - work[theirs]
        loads[most] -= moved
        loads[other] += moved
