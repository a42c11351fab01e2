"""Changing an fx graph so that every change can be taken back."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from .effects import dead_writes, is_removable
from .flex_call import example_value

_VALUE_KEYS = frozenset({"example_value", "val", "tensor_meta"})


class GraphEdit:
    """Inserts nodes into a graph and moves users to them, as steps that can be undone.

    New nodes carry the metadata of the node that they were inserted for (stack trace, module
    stack, recompute tags) and the fake value that they produce themselves, so that a later pass
    sees them as if tracing had written them.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self._inserted: list[fx.Node] = []
        self._moved: list[tuple[fx.Node, fx.Node, list[fx.Node]]] = []
        self._site: fx.Node | None = None
        self._last_settled: fx.Node | None = None

    @contextmanager
    def before(self, site: fx.Node) -> Iterator[None]:
        """Insert what the block emits before ``site``; if it raises, nothing is inserted."""
        start = site.prev
        self._site, self._last_settled = site, start
        try:
            with self.graph.inserting_before(site):
                yield
                self.settle()
        except BaseException:
            for node in reversed(list(_between(start, site))):
                self.graph.erase_node(node)
            raise
        finally:
            self._site = self._last_settled = None
        self._inserted.extend(_between(start, site))

    def settle(self, marks: Mapping[str, Any] | None = None) -> None:
        """Complete the nodes emitted since the last time: fake values and other metadata.

        Args:
            marks: metadata of our own to give them.
        """
        site, last = self._site, self._last_settled
        assert site is not None, "nothing is being inserted"
        assert last is not None, "nothing is being inserted"
        key = "example_value" if "example_value" in site.meta else "val"
        inherited = {name: item for name, item in site.meta.items() if name not in _VALUE_KEYS}
        with _fake_mode(site):
            for node in _between(last, site):
                node.meta = {**inherited, **(marks or {}), key: _run(node)}
        self._last_settled = site.prev

    def getitem(self, node: fx.Node, index: int) -> fx.Node:
        """Emit ``node[index]``."""
        return self.graph.call_function(operator.getitem, (node, index))

    def move_users(self, old: fx.Node, new: fx.Node) -> None:
        """Let everything that uses ``old`` use ``new``."""
        self._moved.append((old, new, list(old.users)))
        old.replace_all_uses_with(new)

    def undo(self) -> None:
        """Take back every move and every insertion."""
        for old, new, users in reversed(self._moved):
            for user in users:
                user.replace_input_with(new, old)
        for node in reversed(self._inserted):
            self.graph.erase_node(node)
        self._moved, self._inserted = [], []

    def sweep(self, replaced: Iterable[fx.Node]) -> None:
        """Remove replaced nodes, their unused items and what only they used. Not to be undone."""
        unused: list[fx.Node] = []
        for node in replaced:
            for item in list(node.users):
                self.graph.erase_node(item)
            unused.extend(node.all_input_nodes)
            self.graph.erase_node(node)
        seen_attributes = set()
        while unused:
            node = unused.pop()
            if node._erased:
                continue
            for write in dead_writes(node):
                unused.extend(write.all_input_nodes)
                self.graph.erase_node(write)
            if not is_removable(node):
                continue
            if node.op == "get_attr":
                seen_attributes.add(str(node.target))
            unused.extend(node.all_input_nodes)
            self.graph.erase_node(node)
        if not seen_attributes:
            return
        owner = self.graph.owning_module
        needed = {str(node.target) for node in self.graph.find_nodes(op="get_attr")}
        for name in seen_attributes - needed:
            if isinstance(getattr(owner, name, None), fx.GraphModule):
                delattr(owner, name)


def _between(first: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
    node = first.next
    while node is not last:
        yield node
        node = node.next


def _fake_mode(site: fx.Node) -> FakeTensorMode:
    for node in (site, *site.all_input_nodes):
        values = example_value(node)
        for value in values if isinstance(values, (tuple, list)) else (values,):
            if isinstance(value, FakeTensor):
                return value.fake_mode
    raise ValueError(f"{site} has no fake value that tracing recorded")


def _run(node: fx.Node) -> Any:
    args = fx.map_arg(node.args, example_value)
    kwargs = fx.map_arg(node.kwargs, example_value)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    if node.op != "call_function" or isinstance(node.target, str):
        raise TypeError(f"an emitted node calls a function or method, not {node.op}")
    return node.target(*args, **kwargs)
