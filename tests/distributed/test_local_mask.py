"""A rank's rows of a mask mean what the whole mask means there."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.attention_cases import hand_made_lists, ids_case
from tests.distributed.attention_checks import mask_of
from tests.strategies import K_ROWS, Q_ROWS, nodes, random_values
from tree_attn_op import Predicate, TreeMask
from tree_attn_op.distributed.balance import TreeLoadBalancer
from tree_attn_op.distributed.local_mask import shard_mask, without_query_index
from tree_attn_op.predicate import INT64_RANGE


@given(
    node=nodes,
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    length=st.integers(1, 90),
    world_size=st.integers(1, 4),
    tile_size=st.sampled_from([16, 32]),
)
def test_any_predicate(
    node, seed: int, dtype: torch.dtype, length: int, world_size: int, tile_size: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    q_vals = random_values(generator, Q_ROWS, length, dtype)
    k_vals = random_values(generator, K_ROWS, length, dtype, batch=2)
    mask = TreeMask.from_predicate(
        Predicate(node), q_vals, k_vals, length, length, BLOCK_SIZE=(16, 32)
    )
    whole = mask.predicate.dense(q_vals, k_vals, length, length)
    balancer = TreeLoadBalancer.of_mask(mask, world_size, tile_size=tile_size)
    for rank in range(world_size):
        local = shard_mask(mask, balancer, rank)
        positions = balancer.positions(rank)
        assert torch.equal(local.to_dense(), whole[:, positions])
        finer = local.block_lists_for(16, 16)
        refined = TreeMask(local.predicate, local.q_vals, local.k_vals, finer)
        assert torch.equal(refined.to_dense(), whole[:, positions])


def test_hand_made_lists_and_their_transposes() -> None:
    mask = mask_of(hand_made_lists(ids_case(150, 150, blocks=(16, 32)), batch=2, heads=3))
    balancer = TreeLoadBalancer([[0, 3, 4], [2], [], [1]], 150, 32)
    for rank in range(4):
        local = shard_mask(mask, balancer, rank)
        assert torch.equal(local.to_dense(), mask.to_dense()[:, :, balancer.positions(rank)])
        lists = local.lists
        for rows, columns in (
            ((lists.kv_num_blocks, lists.kv_indices), (lists.q_num_blocks, lists.q_indices)),
            (
                (lists.full_kv_num_blocks, lists.full_kv_indices),
                (lists.full_q_num_blocks, lists.full_q_indices),
            ),
        ):
            assert listed(*rows) == {(b, h, q, k) for b, h, k, q in listed(*columns)}


def listed(number: torch.Tensor, indices: torch.Tensor) -> set[tuple[int, ...]]:
    found = set()
    for at in torch.cartesian_prod(*map(torch.arange, number.shape)).tolist():
        for other in indices[tuple(at)][: number[tuple(at)]].tolist():
            found.add((*at, other))
    return found


def test_the_index_takes_a_row_of_its_own() -> None:
    predicate, row = without_query_index(Predicate.parse("q >= k & q1 - k < 3"), 4)
    assert (str(predicate), row) == (str(Predicate.parse("q4 >= k & q1 - k < 3")), 4)
    assert without_query_index(predicate, 5) == (predicate, None)


def test_the_index_takes_an_unread_row_where_there_are_no_more() -> None:
    read = " & ".join(f"q{row} < k" for row in range(64) if row != 17)
    predicate, row = without_query_index(Predicate.parse(f"{read} & q >= k"), 64)
    assert row == 17
    assert predicate == Predicate.parse(f"{read} & q17 >= k")
    all_read = Predicate.parse(f"{read} & q17 < k & q >= k")
    with pytest.raises(ValueError, match="reads 64 query rows, the most that there can be"):
        without_query_index(all_read, 64)


def test_an_unread_row_is_written_over() -> None:
    text = " & ".join(f"q{row} <= k" for row in range(64) if row != 17) + " & q >= k"
    q_vals = torch.full((1, 64, 40), INT64_RANGE[0])
    mask = TreeMask.from_predicate(text, q_vals, q_vals.new_empty(1, 0, 40), 40, 40, BLOCK_SIZE=16)
    local = shard_mask(mask, TreeLoadBalancer([[0, 2], [1]], 40, 16), 0)
    assert local.q_vals.shape[1] == 64
    causal = torch.ones(40, 40, dtype=torch.bool).tril()
    assert torch.equal(local.to_dense()[0], causal[[*range(16), *range(32, 40)]])
