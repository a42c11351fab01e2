"""Plans: what was checked and decided for a call, remembered for calls like it.

A call on a GPU is checked, its kernels are chosen and its launches are put together once for each
*key*. A key holds all that checks, choices and launches may go by: of every tensor shape, strides,
dtype, device and the address modulo 16; every other argument; and the settings outside of the
arguments that matter. What is not in the key, a plan may not look at, but for the tensors' memory.
Nothing here needs Triton.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ..layout import empty_like_layout
from . import configs
from .choice import ENVIRONMENT

LIMIT = 1024
"""Plans that are remembered of an op; beyond it the oldest are forgotten."""

_SUBSTITUTES = 3
"""Missing lists are made first, then dense copies for the portable kernels; with those the Hopper
kernels may serve the call, which want copies of their own."""


Arguments = tuple[Any, ...]


class Plan(Protocol):
    """Called with the arguments of a call with the plan's key, it computes the results."""

    @property
    def substitute(self) -> Callable[[Arguments], Arguments] | None:
        """None, or what makes the arguments of another call to do instead of this one."""

    def __call__(self, *arguments: Any) -> Any: ...


class Immediate:
    """The plan of a call that needs no kernel.

    Args:
        call: computes the results from the arguments.
    """

    substitute = None

    def __init__(self, call: Callable[..., Any]):
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)


class Substitute:
    """The plan of a call that kernels cannot serve with the arguments as they are.

    Args:
        substitute: makes arguments that they can serve.
    """

    def __init__(self, substitute: Callable[[Arguments], Arguments]):
        self.substitute = substitute

    def __call__(self, *arguments: Any) -> Any:
        raise AssertionError("not to be called, but the plan of the other arguments")


def copies(places: tuple[int, ...]) -> Substitute:
    """The plan of a call on tensors that kernels cannot read as they lie in memory."""
    return Substitute(partial(with_copies, places=places))


def with_copies(arguments: Sequence[Any], places: tuple[int, ...]) -> Arguments:
    """The arguments, with dense copies in some places.

    Copies of query, key, value and the like lie in memory as outputs do that follow them (see
    ``layout.py``), all others in the order of their dimensions.
    """
    copied = list(arguments)
    for at in places:
        tensor = copied[at]
        if tensor.is_floating_point() and tensor.dim() == 4:
            copied[at] = empty_like_layout(tensor, tensor.shape, tensor.dtype).copy_(tensor)
        else:
            # Not contiguous(): that returns the same for some that a kernel cannot read.
            copied[at] = tensor.clone(memory_format=torch.contiguous_format)
    return tuple(copied)


def call_key(arguments: Arguments, dtype: torch.dtype | None = None) -> Any:
    """The key of a call.

    Args:
        arguments: all arguments: tensors, and what can be hashed.
        dtype: of query, key and value: how float32 products are taken is a global setting.
    """
    precision = configs.dot_precision(dtype) if dtype is torch.float32 else None
    described = [
        (each.shape, each.stride(), each.dtype, each.device, each.data_ptr() & 15)
        if isinstance(each, Tensor)
        else each
        for each in arguments
    ]
    # The Hopper backward has a form that is faster, and one that is the same bits every time.
    exact = torch.are_deterministic_algorithms_enabled()
    return (os.environ.get(ENVIRONMENT), precision, exact, *described)


class Plans:
    """Plans by key; those that came first go first when there are too many. Safe in threads."""

    def __init__(self, limit: int = LIMIT):
        self._limit = limit
        self._plans: dict[Any, Plan] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._plans)

    def run(
        self,
        decide: Callable[[Arguments], Plan],
        arguments: Arguments,
        dtype: torch.dtype | None = None,
        look: Callable[[Arguments], None] | None = None,
    ) -> Any:
        """The results of a call.

        Args:
            decide: checks arguments of a new key and plans for them.
            arguments: of the call.
            dtype: as in :func:`call_key`.
            look: checks what no key can hold, with calls of a known key; ``decide`` does as well.
        """
        for _ in range(_SUBSTITUTES + 1):
            key = call_key(arguments, dtype)
            plan = self._plans.get(key)
            if plan is None:
                plan = decide(arguments)
                self._add(key, plan)
            elif look is not None:
                look(arguments)
            if plan.substitute is None:
                return plan(*arguments)
            arguments = plan.substitute(arguments)
        raise RuntimeError("tree attention found no arguments that its kernels can read")

    def _add(self, key: Any, plan: Plan) -> None:
        with self._lock:
            while len(self._plans) >= self._limit:
                del self._plans[next(iter(self._plans))]
            self._plans[key] = plan

    def clear(self) -> None:
        """Forget all, such as after a change of one of Triton's settings."""
        with self._lock:
            self._plans.clear()
