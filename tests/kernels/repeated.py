"""What launches hand to Triton's launcher, the first time and when they are repeated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any
from unittest import mock

from torch import Tensor
from triton.compiler.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from tests.kernels.aot import compiling_for, target_of
from tree_attn_op.kernels.plans import call_key

Launches = list[tuple[Any, ...]]

# One for all: Triton keeps compiled kernels, and what they launch with, for the whole process.
_launches: Launches = []


@contextmanager
def recorded() -> Iterator[Launches]:
    """Within it launches compile for sm_90 and run nothing.

    Yields:
        What reached the launcher, in order: kernel, grid and arguments.
    """
    _launches.clear()

    def init(self: Any) -> None:
        def run(x: int, y: int, z: int, *rest: Any) -> None:
            # Behind the grid: stream, function, metadata, launch metadata, two hooks.
            _launches.append((self.name, x, y, z, *rest[6:]))

        if self.module is None:
            self.module, self.function, self._run = object(), 0, run

    with mock.patch.object(CompiledKernel, "_init_handles", init), compiling_for(target_of(90)):
        yield _launches


def _comparable(argument: Any, given: list[Any]) -> Any:
    """An argument of a launch: tensors that were given by place, fresh ones by what they are."""
    if isinstance(argument, Tensor):
        for at, tensor in enumerate(given):
            if isinstance(tensor, Tensor) and tensor.data_ptr() == argument.data_ptr() != 0:
                return at, argument.dtype
        return argument.dtype, tuple(argument.shape), argument.stride()
    if is_dataclass(argument):
        values = {field.name: getattr(argument, field.name) for field in fields(argument)}
        values["base"] = _comparable(values["base"], given)
        return {name: str(value) for name, value in values.items()}
    return argument


def check_repeated(plan: Callable[..., Any], calls: list[list[Any]], launches: Launches) -> None:
    """A second call through one plan hands over what a first call through another one does.

    Args:
        plan: makes the plan of a call, given its arguments.
        calls: the arguments of two calls of one key.
        launches: what :func:`recorded` yields.
    """

    def record(call: Callable[..., Any], arguments: list[Any]) -> list[Any]:
        launches.clear()
        results = call(*arguments)
        assert all(isinstance(result, Tensor) for result in results)
        return [[_comparable(each, arguments) for each in entry] for entry in launches]

    first, second = calls
    assert call_key(tuple(first)) == call_key(tuple(second))
    kept = plan(*first)
    kept(*first)
    repeated = record(kept, second)
    assert repeated
    with mock.patch.object(JITFunction, "run", side_effect=AssertionError("bound anew")):
        assert record(kept, second) == repeated
    assert record(plan(*second), second) == repeated
