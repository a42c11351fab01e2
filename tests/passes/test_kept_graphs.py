"""Calls that no model makes through flex's API, but another graph pass or a later torch may."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from passes.flex_call import FLEX_ATTENTION
from tests.passes.hand_written import call_graph, reason_of


def call_of(gm: fx.GraphModule) -> fx.Node:
    (call,) = gm.graph.find_nodes(op="call_function", target=FLEX_ATTENTION)
    return call


def reshape(gm: fx.GraphModule, **shapes: tuple[int, ...]) -> None:
    """Give inputs of the graph other shapes."""
    for node in gm.graph.find_nodes(op="placeholder"):
        if node.name in shapes:
            value = node.meta["example_value"]
            node.meta["example_value"] = value.new_empty(shapes[node.name])


def replace_argument(gm: fx.GraphModule, place: int, argument: Any) -> None:
    call = call_of(gm)
    args = list(call.args)
    args[place] = argument(args[place]) if callable(argument) else argument
    call.args = tuple(args)


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        ({"value": (2, 2, 100, 16)}, "key and value differ in length"),
        ({"key": (2, 2, 192, 8)}, "query and key differ in head dimension"),
        (
            {"value": (2, 1, 192, 16)},
            "the head counts are not constants, or differ between key and value",
        ),
        ({"query": (2, 192, 16)}, "query, key and value must have 4 dimensions"),
        ({"key": (2, 2, 0, 16), "value": (2, 2, 0, 16)}, "the query or the key is empty"),
        ({"kv_indices": (2, 1, 2, 5)}, "block list kv_indices has 5 columns of blocks, over 2"),
        ({"kv_num_blocks": (1, 1)}, "block list kv_num_blocks is no int32 tensor of 3 dimensions"),
        ({"kv_indices": (1, 1, 2, 2)}, "the block lists differ in batch size: 1 and 2"),
        ({"kv_indices": (2, 3, 2, 2)}, "block list kv_indices has head size 3, not 1 or 4"),
    ],
)
def test_shapes(shapes: dict[str, tuple[int, ...]], reason: str) -> None:
    gm = call_graph()
    reshape(gm, **shapes)
    assert reason_of(gm) == reason


def test_a_query_on_another_device_than_the_key() -> None:
    gm = call_graph()
    (key,) = (node for node in gm.graph.find_nodes(op="placeholder") if node.name == "key")
    value = key.meta["example_value"]
    key.meta["example_value"] = value.to("meta")
    assert reason_of(gm) == "key is on meta, the query is on cpu"


def test_a_tensor_that_is_no_plain_one() -> None:
    gm = call_graph()
    (key,) = (node for node in gm.graph.find_nodes(op="placeholder") if node.name == "key")
    key.meta["example_value"] = torch.nn.Parameter(torch.empty(2, 2, 192, 16))
    assert reason_of(gm) == "key is a Parameter, not a plain tensor"


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_a_scale_that_is_not_finite(scale: float) -> None:
    gm = call_graph()
    replace_argument(gm, 5, scale)
    assert reason_of(gm) == f"its scale is {scale}"


@pytest.mark.parametrize(
    ("place", "argument", "reason"),
    [
        (1, None, "key is not a tensor that tracing recorded"),
        (3, None, "score_mod is not a subgraph of the graph"),
        (5, "a text", "the scale is not a constant"),
        (6, ("BLOCK_M", 64), "the kernel options are not constant"),
        (4, lambda mask: 3, "unknown layout of the block mask: <class 'int'> entries"),
        (
            4,
            lambda mask: (*mask[:4], mask[2], *mask[5:]),
            "one list of full blocks is given without the other",
        ),
        (4, lambda mask: (*mask[:-3], None, *mask[-2:]), "a block size is not a number"),
        (4, lambda mask: (*mask[:-1], None), "mask_mod is not a subgraph of the graph"),
    ],
)
def test_arguments(place: int, argument: Any | Callable[[Any], Any], reason: str) -> None:
    gm = call_graph()
    replace_argument(gm, place, argument)
    assert reason_of(gm).startswith(reason)


def test_a_subgraph_that_is_gone() -> None:
    gm = call_graph()
    del gm.mask_mod
    assert reason_of(gm) == "mask_mod is not a subgraph of the graph"


def test_an_argument_of_another_name() -> None:
    gm = call_graph()
    call_of(gm).kwargs = {"is_causal": True}
    assert reason_of(gm).startswith("unknown arguments of flex_attention: ['block_mask', 'is_c")
