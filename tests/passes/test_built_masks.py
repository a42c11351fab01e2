"""create_block_mask in a compiled region: no graph break, equal lists, and none of the S x S."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention
from torch.nn.attention.flex_attention import BlockMask

from tree_attn_op import create_block_mask

from .helpers import PassThenEager, Tree, attention, compiled, count_calls, form_3, qkv
from .test_plan import largest_intermediate
from .test_rewrite import expect_equal_to_oracle

LENGTH = 200
LISTS = [
    f"{prefix}{side}_{kind}"
    for prefix in ("", "full_")
    for side in ("kv", "q")
    for kind in ("num_blocks", "indices")
]


def lists_of(mask: BlockMask) -> list[Tensor]:
    return [getattr(mask, name) for name in LISTS]


def expect_same(found: BlockMask, wanted: BlockMask) -> None:
    assert found.seq_lengths == wanted.seq_lengths
    assert found.BLOCK_SIZE == wanted.BLOCK_SIZE
    for name, one, other in zip(LISTS, lists_of(found), lists_of(wanted), strict=True):
        assert torch.equal(one, other), name


def ends(length: int) -> Tensor:
    return (torch.arange(length) // 37 + 1) * 37


def tree(end: Tensor, window: int = 70) -> Callable[..., Tensor]:
    return lambda b, h, q, k: (q >= k) & (q < end[k]) & (q - k < window)


def build(end: Tensor, window: int = 70, sizes: Any = (None, None), **options: Any) -> BlockMask:
    length = end.shape[-1]
    return create_block_mask(
        tree(end, window), *sizes, length, length, device="cpu", BLOCK_SIZE=32, **options
    )


def flexs(mask_mod: Any, length: int, sizes: Any = (None, None)) -> BlockMask:
    return flex_attention.create_block_mask(
        mask_mod, *sizes, length, length, device="cpu", BLOCK_SIZE=32
    )


@pytest.mark.parametrize("sizes", [(None, None), (2, 3)])
@pytest.mark.parametrize("length", [LENGTH, 192])
def test_lists_are_derived(length: int, sizes: tuple[int | None, int | None]) -> None:
    backend = PassThenEager()
    found = compiled(build, backend)(ends(length), 70, sizes)
    (graph,) = backend.graphs
    assert count_calls(graph, "block_lists") == 1
    assert count_calls(graph, "block_lists_of_mask") == 0
    expect_same(found, flexs(tree(ends(length)), length, sizes))
    assert largest_intermediate(backend) < length * length


def test_without_the_pass_the_lists_are_the_same() -> None:
    for backend in ("eager", "aot_eager", "inductor"):
        found = compiled(build, backend)(ends(LENGTH))
        expect_same(found, flexs(tree(ends(LENGTH)), LENGTH))


@pytest.mark.parametrize("with_pass", [False, True])
def test_lengths_may_change_at_every_call(with_pass: bool) -> None:
    backend = PassThenEager()
    if not with_pass:
        backend.graph_pass = lambda graph: None
    step = compiled(build, backend)
    for call, length in enumerate((200, 192, 97, 321, 64, 500)):
        window = 70 - call
        expect_same(step(ends(length), window), flexs(tree(ends(length), window), length))
        assert len(backend.graphs) <= 2
    assert len(backend.graphs) == 2


def test_masks_of_batch_rows() -> None:
    forest = Tree(2, LENGTH)

    def step(tin: Tensor, tout: Tensor) -> BlockMask:
        forest.tin, forest.tout = tin, tout
        return create_block_mask(
            form_3(forest), 2, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=32
        )

    backend = PassThenEager()
    tin, tout = forest.tin, forest.tout
    found = compiled(step, backend)(tin, tout)
    assert count_calls(backend.graphs[0], "block_lists_of_mask") == 0
    forest.tin, forest.tout = tin, tout
    expect_same(found, flexs(form_3(forest), LENGTH, (2, None)))


def test_attention_in_the_same_region() -> None:
    tensors = qkv(length=LENGTH)
    end = ends(LENGTH)

    def step(query: Tensor, key: Tensor, value: Tensor, end: Tensor) -> Tensor:
        return attention(query, key, value, build(end))

    backend = PassThenEager()
    out = compiled(step, backend)(*tensors, end)
    assert len(backend.report.rewritten) == 1, str(backend.report)
    expect_equal_to_oracle(out, tensors, flexs(tree(end), LENGTH))
    assert largest_intermediate(backend) < LENGTH * LENGTH


def expect_dense(
    step: Callable[..., Any], *inputs: Tensor, warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The lists are those of the dense mask, and a warning says why."""
    wanted = step(*(tensor.clone() for tensor in inputs))
    backend = PassThenEager()
    with caplog.at_level(logging.WARNING, logger="passes.built_masks"):
        found = compiled(step, backend)(*inputs)
    assert count_calls(backend.graphs[0], "block_lists") == 0
    assert warning in caplog.text
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


