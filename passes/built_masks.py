"""Block masks that a graph builds itself: their lists from what the mask means, in linear memory.

``tree_attn_op.create_block_mask`` in a compiled region leaves two things in the graph: flex's
``create_mask``, which is the mask_mod under four nested vmaps (batch, head, query, key), and the
op ``tree_attn_op::block_lists_of_mask`` that makes lists of it. The nodes between the vmaps'
entries and exits are the mask_mod itself, on 0-d indices, as a flex_attention call carries it.
Where they can be proven, the lists come from the predicate, and the dense mask is dead code.
"""

from __future__ import annotations

import logging
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._functorch import predispatch

from tree_attn_op.errors import UnsupportedMask
from tree_attn_op.lowering import CapturedInfo, emit, lower
from tree_attn_op.validation import BLOCK_MULTIPLE

from .edit import GraphEdit
from .effects import Writes
from .flex_call import KeepFlex, example_value, static_int
from .hoist import PREPARES_MASK
from .structure import identity

log = logging.getLogger(__name__)

LISTS_OF_MASK = torch.ops.tree_attn_op.block_lists_of_mask.default

_INDEX_NAMES = ("b", "h", "q", "k")
_DENSE = "tree_attn_dense"


def derive_built_lists(graph: fx.Graph) -> int:
    """Replace the lists of dense masks that are proven, in place.

    Returns:
        how many were replaced. What is not proven stays as it is, and a warning says why.
    """
    edit, replaced = GraphEdit(graph), []
    for node in graph.find_nodes(op="call_function", target=LISTS_OF_MASK):
        if node.meta.get(_DENSE):
            continue
        try:
            _derive(edit, node)
        except (KeepFlex, UnsupportedMask) as error:
            # Once: a pass meets a nested graph again from the graph around it.
            node.meta[_DENSE] = True
            log.warning("create_block_mask: built from the dense mask: %s", error.reason)
        except Exception as error:
            node.meta[_DENSE] = True
            log.warning("create_block_mask: built from the dense mask: internal error: %r", error)
            log.debug("deriving the lists of %s failed", node, exc_info=True)
        else:
            replaced.append(node)
    edit.sweep(replaced)
    return len(replaced)


@dataclass(frozen=True)
class BuiltMask:
    """A mask_mod found in the graph around it.

    Attributes:
        graph: the mask graph; its placeholders are b, h, q, k and the captured operands.
        captures: the captured operands, nodes of the graph around it.
        first: the first node of the mask_mod in the graph around it; None: there is none.
        sizes: batch, heads, query length, key length; nodes where symbolic.
        device: of the mask.
    """

    graph: fx.Graph
    captures: tuple[fx.Node, ...]
    first: fx.Node | None
    sizes: tuple[int | fx.Node, ...]
    device: torch.device


def find_mask(dense: fx.Node) -> BuiltMask:
    """The mask_mod whose dense evaluation over all indices ``dense`` is.

    Raises:
        KeepFlex: ``dense`` was not made by flex's ``create_mask``.
    """
    result, levels, sizes = dense, [], []
    for _ in _INDEX_NAMES:
        # From the outside in: batch, head, query, key.
        result, level, size = _exit_of_vmap(result)
        levels.append(level)
        sizes.append(size)
    if len(set(levels)) != len(levels):
        raise _unknown_form()
    entries = {
        name: _entry(result, level, size)
        for name, level, size in zip(_INDEX_NAMES, levels, sizes, strict=True)
    }
    graph, copies = fx.Graph(), {}
    for name in _INDEX_NAMES:
        index = graph.placeholder(name)
        if (entry := entries[name]) is not None:
            copies[entry] = index
    inside = _dependents(result, set(copies))
    captures: dict[fx.Node, fx.Node] = {}
    for node in inside:
        for operand in node.all_input_nodes:
            if operand not in copies and operand not in inside and operand not in captures:
                captures[operand] = graph.placeholder(f"captured_{len(captures)}")
    for node in inside:
        copies[node] = graph.node_copy(node, lambda n: copies[n] if n in copies else captures[n])
    if result not in copies:
        raise KeepFlex("its mask depends on no index")
    graph.output(copies[result])
    return BuiltMask(
        graph,
        tuple(captures),
        next(iter(inside), None),
        tuple(sizes),
        example_value(dense).device,
    )


def _unknown_form() -> KeepFlex:
    return KeepFlex("its mask is evaluated in another way than flex's create_mask does")


