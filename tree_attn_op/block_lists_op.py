"""The op ``block_lists``: what it accepts, its fake, and its implementations by device.

Block lists from a predicate, or finer ones from given lists. ``ops.py`` registers what is here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import blocks, list_checks, validation
from .arguments import check_tensor
from .blocks import cdiv
from .implementations import gpu_kernels, on_gpu
from .kernels.configs import current
from .kernels.plans import Immediate, Plan, Plans
from .predicate import Predicate

plans = Plans()
"""Of calls of the op on a GPU."""


def block_lists(*arguments: Any) -> tuple[Tensor, ...]:
    """The op on a CPU and on a GPU, called with its arguments by place."""
    # The dispatcher leaves out an argument that is its default.
    arguments = arguments if len(arguments) == 14 else (*arguments, True)
    if on_gpu(arguments[0]):
        look = _look_at_given_lists if list_checks.enabled() else None
        with current(arguments[0].device):
            return plans.run(_plan_block_lists, arguments, None, look)
    _check_block_lists(*arguments)
    return _block_lists_in_torch(*arguments)


def _check_block_lists(
    q_vals: Tensor,
    k_vals: Tensor,
    predicate: str,
    q_len: int,
    kv_len: int,
    kv_num_blocks: Tensor | None,
    kv_indices: Tensor | None,
    full_kv_num_blocks: Tensor | None,
    full_kv_indices: Tensor | None,
    q_block_size: int,
    kv_block_size: int,
    new_q_block_size: int,
    new_kv_block_size: int,
    full_at_ends: bool,
) -> None:
    lists = (kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices)
    check_tensor("q_vals", q_vals)
    validation.check_values(predicate, q_vals, k_vals, q_len, kv_len, q_vals.device)
    validation.check_lists(lists, q_len, kv_len, q_block_size, kv_block_size, q_vals.device)
    for name, new, old in (
        ("new_q_block_size", new_q_block_size, q_block_size),
        ("new_kv_block_size", new_kv_block_size, kv_block_size),
    ):
        validation.check_block_size(name, new)
        if kv_num_blocks is not None and old % new:
            raise ValueError(f"{name} must divide the lists' block size {old}, got {new}")
    validation.check_list_batch(q_vals, k_vals, kv_num_blocks)
    if kv_num_blocks is None and full_kv_num_blocks is not None:
        raise ValueError("kv_num_blocks is missing, full_kv_num_blocks is given")
    if kv_num_blocks is not None and not full_at_ends:
        raise ValueError("full_at_ends=False is for lists derived from the predicate alone")
    if list_checks.enabled():
        _look_at_given_lists((q_vals, k_vals, predicate, q_len, kv_len, *lists))


def _look_at_given_lists(arguments: tuple[Any, ...]) -> None:
    if arguments[5] is not None:
        list_checks.check_contents(arguments[5:9])


def _plan_block_lists(arguments: tuple[Any, ...]) -> Plan:
    _check_block_lists(*arguments)
    q_vals, k_vals, predicate, q_len, kv_len, kv_num_blocks = arguments[:6]
    empty = 0 in (q_len, kv_len, q_vals.shape[0], k_vals.shape[0])
    if empty or (kv_num_blocks is not None and 0 in kv_num_blocks.shape):
        return Immediate(_block_lists_in_torch)
    plan = gpu_kernels("portable.block_lists").plan_block_lists
    return plan(q_vals, k_vals, Predicate.parse(predicate), *arguments[3:])


def _block_lists_in_torch(
    q_vals: Tensor, k_vals: Tensor, predicate: str, q_len: int, kv_len: int, *rest: Any
) -> tuple[Tensor, ...]:
    lists, sizes, full_at_ends = rest[:4], rest[4:8], rest[8]
    parsed = Predicate.parse(predicate)
    states = blocks.refined_states(parsed, q_vals, k_vals, q_len, kv_len, lists, *sizes)
    if not full_at_ends:
        states = blocks.partial_at_ends(states, q_len, kv_len, *sizes[2:])
    return blocks.lists_of(states)


def fake_block_lists(
    q_vals: Tensor,
    k_vals: Tensor,
    predicate: str,
    q_len: int,
    kv_len: int,
    kv_num_blocks: Tensor | None,
    kv_indices: Tensor | None,
    full_kv_num_blocks: Tensor | None,
    full_kv_indices: Tensor | None,
    q_block_size: int,
    kv_block_size: int,
    new_q_block_size: int,
    new_kv_block_size: int,
    full_at_ends: bool = True,
) -> tuple[Tensor, ...]:
    """Tensors like those that the op returns, without their contents."""
    lists = (kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices)
    validation.check_fakes("block_lists", q_vals, k_vals, predicate, q_len, kv_len, *lists)
    batches = [q_vals.shape[:1], k_vals.shape[:1]]
    heads = 1
    if kv_num_blocks is not None:
        batches.append(kv_num_blocks.shape[:1])
        heads = kv_num_blocks.shape[1]
    (batch,) = torch.broadcast_shapes(*batches)
    rows, columns = cdiv(q_len, new_q_block_size), cdiv(kv_len, new_kv_block_size)
    made = []
    for shape in ((rows, columns), (columns, rows)):
        for tail in (shape[:1], shape, shape[:1], shape):
            made.append(q_vals.new_empty((batch, heads, *tail), dtype=torch.int32))
    return tuple(made)


def flex_lists(
    predicate: Predicate,
    q_vals: Tensor,
    k_vals: Tensor,
    q_len: int,
    kv_len: int,
    q_block_size: int,
    kv_block_size: int,
    batch: int,
    heads: int,
) -> tuple[Tensor, ...]:
    """The eight lists that flex's builder makes: ``block_lists`` with ``full_at_ends=False``.

    Not an op, and the arguments are not checked: for callers who made the values themselves.

    Args:
        predicate, q_vals, k_vals: as in ``block_lists``; the values may have any strides.
        q_len, kv_len, q_block_size, kv_block_size: lengths and tokens a block.
        batch, heads: of the lists.
    """
    if q_vals.device.type != "cpu" and 0 not in (q_len, kv_len, batch, heads):
        build = gpu_kernels("portable.block_lists").block_lists
        sizes = (q_block_size, kv_block_size) * 2
        with current(q_vals.device):
            return build(
                *(q_vals, k_vals, predicate, q_len, kv_len, None, None, None, None, *sizes),
                batch=batch,
                heads=heads,
                full_at_ends=False,
            )
    sizes = (q_len, kv_len, q_block_size, kv_block_size)
    states = blocks.classify_tiles(predicate, q_vals, k_vals, *sizes)
    lists = blocks.lists_of(blocks.partial_at_ends(states.unsqueeze(1), *sizes))
    return tuple(tensor.expand(batch, heads, *tensor.shape[2:]).contiguous() for tensor in lists)
