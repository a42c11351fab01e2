"""Keys that are equal for equal pieces of a graph, whatever their nodes are called."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import fx

from .flex_call import example_value


def identity(argument: Any) -> Hashable:
    """What makes an operand the same operand: its node or value or, for a size, what it equals.

    Lengths that guards have made equal come in as several inputs of a graph.
    """
    value = example_value(argument)
    return value.node.expr if isinstance(value, torch.SymInt) else argument


def freeze(argument: Any, of_node: Callable[[fx.Node], Hashable]) -> Hashable:
    """A hashable key of a node's argument: equal for arguments that mean the same.

    Args:
        argument: what ``Node.args`` or ``Node.kwargs`` holds.
        of_node: the key of a node inside it.
    """
    if isinstance(argument, fx.Node):
        return fx.Node, of_node(argument)
    if isinstance(argument, (tuple, list)):
        return tuple, tuple(freeze(item, of_node) for item in argument)
    if isinstance(argument, dict):
        return dict, tuple((name, freeze(item, of_node)) for name, item in argument.items())
    if isinstance(argument, slice):
        bounds = (argument.start, argument.stop, argument.step)
        return slice, freeze(bounds, of_node)
    # 1, 1.0 and True are equal as keys, and so are 0.0 and -0.0, but mean different things.
    return type(argument), repr(argument) if isinstance(argument, float) else argument


def graph_structure(module: fx.GraphModule) -> Hashable:
    """A key of what a graph computes from its inputs."""
    places: dict[fx.Node, int] = {}
    rows = []
    for place, node in enumerate(module.graph.nodes):
        target: Any = node.target
        if node.op == "placeholder":
            target = None
        elif node.op == "get_attr":
            target = id(getattr(module, str(target), target))
        key = (freeze(node.args, places.__getitem__), freeze(node.kwargs, places.__getitem__))
        rows.append((node.op, target, key))
        places[node] = place
    return tuple(rows)
