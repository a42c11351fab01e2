"""Random problems for the block-list kernels, with the lists computed tile by tile."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from tests.strategies import random_values
from tree_attn_op.blocks import lists_of as plain_lists_of
from tree_attn_op.blocks import refined_states
from tree_attn_op.predicate import Bounds, Predicate

PREDICATES = (
    "q >= k & q < k0",
    "q >= k & (q0 == k0 | q1 == k0)",
    "q0 - k0 < 5 & q >= k",
    "True",
    "False",
    "q0 != 0",
    "k1 != 3 | q0 - k0 >= q1",
    "q >= k & q - k < 20",
    "q0 >= k0 & q0 < k1 & q1 <= k1",
)
TILE = 16


def _bounds(values: Tensor) -> Bounds:
    tiles = values.long().split(TILE, -1)
    return torch.stack([t.amin(-1) for t in tiles], -1), torch.stack(
        [t.amax(-1) for t in tiles], -1
    )


def _states(predicate: Predicate, q_vals: Tensor, k_vals: Tensor) -> Tensor:
    """[batch, query tiles, key tiles] of 0, 1 and 2."""

    def on_query(values: Tensor) -> Bounds:
        low, high = _bounds(values)
        return low.unsqueeze(-1), high.unsqueeze(-1)

    def on_key(values: Tensor) -> Bounds:
        low, high = _bounds(values)
        return low.unsqueeze(-2), high.unsqueeze(-2)

    q_len, kv_len = q_vals.shape[2], k_vals.shape[2]
    states = predicate.classify(
        on_query(torch.arange(q_len).unsqueeze(0)),
        on_key(torch.arange(kv_len).unsqueeze(0)),
        [on_query(row) for row in q_vals.unbind(1)],
        [on_key(row) for row in k_vals.unbind(1)],
        q_vals.dtype,
    )
    batch = max(q_vals.shape[0], k_vals.shape[0])
    return states.long().expand(batch, -(-q_len // TILE), -(-kv_len // TILE))


def lists_of(states: Tensor) -> list[Tensor]:
    """The eight lists of a state matrix; behind the listed blocks the others, as in flex."""
    lists = []
    for matrix in (states, states.transpose(-1, -2)):
        for state in (1, 2):
            listed = matrix == state
            lists.append(listed.sum(-1).int())
            lists.append(torch.argsort((~listed).int(), dim=-1, stable=True).int())
    return lists


def problem(seed: int, refine: bool) -> tuple[tuple, list[Tensor]]:
    """The arguments of ``block_lists`` on the CPU, and the lists that it must return."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    dtype = rng.choice([torch.int32, torch.int64])
    q_len, kv_len = rng.randint(1, 90), rng.randint(1, 90)
    batches = rng.choice([(1, 1), (1, 2), (2, 1), (2, 2)])
    # Sorted rows make all three states common.
    q_vals = random_values(generator, 2, q_len, dtype, batches[0]).sort(-1).values
    k_vals = random_values(generator, 2, kv_len, dtype, batches[1]).sort(-1).values
    predicate = Predicate.parse(PREDICATES[seed % len(PREDICATES)])
    states = _states(predicate, q_vals, k_vals).unsqueeze(1)
    given: list[Tensor | None] = [None] * 4
    if refine:
        ratio = 3
        block = ratio * TILE
        shape = (-(-q_len // block), -(-kv_len // block))
        batch = max(batches) if rng.random() < 0.5 else 1
        coarse = torch.randint(0, 3, (batch, rng.choice([1, 3]), *shape), generator=generator)
        if rng.random() < 0.3:
            coarse = coarse.clamp(max=1)
            given = [*lists_of(coarse)[:2], None, None]
        else:
            given = list(lists_of(coarse)[:4])
        fine = coarse.repeat_interleave(ratio, -1).repeat_interleave(ratio, -2)
        fine = fine[..., : states.shape[-2], : states.shape[-1]]
        states = torch.where(fine == 1, states, fine)
        sizes = (block, block, TILE, TILE)
    else:
        sizes = (TILE, TILE, TILE, TILE)
    arguments = (q_vals, k_vals, predicate, q_len, kv_len, *given, *sizes)
    return arguments, lists_of(states)


def flex_problem(seed: int) -> tuple[tuple, list[Tensor], dict[str, Any]]:
    """As ``problem``, for lists as flex's builder makes them, of given batch and heads."""
    (q_vals, k_vals, predicate, q_len, kv_len, *rest), _ = problem(seed, refine=False)
    states = _states(predicate, q_vals, k_vals).unsqueeze(1).clone()
    for length, dim in ((q_len, -2), (kv_len, -1)):
        if length % TILE:
            states.select(dim, -1).clamp_(max=1)
    batch, heads = (states.shape[0], 2) if states.shape[0] > 1 else (3, 1)
    states = states.expand(batch, heads, *states.shape[2:])
    options = {"batch": batch, "heads": heads, "full_at_ends": False}
    # Values of other strides than those of a contiguous tensor.
    q_vals, k_vals = (values.repeat_interleave(2, -1)[..., ::2] for values in (q_vals, k_vals))
    return (q_vals, k_vals, predicate, q_len, kv_len, *rest), lists_of(states), options


def wide_problem(seed: int, tile: int) -> tuple[tuple, list[Tensor]]:
    """Many tiles, or tiles of many tokens, and what the implementation in plain torch lists."""
    generator = torch.Generator().manual_seed(seed)
    predicate = Predicate.parse(PREDICATES[seed % len(PREDICATES)])
    q_len, kv_len = 430 + seed, 330 - seed
    q_vals = random_values(generator, 2, q_len, torch.int32, 2).sort(-1).values
    k_vals = random_values(generator, 2, kv_len, torch.int32, 1).sort(-1).values
    given = (None, None, None, None)
    arguments = (q_vals, k_vals, predicate, q_len, kv_len, *given, *(tile,) * 4)
    states = refined_states(predicate, q_vals, k_vals, q_len, kv_len, None, *(tile,) * 4)
    return arguments, list(plain_lists_of(states))
