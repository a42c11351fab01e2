"""What people use for trees today, and where there is no tree."""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from tree_attn_op import PrefixTree

from .base import Grads, Implementation
from .problem import Problem
from .varlen import Ragged, VarlenCall, best_varlen, flash_attention_4_missing


def tree_block_mask(
    tree: PrefixTree, compiled: bool, block_size: int | tuple[int, int] = 128
) -> BlockMask:
    """The BlockMask that a flex user builds of the tree's arrays."""
    # In 32 bits, in which the token indices are compared already.
    end = tree.subtree_end.int()
    n = tree.num_tokens

    def tree_mask(b, h, q, k):
        return (q >= k) & (q < end[k])

    return create_block_mask(
        tree_mask,
        1,
        None,
        n,
        n,
        device=str(tree.device),
        BLOCK_SIZE=block_size,
        _compile=compiled,
    )


def flex_block_mask(problem: Problem, compiled: bool) -> BlockMask:
    """`tree_block_mask` of a problem's tree."""
    return tree_block_mask(problem.tree, compiled)


@cache
def _compiled_flex() -> Any:
    """One for all that runs on a problem; the runner resets Dynamo between problems."""
    return torch.compile(flex_attention, dynamic=False)


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
        blocks = self.block_size(problem.heads.dim)
        self._block_mask = tree_block_mask(problem.tree, device.type != "cpu", blocks)
        self._call = _compiled_flex()

    @staticmethod
    def block_size(head_dim: int) -> tuple[int, int]:
        """Of the BlockMask."""
        return 128, 128

    def forward(self) -> Tensor:
        return self._call(
            *self.inputs,
            block_mask=self._block_mask,
            enable_gqa=True,
            kernel_options=self.kernel_options,
        )


class FlexFlash(Flex):
    """flex_attention with its FLASH backend, which is FlashAttention-4."""

    name = "flex_flash"
    kernel_options: ClassVar[Any] = {"BACKEND": "FLASH"}

    @classmethod
    def unavailable(cls, problem: Problem) -> str | None:
        if problem.query.device.type == "cpu":
            return "needs a CUDA GPU"
        if problem.query.dtype not in (torch.bfloat16, torch.float16):
            return f"takes bfloat16 and float16, not {problem.query.dtype}"
        return flash_attention_4_missing()

    @staticmethod
    def block_size(head_dim: int) -> tuple[int, int]:
        """Its key blocks must be the key tiles of its backward for sm_90."""
        if head_dim <= 128:
            return 128, 128
        return (128, 96) if head_dim <= 192 else (128, 64)


class Gather(Implementation):
    """Varlen attention of each unbranched stretch over its keys, gathered from root to end.

    As trees are run where there are varlen kernels only: queries are the tokens of a stretch, keys
    those from the root to its end, copied next to each other, and causality is aligned to the
    ends. The copying is part of the forward, and its transpose, which adds, of the backward.
    """

    name = "gather"

    def __init__(self, problem: Problem):
        super().__init__(problem)
        device = problem.query.device
        self.inputs = _by_token(problem.query, problem.key, problem.value)
        self.grad_out = problem.grad_out[0].transpose(0, 1).contiguous()
        keys, self._ragged = gathered_paths(problem.tree)
        self._keys = keys.to(device)
        self.note, self._call = _varlen(problem)

    def forward(self) -> Tensor:
        query, key, value = self.inputs
        key, value = (x.index_select(0, self._keys) for x in (key, value))
        return self._call(query, key, value, self._ragged)

    def packed_results(self) -> tuple[Tensor, Grads]:
        out = self.forward()
        dq, dk, dv = (grad.transpose(0, 1)[None] for grad in self.backward(out))
        return out.transpose(0, 1)[None], (dq, dk, dv)


class Unpacked(Implementation):
    """Varlen attention on the separate trajectories: every shared token again in each."""

    name = "unpacked"

    def __init__(self, problem: Problem):
        super().__init__(problem)
        tree = problem.tree
        self._positions = tree.trajectory_positions
        by_token = (problem.query, problem.key, problem.value, problem.grad_out)
        query, key, value, self.grad_out = (
            x[0].transpose(0, 1)[self._positions].contiguous() for x in by_token
        )
        self.inputs = tuple(x.requires_grad_() for x in (query, key, value))  # type: ignore[assignment]
        lengths = tree.trajectory_lengths
        self._ragged = Ragged.of(lengths, lengths, tree.device)
        self.note, self._call = _varlen(problem)

    def forward(self) -> Tensor:
        return self._call(*self.inputs, self._ragged)

    def packed_results(self) -> tuple[Tensor, Grads]:
        positions, num_tokens = self._positions, self.problem.tree.num_tokens
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
        # Not the one that writes out all scores: on a GPU it runs out of memory.
        self._backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
        if problem.query.device.type == "cpu":
            self._backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]

    def forward(self) -> Tensor:
        query, key, value = self.inputs
        with sdpa_kernel(self._backends, set_priority=True):
            return F.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=True
            )

    def packed_results(self) -> None:
        return None


def gathered_paths(tree: PrefixTree) -> tuple[Tensor, Ragged]:
    """The unbranched stretches of a tree and what each attends to.

    Returns:
        The pack positions of the keys, from the root to the end of each stretch, one stretch after
        another: int64 [K]; and the lengths. The queries are the pack itself: in DFS pre-order the
        tokens of a stretch lie next to each other.
    """
    parents = tree.parents.cpu()
    n = parents.numel()
    children = torch.bincount(parents[parents >= 0], minlength=n)
    position = torch.arange(n)
    goes_on = (parents == position - 1) & (parents >= 0)
    goes_on &= children[parents.clamp(min=0)] == 1
    starts = torch.nonzero(~goes_on).flatten().tolist()
    stops = [*starts[1:], n]
    paths: dict[int, Tensor] = {}
    """By the last token of each stretch, whose children start the stretches below."""
    for start, stop in zip(starts, stops, strict=True):
        above = paths.get(int(parents[start]), position[:0])
        paths[stop - 1] = torch.cat([above, position[start:stop]])
    q_lens = [stop - start for start, stop in zip(starts, stops, strict=True)]
    k_lens = [path.numel() for path in paths.values()]
    return torch.cat([*paths.values()]), Ragged.of(q_lens, k_lens, tree.device)


def _by_token(*tensors: Tensor) -> Any:
    """[1, H, N, D] -> leaves [N, H, D], as models that call varlen attention have them."""
    return tuple(x[0].transpose(0, 1).contiguous().requires_grad_() for x in tensors)


def _varlen(problem: Problem) -> tuple[str, VarlenCall]:
    return best_varlen(problem.query.device.type, problem.query.dtype)
