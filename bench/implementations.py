"""What is measured: this project, flex_attention and what people use where there is no tree."""

from __future__ import annotations

import importlib.util
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from tree_attn_op import tree_attention

from .problem import Problem

Grads = tuple[Tensor, Tensor, Tensor]


class Implementation(ABC):
    """One way to compute a problem's attention, ready to be called again and again.

    Attributes:
        name: how the command line and the reports call it.
        inputs: the tensors that `forward` reads and `backward` differentiates by.
        grad_out: the gradient of `forward`'s result.
        pairs: the useful (query, key) pairs that its time is set against.
        has_backward: whether it can be differentiated on the problem's device.
    """

    name: ClassVar[str]
    has_backward = True

    def __init__(self, problem: Problem):
        self.problem = problem
        self.pairs = problem.pairs
        self.grad_out = problem.grad_out
        query, key, value = (
            x.detach().requires_grad_() for x in (problem.query, problem.key, problem.value)
        )
        self.inputs: Grads = (query, key, value)

    @staticmethod
    def unavailable(device: str) -> str | None:
        """Why it cannot run here, None where it can."""
        return None

    @abstractmethod
    def forward(self) -> Tensor:
        """The attention output in the implementation's own layout."""

    def backward(self, out: Tensor) -> Grads:
        """Gradients by query, key and value; may be called again for the same `out`."""
        dq, dk, dv = torch.autograd.grad(out, self.inputs, self.grad_out, retain_graph=True)
        return dq, dk, dv

    def packed_results(self) -> tuple[Tensor, Grads | None] | None:
        """(out, gradients) in the layout of the problem; None where it computes something else."""
        out = self.forward()
        return out, self.backward(out) if self.has_backward else None


class TreeAttention(Implementation):
    """This project, called as the explicit op; its block lists are built beforehand, as flex's."""

    name = "tree_attn_op"

    def __init__(self, problem: Problem):
        super().__init__(problem)
        self._mask = problem.tree.mask

    def forward(self) -> Tensor:
        return tree_attention(*self.inputs, self._mask, enable_gqa=True)


class Flex(Implementation):
    """flex_attention as torch.compile makes it, with its default (Triton) backend."""

    name = "flex"
    kernel_options: ClassVar[Any] = None

    def __init__(self, problem: Problem):
        super().__init__(problem)
        device = problem.query.device
        self.has_backward = device.type != "cpu"
        if not self.has_backward:
            self.inputs = (problem.query, problem.key, problem.value)
        self._block_mask = flex_block_mask(problem, compiled=device.type != "cpu")
        self._call = torch.compile(flex_attention, dynamic=False)

    def forward(self) -> Tensor:
        return self._call(
            *self.inputs,
            block_mask=self._block_mask,
            enable_gqa=True,
            kernel_options=self.kernel_options,
        )


class FlexFlash(Flex):
    """flex_attention with its FLASH backend, which needs FlashAttention 4."""

    name = "flex_flash"
    kernel_options: ClassVar[Any] = {"BACKEND": "FLASH"}

    @staticmethod
    def unavailable(device: str) -> str | None:
        if device == "cpu":
            return "needs a CUDA GPU"
        parent = importlib.util.find_spec("flash_attn")
        if parent is None or importlib.util.find_spec("flash_attn.cute") is None:
            return "flash_attn.cute is not installed"
        return None


class Varlen(Implementation):
    """torch.nn.attention.varlen on the separate trajectories: every shared token again in each."""

    name = "varlen_unpacked"

    def __init__(self, problem: Problem):
        super().__init__(problem)
        tree = problem.tree
        positions = tree.trajectory_positions

        def unpack(x: Tensor) -> Tensor:
            return x[0].transpose(0, 1)[positions].contiguous()

        query, key, value = (
            unpack(x).requires_grad_() for x in (problem.query, problem.key, problem.value)
        )
        self.inputs = (query, key, value)
        self.grad_out = unpack(problem.grad_out)
        lengths = torch.tensor((0, *tree.trajectory_lengths), device=positions.device)
        self._cu_seqlens = lengths.cumsum(0, dtype=torch.int32)
        self._max_length = max(tree.trajectory_lengths)
        self._call = _varlen_attn()

    @staticmethod
    def unavailable(device: str) -> str | None:
        if device == "cpu":
            return "needs a CUDA GPU"
        if importlib.util.find_spec("torch.nn.attention.varlen") is None:
            return "this torch has no torch.nn.attention.varlen"
        return None

    def forward(self) -> Tensor:
        cu, longest = self._cu_seqlens, self._max_length
        return self._call(*self.inputs, cu, cu, longest, longest)

    def packed_results(self) -> tuple[Tensor, Grads | None]:
        positions, num_tokens = (
            self.problem.tree.trajectory_positions,
            self.problem.tree.num_tokens,
        )
        # A shared token's gradient is the sum over its copies, so giving its grad_out to one of
        # them makes the sums equal those of the tree.
        copies = torch.arange(positions.numel(), device=positions.device)
        first = copies.new_full((num_tokens,), positions.numel())
        first = first.scatter_reduce(0, positions, copies, "amin")
        once = torch.zeros_like(self.grad_out)
        once[first] = self.grad_out[first]

        out = self.forward()
        grads = torch.autograd.grad(out, self.inputs, once)
        summed = []
        for grad in grads:
            total = grad.new_zeros((num_tokens, *grad.shape[1:]), dtype=torch.float32)
            summed.append(total.index_add_(0, positions, grad.float()).transpose(0, 1)[None])
        dq, dk, dv = summed
        return out[first].transpose(0, 1)[None], (dq, dk, dv)


class SdpaCausal(Implementation):
    """Causal attention over a chain as long as the pack: no tree, what a dense kernel reaches."""

    name = "sdpa_causal"

    def __init__(self, problem: Problem):
        super().__init__(problem)
        n = problem.tree.num_tokens
        self.pairs = n * (n + 1) // 2

    def forward(self) -> Tensor:
        query, key, value = self.inputs
        backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
        with sdpa_kernel(backends, set_priority=True):
            return F.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=True
            )

    def packed_results(self) -> None:
        return None


def _varlen_attn() -> Callable[..., Any]:
    """Causal varlen_attn with fewer key/value heads than query heads."""
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"window_size": (-1, 0)}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        # torch 2.11 has no such keyword and takes fewer key/value heads as they are.
        options["enable_gqa"] = True
    return partial(varlen_attn, **options)


def flex_block_mask(problem: Problem, compiled: bool) -> BlockMask:
    """The BlockMask that a flex user builds of the tree's arrays."""
    end = problem.tree.subtree_end
    n = problem.tree.num_tokens

    def tree_mask(b, h, q, k):
        return (q >= k) & (q < end[k])

    device = str(problem.query.device)
    return create_block_mask(tree_mask, 1, None, n, n, device=device, _compile=compiled)


IMPLEMENTATIONS: dict[str, type[Implementation]] = {
    implementation.name: implementation
    for implementation in (Flex, FlexFlash, TreeAttention, Varlen, SdpaCausal)
}
BASELINE = Flex.name
