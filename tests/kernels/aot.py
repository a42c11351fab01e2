"""Compilation for a GPU that is not there: the launches of a case, compiled but not run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from tests.kernels.cases import Case, Inputs, make_inputs
from tree_attn_op.kernels.configs import Device, Kernel, KernelConfig, choose
from tree_attn_op.kernels.portable import launch


class _Target:
    """As much of a Triton driver as a compilation asks for."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> str:
        # Compiled kernels are cached by device: this must not be the number of a real one.
        return f"{self.target.backend}:{self.target.arch}"

    def get_current_stream(self, device: object = None) -> int:
        return 0


@contextmanager
def compiling_for(target: GPUTarget) -> Iterator[None]:
    """Lets Triton compile for ``target`` within the block."""
    before = driver._active
    driver.set_active(_Target(target))
    try:
        yield
    finally:
        driver._active = before


def target_of(architecture: int | str) -> GPUTarget:
    """``90`` or ``"gfx942"`` as a Triton target."""
    if isinstance(architecture, str):
        return GPUTarget("hip", architecture, 64)
    return GPUTarget("cuda", architecture, 32)


def config_of(kernel: Kernel, device: Device, case: Case) -> KernelConfig:
    """The shipped configuration for ``case``."""
    value_dim = case.value_dim or case.dim
    group = case.heads // case.kv_heads
    sizes = (case.dtype.itemsize, case.dim, value_dim, group, case.list_heads == 1)
    return choose(kernel, device, *sizes, *case.blocks)


def launch_of(kernel: Kernel, case: Case, config: KernelConfig, inputs: Inputs) -> launch.Launch:
    """One launch of ``case`` on ``inputs``."""
    value_dim = case.value_dim or case.dim
    problem = launch.Problem(
        inputs.query,
        inputs.key,
        inputs.value,
        inputs.q_vals,
        inputs.k_vals,
        case.predicate,
        *case.blocks,
        case.softmax_scale,
    )
    out = torch.empty(case.batch, case.heads, case.q_len, value_dim, dtype=case.dtype)
    lse = torch.empty(case.batch, case.heads, case.q_len)
    key_lists, query_lists = launch.Lists(*inputs.key_lists), launch.Lists(*inputs.query_lists)
    if kernel == "forward":
        return launch.forward_launch(problem, key_lists, out, lse, config)
    if kernel == "dq":
        return launch.dq_launch(
            problem, key_lists, inputs.grad_out, lse, lse, inputs.query, config
        )
    return launch.dkdv_launch(
        problem, query_lists, inputs.grad_out, lse, lse, inputs.key, inputs.value, config
    )


def compiled_for(architecture: int | str, planned: launch.Launch) -> Any:
    """The compiled kernel (``.metadata.shared``, ``.asm``) of a launch."""
    with compiling_for(target_of(architecture)):
        return planned.kernel.warmup(grid=planned.grid, **planned.arguments, **planned.options)


def compile_kernel(
    kernel: Kernel, case: Case, config: KernelConfig, architecture: int | str
) -> Any:
    """The compiled kernel of one launch of ``case``."""
    return compiled_for(architecture, launch_of(kernel, case, config, make_inputs(case)))
