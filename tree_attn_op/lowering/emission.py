"""Graph nodes and tensors that compute the values of a lowered mask.

A mask is evaluated here for every query and every key, whereas flex_attention evaluates it on
listed blocks only. A look-up that would be out of range for a token that no listed block holds
must not trap, so indices are clamped to ``[-n, n - 1]`` (negative ones count from the end, as
always) unless they are certainly in range. A tensor that is certainly too short for the positions
themselves is refused.

Whoever reads the values at once and keeps none of them may *borrow*: rows that merely are a
captured tensor, or a part of it, are then views of it, and nothing is computed.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from . import reasons
from .functions import FUNCTIONS, SCALAR_FUNCTIONS, sliced
from .rows import Lowered
from .values import CapturedInfo, Deps, Expr, bare_index, check_devices, children

Size = Any
"""An int, or a graph node that yields a SymInt."""


def emit(
    lowered: Lowered,
    graph: fx.Graph,
    captured_nodes: Sequence[Any],
    batch: Size,
    q_len: Size,
    kv_len: Size,
    device: torch.device | str,
) -> tuple[fx.Node, fx.Node]:
    """Insert nodes that compute the values, at the graph's insertion point.

    Args:
        lowered: the mask.
        graph: a graph of the pre-grad dialect (torch functions and Tensor methods).
        captured_nodes: the captured operands in order: nodes, or Python numbers.
        batch, q_len, kv_len: ints, or nodes that yield SymInts.
        device: where the values are computed; that of the captured tensors.

    Raises:
        UnsupportedMask: a captured tensor lives on another device, or is too short.

    Returns:
        nodes of ``q_vals [batch or 1, R, q_len]`` and ``k_vals [batch or 1, C, kv_len]``,
        contiguous, of ``lowered.value_dtype``. The batch is 1 where no row depends on b. Their
        ``meta`` is the caller's to fill.
    """
    return _Emitter(lowered, graph, captured_nodes, batch, q_len, kv_len, device).values()


def evaluator(
    lowered: Lowered,
    captured: Sequence[CapturedInfo],
    B: int,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str,
    borrow: bool = False,
) -> fx.GraphModule:
    """A module that computes the values from captured operands that are as ``captured`` says.

    With ``borrow``, the values may be views of the operands, of any strides.
    """
    # Those given now, which may differ in size from those that the mask was lowered with.
    lowered = replace(lowered, captured=tuple(captured))
    graph = fx.Graph()
    nodes = [graph.placeholder(f"captured_{i}") for i in range(len(captured))]
    emitter = _Emitter(lowered, graph, nodes, B, Q_LEN, KV_LEN, device, borrow)
    graph.output(emitter.values())
    return fx.GraphModule(torch.nn.Module(), graph)


def evaluate(
    lowered: Lowered,
    captured_values: Sequence[Any],
    B: int,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str,
) -> tuple[Tensor, Tensor]:
    """The values themselves, computed now: see :func:`emit`."""
    infos = tuple(map(CapturedInfo.of, captured_values))
    module = evaluator(lowered, infos, B, Q_LEN, KV_LEN, device)
    with torch.no_grad():
        return module(*captured_values)


class _Emitter:
    def __init__(
        self,
        lowered: Lowered,
        graph: fx.Graph,
        captured_nodes: Sequence[Any],
        batch: Size,
        q_len: Size,
        kv_len: Size,
        device: torch.device | str,
        borrow: bool = False,
    ):
        if len(captured_nodes) != len(lowered.captured):
            raise ValueError(
                f"the mask has {len(lowered.captured)} captured operands, got "
                f"{len(captured_nodes)}"
            )
        self.lowered, self.graph, self.captured_nodes = lowered, graph, captured_nodes
        check_devices(lowered.captured, torch.device(device))
        self.lengths = {"b": batch, "q": q_len, "k": kv_len}
        self.device = torch.device(device)
        self.borrow = borrow
        self.raw: dict[Expr, Any] = {}
        self.in_rows: dict[Expr, Any] = {}

    def call(self, function: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_function(function, args, kwargs)

    def values(self) -> tuple[fx.Node, fx.Node]:
        """The nodes of ``q_vals`` and ``k_vals``."""
        lowered, dtype = self.lowered, self.lowered.value_dtype
        return (
            self.stack(lowered.q_rows, self.lengths["q"], dtype),
            self.stack(lowered.k_rows, self.lengths["k"], dtype),
        )

    def stack(self, rows: Sequence[Expr], length: Size, dtype: torch.dtype) -> fx.Node:
        """Rows as one tensor [batch or 1, rows, length], contiguous unless it may be borrowed."""
        if not rows:
            return self.call(torch.empty, (1, 0, length), dtype=dtype, device=self.device)
        batch = self.lengths["b"] if any(row.deps & Deps.B for row in rows) else 1
        nodes = []
        for row in rows:
            node = self.lifted(row)
            if row.dtype is not dtype:
                node = self.graph.call_method("to", (node, dtype))
            if not self.borrow or _dims(row) != (batch != 1, True):
                node = self.call(torch.broadcast_to, node, (batch, length))
            nodes.append(node)
        if self.borrow and len(nodes) == 1:
            return self.graph.call_method("unsqueeze", (nodes[0], 1))
        return self.call(torch.stack, nodes, dim=1)

    def lifted(self, expr: Expr) -> Any:
        """The node of a value of one token: [batch or 1, length or 1]."""
        node = self.in_rows.get(expr)
        if node is None:
            node = self.in_rows[expr] = self.make_lifted(expr)
        return node

    def make_lifted(self, expr: Expr) -> Any:
        if expr.is_scalar:
            return self.invariant(expr)
        if expr.op == "index":
            name = expr.args[0]
            positions = self.call(
                torch.arange, self.lengths[name], dtype=torch.int64, device=self.device
            )
            return self.call(torch.unsqueeze, positions, 1 if name == "b" else 0)
        if expr.op == "constant":
            value, dtype = expr.args
            return self.call(torch.full, (1, 1), value, dtype=dtype, device=self.device)
        if expr.op == "gather":
            return self.gather(*expr.args)
        if expr.lifted:
            return self.computed(expr, self.lifted)
        node = self.call(torch.reshape, self.invariant(expr), (1, 1))
        if self.on_other_device(expr):
            node = self.graph.call_method("to", (node, self.device))
        return node

    def invariant(self, expr: Expr) -> Any:
        """The node of something that depends on no index, in its own shape."""
        node = self.raw.get(expr)
        if node is None:
            node = self.raw[expr] = self.make_invariant(expr)
        return node

    def make_invariant(self, expr: Expr) -> Any:
        if expr.op == "captured":
            return self.captured_nodes[expr.args[0]]
        if expr.op == "constant":
            value, dtype = expr.args
            return self.call(torch.full, (), value, dtype=dtype, device=self.device)
        if expr.op == "tensor_of":
            number, dtype = expr.args
            value = self.invariant(number)
            return self.call(torch.full, (), value, dtype=dtype, device=self.device)
        if expr.op == "size":
            base, dim = expr.args
            return self.graph.call_method("size", (self.invariant(base), dim))
        return self.computed(expr, self.invariant)

    def computed(self, expr: Expr, operand: Any) -> fx.Node:
        def convert(arg: Any) -> Any:
            if isinstance(arg, Expr):
                return operand(arg)
            return tuple(map(convert, arg)) if isinstance(arg, tuple) else arg

        args = tuple(map(convert, expr.args))
        kwargs = {name: convert(value) for name, value in expr.kwargs}
        if expr.op == "to":
            return self.graph.call_method("to", args)
        if expr.op == "slice":
            return self.call(operator.getitem, args[0], sliced(*args[1:]))
        functions = SCALAR_FUNCTIONS if expr.is_scalar else FUNCTIONS
        return self.graph.call_function(functions[expr.op], args, kwargs)

    def gather(self, base: Expr, indices: tuple[Expr | int, ...]) -> fx.Node:
        """``base[indices]`` for every token."""
        if self.borrow and (view := self.view(base, indices)) is not None:
            return view
        table = self.invariant(base)
        items = tuple(
            self.bounded(base, dim, item) if isinstance(item, Expr) else item
            for dim, item in enumerate(indices)
        )
        return self.call(operator.getitem, table, items if len(items) > 1 else items[0])

    def view(self, base: Expr, indices: tuple[Expr | int, ...]) -> fx.Node | None:
        """``base[indices]`` as a view, or None where it is none.

        It is one if every index is a number or the positions themselves: the tensor up to the
        length, ``[1, length]``, or ``[batch, length]`` where b comes before the position.
        """
        items: list[Any] = []
        names = ""
        for dim, item in enumerate(indices):
            if not isinstance(item, Expr):
                items.append(item)
                continue
            name = "b" if item.op == "index" and item.args[0] == "b" else bare_index(item)
            if name is None:
                return None
            length, count = self.lengths[name], self.known_size(base, dim)
            if not isinstance(length, int) or not isinstance(count, int) or length > count:
                return None
            names += name
            items.append(slice(None) if length == count else slice(length))
        if names not in ("q", "k", "bq", "bk"):
            return None
        if len(names) == 1:
            items.insert(0, None)
        table = self.invariant(base)
        if all(item == slice(None) for item in items):
            return table
        return self.call(operator.getitem, table, tuple(items))

    def bounded(self, base: Expr, dim: int, item: Expr) -> Any:
        node = self.lifted(item)
        if item.is_scalar:
            return node
        count = self.known_size(base, dim)
        if item.op == "index":
            length = self.lengths[item.args[0]]
            if _at_most(length, count):
                return node
            if isinstance(length, int) and isinstance(count, int):
                raise reasons.too_short(item.args[0], length, count)
        if isinstance(count, int):
            return self.call(torch.clamp, node, -count, count - 1)
        size = self.graph.call_method("size", (self.invariant(base), dim))
        low, high = self.call(operator.neg, size), self.call(operator.sub, size, 1)
        return self.call(torch.clamp, node, low, high)

    def known_size(self, base: Expr, dim: int) -> Any:
        """The size of a captured tensor or a part of it, an int or a SymInt; None: not known."""
        while base.op == "select" and isinstance(base.args[1], int) and base.args[1] >= 0:
            dim += base.args[1] <= dim
            base = base.args[0]
        if base.op != "captured":
            return None
        shape = self.lowered.captured[base.args[0]].shape
        return None if shape is None else shape[dim]

    def on_other_device(self, expr: Expr) -> bool:
        """Whether a 0-d captured tensor lives elsewhere, which PyTorch allows in arithmetic."""
        leaves, stack = [], [expr]
        while stack:
            item = stack.pop()
            stack.extend(children(item.args, item.kwargs))
            if item.op == "captured" and not item.is_scalar:
                leaves.append(self.lowered.captured[item.args[0]].device)
        return any(leaf is not None and leaf.type != self.device.type for leaf in leaves)


def _dims(row: Expr) -> tuple[bool, bool]:
    """Whether a row is computed for each batch row, and for each token."""
    return bool(row.deps & Deps.B), bool(row.deps & (Deps.Q | Deps.K))


def _at_most(length: Size, count: Any) -> bool:
    """Whether a length is certainly no more than a size; guards nothing."""
    if isinstance(length, fx.Node):
        length = length.meta.get("example_value", length.meta.get("val"))
    if isinstance(length, int) and isinstance(count, int):
        return length <= count
    if isinstance(length, torch.SymInt) and isinstance(count, torch.SymInt):
        return bool(length.node.expr == count.node.expr)
    return False
