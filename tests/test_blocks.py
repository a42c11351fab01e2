"""Block lists: derived, refined, transposed; never wrong, and like flex's own."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from tree_attn_op import blocks
from tree_attn_op.blocks import BlockLists
from tree_attn_op.predicate import EMPTY, FULL, PARTIAL, Predicate
from tree_attn_op.reference import allowed_from_lists

from .attention_cases import Case, case, hand_made_lists, ids_case, tree_case
from .strategies import K_ROWS, Q_ROWS, nodes, random_values


def listed(number: Tensor, indices: Tensor) -> list:
    """The listed entries, row by row."""
    return [
        row[:count].tolist()
        for row, count in zip(indices.flatten(0, -2), number.flatten().tolist(), strict=True)
    ]


def exact_states(dense: Tensor, q_block: int, kv_block: int) -> Tensor:
    """What each tile really is, by looking at every pair."""
    batch, q_len, kv_len = dense.shape
    rows, columns = blocks.cdiv(q_len, q_block), blocks.cdiv(kv_len, kv_block)
    state = torch.empty(batch, rows, columns, dtype=torch.int8)
    for i in range(rows):
        for j in range(columns):
            tile = dense[:, i * q_block : (i + 1) * q_block, j * kv_block : (j + 1) * kv_block]
            tile = tile.flatten(1)
            some = torch.where(tile.any(1), PARTIAL, EMPTY)
            state[:, i, j] = torch.where(tile.all(1), FULL, some)
    return state


def build(made: Case, q_block: int, kv_block: int) -> BlockLists:
    predicate = Predicate.parse(made.predicate)
    sizes = made.lists.q_len, made.lists.kv_len
    return blocks.build(predicate, made.q_vals, made.k_vals, *sizes, q_block, kv_block)


@settings(max_examples=60)
@given(
    node=nodes,
    seed=st.integers(0, 2**31),
    lengths=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    tiles=st.tuples(st.sampled_from([1, 4, 16]), st.sampled_from([1, 5, 16])),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_tile_states_are_never_wrong(node, seed, lengths, tiles, dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    q_vals = random_values(generator, Q_ROWS, lengths[0], dtype, batch=2)
    k_vals = random_values(generator, K_ROWS, lengths[1], dtype)
    predicate = Predicate(node)
    state = blocks.classify_tiles(predicate, q_vals, k_vals, *lengths, *tiles)
    exact = exact_states(predicate.dense(q_vals, k_vals, *lengths), *tiles)
    assert state.shape == exact.shape
    assert ((state == exact) | (state == PARTIAL)).all()


def test_a_tail_does_not_widen_its_tile() -> None:
    values = torch.tensor([[[5] * 16 + [7] * 3]])
    state = blocks.classify_tiles(Predicate.parse("q0 == k0"), values, values, 19, 19, 16, 16)
    assert state.tolist() == [[[FULL, EMPTY], [EMPTY, FULL]]]


@pytest.mark.parametrize("length", [64, 1024])
def test_same_lists_as_flex(length: int) -> None:
    made = tree_case(length, (32, 32), leaves=5)
    end = made.k_vals[0, 0]

    def mask_mod(b, h, q, k):
        return (q >= k) & (q < end[k])

    theirs = create_block_mask(mask_mod, 1, 1, length, length, device="cpu", BLOCK_SIZE=32)
    ours = build(made, 32, 32)
    for name in ("kv", "full_kv", "q", "full_q"):
        number, indices = f"{name}_num_blocks", f"{name}_indices"
        assert torch.equal(getattr(ours, number), getattr(theirs, number))
        assert torch.equal(getattr(ours, indices), getattr(theirs, indices))


def test_from_block_mask() -> None:
    made = tree_case(100, (16, 32))
    lists = made.lists
    block_mask = BlockMask.from_kv_blocks(
        *lists.key_side, BLOCK_SIZE=(16, 32), seq_lengths=(100, 100)
    )
    again = BlockLists.from_block_mask(block_mask)
    assert again.sizes == (16, 32, 100, 100)
    for got, want in zip(again.tensors, lists.tensors, strict=True):
        assert got is not None
        assert want is not None
        assert torch.equal(got, want)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("values", [1, 2])
@pytest.mark.parametrize("absent", [False, True])
def test_refined_lists_mean_the_same(batch: int, heads: int, values: int, absent: bool) -> None:
    made = hand_made_lists(ids_case(150, 200, values), batch, heads)
    if absent:
        made = made.with_lists(full_kv_num_blocks=None, full_kv_indices=None)
    predicate = Predicate.parse(made.predicate)
    refined = blocks.refine(
        predicate, made.q_vals, made.k_vals, 150, 200, made.lists.key_side, 32, 32, 16, 16
    )
    assert refined.kv_indices.shape == (max(batch, values), heads, 10, 13)
    meaning = allowed_from_lists(
        predicate, made.q_vals, made.k_vals, refined.tensors, *refined.sizes
    )
    assert torch.equal(meaning, made.allowed.expand(meaning.shape))


def test_refinement_of_derived_lists_is_their_derivation() -> None:
    made = ids_case(150, 200)
    predicate = Predicate.parse(made.predicate)
    refined = blocks.refine(
        predicate, made.q_vals, made.k_vals, 150, 200, made.lists.key_side, 32, 32, 16, 16
    )
    for got, want in zip(refined.tensors, build(made, 16, 16).tensors, strict=True):
        assert torch.equal(got, want)


def test_both_directions_list_the_same_blocks() -> None:
    lists = tree_case(200, (16, 32)).lists
    for number, indices, by_key, key_indices in (
        lists.tensors[0:2] + lists.tensors[4:6],
        lists.tensors[2:4] + lists.tensors[6:8],
    ):
        forward = {(i, j) for i, row in enumerate(listed(number, indices)) for j in row}
        backward = {(i, j) for j, row in enumerate(listed(by_key, key_indices)) for i in row}
        assert forward == backward
        assert forward
        got = blocks.transpose_lists(number, indices, by_key.shape[-1])
        assert torch.equal(got[0], by_key)
        assert torch.equal(got[1], key_indices)


def test_entries_behind_the_count_mean_nothing() -> None:
    made = hand_made_lists(ids_case(150, 200), 1, 1)
    assert (made.lists.kv_indices == 2**30).any()
    clean = [
        tensor.masked_fill(tensor == 2**30, 0) if tensor is not None else None
        for tensor in made.lists.key_side
    ]
    columns = made.lists.kv_indices.shape[-1]
    for lists in (made.lists.key_side, clean):
        state = blocks.listed_states(*lists, columns)
        for i, j in product(range(state.shape[2]), range(columns)):
            row = (0, 0, i)
            partial = made.lists.kv_indices[row][: int(made.lists.kv_num_blocks[row])]
            full = made.lists.full_kv_indices[row][: int(made.lists.full_kv_num_blocks[row])]
            want = FULL if j in full else PARTIAL if j in partial else EMPTY
            assert state[0, 0, i, j] == want


def test_indices_ascend() -> None:
    chosen = torch.rand(2, 3, 5, 40) < 0.4
    number, indices = blocks.compact(chosen)
    assert number.dtype == indices.dtype == torch.int32
    assert torch.equal(indices.sort(-1).values, torch.arange(40).int().expand(indices.shape))
    for row, flags in zip(listed(number, indices), chosen.flatten(0, 2), strict=True):
        assert row == flags.nonzero().flatten().tolist()


def test_op_equals_the_functions() -> None:
    made = ids_case(150, 200)
    lists = torch.ops.tree_attn_op.block_lists(
        made.q_vals, made.k_vals, made.predicate, 150, 200, *(None,) * 4, 48, 16, 48, 16
    )
    for got, want in zip(lists, build(made, 48, 16).tensors, strict=True):
        assert torch.equal(got, want)


def test_memory_is_linear_in_the_length() -> None:
    """At 64k tokens nothing as large as one byte a pair is ever held."""
    length = 1 << 16
    made_values = torch.full((1, 1, length), length, dtype=torch.int32)
    empty = made_values.new_empty(1, 0, length)
    with torch.profiler.profile(profile_memory=True) as profile:
        blocks.build(
            Predicate.parse("q >= k & q < k0"), empty, made_values, length, length, 128, 128
        )
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert 0 < largest < 32 * 2**20


def test_whole_mask_in_one_block() -> None:
    made = case("q >= k", torch.empty(1, 0, 10).int(), torch.empty(1, 0, 10).int(), (16, 16))
    assert made.lists.kv_num_blocks.tolist() == [[[1]]]
    assert made.lists.full_kv_num_blocks is not None
    assert made.lists.full_kv_num_blocks.tolist() == [[[0]]]


@pytest.mark.parametrize("lengths", [(96, 64), (70, 129), (1, 33)])
def test_lists_of_a_dense_mask_are_those_of_flex(lengths: tuple[int, int]) -> None:
    allowed = torch.rand(2, 3, *lengths) < 0.5
    allowed[..., : lengths[0] // 2, : lengths[1] // 2] = True
    allowed[..., lengths[0] // 2 :, : lengths[1] // 2] = False
    flexs = create_block_mask(
        lambda b, h, q, k: allowed[b, h, q, k], 2, 3, *lengths, "cpu", BLOCK_SIZE=(16, 32)
    )
    wanted = BlockLists.from_block_mask(flexs).tensors
    found = torch.ops.tree_attn_op.block_lists_of_mask(allowed, 16, 32)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)
