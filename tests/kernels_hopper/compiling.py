"""Compiling the Hopper kernels, through their host code, where there is no GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import tree_attn_op.kernels.hopper  # noqa: F401 - the package is patched below
from tree_attn_op.kernels import launching


class _Driver:
    """As much of a driver as a compilation asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: object = None) -> int:
        return 0


@contextmanager
def compile_only() -> Iterator[dict[str, Any]]:
    """Launches of Triton kernels compile for sm_90 and run nothing; tensors may be on the CPU.

    Yields:
        The compiled kernels by name.
    """
    kernels: dict[str, Any] = {}
    original = JITFunction.run

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = original(self, *args, grid=grid, warmup=True, **kwargs)
        kernels[self.__name__] = kernel
        return kernel

    hosts = [
        sys.modules[f"tree_attn_op.kernels.hopper.{name}"] for name in ("forward", "backward")
    ]
    with (
        mock.patch.object(JITFunction, "run", run),
        # What was compiled for a GPU that is not there cannot be launched.
        mock.patch.object(launching, "compiles", return_value=False),
        mock.patch.object(hosts[0], "multiprocessors", return_value=132),
        mock.patch.object(hosts[1], "multiprocessors", return_value=132),
        mock.patch.object(driver, "_active", _Driver()),
    ):
        yield kernels
