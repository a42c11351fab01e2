"""Inputs and the float64 oracle for kernel tests."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tree_attn_op.predicate import Predicate

UNREAD = 1 << 20
"""Filler of index lists past their count: reading a block there would be far out of bounds."""


@dataclass(frozen=True)
class Case:
    """One attention problem; the defaults are a small causal tree over two trees of heads."""

    predicate: str = "q >= k & q < k0"
    batch: int = 1
    heads: int = 2
    kv_heads: int = 1
    q_len: int = 64
    kv_len: int = 64
    dim: int = 32
    value_dim: int | None = None
    dtype: torch.dtype = torch.float32
    blocks: tuple[int, int] = (32, 32)
    values: torch.dtype = torch.int32
    values_batch: int = 1
    list_batch: int = 1
    list_heads: int = 1
    full_lists: bool = True
    sequence_major: bool = True
    last_stride: int = 1
    grad_lse: bool = False
    scale: float | None = None
    dropped_blocks: bool = False
    value_range: tuple[int, int] = (0, 64)
    seed: int = 0

    @property
    def softmax_scale(self) -> float:
        return self.dim**-0.5 if self.scale is None else self.scale


@dataclass
class Inputs:
    """Tensors of a case."""

    query: Tensor
    key: Tensor
    value: Tensor
    q_vals: Tensor
    k_vals: Tensor
    visible: Tensor
    key_lists: list[Tensor | None]
    query_lists: list[Tensor | None]
    grad_out: Tensor
    grad_lse: Tensor | None
    extra: dict[str, Any] = field(default_factory=dict)


def strided(
    shape: tuple[int, int, int, int], case: Case, generator: torch.Generator, device: str
) -> Tensor:
    """Random ``[B, H, S, D]`` numbers in the case's memory order and last stride."""
    batch, heads, length, dim = shape
    stored = (
        (batch, length, heads, dim * case.last_stride)
        if case.sequence_major
        else (batch, heads, length, dim * case.last_stride)
    )
    data = torch.randn(stored, generator=generator, device=device).to(case.dtype)
    tensor = data.transpose(1, 2) if case.sequence_major else data
    return tensor[..., :: case.last_stride]


def with_meaningless_strides(inputs: Inputs) -> Inputs:
    """The same numbers in the same places; dimensions of size 1 have strides that lead nowhere."""

    def odd(tensor: Tensor) -> Tensor:
        sizes_and_strides = zip(tensor.shape, tensor.stride(), (3, 0, 1 << 42, 1), strict=True)
        strides = [odd if size == 1 else stride for size, stride, odd in sizes_and_strides]
        return tensor.as_strided(tensor.shape, strides)

    names = ("query", "key", "value", "grad_out")
    return replace(inputs, **{name: odd(getattr(inputs, name)) for name in names})


