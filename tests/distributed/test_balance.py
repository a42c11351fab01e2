"""The balance plan: a partition, the same everywhere, close to equal in tokens and in work."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor.experimental._attention import _LoadBalancer

from bench.workloads import grpo, load
from tests.attention_cases import hand_made_lists, ids_case, tree_case
from tests.distributed.attention_checks import mask_of
from tree_attn_op import PrefixTree
from tree_attn_op.distributed import TreeLoadBalancer, balance
from tree_attn_op.distributed.balance import deal, tile_work


@given(st.lists(st.integers(0, 1000), max_size=60), st.integers(1, 9))
def test_a_deal_is_a_partition_with_counts_that_differ_by_one(work: list[int], ranks: int) -> None:
    hands = deal(work, ranks)
    assert sorted(tile for hand in hands for tile in hand) == list(range(len(work)))
    assert len(hands) == ranks
    counts = [len(hand) for hand in hands]
    assert max(counts) - min(counts) <= 1
    assert hands == deal(list(work), ranks)


@given(st.lists(st.integers(0, 50), min_size=2, max_size=7))
def test_two_ranks_are_close_to_the_best_deal(work: list[int]) -> None:
    half = len(work) // 2
    best = min(max(sum(one[:half]), sum(one[half:])) for one in permutations(work))
    dealt = max(sum(work[tile] for tile in hand) for hand in deal(work, 2))
    assert best <= dealt <= best * 7 / 6


def test_work_is_that_of_the_lists() -> None:
    for given_case in (
        tree_case(300, (64, 64)),
        hand_made_lists(ids_case(300, 300, blocks=(64, 64)), batch=2, heads=3),
    ):
        mask = mask_of(given_case)
        lists = mask.block_lists_for(64, 64)
        counts = lists.kv_num_blocks + lists.full_kv_num_blocks
        work = torch.tensor(tile_work(mask, 128))
        expected = torch.nn.functional.pad(counts.sum((0, 1)), (0, 1)).view(-1, 2).sum(1)
        assert torch.equal(work, expected)


def test_work_is_counted_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = mask_of(tree_case(300, (16, 16)))
    whole = tile_work(mask, 32)
    monkeypatch.setattr(balance, "_MAX_STATES", 19 * 2 * 3)
    assert tile_work(mask, 32) == whole


@pytest.mark.parametrize(
    ("name", "contiguous"),
    [("chain_16k", 1.7), ("longprompt_32k", 1.6), ("agentic_32k", 1.1), ("grpo_1x16_32k", 1.08)],
)
def test_workloads_on_four_ranks(name: str, contiguous: float) -> None:
    mask = load()[name].tree("cpu").mask
    balancer = TreeLoadBalancer.of_mask(mask, 4)
    assert balancer.imbalance < 1.001
    assert len(set(balancer.lengths)) == 1
    work = tile_work(mask, 128)
    assert TreeLoadBalancer.contiguous(mask.q_len, 4, 128, work).imbalance > contiguous


def test_a_short_last_tile_ends_its_shard() -> None:
    mask = grpo("short", prompts=1, prompt_len=333, n=3, completion_len=111).tree("cpu").mask
    assert mask.q_len % 128
    balancer = TreeLoadBalancer.of_mask(mask, 3)
    assert sum(balancer.lengths) == mask.q_len
    shards = [balancer.positions(rank) for rank in range(3)]
    for shard, length in zip(shards, balancer.lengths, strict=True):
        assert shard.numel() == length
        assert torch.equal(shard, shard.sort().values)
    assert torch.equal(torch.cat(shards).sort().values, torch.arange(mask.q_len))
    # Token t is row places[t] of the padded shards.
    padded = torch.full((3, max(balancer.lengths)), -1)
    for row, shard in zip(padded, shards, strict=True):
        row[: shard.numel()] = shard
    assert torch.equal(padded.flatten()[balancer.places()], torch.arange(mask.q_len))
    assert torch.equal(balancer.padded_tokens(), padded.flatten().clamp(min=0))


def test_no_tokens_and_fewer_tiles_than_ranks() -> None:
    empty = TreeLoadBalancer.of_mask(PrefixTree.from_sequences([[]]).mask, 2)
    assert (empty.lengths, empty.imbalance, empty.places().numel()) == ((0, 0), 1.0, 0)
    few = TreeLoadBalancer.of_mask(PrefixTree.from_sequences([[1, 2], [1, 3]]).mask, 3)
    assert sorted(few.lengths) == [0, 0, 3]


def test_the_protocol_of_torch() -> None:
    """Called the way that torch's _context_parallel_shard calls its own load balancers."""
    balancer = TreeLoadBalancer.of_mask(mask_of(tree_case(128, (16, 16))), 2)
    assert set(_LoadBalancer.__abstractmethods__) <= set(dir(balancer))
    order, back = balancer._generate_indices(), balancer._generate_indices(restore=True)
    assert order.shape == back.shape == (1, 128)
    assert torch.equal(order[0][back[0]], torch.arange(128))
    for rank, chunk in enumerate(order[0].chunk(2)):
        assert torch.equal(chunk, balancer.positions(rank))


