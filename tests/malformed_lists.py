"""Block lists whose numbers are out of range, and what they mean all the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from tree_attn_op import TreeMask
from tree_attn_op.blocks import BlockLists
from tree_attn_op.predicate import Predicate

from .attention_cases import Case, ids_case

LENGTHS = (150, 200)
BLOCK = 32


def _written(tensor: Tensor, place: tuple[int, ...], number: int) -> Tensor:
    tensor = tensor.clone()
    tensor[place] = number
    return tensor


Change = Callable[[BlockLists], dict[str, Tensor]]

CHANGES: dict[str, tuple[str, Change]] = {
    "count above capacity": (
        "kv_num_blocks",
        lambda lists: {"kv_num_blocks": _written(lists.kv_num_blocks, (0, 0, 1), 2**31 - 1)},
    ),
    "negative count": (
        "kv_num_blocks",
        lambda lists: {"kv_num_blocks": _written(lists.kv_num_blocks, (0, 0, 1), -5)},
    ),
    "count of full blocks above capacity": (
        "full_kv_num_blocks",
        lambda lists: {"full_kv_num_blocks": _written(lists.full_kv_num_blocks, (0, 0, 2), 99)},
    ),
    "negative index": (
        "kv_indices",
        lambda lists: {"kv_indices": _written(lists.kv_indices, (0, 0, 1, 0), -1)},
    ),
    "far negative index": (
        "kv_indices",
        lambda lists: {"kv_indices": _written(lists.kv_indices, (0, 0, 1, 0), -(2**30))},
    ),
    "index above the last block": (
        "kv_indices",
        lambda lists: {"kv_indices": _written(lists.kv_indices, (0, 0, 1, 1), 7)},
    ),
    "index far above": (
        "kv_indices",
        lambda lists: {"kv_indices": _written(lists.kv_indices, (0, 0, 0, 0), 2**30)},
    ),
    "block listed twice": (
        "kv_indices",
        lambda lists: {"kv_indices": lists.kv_indices.index_fill(3, torch.tensor([0]), 3)},
    ),
    "block both partial and full": (
        "full_kv_indices",
        lambda lists: {
            "full_kv_num_blocks": torch.ones_like(lists.kv_num_blocks),
            "full_kv_indices": lists.kv_indices.clone(),
        },
    ),
}
"""Name -> the list that an error names, and what to change."""


def whole_case() -> Case:
    """Random ids with every block listed as partial: any number of a row matters."""
    made = ids_case(*LENGTHS)
    rows, columns = made.lists.kv_indices.shape[2:]
    counts = torch.full((1, 1, rows), columns, dtype=torch.int32)
    indices = torch.arange(columns, dtype=torch.int32).expand(1, 1, rows, columns)
    none = torch.zeros_like(counts)
    tensors = (counts, indices.contiguous(), none, indices.contiguous(), *(None,) * 4)
    return replace(made, lists=BlockLists.of(tensors, BLOCK, BLOCK, *LENGTHS))


def malformed() -> Iterator[tuple[str, str, Case]]:
    """(name, the list that an error names, the case) of every change."""
    for name, (named, change) in CHANGES.items():
        made = whole_case()
        yield name, named, made.with_lists(**change(made.lists))


def mask_of(made: Case) -> TreeMask:
    """The case's mask, with its lists as they are."""
    return TreeMask(Predicate.parse(made.predicate), made.q_vals, made.k_vals, made.lists)


def meaning(made: Case) -> Tensor:
    """What the lists mean, read entry by entry: bool ``[1, 1, Q, K]``."""
    lists = made.lists
    rows, columns = lists.kv_indices.shape[2:]
    pairs = Predicate.parse(made.predicate).dense(made.q_vals, made.k_vals, *LENGTHS)[0]
    allowed = torch.zeros(LENGTHS, dtype=torch.bool)
    sides = ((lists.kv_num_blocks, lists.kv_indices), lists.key_side[2:])
    for full, (counts, indices) in enumerate(sides):
        assert counts is not None
        assert indices is not None
        for row, entry in product(range(rows), range(columns)):
            column = int(indices[0, 0, row, entry])
            if entry < int(counts[0, 0, row]) and 0 <= column < columns:
                q = slice(row * BLOCK, (row + 1) * BLOCK)
                k = slice(column * BLOCK, (column + 1) * BLOCK)
                allowed[q, k] |= True if full else pairs[q, k]
    return allowed[None, None]
