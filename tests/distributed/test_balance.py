"""The balance plan: a partition, the same everywhere, close to equal in tokens and in work."""

from __future__ import annotations

from itertools import permutations

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
    with pytest.raises(ValueError, match="world_size must be at least 1, got 0"):
        TreeLoadBalancer.of_mask(mask, 0)
    with pytest.raises(ValueError, match="as many queries as keys, got 50 and 70"):
        TreeLoadBalancer.of_mask(mask_of(ids_case(50, 70)), 2)