def block_states(visible: Tensor, q_block: int, kv_block: int) -> Tensor:
    """``[B, H, Q, K]`` bool -> ``[B, H, q blocks, kv blocks]``: 0 empty, 1 partial, 2 full."""
    batch, heads, q_len, kv_len = visible.shape
    rows, columns = -(-q_len // q_block), -(-kv_len // kv_block)
    padding = (0, columns * kv_block - kv_len, 0, rows * q_block - q_len)
    shape = (batch, heads, rows, q_block, columns, kv_block)

    def tiles(fill: int) -> Tensor:
        return torch.nn.functional.pad(visible.int(), padding, value=fill).view(shape)

    some, every = tiles(0).amax(dim=(3, 5)), tiles(1).amin(dim=(3, 5))
    return some + some * every


def lists_of(states: Tensor, full: bool) -> list[Tensor | None]:
    """Partial and full lists of ``[B, H, rows, columns]`` states; unread entries are poisoned."""

    def compact(chosen: Tensor) -> tuple[Tensor, Tensor]:
        counts = chosen.sum(-1)
        order = torch.argsort(chosen.int(), dim=-1, descending=True, stable=True)
        place = torch.arange(chosen.shape[-1], device=chosen.device)
        indices = torch.where(place < counts[..., None], order, UNREAD)
        return counts.to(torch.int32), indices.to(torch.int32)

    partial = compact(states == 1 if full else states > 0)
    return [*partial, *(compact(states == 2) if full else (None, None))]


def make_inputs(case: Case, device: str = "cpu") -> Inputs:
    """Random inputs of ``case`` and the exact visibility that its lists and predicate mean."""
    generator = torch.Generator(device=device).manual_seed(case.seed)
    predicate = Predicate.parse(case.predicate)
    value_dim = case.value_dim or case.dim
    query = strided((case.batch, case.heads, case.q_len, case.dim), case, generator, device)
    key = strided((case.batch, case.kv_heads, case.kv_len, case.dim), case, generator, device)
    value = strided((case.batch, case.kv_heads, case.kv_len, value_dim), case, generator, device)
    low, high = case.value_range

    def rows(count: int, length: int) -> Tensor:
        shape = (case.values_batch, count, length)
        return torch.randint(low, high, shape, generator=generator, device=device).to(case.values)

    q_vals = rows(predicate.num_q_rows, case.q_len)
    k_vals = rows(predicate.num_k_rows, case.kv_len)
    mask = predicate.dense(q_vals, k_vals, case.q_len, case.kv_len)
    visible = mask[:, None].expand(case.batch, case.heads, -1, -1)

    # One state holds for all batches (heads) that share a list: full only where full in each.
    q_block, kv_block = case.blocks
    states = block_states(visible, q_block, kv_block)
    for dim, size, shared in ((0, case.batch, case.list_batch), (1, case.heads, case.list_heads)):
        if shared == 1 and size > 1:
            most, least = states.amax(dim, keepdim=True), states.amin(dim, keepdim=True)
            states = torch.where(most == least, most, 1)
    if case.dropped_blocks:
        keep = torch.rand(states.shape, generator=generator, device=device) < 0.7
        states = states * keep
        listed = states.repeat_interleave(q_block, 2).repeat_interleave(kv_block, 3)
        visible = visible & (listed[:, :, : case.q_len, : case.kv_len] > 0)
    grad_out = strided((case.batch, case.heads, case.q_len, value_dim), case, generator, device)
    grad_lse = None
    if case.grad_lse:
        shape = (case.batch, case.heads, case.q_len)
        grad_lse = torch.randn(shape, generator=generator, device=device)
    return Inputs(
        query,
        key,
        value,
        q_vals,
        k_vals,
        visible,
        lists_of(states, case.full_lists),
        lists_of(states.transpose(2, 3), case.full_lists),
        grad_out,
        grad_lse,
    )


def oracle(case: Case, inputs: Inputs) -> dict[str, Tensor]:
    """``out``, ``lse``, ``dq``, ``dk``, ``dv`` in float64, dense."""
    query, key, value = (
        t.double().detach().requires_grad_() for t in (inputs.query, inputs.key, inputs.value)
    )
    group = case.heads // case.kv_heads
    keys, values = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = (query @ keys.mT) * case.softmax_scale
    scores = scores.masked_fill(~inputs.visible, -torch.inf)
    sees = inputs.visible.any(-1)
    lse = torch.logsumexp(scores.masked_fill(~sees[..., None], 0.0), -1)
    lse = lse.masked_fill(~sees, -torch.inf)
    weights = torch.exp(scores - lse.masked_fill(~sees, 0.0)[..., None])
    out = weights @ values
    loss = (out * inputs.grad_out.double()).sum()
    if inputs.grad_lse is not None:
        loss = loss + (lse.masked_fill(~sees, 0.0) * inputs.grad_lse.double()).sum()
    grads = torch.autograd.grad(loss, (query, key, value))
    return dict(
        zip(("out", "lse", "dq", "dk", "dv"), (out.detach(), lse.detach(), *grads), strict=True)
    )


def run_kernels(case: Case, inputs: Inputs) -> dict[str, Tensor]:
    """The same from the portable kernels."""
    from tree_attn_op.kernels import portable

    common = (inputs.q_vals, inputs.k_vals, case.predicate)
    tensors = (inputs.query, inputs.key, inputs.value)
    sizes = (*case.blocks, case.softmax_scale)
    out, lse = portable.forward(*tensors, *common, *inputs.key_lists, *sizes)
    dq, dk, dv = portable.backward(
        inputs.grad_out,
        inputs.grad_lse,
        *tensors,
        out,
        lse,
        *common,
        *inputs.key_lists,
        *inputs.query_lists,
        *sizes,
    )
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def errors(
    actual: dict[str, Tensor], expected: dict[str, Tensor]
) -> dict[str, tuple[float, float]]:
    """Root mean square and largest error of each result, over the oracle's root mean square.

    Infinities must be equal, and everything else finite.
    """
    found = {}
    for name, want in expected.items():
        got = actual[name].double()
        assert got.shape == want.shape, name
        infinite = torch.isinf(want)
        assert torch.equal(got[infinite], want[infinite]), f"{name}: infinities differ"
        got, want = got[~infinite], want[~infinite]
        assert torch.isfinite(got).all(), f"{name}: not finite"
        if want.numel():
            # A result that is zero by cancellation is judged by the size of its inputs.
            size = max(want.square().mean().sqrt().item(), 0.1)
            error = got - want
            found[name] = (
                error.square().mean().sqrt().item() / size,
                error.abs().max().item() / size,
            )
    return found


def assert_matches(
    actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float
) -> None:
    """The largest error of each result is below ``tolerance``, see :func:`errors`."""
    for name, (_, largest) in errors(actual, expected).items():
        assert largest < tolerance, f"{name}: error {largest:.2e}, allowed {tolerance:.0e}"
