"""Which implementation an op runs: told by the device, never by what has failed."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from torch import Tensor


def on_gpu(tensor: Tensor) -> bool:
    """Whether the op's Triton kernels serve calls on a tensor like this one."""
    # What is no tensor, which a schema lets through as None, is for the checks to name.
    return isinstance(tensor, Tensor) and not tensor.is_cpu


@cache
def gpu_kernels(name: str) -> Any:
    """A module below ``kernels``, imported with the first call that needs it.

    Raises:
        RuntimeError: Triton is not installed.
    """
    try:
        return importlib.import_module(f".kernels.{name}", __package__)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "triton":
            raise
        raise RuntimeError(
            "tree attention on a GPU needs Triton, which is not installed: install triton"
        ) from error
