"""Moving what prepares a mask out of checkpointed bodies, so that it runs once.

Each checkpointed layer is a graph of its own, which would compute the mask's values and block
lists for itself, in the forward and again when the backward recomputes it. They depend on nothing
but the body's inputs, so the surrounding graph can compute them once and hand them in.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import fx

from .edit import GraphEdit
from .effects import Writes
from .structure import freeze, identity

PREPARES_MASK = "tree_attn_prepares_mask"
"""Metadata key of the nodes that compute a mask's values and lists."""

_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint


def hoist_masks(graph: fx.Graph) -> bool:
    """Move the preparation of masks from the checkpointed bodies of ``graph`` into ``graph``.

    Equal preparations of several bodies, and of ``graph`` itself, become one.

    Returns:
        whether anything was moved.
    """
    sites = []
    for site in graph.find_nodes(op="call_function", target=_CHECKPOINT):
        body = _own_body(site)
        nodes = [] if body is None else _movable(body.graph)
        if body is not None and nodes:
            sites.append((site, body, nodes))
    if not sites:
        return False
    edit, known = GraphEdit(graph), _Known(graph)
    for site, body, nodes in sites:
        inputs = body.graph.find_nodes(op="placeholder")
        outer: dict[fx.Node, Any] = dict(zip(inputs, site.args[1:], strict=True))
        with edit.before(site):
            for node in nodes:
                args, kwargs = fx.map_arg((node.args, node.kwargs), outer.__getitem__)
                copy = known.find(node.op, node.target, args, kwargs, site)
                if copy is None:
                    copy = graph.create_node(node.op, node.target, args, kwargs)
                    copy.meta = dict(node.meta)
                    known.add(copy)
                outer[node] = copy
            edit.settle({PREPARES_MASK: True})
        _pass_in(site, body, nodes, outer)
    return True


def _own_body(site: fx.Node) -> fx.GraphModule | None:
    """The body of a call, if nothing else runs it and its inputs are the call's arguments."""
    reference = site.args[0]
    if (
        not isinstance(reference, fx.Node)
        or reference.op != "get_attr"
        or len(reference.users) > 1
    ):
        return None
    body = getattr(site.graph.owning_module, str(reference.target), None)
    if not isinstance(body, fx.GraphModule):
        return None
    references = site.graph.find_nodes(op="get_attr")
    inputs = body.graph.find_nodes(op="placeholder")
    alone = sum(node.target == reference.target for node in references) == 1
    return body if alone and len(inputs) == len(site.args) - 1 else None


def _movable(body: fx.Graph) -> list[fx.Node]:
    """The nodes that prepare masks from nothing but inputs that the body does not write to."""
    inputs = body.find_nodes(op="placeholder")
    available = set(inputs)
    writes = Writes(body)
    movable: list[fx.Node] = []
    for node in body.nodes:
        if not node.meta.get(PREPARES_MASK) or not available.issuperset(node.all_input_nodes):
            continue
        if not writes.between(inputs[0], node, node.all_input_nodes):
            movable.append(node)
            available.add(node)
    return movable


class _Known:
    """The nodes of a graph that prepare masks, found by what they compute."""

    def __init__(self, graph: fx.Graph) -> None:
        self._writes = Writes(graph)
        self._nodes: dict[Hashable, list[fx.Node]] = {}
        # With equal lengths, the positions of queries and of keys are two nodes of one value.
        self._first: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:
            if node.meta.get(PREPARES_MASK):
                self.add(node)

    def add(self, node: fx.Node) -> None:
        """Remember a node."""
        equal = self.find(node.op, node.target, node.args, node.kwargs, node)
        if equal is not None:
            self._first[node] = equal
            return
        key = self._key(node.op, node.target, node.args, node.kwargs)
        self._nodes.setdefault(key, []).append(node)

    def find(self, op: str, target: Any, args: Any, kwargs: Any, site: fx.Node) -> fx.Node | None:
        """A node before ``site`` whose value is what a call there would give."""
        for node in self._nodes.get(self._key(op, target, args, kwargs), ()):
            if node < site and not self._writes.between(node, site, node.all_input_nodes):
                return node
        return None

    def _key(self, op: str, target: Any, args: Any, kwargs: Any) -> Hashable:
        def first(node: fx.Node) -> Hashable:
            return identity(self._first.get(node, node))

        return op, target, freeze(args, first), freeze(kwargs, first)


def _pass_in(
    site: fx.Node, body: fx.GraphModule, moved: list[fx.Node], outer: Mapping[fx.Node, Any]
) -> None:
    """Give the body what was moved out of it as inputs."""
    inputs = body.graph.find_nodes(op="placeholder")
    taken = {str(node.target) for node in inputs}
    inside = set(moved)
    for node in moved:
        if inside.issuperset(node.users):
            continue
        name = f"tree_attn_{len(inputs)}"
        assert name not in taken, f"the body has an input {name} of its own"
        with body.graph.inserting_after(inputs[-1]):
            given = body.graph.placeholder(name)
        given.meta = dict(node.meta)
        node.replace_all_uses_with(given, lambda user: user not in inside)
        site.args = (*site.args, outer[node])
        inputs.append(given)
    for node in reversed(moved):
        body.graph.erase_node(node)
    body.recompile()
