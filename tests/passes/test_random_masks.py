"""Random masks through torch.compile: what is rewritten equals the oracle, and flex on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask
from torch.utils._python_dispatch import TorchDispatchMode

import passes
from tests.lowering import generator
from tree_attn_op.reference import reference_attention

from .helpers import PassThenEager, attention, compiled, qkv

SEED = 20_261_130
BATCH = 2
SIZES = {"cpu": (72, 96, 16), "cuda": (200, 260, 128)}
"""Queries, keys and block size: several blocks, where the generator's own masks have a few tokens.
On a GPU flex decodes fewer than 128 queries, and its kernels want blocks of their tiles' size."""

MaskMod = Callable[..., Tensor]


class NegativeIndices(TorchDispatchMode):
    """Sees whether tensors are indexed from behind.

    In flex's kernels such an index reads what lies in front of the tensor: Inductor's
    ``ModificationWrapper.indirect_indexing`` (torch 2.11 to 2.14) does not wrap it.
    """

    found = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.index.Tensor:
            indices = [x for x in args[1] if x is not None and x.dtype is not torch.bool]
            self.found |= any(bool((x < 0).any()) for x in indices)
        return func(*args, **(kwargs or {}))


def random_masks(first: int, device: str) -> Iterator[tuple[int, BlockMask, Tensor, bool]]:
    """Seeds with the BlockMask of their mask, bool ``[B, 1, Q, K]`` of what it allows, and whether
    flex's kernels can evaluate it."""
    q_len, kv_len, block_size = SIZES[device]
    lengths = {"B": BATCH, "Q_LEN": q_len, "KV_LEN": kv_len, "LENGTH": kv_len}
    with mock.patch.multiple(generator, **lengths):
        for seed in range(first, first + 1000):
            mask = generator.random_mask(seed)
            mask.captured = [
                item.to(device) if isinstance(item, Tensor) else item for item in mask.captured
            ]
            sizes = (BATCH, None, q_len, kv_len, device)
            mask_mod = mask_mod_of(mask)
            try:
                with NegativeIndices() as indices:
                    allowed = create_mask(mask_mod, *sizes)
            except (RuntimeError, IndexError, ZeroDivisionError):
                continue  # PyTorch itself can't evaluate it
            if allowed.dtype is torch.bool and 0 < allowed.sum() < allowed.numel():
                block_mask = create_block_mask(mask_mod, *sizes, BLOCK_SIZE=block_size)
                yield seed, block_mask, allowed, not indices.found


def random_tensors(device: str) -> tuple[Tensor, ...]:
    q_len, kv_len, _ = SIZES[device]
    dim = 16 if device == "cpu" else 64
    return tuple(x.to(device) for x in qkv(BATCH, q_len, kv_length=kv_len, dim=dim))


def mask_mod_of(mask: generator.RandomMask) -> MaskMod:
    """The mask as a function, whose parameters flex counts."""
    return lambda b, h, q, k: mask.mask_mod(b, h, q, k)


def exact(tensors: tuple[Tensor, ...], allowed: Tensor) -> list[Tensor]:
    """Output and gradients of its sum of cosines in float64."""
    leaves = [tensor.detach().double().requires_grad_() for tensor in tensors]
    out, _ = reference_attention(*leaves, allowed)
    out.cos().sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def run(fn: Callable[..., Tensor], tensors: tuple[Tensor, ...], mask: BlockMask) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    out = fn(*leaves, mask)
    out.cos().sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def check_on_cpu(first: int, count: int) -> None:
    rewritten = tried = 0
    for seed, mask, allowed, _ in random_masks(first, "cpu"):
        tensors = random_tensors("cpu")
        backend = PassThenEager()
        found = run(compiled(attention, backend), tensors, mask)
        tried += 1
        if not backend.report.rewritten:
            continue
        for given, wanted in zip(found, exact(tensors, allowed), strict=True):
            torch.testing.assert_close(
                given.double(), wanted, atol=1e-5, rtol=1e-5, msg=lambda m, s=seed: f"{s}: {m}"
            )
        rewritten += 1
        if rewritten == count:
            break
    assert rewritten > tried / 2


@pytest.mark.usefixtures("traceable_training")
def test_rewritten_equals_the_oracle() -> None:
    check_on_cpu(SEED, 14)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("traceable_training")
@pytest.mark.parametrize("part", range(4))
def test_rewritten_equals_the_oracle_nightly(part: int) -> None:
    check_on_cpu(SEED + 10_000 * (part + 1), 100)


def compile_on_gpu(backend: Any) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    counters.clear()
    return torch.compile(attention, backend=backend)


@pytest.mark.gpu
@pytest.mark.timeout(1800)
def test_on_a_gpu_rewritten_equals_the_oracle_and_flex() -> None:
    rewritten = against_flex = 0
    for seed, mask, allowed, for_flex in random_masks(SEED, "cuda"):
        tensors = random_tensors("cuda")
        wanted = exact(tensors, allowed)
        with fresh_cache():
            found = run(compile_on_gpu(passes.tree_attn), tensors, mask)
        if not counters["inductor"]["tree_attn_rewritten"]:
            continue
        rewritten += 1
        results = {"rewritten": found}
        if for_flex and against_flex < 3:
            with fresh_cache():
                results["flex"] = run(compile_on_gpu("inductor"), tensors, mask)
            assert counters["inductor"]["tree_attn_rewritten"] == 0
            against_flex += 1
        for name, result in results.items():
            for given, right in zip(result, wanted, strict=True):
                torch.testing.assert_close(
                    given.double(), right, atol=1e-4, rtol=1e-4,
                    msg=lambda m, name=name, seed=seed: f"{name}, {seed}: {m}",
                )  # fmt: skip
        if rewritten == 12:
            break
    assert against_flex == 3
