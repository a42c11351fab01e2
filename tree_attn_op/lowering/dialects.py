"""The names of operations, one for both graph dialects.

A node's target is a Python operator, a torch function, a Tensor method, an aten overload, or an
aten operator that has yet to choose its overload.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

_ALIASES = {
    "and_": "bitwise_and",
    "or_": "bitwise_or",
    "xor": "bitwise_xor",
    "invert": "bitwise_not",
    "not_": "logical_not",
    "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift",
    "floordiv": "floor_divide",
    "truediv": "true_divide",
    "divide": "div",
    "mod": "remainder",
    "subtract": "sub",
    "multiply": "mul",
    "negative": "neg",
    "absolute": "abs",
    "greater": "gt",
    "greater_equal": "ge",
    "less": "lt",
    "less_equal": "le",
    "not_equal": "ne",
    "clip": "clamp",
    "fix": "trunc",
    "max": "maximum",
    "min": "minimum",
    "sym_max": "maximum",
    "sym_min": "minimum",
    "_to_copy": "to",
    "convert_element_type": "to",
    "sgn": "sign",
}
"""Other names of the same operation."""

IN_PLACE_OPERATORS = {
    getattr(operator, name): getattr(operator, plain)
    for name, plain in {
        "iadd": "add",
        "isub": "sub",
        "imul": "mul",
        "iand": "and_",
        "ior": "or_",
        "ixor": "xor",
        "ifloordiv": "floordiv",
        "imod": "mod",
        "ilshift": "lshift",
        "irshift": "rshift",
    }.items()
}

MUTATING_NAMES = frozenset({"setitem", *(target.__name__ for target in IN_PLACE_OPERATORS)})
"""Python's names, without underscores, of what changes its first operand."""


def describe(node: fx.Node) -> str:
    """What a node computes, for messages."""
    target = node.target
    if node.op == "call_method":
        return f"Tensor.{target}"
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(target)
    module = getattr(target, "__module__", None)
    name = getattr(target, "__name__", str(target))
    return f"{module.lstrip('_')}.{name}" if module else f"torch.{name}"


def operation_name(node: fx.Node) -> str | None:
    """The name of what a call node computes; None for a target of another kind."""
    target: Any = node.target
    if node.op == "call_method":
        name = str(target)
    elif isinstance(target, torch._ops.OpOverload):
        if target.namespace not in ("aten", "prims"):
            return None
        name = target.overloadpacket.__name__
    elif isinstance(target, torch._ops.OpOverloadPacket):
        namespace, _, name = target._qualified_op_name.partition("::")
        if namespace not in ("aten", "prims"):
            return None
    elif target in IN_PLACE_OPERATORS:
        name = IN_PLACE_OPERATORS[target].__name__
    else:
        name = getattr(target, "__name__", "")
        homes = (operator, torch, torch.Tensor)
        if target is not getattr and not any(getattr(h, name, None) is target for h in homes):
            return None
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
        name = {"and": "and_", "or": "or_", "rand": "and_", "ror": "or_"}.get(name, name)
        name = {"radd": "add", "rmul": "mul", "rxor": "xor"}.get(name, name)
    elif name.endswith("_") and name not in _ALIASES:
        name = name[:-1]
    name = _ALIASES.get(name, name)
    return name
