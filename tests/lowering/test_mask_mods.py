"""Callables of every kind, masks of other libraries, and graphs as Dynamo makes them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    and_masks,
    create_block_mask,
    flex_attention,
    noop_mask,
    or_masks,
)

from tests.lowering.checks import dense, reference
from tree_attn_op.lowering import CapturedInfo, Lowered, lower, lower_mask_mod

B, LENGTH = 3, 16
generator = torch.Generator().manual_seed(3)
group = torch.randint(0, 4, (B, LENGTH), generator=generator)
limits = torch.tensor([5, 9, 16])


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def same_group(b: Tensor, h: Tensor, q: Tensor, k: Tensor, ids: Tensor = group) -> Tensor:
    return ids[b, q] == ids[b, k]


class Mask:
    """Masks as methods and as an object."""

    def __init__(self, window: int):
        self.window, self.ids = window, group

    def __call__(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q - k < self.window) & (self.ids[b, q] == self.ids[b, k])

    def method(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return self(b, h, q, k) & causal(b, h, q, k)


def check(mask_mod: Callable[..., Tensor], text: str | None) -> Lowered:
    lowered, captured = lower_mask_mod(mask_mod, "cpu")
    assert text is None or str(lowered.predicate) == text

    def function(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return mask_mod(b, h, q, k)

    expected = reference(function, B, LENGTH, LENGTH)
    assert torch.equal(dense(lowered, captured, B, LENGTH, LENGTH), expected)
    return lowered


@pytest.mark.parametrize(
    ("mask_mod", "text"),
    [
        (causal, "q >= k"),
        (partial(same_group, ids=group.flip(0)), "q0 == k0"),
        (Mask(4), "q - k < 4 & q0 == k0"),
        (lambda b, h, q, k: torch.zeros_like(h) <= q - k, "q >= k"),
        (lambda b, h, q, k: torch.abs(q - k) % torch.tensor(4) == 1, None),
        (lambda b, h, q, k: (q - k) // 4 <= 1, "q - k < 8"),
        (lambda b, h, q, k: torch.div(k - q, 4, rounding_mode="floor") == 1, None),
        (lambda b, h, q, k: (group[b, q] - group[b, k]) % 8 != 3, "q0 != k0"),
        (Mask(4).method, "q >= k & q - k < 4 & q0 == k0"),
        (and_masks(causal, same_group), "q >= k & q0 == k0"),
        (or_masks(same_group, and_masks(causal, Mask(4))), "q0 == k0"),
        (and_masks(), "True"),
        (or_masks(), "False"),
        (noop_mask, "True"),
        (lambda b, h, q, k: q.new_zeros((), dtype=torch.bool), "False"),
        (lambda b, h, q, k: (k < limits[b]) & (q >= k), "q >= k & k0 != 0"),
        (lambda b, h, q, k: torch.tensor(3) > k, "k0 != 0"),
        (
            lambda b, h, q, k: group[b, torch.maximum(q, k)] == 1,
            "(q >= k & q0 != 0) | (q < k & k0 != 0)",
        ),
        (lambda b, h, q, k: torch.nn.functional.relu(q - k) < 1, "q <= k"),
    ],
    ids=range(19),
)
def test_callables(mask_mod: Callable[..., Tensor], text: str) -> None:
    check(mask_mod, text)


def test_literals_are_no_captures() -> None:
    lowered, captured = lower_mask_mod(
        lambda b, h, q, k: (q - k < torch.tensor(4)) & (k < torch.tensor(9)), "cpu"
    )
    assert not captured
    assert not lowered.captures_used


def test_a_tensor_captured_twice_is_one_operand() -> None:
    again = group
    _, captured = lower_mask_mod(lambda b, h, q, k: group[b, q] == again[b, k], "cpu")
    assert len(captured) == 1
    assert captured[0] is group


def test_transformers_masks() -> None:
    masking = pytest.importorskip("transformers.masking_utils")
    packed = torch.arange(LENGTH).expand(B, LENGTH) // 6
    padding = torch.arange(LENGTH) < limits[:, None]
    causal_mask = masking.causal_mask_function
    check(causal_mask, "q >= k")
    check(masking.sliding_window_causal_mask_function(5), "q >= k & q - k < 5")
    document = masking.packed_sequence_mask_function(packed)
    check(masking.and_masks(causal_mask, document), "q >= k & q0 == k0")
    padded = masking.and_masks(causal_mask, masking.padding_mask_function(padding))
    check(padded, "q >= k & k0 != 0")
    chunked = masking.chunked_causal_mask_function(4, torch.zeros(B, dtype=torch.int64))
    check(chunked, "q >= k & q0 == k0")
    bidirectional = masking.or_masks(causal_mask, document)
    check(bidirectional, "q >= k | q0 == k0")


def test_block_mask_of_several_batch_rows() -> None:
    block_mask = create_block_mask(
        and_masks(causal, same_group), B, None, LENGTH, LENGTH, device="cpu"
    )
    lowered = check(block_mask.mask_mod, "q >= k & q0 == k0")
    assert lowered.captures_used


def mask_graphs(function: Callable[..., Any], *inputs: Tensor) -> list[Lowered]:
    """Lower the mask graphs of all flex_attention calls, as Dynamo hands them over."""
    found: list[Lowered] = []

    def backend(module: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        for node in module.graph.nodes:
            if node.target is torch.ops.higher_order.flex_attention:
                mask = getattr(module, node.args[4][-1].target)
                operands = [
                    arg.meta["example_value"] if isinstance(arg, torch.fx.Node) else arg
                    for arg in node.args[-1]
                ]
                found.append(lower(mask, [CapturedInfo.of(operand) for operand in operands]))
        return module.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend)(*inputs)
    return found


def test_dynamo_graphs() -> None:
    length = 128
    ids = torch.arange(length).expand(2, length) // 20
    parents, count = (ids - 1).clamp(min=0), torch.tensor(100)

    def tree(b, h, q, k):
        return (q >= k) & ((ids[b, q] == ids[b, k]) | (parents[b][q] == ids[b][k]))

    def padded(b, h, q, k):
        mask = q >= k
        mask &= k < count
        return mask & torch.where(b == 0, q < count, q - k < 9)

    masks = [tree, and_masks(causal, tree), padded, causal]
    block_masks = [create_block_mask(m, 2, None, length, length, device="cpu") for m in masks]

    def attend(query: Tensor) -> list[Tensor]:
        return [flex_attention(query, query, query, block_mask=m) for m in block_masks]

    found = mask_graphs(attend, torch.randn(2, 2, length, 16))
    assert [str(lowered.predicate) for lowered in found] == [
        "q >= k & (q0 == k0 | q1 == k0)",
        "q >= k & (q0 == k0 | q1 == k0)",
        "q >= k & k0 != 0 & (q0 != 0 | (q - k < 9 & q1 != 0))",
        "q >= k",
    ]
    assert [lowered.captures_used for lowered in found] == [True, True, True, False]


def test_dynamo_graph_with_symbolic_shapes_and_ints() -> None:
    def attend(query: Tensor, ids: Tensor, window: int) -> Tensor:
        length = query.shape[2]

        def mask_mod(b, h, q, k):
            flat = ids.view(-1)
            return (flat[b * length + q] == flat[b * length + k]) & (q - k < window)

        block_mask = create_block_mask(mask_mod, 2, None, length, length, device="cpu")
        return flex_attention(query, query, query, block_mask=block_mask)

    inputs = []
    for length, window in ((128, 7), (256, 9), (384, 11)):
        inputs.append((torch.randn(2, 2, length, 16), torch.zeros(2, length).long(), window))

    found: list[Lowered] = []

    def backend(module: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        for node in module.graph.nodes:
            if node.target is torch.ops.higher_order.flex_attention:
                mask = getattr(module, node.args[4][-1].target)
                operands = [
                    arg.meta["example_value"] if isinstance(arg, torch.fx.Node) else arg
                    for arg in node.args[-1]
                ]
                found.append(lower(mask, [CapturedInfo.of(operand) for operand in operands]))
        return module.forward

    torch._dynamo.reset()
    compiled = torch.compile(attend, backend=backend)
    for given in inputs:
        compiled(*given)
    texts = [str(lowered.predicate) for lowered in found]
    assert texts[0] == "q - k < 7 & q0 == k0"
    assert texts[-1] == "q - k < q0 & q1 == k0"
    assert len(texts) == 2
