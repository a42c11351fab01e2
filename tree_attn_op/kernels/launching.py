"""Launches that are decided once and repeated: what is left of one is its tensors.

Triton's ``kernel[grid](...)`` binds and specialises every argument of every call, which costs the
host more than all else in an attention call on short sequences. A :class:`Launch` does so the
first time; after that it goes to the compiled kernel that Triton gave back, by the same interface
in Triton 3.6, 3.7 and 3.8. That is sound only for calls that Triton would specialise alike: those
of one key of ``plans.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from tree_attn_op.layout import empty_like_layout

ALIGNMENT = 16
"""Bytes: Triton compiles for pointers that are multiples of it, or that are not."""


class Output:
    """Uninitialised dense tensors of one shape, dtype and device.

    Args:
        shape, strides, dtype, device: what :func:`torch.empty_strided` takes.
    """

    def __init__(
        self,
        shape: Sequence[int],
        strides: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.shape, self.strides = tuple(shape), tuple(strides)
        self.dtype, self.device = dtype, device

    @staticmethod
    def like(reference: Tensor, shape: Sequence[int]) -> Output:
        """In the dtype, the layout (see ``empty_like_layout``) and on the device of another."""
        sizes = (reference.shape, reference.stride())
        stand_in = torch.empty_strided(*sizes, dtype=reference.dtype, device="meta")
        strides = empty_like_layout(stand_in, shape, reference.dtype).stride()
        return Output(shape, strides, reference.dtype, reference.device)

    @staticmethod
    def dense(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Output:
        """A contiguous one."""
        return Output(shape, torch.empty(shape, device="meta").stride(), dtype, device)

    def sample(self) -> Tensor:
        """One without memory, to plan with."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")

    def __call__(self) -> Tensor:
        made = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)
        # Not part of any key, but of what the kernels are compiled for. PyTorch's own allocators
        # give more; one that a user has plugged in may not.
        if made.data_ptr() % ALIGNMENT:
            raise RuntimeError(
                f"tree attention needs memory at multiples of {ALIGNMENT} bytes, and the "
                f"allocator of {self.device} gave {made.data_ptr():#x}"
            )
        return made


class _Boxes:
    """A TMA descriptor for any base: Triton's checks of all else are made once.

    Alignment of the base, which they look at too, is for the caller to see to.
    """

    __slots__ = ("_fields", "_kind")

    def __init__(self, descriptor: Any):
        self._kind = type(descriptor)
        self._fields = dict(vars(descriptor), base=None)

    def __call__(self, base: Tensor) -> Any:
        made = object.__new__(self._kind)
        made.__dict__.update(self._fields)
        made.base = base
        return made


def compiles(kernel: Any) -> bool:
    """Whether launches of ``kernel`` leave something that can be launched again.

    So it is with what ``triton.jit`` makes. What Triton's interpreter makes of a function, and
    what tests put in a kernel's place, is called as it is, every time.
    """
    return isinstance(kernel, JITFunction)


class Launch:
    """A kernel with everything of its launch but the tensors.

    Args:
        kernel: what ``triton.jit`` or ``gluon.jit`` made.
        grid: at most three numbers of programs; with a 0 among them, calls do nothing.
        leading: the kernel's first arguments, as of a call: tensors, and TMA descriptors where
            calls are to give the tensor of which to make one.
        fixed: all other arguments, by name.
        options: ``num_warps`` and the like.
    """

    __slots__ = ("_boxes", "_fixed", "_grid", "_kernel", "_options", "_rest", "_run")

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        leading: Sequence[Any],
        fixed: dict[str, Any],
        options: dict[str, Any],
    ):
        self._kernel, self._grid = kernel, grid
        self._fixed, self._options = fixed, options
        self._boxes = tuple(
            (at, _Boxes(argument))
            for at, argument in enumerate(leading)
            if hasattr(argument, "block_shape")
        )
        self._rest: tuple[Any, ...] = ()
        self._run: Callable[..., None] | None = None

    def __call__(self, *tensors: Tensor) -> None:
        """Launch on ``tensors``, the kernel's first arguments."""
        arguments: Sequence[Any] = tensors
        if self._boxes:
            arguments = [*tensors]
            for at, boxes in self._boxes:
                arguments[at] = boxes(arguments[at])
        if self._run is not None:
            self._run(*arguments, *self._rest)
        elif 0 not in self._grid:
            self._first(arguments)

    def _first(self, arguments: Sequence[Any]) -> None:
        kernel = self._kernel
        compiled = kernel[self._grid](*arguments, **self._fixed, **self._options)
        if compiles(kernel) and compiled is not None:
            names = kernel.arg_names[len(arguments) :]
            # A compiled kernel takes all arguments by place, those that it was compiled for too.
            self._rest = tuple(self._fixed[name] for name in names)
            self._run = compiled[(*self._grid, 1, 1)[:3]]
