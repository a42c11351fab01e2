"""Ranks that are given different things: every rank gets an error that says what differs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from tests.attention_cases import case, hand_made_lists, ids_case, operands, tree_case
from tests.distributed.attention_checks import cp_mesh, mask_of
from tree_attn_op import PrefixTree, TreeMask
from tree_attn_op.distributed import (
    RankMismatchError,
    TreeLoadBalancer,
    context_parallel_attention,
    context_parallel_loss_terms,
    context_parallel_mask,
    context_parallel_shard,
    context_parallel_unshard,
)
from tree_attn_op.distributed.checks import VARIABLE


@contextmanager
def refused(*expected: str) -> Iterator[None]:
    """Nothing differs on one rank alone; else an error with each of the expected texts."""
    if dist.get_world_size() == 1:
        yield
        return
    with pytest.raises(RankMismatchError) as info:
        yield
    for text in expected:
        assert text in str(info.value)


def is_last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def check_mask(make: Callable[[], TreeMask], other: Callable[[], TreeMask], *text: str) -> None:
    """A mask that is another one on the last rank."""
    torch.manual_seed(0)
    with refused(*text):
        context_parallel_mask(cp_mesh(), other() if is_last() else make())
    # The group is in step again.
    torch.manual_seed(0)
    context_parallel_mask(cp_mesh(), make())


def a_tree(length: int = 50, **options: object) -> TreeMask:
    return mask_of(tree_case(length, (16, 16), **options))


def masks() -> None:
    last = str(dist.get_world_size() - 1)
    check_mask(a_tree, lambda: a_tree(51), "queries is [", ", 51] by rank", "keys is [")
    check_mask(a_tree, lambda: a_tree(leaves=4), f"k_vals differs from rank 0's on rank {last}")
    check_mask(a_tree, lambda: a_tree(dtype=torch.int64), "dtype of the values is ['int32', ")
    rows = torch.randint(0, 9, (1, 1, 50))

    def of(text: str) -> TreeMask:
        return mask_of(case(text, rows, rows, (16, 16)))

    check_mask(lambda: of("q0 < k0"), lambda: of("q0 <= k0"), "the predicate differs")
    check_mask(
        lambda: of("q0 < k0"),
        lambda: mask_of(case("q0 < k0", rows + 1, rows, (16, 16))),
        "q_vals differs",
    )
    check_mask(
        lambda: of("q0 < k0"),
        lambda: mask_of(case("q0 < k0", rows, rows, (32, 16))),
        "query block size is [16, ",
    )
    given = hand_made_lists(ids_case(50, 50, blocks=(16, 16)), 1, 1)
    other = hand_made_lists(given, 1, 1)
    check_mask(lambda: mask_of(given), lambda: mask_of(other), "blocks differs")


def what_stands_behind_a_list_does_not_count() -> None:
    given = tree_case(50, (16, 16))
    lists = given.lists
    rank = torch.arange(lists.kv_indices.shape[-1])
    listed = rank < lists.kv_num_blocks.unsqueeze(-1)
    kv_indices = torch.where(listed, lists.kv_indices, dist.get_rank())
    context_parallel_mask(cp_mesh(), mask_of(given.with_lists(kv_indices=kv_indices)))


def partitions() -> None:
    tiles = [[0, 1, 2, 3], *[[]] * (dist.get_world_size() - 1)]
    balancer = TreeLoadBalancer(tiles[::-1] if is_last() else tiles, 50, 16)
    with refused("the load balancer differs"):
        context_parallel_mask(cp_mesh(), a_tree(), balancer)


def calls() -> None:
    mask = context_parallel_mask(cp_mesh(), a_tree())
    length = mask.local.q_len

    def call(length: int = length, dim: int = 8, heads: int = 2, **options: object) -> None:
        dtype = options.pop("dtype", torch.float64)
        inputs = operands(1, (4, heads), (length, length), (dim, dim), dtype=dtype)
        context_parallel_attention(*inputs, mask, enable_gqa=True, **options)

    if dist.get_world_size() > 1:
        lengths = list(mask.load_balancer.lengths)
        wrong = [*lengths[:-1], lengths[-1] + 1]
        with refused(f"the length of key should be {lengths} by rank and is {wrong}"):
            call(length + 1 if is_last() else length)
    with refused("the dtype of query is ['float64', ", "'float32'] by rank"):
        call(dtype=torch.float32 if is_last() else torch.float64)
    with refused("the key heads is [2, "):
        call(heads=4 if is_last() else 2)
    with refused("the head dim of value is [8, "):
        call(dim=16 if is_last() else 8)
    with refused("the scale differs"):
        call(scale=2.0 if is_last() else 1.0)
    with refused("the options of the call differs"):
        call(num_chunks=2 if is_last() else 1)
    call()


def masks_of_one_call() -> None:
    """Masks and plans that fit on each rank, and are not the same ones."""
    mesh, world_size = cp_mesh(), dist.get_world_size()
    length = 32 * world_size
    tree = mask_of(tree_case(length, (16, 16)))
    other = TreeMask(tree.predicate, tree.q_vals, tree.k_vals - 1, tree.lists)
    tiles = [[2 * rank, 2 * rank + 1] for rank in range(world_size)]
    plan = TreeLoadBalancer(tiles, length, 16)
    other_plan = TreeLoadBalancer(tiles[::-1], length, 16)
    inputs = operands(1, (2, 2), (32, 32))
    for different in ((other, plan), (tree, other_plan)):
        ones = [context_parallel_mask(mesh, *pair) for pair in ((tree, plan), different)]
        with refused("the mask or its load balancer differs"):
            context_parallel_attention(*inputs, ones[is_last()])
        for mask in ones:
            context_parallel_attention(*inputs, mask)
    # Also if masks were not compared when they were made.
    mask = context_parallel_mask(mesh, other if is_last() else tree, plan, check=False)
    with refused("the mask or its load balancer differs"):
        context_parallel_attention(*inputs, mask)


def modes() -> None:
    """What surrounds the call decides which exchanges there are, and of what."""
    mask = context_parallel_mask(cp_mesh(), a_tree())
    inputs = operands(1, (2, 2), (mask.local.q_len,) * 2, dtype=torch.float32, requires_grad=True)
    without = torch.no_grad() if is_last() else nullcontext()
    with refused("whether query requires gradients is [1, "), without:
        context_parallel_attention(*inputs, mask)
    on_one = torch.autocast("cpu", torch.bfloat16, enabled=is_last())
    with refused("the dtype of autocast is ['none', ", "'bfloat16'] by rank"), on_one:
        context_parallel_attention(*inputs, mask)
    of_two = torch.autocast("cpu", torch.bfloat16 if is_last() else torch.float16)
    with refused("the dtype of autocast is ['float16', ", "'bfloat16'] by rank"), of_two:
        context_parallel_attention(*inputs, mask)
    # Without gradients there is no backward, whatever the reason.
    with torch.no_grad() if is_last() else nullcontext():
        detached = [x.detach().requires_grad_(is_last()) for x in inputs]
        context_parallel_attention(*detached, mask)


def different_calls() -> None:
    mask = context_parallel_mask(cp_mesh(), a_tree())
    inputs = operands(1, (2, 2), (mask.local.q_len,) * 2)
    with refused("meet in different calls"):
        if is_last():
            context_parallel_mask(cp_mesh(), a_tree())
        else:
            context_parallel_attention(*inputs, mask)


def shards_put_together() -> None:
    mesh, world_size = cp_mesh(), dist.get_world_size()
    balancer = TreeLoadBalancer.contiguous(50, world_size, 16)
    length = balancer.lengths[dist.get_rank()]

    def unshard(shards: list[torch.Tensor], dims: list[int], **options: object) -> None:
        context_parallel_unshard(mesh, shards, dims, balancer, **options)

    good = torch.zeros(length, 2)
    other = {True: torch.float32, False: torch.float64}
    with refused("the dtype of buffers[1] is ['float64', ", "'float32'] by rank"):
        unshard([good, good.to(other[is_last()])], [0, 0])
    # No dtype is like another one, also of those that few use, which gloo could not exchange.
    pairs = [(torch.bool, torch.uint8), (torch.complex64, torch.uint16)]
    for pair in pairs if world_size > 1 else ():
        with refused("the dtype of buffers[0] is ["):
            unshard([torch.zeros(length, dtype=pair[is_last()])], [0])
    with refused("the number of buffers is [1, ", ", 2] by rank"):
        unshard([good] * (2 if is_last() else 1), [0] * (2 if is_last() else 1))
    with refused("the sequence dimension of buffers[0] is [0, ", ", 1] by rank"):
        unshard([good.T if is_last() else good], [-1 if is_last() else 0])
    with refused("the dimensions of buffers[0] is [2, ", ", 1] by rank"):
        unshard([good[:, 0] if is_last() else good], [0])
    with refused("the other sizes of buffers[0] differs"):
        unshard([good[:, :1] if is_last() else good], [0])
    if world_size > 1:
        lengths = list(balancer.lengths)
        with refused(f"the length of buffers[0] should be {lengths} by rank and is"):
            unshard([torch.zeros(length + is_last())], [0])
    with pytest.raises(TypeError, match="check must be a bool or None, got str"):
        unshard([good], [0], check="no")
    # Not compared unless asked for: this would not be seen by the exchange either.
    os.environ[VARIABLE] = ""
    try:
        unshard([torch.zeros(length, dtype=torch.int32 if is_last() else torch.float32)], [0])
        with refused("the dtype of buffers[0] is ["):
            shard = torch.zeros(length, dtype=torch.int32 if is_last() else torch.float32)
            unshard([shard], [0], check=True)
    finally:
        os.environ[VARIABLE] = "1"
    unshard([good, good.T], [0, -1])


def loss_terms_of_another_tree() -> None:
    sequences = [[1, 2, 3], [1, 2, 4, 5], [1, 6]]
    given = PrefixTree.from_sequences(sequences)
    mask = context_parallel_mask(cp_mesh(), given.mask)
    terms = given.loss_terms
    assert len(terms) == given.num_tokens - 1
    context_parallel_loss_terms(terms, mask)
    for other in (sequences[:2], [*sequences, [1, 7]]):
        wrong = PrefixTree.from_sequences(other).loss_terms
        message = f"of {given.num_tokens} tokens, got those of {wrong.num_tokens}"
        with pytest.raises(ValueError, match=message):
            context_parallel_loss_terms(wrong, mask)
    # Terms made by hand, which do not say how many tokens there are.
    context_parallel_loss_terms(replace(terms, num_tokens=None), mask)
    for name in ("source", "token"):
        wrong = replace(terms, num_tokens=None, **{name: getattr(terms, name) + 6})
        with pytest.raises(ValueError, match="terms must be of 6 tokens as the mask is"):
            context_parallel_loss_terms(wrong, mask)


def settings() -> None:
    """By default calls are not compared: without that they do not wait for the device."""
    mask = context_parallel_mask(cp_mesh(), a_tree())
    inputs = operands(1, (2, 2), (mask.local.q_len,) * 2)
    try:
        for setting in ("", "0"):
            os.environ[VARIABLE] = setting
            context_parallel_attention(*inputs, mask, scale=1.0 + dist.get_rank())
            with refused("the scale differs"):
                context_parallel_attention(*inputs, mask, scale=1.0 + dist.get_rank(), check=True)
        context_parallel_mask(cp_mesh(), a_tree(dtype=torch.int64 if is_last() else torch.int32))
        os.environ[VARIABLE] = "yes"
        with pytest.raises(ValueError, match="must be 0, 1 or unset, got 'yes'"):
            context_parallel_mask(cp_mesh(), a_tree())
    finally:
        os.environ[VARIABLE] = "1"


def arguments() -> None:
    """What is wrong on all ranks alike."""
    mesh, world_size = cp_mesh(), dist.get_world_size()
    with pytest.raises(TypeError, match="mask must be a TreeMask, got BlockMask"):
        context_parallel_mask(mesh, a_tree().block_mask)
    with pytest.raises(TypeError, match="mesh must be a DeviceMesh, got ProcessGroup"):
        context_parallel_mask(dist.group.WORLD, a_tree())
    with pytest.raises(TypeError, match="load_balancer must be a TreeLoadBalancer or None, got"):
        context_parallel_mask(mesh, a_tree(), [[0]])
    with pytest.raises(TypeError, match="check must be a bool or None, got str"):
        context_parallel_mask(mesh, a_tree(), check="no")
    with pytest.raises(ValueError, match="as many queries as keys, got 50 and 70"):
        context_parallel_mask(mesh, mask_of(ids_case(50, 70)))
    balancer = TreeLoadBalancer.contiguous(50, world_size + 1, 16)
    with pytest.raises(ValueError, match=f"is for {world_size + 1} ranks, the mesh has"):
        context_parallel_mask(mesh, a_tree(), balancer)
    balancer = TreeLoadBalancer.contiguous(49, world_size, 16)
    with pytest.raises(ValueError, match="the mask is for 50 queries and 50 keys, both must be"):
        context_parallel_mask(mesh, a_tree(), balancer)
    balancer = TreeLoadBalancer.contiguous(50, world_size, 8)
    with pytest.raises(ValueError, match="multiple of the mask's query block size 16, got 8"):
        context_parallel_mask(mesh, a_tree(), balancer)
    mask = context_parallel_mask(mesh, a_tree())
    inputs = operands(1, (4, 2), (mask.local.q_len,) * 2)
    with pytest.raises(TypeError, match="mask must be a ContextParallelMask, got TreeMask"):
        context_parallel_attention(*inputs, a_tree())
    with pytest.raises(ValueError, match="enable_gqa=True"):
        context_parallel_attention(*inputs, mask)
    with pytest.raises(ValueError, match=r"num_chunks must divide .* key heads 2, got 3"):
        context_parallel_attention(*inputs, mask, enable_gqa=True, num_chunks=3)
    for option, value, message in (
        ("num_chunks", 2.0, "must be an int, got 2.0"),
        ("num_chunks", True, "must be an int, got True"),
        ("reshard_after_forward", 1, "must be a bool, got int"),
        ("reduce_dtype", "float32", "must be a floating-point torch.dtype or None, got str"),
        ("reduce_dtype", torch.int32, "must be a floating-point torch.dtype or None, got torch.i"),
        ("scale", "1", "must be a number, got '1'"),
        ("scale", torch.tensor(1.0), "must be a number, got a Tensor"),
        ("check", 1, "must be a bool or None, got int"),
    ):
        with pytest.raises(TypeError, match=f"{option} {message}"):
            context_parallel_attention(*inputs, mask, enable_gqa=True, **{option: value})
    distributed = [DTensor.from_local(x, mesh, [Replicate()], run_check=False) for x in inputs]
    for at, name in enumerate(("query", "key", "value")):
        given = [*inputs[:at], distributed[at], *inputs[at + 1 :]]
        with pytest.raises(TypeError, match=rf"{name} must be .* pass {name}.to_local\(\)"):
            context_parallel_attention(*given, mask, enable_gqa=True)
    with pytest.raises(AttributeError, match="immutable"):
        mask.local = a_tree()
    with pytest.raises(AttributeError, match="immutable"):
        del mask.local


def arguments_of_per_token_tensors() -> None:
    mesh = cp_mesh()
    mask = context_parallel_mask(mesh, a_tree())
    balancer = mask.load_balancer
    here = balancer.lengths[dist.get_rank()]
    distributed = DTensor.from_local(torch.zeros(50), mesh, [Replicate()], run_check=False)
    for change, length in ((context_parallel_shard, 50), (context_parallel_unshard, here)):
        good = torch.zeros(length)
        for error, buffers, dims, message in (
            (ValueError, [good], [1], r"seq_dims\[0\] must be a dimension of buffers\[0\], of"),
            (ValueError, [torch.tensor(3)], [0], r"of shape \(\), got 0"),
            (TypeError, [[1, 2]], [0], r"buffers\[0\] must be a Tensor.*, got list"),
            (TypeError, good, [0], "buffers must be a sequence of Tensors.*, got Tensor"),
            (TypeError, [good], 0, "seq_dims must be a sequence of ints, got int"),
            (TypeError, [good], [0.0], r"seq_dims\[0\] must be an int, got 0.0"),
            (TypeError, [distributed], [0], r"pass buffers\[0\].to_local\(\)"),
        ):
            with pytest.raises(error, match=message):
                change(mesh, buffers, dims, balancer)
        with pytest.raises(TypeError, match="load_balancer must be a TreeLoadBalancer, got Con"):
            change(mesh, [good], [0], mask)
    with pytest.raises(TypeError, match=r"buffers\[0\] must be a Tensor, got TreeMask"):
        context_parallel_unshard(mesh, [a_tree()], [0], balancer)
    terms = PrefixTree.from_sequences([[1, 2], [1, 3]]).loss_terms
    with pytest.raises(TypeError, match="terms must be LossTerms, got NoneType"):
        context_parallel_loss_terms(None, mask)
    with pytest.raises(TypeError, match="mask must be a ContextParallelMask, got TreeMask"):
        context_parallel_loss_terms(terms, a_tree())
    with pytest.raises(ValueError, match=r"has 49 tokens in dimension 1, .* is for 50"):
        context_parallel_shard(mesh, [torch.zeros(1, 49)], [1], balancer)
    with pytest.raises(ValueError, match="one dimension for each of 1 buffers, got 2"):
        context_parallel_shard(mesh, [torch.zeros(50)], [0, 1], balancer)
    with pytest.raises(ValueError, match=r"dimension 0, rank \d holds"):
        context_parallel_unshard(mesh, [torch.zeros(51)], [0], balancer, check=False)


CASES = (
    masks,
    what_stands_behind_a_list_does_not_count,
    partitions,
    calls,
    masks_of_one_call,
    modes,
    different_calls,
    shards_put_together,
    loss_terms_of_another_tree,
    settings,
    arguments,
    arguments_of_per_token_tensors,
)
