"""What the numbers in block lists must be, and a debug switch that looks at them.

Shapes, dtypes and devices of lists are checked with every call (``validation.check_lists``). Their
numbers are on the device, where looking at them makes the host wait, so that nothing does unless
``TREE_ATTN_VALIDATE=1`` is in the environment. Well-formed lists have

- counts from 0 to the number of blocks of the other side;
- listed indices from 0 to that number less one, none twice, none both partial and full;
- query-side lists, if given, of the same blocks as the key-side lists.

What is done with other lists: ``tree_attn_op::block_lists``, which every TreeMask and every
rewritten flex_attention call goes through, and the CPU implementation take counts for at most the
number of entries, let indices out of range list nothing, count a block once and a block of both
kinds as full. A call of the op ``tree_attention`` on a GPU follows its lists as they are and would
read outside of its tensors.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .blocks import listed_states
from .predicate import PARTIAL

VARIABLE = "TREE_ATTN_VALIDATE"
"""Environment variable: ``1`` checks the numbers of all block lists, ``0`` or nothing does not."""

_SIDES = (("kv", "full_kv", "keys"), ("q", "full_q", "queries"))


def enabled() -> bool:
    """Whether the numbers of block lists are to be checked, as the environment says now.

    Raises:
        ValueError: it says neither.
    """
    setting = os.environ.get(VARIABLE, "")
    if setting not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE} must be 0 or 1, got {setting!r}")
    return setting == "1"


def check_contents(lists: Sequence[Tensor | None]) -> None:
    """Check the numbers of two, four or eight block lists in the op's order.

    Waits for the device. While a CUDA graph is captured nothing can wait: a failed check then
    stops the device when the graph runs (``torch._assert_async``).

    Raises:
        ValueError: they are not well-formed; the message names the list and the place.
    """
    for (kind, full_kind, other), at in zip(_SIDES, range(0, len(lists), 4), strict=False):
        side = [
            _List(name, counts, indices)
            for name, (counts, indices) in (
                (kind, lists[at : at + 2]),
                (full_kind, lists[at + 2 : at + 4] or (None, None)),
            )
            if counts is not None and indices is not None
        ]
        for each in side:
            each.check(other)
        if side:
            _check_once(side)
    if len(lists) == 8 and lists[4] is not None:
        _check_same_blocks(lists)


@dataclass(frozen=True)
class _List:
    """A list of one kind and side: counts ``[B, H, rows]``, indices ``[B, H, rows, columns]``."""

    kind: str
    counts: Tensor
    indices: Tensor

    @property
    def columns(self) -> int:
        return self.indices.shape[-1]

    def listed(self) -> Tensor:
        """bool ``[B, H, rows, columns]``: which entries the counts list."""
        rank = torch.arange(self.columns, device=self.counts.device, dtype=torch.int32)
        return rank < self.counts.unsqueeze(-1)

    def check(self, other: str) -> None:
        wrong = (self.counts < 0) | (self.counts > self.columns)
        _refuse(
            wrong,
            f"{self.kind}_num_blocks must be from 0 to {self.columns}, the blocks of {other}",
            self.counts,
        )
        wrong = self.listed() & ((self.indices < 0) | (self.indices >= self.columns))
        _refuse(
            wrong,
            f"{self.kind}_indices must list blocks of {other} from 0 to {self.columns - 1}",
            self.indices,
        )


def _check_once(side: Sequence[_List]) -> None:
    """No block may be listed twice in a row, by one list or by two."""
    columns = side[0].columns
    times = torch.zeros_like(side[0].indices)
    for each in side:
        # While capturing, what was refused above is still to come: keep it out of range here.
        place = each.indices.clamp(0, max(columns - 1, 0)).long()
        times.scatter_add_(-1, place, each.listed().to(times.dtype))
    names = " and ".join(f"{each.kind}_indices" for each in side)
    block = torch.arange(columns, device=times.device, dtype=torch.int32).expand(times.shape)
    _refuse(times > 1, f"{names} must list a block once in a row", block)


def _check_same_blocks(lists: Sequence[Tensor | None]) -> None:
    by_key, by_query = _states(lists[:4]), _states(lists[4:])
    # Full lists of the key side alone are derived for the other.
    known = lists[2] is None or lists[6] is not None
    wrong = by_key != by_query.mT if known else (by_key == PARTIAL) != (by_query.mT == PARTIAL)
    block = torch.arange(wrong.shape[-1], device=wrong.device).expand(wrong.shape)
    rule = "q_indices and full_q_indices must list what kv_indices and full_kv_indices do"
    _refuse(wrong, rule, block)


def _states(side: Sequence[Tensor | None]) -> Tensor:
    counts, indices, full_counts, full_indices = side
    assert counts is not None
    assert indices is not None
    return listed_states(counts, indices, full_counts, full_indices, indices.shape[-1])


def _refuse(wrong: Tensor, rule: str, shown: Tensor) -> None:
    if wrong.is_cuda and torch.cuda.is_current_stream_capturing():
        torch._assert_async(~wrong.any(), rule)
    elif bool(wrong.any()):
        place = tuple(wrong.nonzero()[0].tolist())
        raise ValueError(f"{rule}, got {int(shown[place])} at {list(place)}")
