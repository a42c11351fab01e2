"""What can be wrong with a mask, in words that a user can act on."""

from __future__ import annotations

import torch

from ..errors import UnsupportedMask

MAX_CLAUSES = 64
"""Comparisons in the predicate."""

MAX_ROWS = 32
"""Rows of values for the queries, and as many for the keys."""

MAX_NODES = 512
"""Nodes of the mask graph that its output depends on."""

MAX_FORMULA = 512
"""Comparisons of an intermediate formula, before simplification."""

MAX_DEPTH = 48
"""How deep a formula's connectives may nest; a value's operations may nest twice as deep."""

MAX_CASES = 32
"""Cases of an integer that is chosen by conditions on query and key."""


def head_dependent() -> UnsupportedMask:
    return UnsupportedMask(
        "depends on the head index",
        hint="A tree mask is the same for all heads: call flex_attention once for each group of "
        "heads, each with a mask of b, q and k only",
    )


def table() -> UnsupportedMask:
    return UnsupportedMask(
        "looks up a q-by-k table",
        hint="Instead of a table indexed by query and key, store one number a token and compare: "
        "node and parent ids, or the tree's enter/exit (tin/tout) order, "
        "(tin[k] <= tin[q]) & (tin[q] < tout[k])",
    )


def mixed_value(what: str) -> UnsupportedMask:
    return UnsupportedMask(
        f"{what} a value that depends on both query and key",
        hint="Compute one value from the query index and one from the key index, and compare them",
    )


def not_integer(dtype: torch.dtype) -> UnsupportedMask:
    return UnsupportedMask(
        f"compares query and key values that are not integers ({short(dtype)})",
        hint="Use integer ids or positions (int32 or int64); in place of x / n write x // n",
    )


def unsigned(dtype: torch.dtype) -> UnsupportedMask:
    return UnsupportedMask(
        f"compares a difference of query and key values in unsigned {short(dtype)}",
        hint="Convert the ids to int32 or int64 before subtracting",
    )


def widened(narrow: torch.dtype, wide: torch.dtype) -> UnsupportedMask:
    return UnsupportedMask(
        f"computes with a difference of query and key values in {short(narrow)} that is then "
        f"widened to {short(wide)}",
        hint=f"Convert the values to {short(wide)} before subtracting",
    )


def unsupported(operation: str) -> UnsupportedMask:
    return UnsupportedMask(
        f"uses {operation}, which is not among the supported element-wise operations",
        hint="Compute it outside the mask and capture the result as one integer a token",
    )


def reads_data(operation: str) -> UnsupportedMask:
    return UnsupportedMask(
        f"reads the contents of a tensor while it is traced ({operation})",
        hint="Use the tensor itself in comparisons, torch.where in place of if, and & | ~ in "
        "place of and, or, not",
    )


def too_many(what: str, count: int, limit: int) -> UnsupportedMask:
    return UnsupportedMask(
        f"needs {count} {what}, at most {limit} are supported",
        hint="Precompute conditions on single tokens outside the mask and capture the result",
    )


def devices(names: list[str]) -> UnsupportedMask:
    return UnsupportedMask(
        f"uses tensors on different devices ({', '.join(names)})",
        hint="Move all captured tensors to the device of the query",
    )


def too_short(index: str, length: int, size: int) -> UnsupportedMask:
    what = {"b": "batch rows", "q": "queries", "k": "keys"}[index]
    return UnsupportedMask(
        f"looks up a tensor of size {size} at {length} {what}, which is out of range",
        hint=f"Give the captured tensor one entry for each of the {length} {what}",
    )


def empty_table() -> UnsupportedMask:
    return UnsupportedMask("looks up a captured tensor that is empty")


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
