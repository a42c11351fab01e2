"""Which nodes of a pre-grad graph write to a tensor, and which may be removed when unused.

A pre-grad graph is not functional: ``ids.add_(1)`` between two attention calls is a node with no
users, and a mask that captured ``ids`` differs before and after it. Values may therefore be shared
by two calls only if nothing between them writes to what they were computed from.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx

from .flex_call import FLEX_ATTENTION, example_value

# The operator module spells `a += b` as iadd(a, b).
_WRITING_OPERATORS = frozenset(
    {
        operator.setitem,
        operator.iadd,
        operator.iand,
        operator.ifloordiv,
        operator.ilshift,
        operator.imatmul,
        operator.imod,
        operator.imul,
        operator.ior,
        operator.ipow,
        operator.irshift,
        operator.isub,
        operator.itruediv,
        operator.ixor,
    }
)
_IN_PLACE_DUNDERS = frozenset(f"__{function.__name__}__" for function in _WRITING_OPERATORS)
_NEW_TENSORS = frozenset(
    f"{prefix}{name}{suffix}"
    for name in ("empty", "zeros", "ones", "full")
    for prefix, suffix in (("", ""), ("new_", ""), ("", "_like"))
)
_PURE_MODULES = ("_operator", "builtins", "math", "torch")
UNKNOWN_STORAGE = 0
_PURE_HIGHER_ORDER = frozenset({FLEX_ATTENTION})


class Writes:
    """The nodes of one graph that write to a tensor, in graph order.

    Args:
        graph: the graph; it may change afterwards as long as no writing node is added.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._writes = [
            (node, {storage for arg in targets for storage in storages(arg)})
            for node in graph.nodes
            if (targets := written(node))
        ]

    def between(self, first: fx.Node, last: fx.Node, of: Iterable[fx.Node]) -> bool:
        """Whether a node after ``first`` and before ``last`` may write to one of the tensors."""
        if not self._writes:
            return False
        read = {storage for node in of for storage in storages(node)}
        return any(
            first < node < last
            and (UNKNOWN_STORAGE in targets | read or not targets.isdisjoint(read))
            for node, targets in self._writes
        )


def storages(node: fx.Node) -> Iterator[int]:
    """The identities of the storages behind the fake tensors of a node: views share them.

    A tensor whose storage can't be told yields ``UNKNOWN_STORAGE``.
    """
    value = example_value(node)
    for tensor in value if isinstance(value, (tuple, list)) else (value,):
        if not isinstance(tensor, torch.Tensor):
            continue
        while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        try:
            yield tensor.untyped_storage()._cdata
        except (NotImplementedError, RuntimeError):
            yield UNKNOWN_STORAGE


def written(node: fx.Node) -> list[fx.Node]:
    """The arguments that a node may write to; all of them where what it does is not known."""
    target = node.target
    if node.op in ("placeholder", "get_attr", "output"):
        return []
    if node.op == "call_method":
        name = str(target)
        in_place = name in _IN_PLACE_DUNDERS or (name.endswith("_") and not name.endswith("__"))
        return node.all_input_nodes[:1] if in_place else _out_arguments(node)
    if node.op != "call_function":
        return node.all_input_nodes
    if target in _WRITING_OPERATORS:
        return node.all_input_nodes[:1]
    if isinstance(target, torch._ops.OpOverload):
        return node.all_input_nodes if target._schema.is_mutable else []
    if isinstance(target, torch._ops.OpOverloadPacket):
        overloads = [getattr(target, name) for name in target.overloads() if "out" not in name]
        if any(overload._schema.is_mutable for overload in overloads):
            return node.all_input_nodes
        return _out_arguments(node)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return _written_by_higher_order(node)
    module = getattr(target, "__module__", None) or ""
    if module.split(".")[0] not in _PURE_MODULES and not _is_torch_builtin(target):
        return node.all_input_nodes
    # The operator module's and_, or_ and not_ only avoid Python's keywords.
    in_place = getattr(target, "__name__", "").endswith("_") and module != "_operator"
    if in_place or _asks_in_place(node):
        return node.all_input_nodes[:1]
    return _out_arguments(node)


def is_removable(node: fx.Node) -> bool:
    """Whether a node without users can be dropped: it computes a value and does nothing else."""
    if node.users or node.op in ("placeholder", "output") or written(node):
        return False
    if node.op == "get_attr":
        return True
    value = example_value(node)
    # What returns no tensor (switching a mode, checking, entering a vmap level) is there for what
    # it does; so may be a random number, which moves its generator.
    if isinstance(value, (tuple, list)):
        has_value = any(isinstance(item, torch.Tensor) for item in value)
    else:
        has_value = isinstance(value, (torch.Tensor, torch.SymInt, torch.SymBool))
    return has_value and not node.is_impure() and not _is_random(node)


def dead_writes(node: fx.Node) -> list[fx.Node]:
    """The writes to ``node`` if it makes a new tensor that nothing reads, else [].

    What is made from it for a write alone, such as the ones that are written, does not count.
    """
    if str(getattr(node.target, "__name__", node.target)) not in _NEW_TENSORS:
        return []
    writes = [user for user in node.users if not user.users and written(user) == [node]]
    readers = [user for user in node.users if user not in writes]
    unread = all(reader.users.keys() <= set(writes) and not written(reader) for reader in readers)
    return writes if unread else []


def _written_by_higher_order(node: fx.Node) -> list[fx.Node]:
    if node.target in _PURE_HIGHER_ORDER:
        return []
    owner = node.graph.owning_module
    bodies = [
        body
        for arg in node.all_input_nodes
        if arg.op == "get_attr"
        and isinstance(body := getattr(owner, str(arg.target), None), fx.GraphModule)
    ]
    # An operator without a body that can be read (a user's Triton kernel) may write to anything.
    if bodies and not any(written(inner) for body in bodies for inner in body.graph.nodes):
        return []
    return [arg for arg in node.all_input_nodes if arg.op != "get_attr"]


def _out_arguments(node: fx.Node) -> list[fx.Node]:
    out = node.kwargs.get("out")
    outs = out if isinstance(out, (tuple, list)) else (out,)
    return [item for item in outs if isinstance(item, fx.Node)]


def _asks_in_place(node: fx.Node) -> bool:
    place = _inplace_parameter(node.target)
    if place is None:
        return False
    flag: Any = node.kwargs.get("inplace", node.args[place] if len(node.args) > place else False)
    return flag is not False


@functools.lru_cache(maxsize=4096)
def _inplace_parameter(function: Any) -> int | None:
    try:
        parameters = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None
    return parameters.index("inplace") if "inplace" in parameters else None


def _is_torch_builtin(target: Any) -> bool:
    # Functions of torch._C carry no module, or that of their class.
    return type(target).__name__ in ("builtin_function_or_method", "method_descriptor")


def _is_random(node: fx.Node) -> bool:
    name = str(getattr(node.target, "__name__", node.target)).split(".")[0]
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags or name.startswith(
        ("rand", "dropout", "bernoulli", "multinomial", "normal", "poisson", "alpha_dropout")
    )
