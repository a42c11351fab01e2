"""Which nodes write, which may be dropped, and what hoisting must leave where it is."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from passes.effects import Writes, is_removable, written
from passes.structure import freeze, graph_structure


def node_of(build: Callable[[fx.Graph, fx.Node, fx.Node], fx.Node]) -> tuple[fx.Node, list[str]]:
    """A node built on two tensors ``a`` and ``b``, and the names of what it may write to."""
    graph = fx.Graph()
    with FakeTensorMode():
        a, b = graph.placeholder("a"), graph.placeholder("b")
        a.meta["example_value"], b.meta["example_value"] = torch.empty(3), torch.empty(3)
        node = build(graph, a, b)
        node.meta["example_value"] = torch.empty(3)
    return node, [argument.name for argument in written(node)]


def user_function(a: Any, b: Any) -> Any:
    return a.add_(b)


@pytest.mark.parametrize(
    ("build", "targets"),
    [
        (lambda g, a, b: g.call_method("add_", (a, b)), ["a"]),
        (lambda g, a, b: g.call_method("add", (a, b)), []),
        (lambda g, a, b: g.call_method("__iadd__", (a, b)), ["a"]),
        (lambda g, a, b: g.call_method("__and__", (a, b)), []),
        (lambda g, a, b: g.call_method("__setitem__", (a, 0, b)), ["a"]),
        (lambda g, a, b: g.call_function(operator.iadd, (a, b)), ["a"]),
        (lambda g, a, b: g.call_function(operator.setitem, (a, 0, b)), ["a"]),
        (lambda g, a, b: g.call_function(operator.and_, (a, b)), []),
        (lambda g, a, b: g.call_function(torch.relu_, (a,)), ["a"]),
        (lambda g, a, b: g.call_function(torch.add, (a, b)), []),
        (lambda g, a, b: g.call_function(torch.add, (a, a), {"out": b}), ["b"]),
        (lambda g, a, b: g.call_function(torch.nn.functional.relu, (a, True)), ["a"]),
        (
            lambda g, a, b: g.call_function(torch.nn.functional.relu, (a,), {"inplace": True}),
            ["a"],
        ),
        (lambda g, a, b: g.call_function(torch.nn.functional.relu, (a,)), []),
        (lambda g, a, b: g.call_function(torch.ops.aten.add_.Tensor, (a, b)), ["a", "b"]),
        (lambda g, a, b: g.call_function(torch.ops.aten.add.Tensor, (a, b)), []),
        (lambda g, a, b: g.call_function(torch.ops.aten.index, (a, [b])), []),
        (lambda g, a, b: g.call_function(torch.ops.aten.copy_, (a, b)), ["a", "b"]),
        (lambda g, a, b: g.call_function(user_function, (a, b)), ["a", "b"]),
        (lambda g, a, b: g.call_module("submodule", (a, b)), ["a", "b"]),
    ],
)
def test_what_a_node_writes_to(build: Any, targets: list[str]) -> None:
    node, actual = node_of(build)
    assert actual == targets
    assert is_removable(node) == (not targets)


@pytest.mark.parametrize(
    "build",
    [
        lambda g, a, b: g.call_function(torch.rand_like, (a,)),
        lambda g, a, b: g.call_function(torch.nn.functional.dropout, (a,)),
        lambda g, a, b: g.call_function(torch._C._set_grad_enabled, (False,)),
    ],
)
def test_what_is_there_for_more_than_its_value(build: Any) -> None:
    node, _ = node_of(build)
    if node.target is torch._C._set_grad_enabled:
        node.meta["example_value"] = None
    assert not is_removable(node)


def test_a_view_is_written_through() -> None:
    graph = fx.Graph()
    with FakeTensorMode():
        base, other = graph.placeholder("base"), graph.placeholder("other")
        base.meta["example_value"], other.meta["example_value"] = torch.empty(4), torch.empty(4)
        view = graph.call_method("view", (base, 2, 2))
        view.meta["example_value"] = base.meta["example_value"].view(2, 2)
        write = graph.call_method("zero_", (view,))
        write.meta["example_value"] = view.meta["example_value"]
        last = graph.call_method("sum", (base,))
    writes = Writes(graph)
    assert writes.between(base, last, [base])
    assert not writes.between(base, last, [other])
    assert not writes.between(write, last, [base])


def test_structure_ignores_names_and_tells_values_apart() -> None:
    def traced(fn: Callable[..., Any]) -> Any:
        return graph_structure(fx.symbolic_trace(fn))

    same = traced(lambda b, h, q, k: (q >= k) & (q < 3))
    assert same == traced(lambda batch, head, i, j: (i >= j) & (i < 3))
    assert same != traced(lambda b, h, q, k: (q >= k) & (q < 4))
    assert same != traced(lambda b, h, q, k: (k >= q) & (q < 3))
    keys = [freeze(value, id) for value in (1, 1.0, True, 0.0, -0.0, (1,), slice(1, None))]
    assert len(set(keys)) == len(keys)
