"""The walk over a mask graph: from nodes to the formula of its output."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..errors import UnsupportedMask
from . import constructors, operations, reasons  # noqa: F401 - they register their handlers
from .dialects import MUTATING_NAMES, describe, operation_name
from .formula import Formula, Truth
from .mixed import as_value, dtype_of
from .registry import HANDLERS, call
from .values import CapturedInfo, captured, index

_INDEX_NAMES = ("b", "h", "q", "k")


def formula_of_graph(
    graph: fx.Graph,
    operands: Sequence[CapturedInfo],
    *,
    index_placeholders: int = 4,
    check_dtypes: bool = False,
) -> Formula:
    """The formula that a mask graph computes.

    Args:
        graph: the first ``index_placeholders`` placeholders are b, h, q, k, the others the
            captured operands in order.
        operands: what is known of each captured operand.
        check_dtypes: refuse a node whose traced dtype (``meta["val"]``, of int64 indices) is not
            the one found here.

    Raises:
        UnsupportedMask: with the node, and its source line where the graph has it.
    """
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    if index_placeholders != len(_INDEX_NAMES):
        raise ValueError(f"a mask has the indices b, h, q and k, got {index_placeholders}")
    if len(placeholders) != index_placeholders + len(operands):
        raise ValueError(
            f"the mask graph has {len(placeholders)} placeholders, expected {index_placeholders} "
            f"indices and {len(operands)} captured operands"
        )
    _check_mutations(graph)
    values: dict[fx.Node, Any] = {}
    for position, node in enumerate(placeholders):
        if position < index_placeholders:
            values[node] = index(_INDEX_NAMES[position])
        else:
            position -= index_placeholders
            values[node] = as_value(captured(position, operands[position]))
    needed = _needed(graph)
    if len(needed) > reasons.MAX_NODES:
        raise reasons.too_many("graph nodes", len(needed), reasons.MAX_NODES)
    for node in graph.nodes:
        if node not in needed or node in values:
            continue
        try:
            values[node] = _value(node, values)
            if check_dtypes:
                _check_dtype(node, values[node])
        except UnsupportedMask as error:
            raise located(error, node) from error
    output = next(node for node in graph.nodes if node.op == "output")
    return values[output]


def _needed(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that the output depends on."""
    needed: set[fx.Node] = set()
    stack = [node for node in graph.nodes if node.op == "output"]
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack.extend(node.all_input_nodes)
    return needed


def _value(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    if node.op in ("call_function", "call_method"):
        args: Any = fx.node.map_aggregate(node.args, lambda arg: _argument(arg, values))
        kwargs: Any = fx.node.map_aggregate(node.kwargs, lambda arg: _argument(arg, values))
        result = call(node, args, kwargs)
        if _is_mutation(node) and dtype_of(result) is not dtype_of(args[0]):
            raise UnsupportedMask(
                "changes a tensor in place by values of another dtype",
                hint="Write x = x + y in place of x += y",
            )
        return result
    if node.op == "output":
        result = fx.node.map_aggregate(node.args[0], lambda arg: _argument(arg, values))
        if isinstance(result, (tuple, list)) and len(result) == 1:
            (result,) = result
        if isinstance(result, bool):
            return Truth(result)
        if not isinstance(result, Formula):
            raise UnsupportedMask("returns something other than a 0-d bool tensor")
        return result
    raise reasons.unsupported(f"a {node.op} node ({node.target})")


def _argument(arg: Any, values: dict[fx.Node, Any]) -> Any:
    return values[arg] if isinstance(arg, fx.Node) else arg


def _check_dtype(node: fx.Node, value: Any) -> None:
    traced = node.meta.get("val")
    if isinstance(traced, torch.Tensor) and (
        isinstance(value, Formula) or hasattr(value, "dtype")
    ):
        found = dtype_of(value)
        if found is not traced.dtype:
            raise UnsupportedMask(
                f"computes {describe(node)} in {reasons.short(traced.dtype)}, found "
                f"{reasons.short(found)}"
            )


def _check_mutations(graph: fx.Graph) -> None:
    """Refuse in-place operations unless nothing can tell them from out-of-place ones.

    That is so if the changed tensor is the fresh result of a computation, nothing reads it later,
    and nothing that read it earlier may be a view of it.
    """
    order = {node: position for position, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if not _is_mutation(node):
            continue
        changed = node.args[0] if node.args else None
        fine = (
            operation_name(node) in HANDLERS
            and isinstance(changed, fx.Node)
            and _is_fresh(changed)
            and all(
                user is node or (order[user] < order[node] and _is_fresh(user))
                for user in changed.users
            )
        )
        if not fine:
            raise located(
                UnsupportedMask(
                    f"changes a tensor in place ({describe(node)})",
                    hint="Write x = x & y in place of x &= y",
                ),
                node,
            )


_PLAIN_OPERATORS = (operator.and_, operator.or_, operator.not_, operator.is_)


def _is_mutation(node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method"):
        return False
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if "out" in node.kwargs or name.strip("_") in MUTATING_NAMES:
        return True
    return name.endswith("_") and not name.endswith("__") and target not in _PLAIN_OPERATORS


_MAY_ALIAS = frozenset(
    [
        "to",
        "type_as",
        "view",
        "reshape",
        "_unsafe_view",
        "expand",
        "broadcast_to",
        "flatten",
        "contiguous",
        "detach",
        "alias",
        "getitem",
        "index",
        "select",
        "slice",
        "squeeze",
        "unsqueeze",
        "transpose",
        "permute",
        "t",
        "lift_fresh",
        "bool",
        "char",
        "byte",
        "bfloat16",
        "double",
        "float",
        "half",
        "int",
        "long",
        "short",
        "getattr",
        "tensor",
        "as_tensor",
    ]
)


def _is_fresh(node: fx.Node) -> bool:
    """Whether a node's result is certainly a tensor of its own."""
    if node.op not in ("call_function", "call_method"):
        return False
    name = operation_name(node)
    return name in HANDLERS and name not in _MAY_ALIAS


def located(error: UnsupportedMask, node: fx.Node) -> UnsupportedMask:
    """``error`` with the node that caused it."""
    if error.node_name is None:
        error.node_name = node.name
        error.source = source_of(node)
    return error


_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_TORCH_HOME = os.path.dirname(torch.__file__)


def source_of(node: fx.Node) -> str | None:
    """``file:line`` of the innermost frame outside PyTorch that made a node, or None."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [frame for frame in frames if not frame[0].startswith(_TORCH_HOME)]
    return ":".join((own or frames)[-1]) if frames else None
