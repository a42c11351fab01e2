"""This project: what the op chooses, and its kernels one by one."""

from __future__ import annotations

import contextlib
import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tree_attn_op import tree_attention
from tree_attn_op.kernels import choice, configs

from .base import Grads, Implementation
from .problem import Problem


@contextlib.contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """torch.use_deterministic_algorithms, without its filling of every new tensor.

    That filling is a debugging aid of PyTorch, has nothing to do with the algorithm and would be
    added to the time of whoever allocates an output.
    """
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    # A property that type checkers do not see.
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        settings.fill_uninitialized_memory = fill


class TreeAttention(Implementation):
    """The op as called by a user; its block lists are built beforehand, as flex's."""

    name = "tree_attn_op"
    ours = True

    def __init__(self, problem: Problem):
        super().__init__(problem)
        self._mask = problem.tree.mask

    def forward(self) -> Tensor:
        out = tree_attention(*self.inputs, self._mask, enable_gqa=True)
        assert isinstance(out, Tensor)
        return out


class DeterministicTreeAttention(TreeAttention):
    """The same under torch.use_deterministic_algorithms."""

    name = "tree_attn_op_deterministic"

    def forward(self) -> Tensor:
        with deterministic_algorithms():
            return super().forward()

    def backward(self, out: Tensor) -> Grads:
        with deterministic_algorithms():
            return super().backward(out)


class _KernelCall(torch.autograd.Function):
    """A kernel package as an autograd function, past the op and its choice."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, kernels: Kernels) -> Tensor:
        call, _ = kernels.functions()
        given = {"query": query, "key": key, "value": value, **kernels.arguments}
        out, lse = call(**_taken(call, given))
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.kernels = kernels
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        _, call = ctx.kernels.functions()
        names = ("query", "key", "value", "out", "lse")
        given = dict(zip(names, ctx.saved_tensors, strict=True))
        given |= {"grad_out": grad_out, "grad_lse": None, **ctx.kernels.arguments}
        return (*call(**_taken(call, given)), None)


def _taken(call: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """Those of the op's arguments that a function of a kernel package wants."""
    return {name: given[name] for name in inspect.signature(call).parameters if name in given}


class Kernels(Implementation):
    """One package of `tree_attn_op.kernels`, called whatever the op would choose."""

    ours = True

    def __init__(self, problem: Problem):
        super().__init__(problem)
        mask = problem.tree.mask
        lists = mask.block_lists_for(*self.list_blocks(problem))
        self.arguments = {
            "q_vals": mask.q_vals,
            "k_vals": mask.k_vals,
            "predicate": str(mask.predicate),
            "q_block_size": lists.q_block_size,
            "kv_block_size": lists.kv_block_size,
            "scale": problem.heads.dim**-0.5,
            **{
                f"{full}{side}_{what}": getattr(lists, f"{full}{side}_{what}")
                for side in ("kv", "q")
                for full in ("", "full_")
                for what in ("num_blocks", "indices")
            },
        }

    @classmethod
    def unavailable(cls, problem: Problem) -> str | None:
        return "needs a CUDA GPU" if problem.query.device.type == "cpu" else None

    @staticmethod
    @abstractmethod
    def functions() -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Forward and backward, with arguments named as the op's."""

    @staticmethod
    @abstractmethod
    def list_blocks(problem: Problem) -> tuple[int, int]:
        """The block sizes of the lists that the package wants."""

    def forward(self) -> Tensor:
        return _KernelCall.apply(*self.inputs, self)


class PortableKernels(Kernels):
    """The `tl` kernels."""

    name = "tree_attn_op_portable"

    @staticmethod
    def functions() -> tuple[Callable[..., Any], Callable[..., Any]]:
        from tree_attn_op.kernels import portable

        return portable.forward, portable.backward

    @staticmethod
    def list_blocks(problem: Problem) -> tuple[int, int]:
        heads, query = problem.heads, problem.query
        group = heads.query // heads.kv
        return configs.preferred_list_blocks(query.device, query.dtype, heads.dim, group)


class HopperKernels(Kernels):
    """The Gluon kernels for sm_90, with their deterministic backward."""

    name = "tree_attn_op_hopper"

    @staticmethod
    def functions() -> tuple[Callable[..., Any], Callable[..., Any]]:
        from tree_attn_op.kernels import hopper

        return hopper.forward, partial(hopper.backward, form="deterministic")

    @staticmethod
    def list_blocks(problem: Problem) -> tuple[int, int]:
        return choice.hopper_list_blocks(problem.heads.query // problem.heads.kv)

    @classmethod
    def unavailable(cls, problem: Problem) -> str | None:
        if problem.query.device.type == "cpu":
            return "needs a CUDA GPU"
        device = configs.device_of(problem.query.device)
        tensors = (problem.query, problem.key, problem.value)
        blocks, scale = cls.list_blocks(problem), problem.heads.dim**-0.5
        chosen = choice.call_choice(device, *tensors, 1, *blocks, scale)
        if chosen.kernels == "hopper":
            return None
        return chosen.reason or f"not for devices of family {device.family}"


class FastHopperKernels(HopperKernels):
    """The same with the backward that sums dQ in no fixed order."""

    name = "tree_attn_op_hopper_fast"

    @staticmethod
    def functions() -> tuple[Callable[..., Any], Callable[..., Any]]:
        from tree_attn_op.kernels import hopper

        return hopper.forward, partial(hopper.backward, form="fast")