def _exit_of_vmap(node: fx.Node) -> tuple[fx.Node, int, int | fx.Node]:
    """(the node inside, the vmap's level, its size) of a result that becomes dimension 0."""
    if node.target is not predispatch._remove_batch_dim or len(node.args) != 4:
        raise _unknown_form()
    inner, level, size, dim = node.args
    if not isinstance(inner, fx.Node) or not isinstance(level, int) or dim != 0:
        raise _unknown_form()
    if not isinstance(size, (int, fx.Node)):
        raise _unknown_form()
    return inner, level, size


def _ancestors(node: fx.Node) -> set[fx.Node]:
    """``node`` and what it is computed from, within the vmaps around it."""
    found, stack = set(), [node]
    while stack:
        item = stack.pop()
        if item in found:
            continue
        found.add(item)
        # Behind the exit of another vmap is the outside; an entry of this one has no more to say.
        if item.target not in (predispatch._remove_batch_dim, predispatch._add_batch_dim):
            stack.extend(item.all_input_nodes)
    return found


def _entry(result: fx.Node, level: int, size: int | fx.Node) -> fx.Node | None:
    """The node by which the positions 0, 1, ... size - 1 enter the vmap; None: it is not used."""
    entries = [
        node
        for node in _ancestors(result)
        if node.target is predispatch._add_batch_dim and node.args[2] == level
    ]
    if not entries:
        return None
    if len(entries) > 1:
        raise _unknown_form()
    positions, dim, _ = entries[0].args
    if not isinstance(positions, fx.Node) or positions.target is not torch.arange or dim != 0:
        raise _unknown_form()
    start, length = positions.args if len(positions.args) == 2 else (None, None)
    if start != 0 or set(positions.kwargs) - {"device"} or identity(length) != identity(size):
        raise _unknown_form()
    return entries[0]


def _dependents(result: fx.Node, entries: set[fx.Node]) -> dict[fx.Node, None]:
    """The nodes from the entries to ``result``, in graph order: those that depend on an index."""
    ancestors = _ancestors(result)
    inside: dict[fx.Node, None] = {}
    for node in result.graph.nodes:
        inputs = node.all_input_nodes if node in ancestors and node not in entries else ()
        if any(operand in entries or operand in inside for operand in inputs):
            inside[node] = None
    return inside


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _derive(edit: GraphEdit, node: fx.Node) -> None:
    dense, *block_sizes = node.args
    if not isinstance(dense, fx.Node) or any(u.target is not operator.getitem for u in node.users):
        raise _unknown_form()
    sizes = []
    for size in block_sizes:
        known = static_int(example_value(size))
        if known is None or known % BLOCK_MULTIPLE:
            raise KeepFlex(f"block size {size} is no multiple of {BLOCK_MULTIPLE}")
        sizes.append(known)
    mask = find_mask(dense)
    values = [example_value(item) for item in mask.captures]
    if any(torch._C._functorch.is_functorch_wrapped_tensor(v) for v in values if _is_tensor(v)):
        raise KeepFlex("it is made inside of a vmap or another transform")
    if mask.first is not None and Writes(edit.graph).between(mask.first, node, mask.captures):
        raise KeepFlex("a tensor that its mask reads is written to while it is built")
    lowered = lower(mask.graph, [CapturedInfo.of(value) for value in values])
    batch, _, q_len, kv_len = mask.sizes
    graph = edit.graph
    with edit.before(node):
        q_vals, k_vals = emit(lowered, graph, mask.captures, batch, q_len, kv_len, mask.device)
        edit.settle({PREPARES_MASK: True})
        lowered.predicate.check_values(example_value(q_vals), example_value(k_vals))
        given = (None, None, None, None)
        built = graph.call_function(
            torch.ops.tree_attn_op.block_lists.default,
            (
                *(q_vals, k_vals, str(lowered.predicate), q_len, kv_len),
                *given,
                *(*sizes, *sizes),
                False,  # full_at_ends: as flex's builder lists them
            ),
        )
        lists = [edit.getitem(built, place) for place in range(8)]
        edit.settle({PREPARES_MASK: True})
        lists = [_expanded(edit, item, *mask.sizes[:2]) for item in lists]
        edit.settle({PREPARES_MASK: True})
    for item in list(node.users):
        place: Any = item.args[1]
        edit.move_users(item, lists[place])


def _expanded(
    edit: GraphEdit, item: fx.Node, batch: int | fx.Node, heads: int | fx.Node
) -> fx.Node:
    """A list with the batch and heads that were asked for."""
    shape = example_value(item).shape
    if (identity(shape[0]), identity(shape[1])) == (identity(batch), identity(heads)):
        return item
    kept = (-1,) * (len(shape) - 2)
    expanded = edit.graph.call_method("expand", (item, batch, heads, *kept))
    return edit.graph.call_method("contiguous", (expanded,))
