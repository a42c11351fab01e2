"""Inputs shared by the tests of the ops: trees, random masks with block lists, and the oracle."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tree_attn_op.blocks import BlockLists, build
from tree_attn_op.predicate import Predicate
from tree_attn_op.reference import allowed_from_lists, reference_attention


@dataclass(frozen=True)
class Case:
    """One call of the op, but for query, key and value."""

    predicate: str
    q_vals: Tensor
    k_vals: Tensor
    lists: BlockLists

    @property
    def mask_arguments(self) -> tuple:
        sizes = (self.lists.q_block_size, self.lists.kv_block_size)
        return (self.q_vals, self.k_vals, self.predicate, *self.lists.tensors, *sizes)

    @property
    def allowed(self) -> Tensor:
        return allowed_from_lists(
            Predicate.parse(self.predicate),
            self.q_vals,
            self.k_vals,
            self.lists.tensors,
            *self.lists.sizes,
        )

    def with_lists(self, **lists: Tensor | None) -> Case:
        return replace(self, lists=replace(self.lists, **lists))

    def call(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple:
        return torch.ops.tree_attn_op.tree_attention(
            query, key, value, *self.mask_arguments, scale
        )

    def oracle(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple:
        operands = (tensor.double() for tensor in (query, key, value))
        return reference_attention(*operands, self.allowed, scale)


def case(
    predicate: str,
    q_vals: Tensor,
    k_vals: Tensor,
    blocks: tuple[int, int] = (32, 32),
) -> Case:
    """A case whose lists are derived from the predicate."""
    q_len, kv_len = q_vals.shape[2], k_vals.shape[2]
    lists = build(Predicate.parse(predicate), q_vals, k_vals, q_len, kv_len, *blocks)
    return Case(predicate, q_vals, k_vals, lists)


def tree_case(
    length: int, blocks: tuple[int, int] = (32, 32), leaves: int = 3, dtype=torch.int32
) -> Case:
    """A prompt of a third of the length and its completions, in DFS pre-order."""
    prompt = length // 3
    cuts = torch.linspace(prompt, length, leaves + 1).long()
    end = torch.full((length,), length)
    for first, last in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
        end[first:last] = last
    values = end.to(dtype).view(1, 1, length)
    return case("q >= k & q < k0", values.new_empty(1, 0, length), values, blocks)


def ids_case(
    q_len: int,
    kv_len: int,
    batch: int = 1,
    blocks: tuple[int, int] = (32, 32),
    dtype: torch.dtype = torch.int64,
) -> Case:
    """Random ids in no order: many partial tiles, and some rows that see nothing."""
    q_vals = torch.randint(0, 6, (batch, 2, q_len)).to(dtype)
    k_vals = torch.randint(0, 5, (batch, 2, kv_len)).to(dtype)
    return case("q0 == k0 & q1 - k1 < 2", q_vals, k_vals, blocks)


def hand_made_lists(given: Case, batch: int, heads: int) -> Case:
    """The case with random lists: blocks of each kind, rows without any, entries of no meaning."""
    lists = given.lists
    rows, columns = lists.kv_indices.shape[2:]
    kind = torch.randint(0, 4, (batch, heads, rows, columns))
    kind[:, :, ::3] = torch.where(torch.rand(batch, heads, 1, 1) < 0.5, 0, kind[:, :, ::3])
    made = []
    for view in (kind, kind.mT):
        for wanted in (1, 2):
            chosen = view == wanted
            order = torch.argsort(chosen.int(), dim=-1, descending=True, stable=True).int()
            number = chosen.sum(-1, dtype=torch.int32)
            listed = torch.arange(order.shape[-1]) < number.unsqueeze(-1)
            made += [number, torch.where(listed, order, torch.full_like(order, 2**30))]
    return replace(given, lists=BlockLists(*made, *lists.sizes))


def operands(
    batch: int,
    heads: tuple[int, int],
    lengths: tuple[int, int],
    dims: tuple[int, int] = (16, 16),
    dtype: torch.dtype = torch.float64,
    requires_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Random query, key and value."""
    shapes = (
        (batch, heads[0], lengths[0], dims[0]),
        (batch, heads[1], lengths[1], dims[0]),
        (batch, heads[1], lengths[1], dims[1]),
    )
    query, key, value = (
        torch.randn(shape, dtype=dtype, requires_grad=requires_grad) for shape in shapes
    )
    return query, key, value
