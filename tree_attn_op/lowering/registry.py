"""The allow-list of operations: a handler for each name; anything else is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from ..errors import UnsupportedMask
from . import reasons
from .dialects import describe, operation_name
from .indexing import Rows

Handler = Callable[..., Any]
HANDLERS: dict[str, Handler] = {}
"""From the names of ``dialects.py``; filled by ``operations.py`` and ``constructors.py``."""

_SELF_NAMES = {"input": "self", "x": "self", "a": "self", "y": "other", "b": "other"}

_IGNORED = frozenset(
    ["device", "layout", "pin_memory", "memory_format", "copy", "non_blocking", "requires_grad"]
)
"""Keywords that do not change the values of a result of rank 0."""

_ROW_OPERATIONS = frozenset(
    [
        "getitem",
        "index",
        "select",
        "slice",
        "clone",
        "contiguous",
        "detach",
        "alias",
        "dim",
        "ndimension",
    ]
)
"""What may be done to a captured tensor that is indexed in some of its dimensions."""


def handles(*names: str) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


def call(node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The value of a call node from the values of its operands.

    Raises:
        UnsupportedMask: the operation is not on the list, or not with these operands.
    """
    name = operation_name(node)
    if name is None or name not in HANDLERS:
        raise reasons.unsupported(describe(node))
    if any(isinstance(arg, Rows) for arg in args) and name not in _ROW_OPERATIONS:
        raise UnsupportedMask(
            f"computes {describe(node)} of a whole row of a captured tensor",
            hint="Index the captured tensor with one index a dimension, such as x[b, q]",
        )
    named = {
        _SELF_NAMES.get(key, key): value
        for key, value in kwargs.items()
        if key not in _IGNORED and value is not None
    }
    try:
        return HANDLERS[name](*args, **named)
    except TypeError as error:
        raise reasons.unsupported(f"{describe(node)} with these arguments ({error})") from error
