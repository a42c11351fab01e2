"""Windows on tree positions against the definition, pair by pair."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tree_attn_op import PrefixTree, TreeMask, tree_attention
from tree_attn_op.blocks import BlockLists
from tree_attn_op.integrations.windows import PositionedMask, windowed
from tree_attn_op.predicate import Predicate
from tree_attn_op.reference import reference_attention

from ..attention_cases import hand_made_lists, ids_case, operands
from .trajectories import multi_turn


@pytest.fixture
def tree() -> PrefixTree:
    return PrefixTree.from_sequences(multi_turn(2, longest=40))


def by_definition(mask: TreeMask, positions: Tensor, window: int) -> Tensor:
    positions = positions.expand(mask.batch_size, -1) if positions.dim() == 1 else positions
    return mask.to_dense() & (positions[:, :, None] - positions[:, None, :] < window)


@pytest.mark.parametrize("window", [1, 2, 17, 64, 10**6, 2**40])
@pytest.mark.parametrize("block", [16, 128])
def test_it_is_what_the_definition_says(window: int, block: int, tree: PrefixTree) -> None:
    ends = tree.subtree_end[None, None].int()
    length = tree.num_tokens
    mask = TreeMask.from_predicate(
        "q >= k & q < k0", ends[:, :0], ends, length, length, BLOCK_SIZE=block
    )
    cut = windowed(mask, tree.position_ids, window)
    want = by_definition(mask, tree.position_ids, window)
    assert torch.equal(cut.to_dense(), want)
    # And the lists of it are as flex needs them, and no more than needed.
    inputs = operands(1, (2, 1), (length, length))
    exact, _ = reference_attention(*inputs, want)
    torch.testing.assert_close(tree_attention(*inputs, cut, enable_gqa=True), exact)
    if window < 20 and block == 16:
        assert cut.lists.kv_num_blocks.sum() < mask.lists.kv_num_blocks.sum() + (
            mask.lists.full_kv_num_blocks.sum()  # type: ignore[union-attr]
        )


def test_depth_counts_not_the_place_in_the_pack() -> None:
    """After a long sibling, the stem is far in the pack and near in the tree."""
    tree = PrefixTree.from_sequences([[1, 2, *range(10, 60)], [1, 2, 70]])
    cut = windowed(tree.mask, tree.position_ids, 3).to_dense()[0]
    last = tree.num_tokens - 1
    assert cut[last].nonzero().flatten().tolist() == [0, 1, last]


def test_positions_of_a_batch(tree: PrefixTree) -> None:
    positions = torch.stack([tree.position_ids, tree.position_ids // 2])
    cut = windowed(tree.mask, positions, 9)
    assert cut.batch_size == 2
    dense = tree.mask.to_dense().expand(2, -1, -1)
    want = dense & (positions[:, :, None] - positions[:, None, :] < 9)
    assert torch.equal(cut.to_dense(), want)


def test_rows_that_the_mask_has_stay(tree: PrefixTree) -> None:
    made = ids_case(90, 90)
    mask = TreeMask.from_predicate(made.predicate, made.q_vals, made.k_vals, 90, 90)
    positions = torch.randint(-50, 50, (90,))
    cut = windowed(mask, positions, 5)
    assert torch.equal(cut.to_dense(), by_definition(mask, positions, 5))


def test_listed_blocks_stay_a_part_of_the_meaning() -> None:
    """Partial blocks only: what is not listed stays unseen."""
    made = hand_made_lists(ids_case(96, 96), 1, 1)
    lists = made.with_lists(full_kv_num_blocks=None, full_kv_indices=None).lists
    partial = BlockLists.of([*lists.tensors[:2], *[None] * 6], *lists.sizes)
    mask = TreeMask.from_predicate(made.predicate, made.q_vals, made.k_vals, 96, 96)
    mask = TreeMask(mask.predicate, mask.q_vals, mask.k_vals, partial)
    positions = torch.arange(96)
    cut = windowed(mask, positions, 7)
    assert torch.equal(cut.to_dense(), by_definition(mask, positions, 7))


def test_full_blocks_that_contradict_the_predicate_are_refused() -> None:
    made = ids_case(96, 96)
    one, none = torch.ones(1, 1, 3, dtype=torch.int32), torch.zeros(1, 1, 3, dtype=torch.int32)
    columns = torch.arange(3, dtype=torch.int32).expand(1, 1, 3, 3)
    lists = BlockLists.of([none, columns, one, columns, *[None] * 4], 32, 32, 96, 96)
    mask = TreeMask(Predicate.parse(made.predicate), made.q_vals, made.k_vals, lists)
    with pytest.raises(ValueError, match="lists blocks as full that its predicate does not prove"):
        windowed(mask, torch.arange(96), 7)


def test_it_is_made_once_for_all_layers(tree: PrefixTree) -> None:
    mask, positions = tree.mask, tree.position_ids.clone()
    first = windowed(mask, positions, 5)
    assert windowed(mask, positions, 5) is first
    assert windowed(mask, positions, 6) is not first
    assert windowed(mask, positions.clone(), 5) is not first
    again = windowed(mask, positions, 5)
    positions.zero_()
    changed = windowed(mask, positions, 5)
    assert changed is not again
    assert torch.equal(changed.to_dense(), mask.to_dense())


def test_positioned_mask(tree: PrefixTree) -> None:
    both = PositionedMask(tree.mask, tree.position_ids)
    assert both.windowed(None) is tree.mask
    assert both.windowed(5) is windowed(tree.mask, tree.position_ids, 5)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_inside_compiled_code(backend: str, tree: PrefixTree) -> None:
    def model(query: Tensor, mask: TreeMask, positions: Tensor) -> Tensor:
        return tree_attention(query, query, query, windowed(mask, positions, 5))

    query = torch.randn(1, 2, tree.num_tokens, 16, requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    got, want = (f(query, tree.mask, tree.position_ids) for f in (compiled, model))
    torch.testing.assert_close(got, want)
    for one, other in zip(
        torch.autograd.grad(got.sum(), query), torch.autograd.grad(want.sum(), query), strict=True
    ):
        torch.testing.assert_close(one, other)
    torch._dynamo.reset()


def test_errors(tree: PrefixTree) -> None:
    mask, positions = tree.mask, tree.position_ids
    with pytest.raises(ValueError, match="of at least 1, got 0"):
        windowed(mask, positions, 0)
    with pytest.raises(TypeError, match=r"integers, got torch\.float32"):
        windowed(mask, positions.float(), 5)
    with pytest.raises(ValueError, match=rf"must be \[{len(positions)}\] or .*, got \(3,\)"):
        windowed(mask, positions[:3], 5)
    values = torch.empty(1, 0, 40, dtype=torch.int32)
    uneven = TreeMask.from_predicate("q >= k", values[..., :20], values, 20, 40)
    with pytest.raises(ValueError, match="as many queries as keys, the mask has 20 and 40"):
        windowed(uneven, torch.arange(20), 5)