def test_equality() -> None:
    one = TreeLoadBalancer([[0, 2], [1]], 40, 16)
    same = TreeLoadBalancer([[2, 0], [1]], 40, 16, work=[1, 2, 3])
    assert one == same
    assert torch.equal(same.positions(0), torch.tensor([*range(16), *range(32, 40)]))
    assert hash(one) == hash(same)
    assert one != TreeLoadBalancer([[0, 2], [1]], 41, 16)
    assert one != TreeLoadBalancer([[0], [1, 2]], 40, 16)
    assert one != "another type"
    assert same.work == (4, 2)
    assert same.imbalance == pytest.approx(4 / 3)
    assert "lengths=(24, 16), imbalance=1.3333" in repr(same)


def test_integers_of_other_types_make_no_difference() -> None:
    plain = TreeLoadBalancer([[0, 2], [1]], 40, 16, work=[1, 2, 3])
    tensors = [torch.tensor([2, 0]), torch.tensor([1])]
    others = (
        TreeLoadBalancer(tensors, torch.tensor(40), torch.tensor(16), torch.tensor([1, 2, 3])),
        TreeLoadBalancer(
            [one.numpy() for one in tensors], np.int64(40), np.int32(16), np.array([1, 2, 3])
        ),
        TreeLoadBalancer((tile for tile in ([0, 2], [1])), 40, 16, [1, 2, 3]),
    )
    for one in others:
        assert one == plain
        assert hash(one) == hash(plain)
        assert (one.tiles, one.work, one.lengths) == (plain.tiles, plain.work, plain.lengths)
        numbers = [*one.tiles[0], *one.work, one.seq_length, one.tile_size]
        assert {type(number) for number in numbers} == {int}
    mask = mask_of(tree_case(50, (16, 16)))
    assert TreeLoadBalancer.of_mask(mask, np.int64(2)) == TreeLoadBalancer.of_mask(mask, 2)


def test_immutable() -> None:
    one = TreeLoadBalancer([[0, 2], [1]], 40, 16, work=[1, 2, 3])
    with pytest.raises(AttributeError, match="immutable"):
        one.tiles = ((0,), (1, 2))
    with pytest.raises(AttributeError, match="immutable"):
        del one.work
    for same in (copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert (same, same.work) == (one, one.work)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: TreeLoadBalancer(None, 40, 16), TypeError, "tiles must be a sequence of seq"),
        (lambda: TreeLoadBalancer([0, 1], 20, 16), TypeError, r"tiles\[0\] must be a sequence"),
        (lambda: TreeLoadBalancer([[0.0]], 16, 16), TypeError, "tile of rank 0 must be an int"),
        (lambda: TreeLoadBalancer([[False]], 16, 16), TypeError, "must be an int, got False"),
        (lambda: TreeLoadBalancer([[0]], 16.0, 16), TypeError, "seq_length must be an int"),
        (lambda: TreeLoadBalancer([[]], -1, 16), ValueError, "seq_length must be at least 0"),
        (lambda: TreeLoadBalancer([[0]], 16, 16, [1.5]), TypeError, "work of a tile must be an"),
        (lambda: TreeLoadBalancer([[0]], 16, 16, 3), TypeError, "work must be a sequence of ints"),
        (lambda: TreeLoadBalancer.contiguous(-1, 2, 16), ValueError, "seq_length must be at"),
        (lambda: TreeLoadBalancer.contiguous(10, 0, 16), ValueError, "world_size must be at le"),
        (lambda: TreeLoadBalancer.contiguous(10, 2, 0), ValueError, "tile_size must be at least"),
        (lambda: TreeLoadBalancer.contiguous(10, 2.0, 16), TypeError, "world_size must be an int"),
        (lambda: TreeLoadBalancer.of_mask(None, 2), TypeError, "mask must be a TreeMask, got Non"),
        (lambda: TreeLoadBalancer([[0]], 16, 16).positions(1), ValueError, "must be below 1, got"),
        (lambda: TreeLoadBalancer([[0]], 16, 16).positions(-1), ValueError, "at least 0, got -1"),
        (lambda: TreeLoadBalancer([[0]], 16, 16).positions("0"), TypeError, "rank must be an int"),
    ],
)
def test_wrong_arguments(call: Callable[[], object], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[0], [1]], 40, 16), "each of the 3 tiles of 40 tokens must belong to one rank"),
        (([[0, 1], [1, 2]], 40, 16), "must belong to one rank"),
        (([[0, 1, 2, 3]], 40, 16), "must belong to one rank"),
        (([], 0, 16), "one entry a rank, got none"),
        (([[0]], 16, 0), "tile_size must be at least 1"),
        (([[0]], 16, 16, [1, 2]), "one number for each of 1 tiles"),
    ],
)
def test_what_is_no_partition(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TreeLoadBalancer(*arguments)


def test_wrong_sizes() -> None:
    mask = mask_of(tree_case(50, (16, 16)))
    with pytest.raises(ValueError, match="multiple of the mask's query block size 16, got 24"):
        TreeLoadBalancer.of_mask(mask, 2, tile_size=24)
    with pytest.raises(TypeError, match=r"tile_size must be an int, got 16\.0"):
        TreeLoadBalancer.of_mask(mask, 2, tile_size=16.0)
    with pytest.raises(TypeError, match="world_size must be an int, got '2'"):
        TreeLoadBalancer.of_mask(mask, "2")
    with pytest.raises(ValueError, match="world_size must be at least 1, got 0"):
        TreeLoadBalancer.of_mask(mask, 0)
    with pytest.raises(ValueError, match="as many queries as keys, got 50 and 70"):
        TreeLoadBalancer.of_mask(mask_of(ids_case(50, 70)), 2)
