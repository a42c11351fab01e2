"""TreeMask: construction, meaning, refinement, its flex BlockMask, copies."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask, create_mask, flex_attention

from tree_attn_op import TreeMask, UnsupportedMask
from tree_attn_op.mask_mod import mask_mod_of
from tree_attn_op.predicate import Predicate, PredicateError
from tree_attn_op.reference import allowed_from_lists, reference_attention

from .attention_cases import hand_made_lists, ids_case, operands, tree_case
from .strategies import K_ROWS, Q_ROWS, nodes, random_values


def tree_mask(length: int = 100, block: int = 32) -> TreeMask:
    made = tree_case(length, (block, block))
    return TreeMask(Predicate.parse(made.predicate), made.q_vals, made.k_vals, made.lists)


def meaning(mask: TreeMask) -> torch.Tensor:
    return allowed_from_lists(
        mask.predicate, mask.q_vals, mask.k_vals, mask.lists.tensors, *mask.lists.sizes
    )


def test_from_predicate() -> None:
    made = tree_case(100)
    mask = TreeMask.from_predicate(
        made.predicate, made.q_vals, made.k_vals, 100, 100, BLOCK_SIZE=(32, 16)
    )
    assert str(mask.predicate) == "q >= k & q < k0"
    assert (mask.lists.q_block_size, mask.lists.kv_block_size) == (32, 16)
    assert torch.equal(mask.to_dense(), made.allowed[:, 0])
    assert repr(mask) == (
        "TreeMask('q >= k & q < k0', batch=1, q_len=100, kv_len=100, device=cpu)"
    )


@pytest.mark.parametrize("batch", [None, 1, 3])
def test_from_mask_mod(batch: int | None) -> None:
    ids = torch.randint(0, 4, (3, 90))

    def mask_mod(b, h, q, k):
        return (q >= k) & (ids[b, q] == ids[b, k])

    mask = TreeMask.from_mask_mod(mask_mod, batch, 90, 90, device="cpu", BLOCK_SIZE=32)
    want = create_mask(mask_mod, batch, 1, 90, 90, device="cpu")[:, 0]
    assert torch.equal(mask.to_dense(), want)
    assert str(mask.predicate) == "q >= k & q0 == k0"


def test_an_unsupported_mask_mod_says_why() -> None:
    table = torch.rand(20, 20) < 0.5
    with pytest.raises(UnsupportedMask) as caught:
        TreeMask.from_mask_mod(lambda b, h, q, k: table[q, k], 1, 20, 20)
    assert caught.value.reason


def test_from_block_mask_keeps_hand_made_lists() -> None:
    made = hand_made_lists(ids_case(150, 200), 1, 1)
    ids_q, ids_k = made.q_vals[0], made.k_vals[0]

    def mask_mod(b, h, q, k):
        return (ids_q[0][q] == ids_k[0][k]) & (ids_q[1][q] - ids_k[1][k] < 2)

    lists = made.lists.map(lambda tensor: tensor.masked_fill(tensor == 2**30, 0))
    block_mask = BlockMask.from_kv_blocks(
        *lists.key_side,
        BLOCK_SIZE=(32, 32),
        mask_mod=mask_mod,
        seq_lengths=(150, 200),
        compute_q_blocks=False,
    )
    mask = TreeMask.from_block_mask(block_mask)
    assert torch.equal(mask.to_dense(), made.allowed[:, 0])
    assert torch.equal(meaning(mask), made.allowed)


@pytest.mark.parametrize("heads", [1, 3])
def test_dense_honours_lists(heads: int) -> None:
    made = hand_made_lists(ids_case(150, 200, 2), 2, heads)
    mask = TreeMask(Predicate.parse(made.predicate), made.q_vals, made.k_vals, made.lists)
    want = made.allowed if heads > 1 else made.allowed[:, 0]
    assert torch.equal(mask.to_dense(), want)


def test_refinement_is_kept_and_means_the_same() -> None:
    made = hand_made_lists(ids_case(150, 200), 1, 1)
    mask = TreeMask(Predicate.parse(made.predicate), made.q_vals, made.k_vals, made.lists)
    assert mask.block_lists_for(32, 32) is mask.lists
    fine = mask.block_lists_for(16, 32)
    assert mask.block_lists_for(16, 32) is fine
    assert (fine.q_block_size, fine.kv_block_size) == (16, 32)
    got = allowed_from_lists(mask.predicate, mask.q_vals, mask.k_vals, fine.tensors, *fine.sizes)
    assert torch.equal(got, made.allowed)
    with pytest.raises(ValueError, match="must divide"):
        mask.block_lists_for(64, 32)


@pytest.mark.parametrize("copied", ["pickle", "deepcopy", "to"])
def test_copies(copied: str) -> None:
    mask = tree_mask()
    mask.block_lists_for(16, 16)
    if copied == "pickle":
        again = pickle.loads(pickle.dumps(mask))
    elif copied == "deepcopy":
        again = copy.deepcopy(mask)
    else:
        again = mask.to("meta")
        assert again.device.type == "meta"
        assert again.lists.q_indices is not None
        assert again.lists.q_indices.device.type == "meta"
        assert mask.to("cpu") is mask
        return
    assert again.predicate == mask.predicate
    assert torch.equal(meaning(again), meaning(mask))
    assert torch.equal(
        again.block_lists_for(16, 16).kv_indices, mask.block_lists_for(16, 16).kv_indices
    )


def test_a_mask_is_frozen() -> None:
    with pytest.raises(AttributeError):
        tree_mask().predicate = Predicate.parse("True")  # type: ignore[misc]


def test_parts_must_fit() -> None:
    made = tree_case(100)
    predicate = Predicate.parse(made.predicate)
    with pytest.raises(PredicateError, match="reads 1 rows of k_vals"):
        TreeMask(predicate, made.q_vals, made.k_vals[:, :0], made.lists)
    with pytest.raises(ValueError, match="length is 100, got 90"):
        TreeMask(predicate, made.q_vals, made.k_vals[..., :90], made.lists)
    lists = made.lists.map(lambda tensor: tensor.expand(2, *tensor.shape[1:]))
    with pytest.raises(ValueError, match="one batch size or 1, got 3 and 2"):
        TreeMask(predicate, made.q_vals, made.k_vals.expand(3, -1, -1), lists)
    with pytest.raises(PredicateError, match="not a predicate"):
        TreeMask.from_predicate("q >", made.q_vals, made.k_vals, 100, 100)
    with pytest.raises(ValueError, match="multiple of 16, got 24"):
        TreeMask.from_predicate(predicate, made.q_vals, made.k_vals, 100, 100, BLOCK_SIZE=24)


@settings(max_examples=40)
@given(
    node=nodes,
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    batch=st.sampled_from([1, 2]),
)
def test_mask_mod_says_what_the_predicate_says(node, seed: int, dtype, batch: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q_vals = random_values(generator, Q_ROWS, 13, dtype, batch)
    k_vals = random_values(generator, K_ROWS, 11, dtype)
    predicate = Predicate(node)
    got = create_mask(mask_mod_of(predicate, q_vals, k_vals), batch, 1, 13, 11, device="cpu")
    want = predicate.dense(q_vals, k_vals, 13, 11).expand(batch, 13, 11)
    assert torch.equal(got[:, 0], want)


@pytest.mark.parametrize("text", ["q >= k & q < k0", "q0 != k0 | q - k0 < 3", "True", "False"])
def test_mask_mod_lowers_to_the_predicate(text: str) -> None:
    values = torch.randint(0, 50, (1, 1, 50))
    mask = TreeMask.from_predicate(text, values, values, 50, 50, BLOCK_SIZE=16)
    again = TreeMask.from_mask_mod(mask.mask_mod, 1, 50, 50, BLOCK_SIZE=16)
    assert torch.equal(again.to_dense(), mask.to_dense())
    if text == "q >= k & q < k0":
        assert again.predicate == mask.predicate


@pytest.mark.parametrize("hand_made", [False, True])
def test_block_mask(hand_made: bool) -> None:
    """flex with the mask's BlockMask computes what the mask means."""
    length = 100
    made = ids_case(length, length, 2)
    if hand_made:
        made = hand_made_lists(made, 2, 1)
    mask = TreeMask(Predicate.parse(made.predicate), made.q_vals, made.k_vals, made.lists)
    block_mask = mask.block_mask
    assert block_mask.shape == (2, 1, length, length)
    query, key, value = operands(2, (2, 2), (length, length), dtype=torch.float32)
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    got = compiled(query, key, value, block_mask=block_mask)
    want, _ = reference_attention(query, key, value, made.allowed)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((-1, 64, 64), "B must be at least 0, got -1"),
        ((1.5, 64, 64), "B must be an int, got 1.5"),
        ((1, -64, 64), "Q_LEN must be at least 0, got -64"),
        ((1, 64, "64"), "KV_LEN must be an int, got '64'"),
    ],
)
def test_sizes_that_are_no_counts(sizes, message):
    with pytest.raises((TypeError, ValueError), match=message):
        TreeMask.from_mask_mod(lambda b, h, q, k: q >= k, *sizes)