def test_what_cannot_be_proven_is_built_from_the_mask(caplog: pytest.LogCaptureFixture) -> None:
    table = torch.rand(64, 64) < 0.3

    def step(table: Tensor) -> list[Tensor]:
        def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return table[q, k]

        return lists_of(create_block_mask(mask_mod, 1, 1, 64, 64, device="cpu", BLOCK_SIZE=32))

    expect_dense(step, table, warning="table", caplog=caplog)


def lists_of_dense(mask: Tensor) -> Any:
    return torch.ops.tree_attn_op.block_lists_of_mask.default(mask, 32, 32)


def test_a_mask_from_elsewhere(caplog: pytest.LogCaptureFixture) -> None:
    given = torch.rand(1, 1, 70, 70) < 0.5
    expect_dense(lists_of_dense, given, warning="in another way", caplog=caplog)


def nested(mask_mod: Any, *positions: Tensor, order: tuple[int, ...] = (3, 2, 1, 0)) -> Tensor:
    """A mask_mod under a vmap for each of its arguments, that of ``order[0]`` innermost."""
    for argument in order:
        in_dims = tuple(0 if place == argument else None for place in range(4))
        mask_mod = torch.vmap(mask_mod, in_dims=in_dims)
    return mask_mod(*positions)


ODD_POSITIONS = {
    "an offset": lambda n: torch.arange(3, n + 3),
    "a step": lambda n: torch.arange(0, 2 * n, 2),
    "other values": lambda n: torch.arange(0, n) * 2,
    "another dtype": lambda n: torch.arange(0, n, dtype=torch.int32),
}


@pytest.mark.parametrize("which", ODD_POSITIONS)
def test_other_positions_are_not_taken_for_indices(
    which: str, caplog: pytest.LogCaptureFixture
) -> None:
    def step(end: Tensor) -> Any:
        one, n = torch.arange(0, 1), LENGTH // 2
        queries = ODD_POSITIONS[which](n)
        return lists_of_dense(nested(tree(end), one, one, queries, torch.arange(0, n)))

    expect_dense(step, ends(3 * LENGTH), warning="in another way", caplog=caplog)


def test_dimensions_decide_which_index_is_which() -> None:
    def step(end: Tensor) -> Any:
        one, n = torch.arange(0, 1), torch.arange(0, LENGTH)
        return lists_of_dense(nested(tree(end), one, one, n, n, order=(2, 3, 1, 0)))

    backend = PassThenEager()
    found = compiled(step, backend)(ends(LENGTH))
    assert count_calls(backend.graphs[0], "block_lists_of_mask") == 0
    for one, other in zip(found, step(ends(LENGTH)), strict=True):
        assert torch.equal(one, other)


def test_a_write_between_mask_and_lists(caplog: pytest.LogCaptureFixture) -> None:
    def step(end: Tensor) -> Any:
        mask = flex_attention.create_mask(tree(end), 1, 1, LENGTH, LENGTH, device="cpu")
        end.sub_(20)
        return lists_of_dense(mask)

    expect_dense(step, ends(LENGTH), warning="is written to", caplog=caplog)


def test_two_masks_of_one_region() -> None:
    def step(end: Tensor) -> tuple[BlockMask, BlockMask]:
        return build(end, 70), build(end + 5, 40)

    backend = PassThenEager()
    first, second = compiled(step, backend)(ends(LENGTH))
    assert count_calls(backend.graphs[0], "block_lists_of_mask") == 0
    expect_same(first, flexs(tree(ends(LENGTH), 70), LENGTH))
    expect_same(second, flexs(tree(ends(LENGTH) + 5, 40), LENGTH))
