"""Wrong arguments made from right ones, and what counts as a clear refusal."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

REFUSALS = (TypeError, ValueError, RuntimeError, IndexError, NotImplementedError)
"""Errors that may refuse an argument; UnsupportedMask and PredicateError are ValueErrors.

Not AttributeError, KeyError, AssertionError and the like: those are what code runs into that has
not looked at what it was given.
"""


@dataclass(frozen=True)
class Target:
    """A public function with arguments that it takes.

    Attributes:
        name: how it is called.
        call: the function, taking all arguments by name.
        make: makes right arguments.
        accepted: for each argument the wrong values, by label, that are not wrong there.
        also_named: other words that errors about an argument may use for it.
        left_out: for each argument the wrong values, by label, that are not tried.
    """

    name: str
    call: Callable[..., Any]
    make: Callable[[], dict[str, Any]]
    accepted: Mapping[str, Sequence[str]] = field(default_factory=dict)
    also_named: Mapping[str, Sequence[str]] = field(default_factory=dict)
    left_out: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """The right arguments."""
        return self.make()


def _nothing(*arguments: Any) -> None:
    pass


def wrong_values(right: Any, seed: int) -> Iterator[tuple[str, Any]]:
    """(label, value): of other types, and near misses of the right value."""
    yield "None", None
    yield "an object", object()
    yield "text", "no such thing"
    yield "a float", 1.5
    yield "NaN", float("nan")
    yield "a negative int", -3
    yield "a huge int", 2**70
    yield "a list of text", ["a", "b"]
    yield "a function", _nothing
    yield "a scalar tensor", torch.tensor(3)
    yield "a complex tensor", torch.zeros(2, 3, dtype=torch.complex64)
    yield "a meta tensor", torch.zeros(2, 3, device="meta")
    yield "a sparse tensor", torch.eye(3).to_sparse()
    if isinstance(right, Tensor):
        yield from _near_tensors(right, random.Random(seed))


def _near_tensors(right: Tensor, choose: random.Random) -> Iterator[tuple[str, Tensor]]:
    yield "an array", np.asarray(right.detach())
    yield "on meta", right.to("meta")
    yield "one dimension more", right.unsqueeze(0)
    if right.dim():
        yield "one dimension less", right.sum(0).to(right.dtype)
        yield "empty", right[:0]
        dim = choose.randrange(right.dim())
        if right.shape[dim] > 1:
            yield f"shorter in dim {dim}", right.narrow(dim, 0, right.shape[dim] - 1)
        if right.shape[dim]:
            yield f"longer in dim {dim}", torch.cat([right, right.narrow(dim, 0, 1)], dim)
    for dtype in (torch.float32, torch.float64, torch.bool, torch.int16, torch.int64):
        if dtype != right.dtype:
            yield f"of {dtype}", right.to(dtype)


def problem_of(target: Target, name: str, label: str, wrong: Any) -> str | None:
    """What is wrong with how ``target`` treats a wrong argument; None: it refuses it clearly."""
    where = f"{target.name}({name}={label})"
    if label in target.left_out.get(name, ()):
        return None
    try:
        target.call(**{**target.arguments, name: wrong})
    except REFUSALS as error:
        words = (name, *target.also_named.get(name, ()))
        if any(re.search(rf"\b{re.escape(word)}\b", str(error)) for word in words):
            return None
        return f"{where}: {type(error).__name__} does not name it: {str(error)[:200]}"
    except Exception as error:
        return f"{where}: {type(error).__name__}: {str(error)[:200]}"
    if any(re.fullmatch(pattern, label) for pattern in target.accepted.get(name, ())):
        return None
    return f"{where}: accepted"
