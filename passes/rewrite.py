"""The graph pass: flex_attention calls whose mask is proven become the tree attention op.

For each call: read it (``flex_call``), check that the op computes the same (``checks``), prove
what its mask means (``tree_attn_op.lowering``), then emit, once for all calls that share them, the
mask's value rows and its refined block lists, and in place of the call the op. A call that fails
any step stays as it was, and the report says why.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._logging import trace_structured
from torch.fx.experimental.symbolic_shapes import guard_or_false

from tree_attn_op import ops
from tree_attn_op.errors import UnsupportedMask
from tree_attn_op.kernels.choice import describe, preferred_list_blocks
from tree_attn_op.lowering import CapturedInfo, Lowered, emit, lower

from .built_masks import derive_built_lists
from .cache_key import source_digest
from .checks import check_call, check_capture, check_lists, check_size, operand_dtype
from .edit import GraphEdit
from .effects import Writes
from .flex_call import (
    FLEX_ATTENTION,
    LN2,
    FlexCall,
    KeepFlex,
    example_value,
    read_flex_call,
    static_int,
)
from .hoist import PREPARES_MASK, hoist_masks
from .layout import order_to_restore
from .options import PassOptions, Plan
from .report import CallReport, Report, layer_path, source_line, with_code
from .structure import graph_structure, identity

log = logging.getLogger(__name__)

_KEPT = "tree_attn_kept"


class TreeAttentionPass(CustomGraphPass):
    """A pre-grad pass that rewrites flex_attention calls to the tree attention op.

    Use it as ``torch.compile(model, options={"pre_grad_custom_pass": TreeAttentionPass()})``, or
    through :func:`passes.install` or ``backend="tree_attn"``. It never raises, and changes nothing
    that it cannot prove.

    Args:
        plan, rewrite_small: see :class:`PassOptions`.

    Attributes:
        options: the options, part of :meth:`uuid`.
        report: the calls that this instance has seen.
    """

    def __init__(self, *, plan: Plan = "lists", rewrite_small: bool | None = None) -> None:
        self.options = PassOptions(plan, rewrite_small)
        self.report = Report()

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite the calls of ``graph`` and of the graphs nested in it, in place."""
        try:
            self._run(graph)
        except Exception:
            log.warning("the pass failed; what it had not rewritten stays flex", exc_info=True)

    def uuid(self) -> str:
        """The pass's part of the compile cache key: its sources, options and the op's schema."""
        roots = (Path(__file__).parent, Path(ops.__file__).parent)
        return f"{source_digest(roots)}:{self.options}"

    def __eq__(self, other: object) -> bool:
        # torch.compile compares its options to tell whether it has compiled with them before.
        return isinstance(other, type(self)) and other.options == self.options

    def __hash__(self) -> int:
        return hash(self.options)

    def __reduce__(self) -> tuple[Any, ...]:
        # torch 2.11 pickles the pass into its cache key, which the report must not change.
        return functools.partial(type(self), **vars(self.options)), ()

    def _run(self, graph: fx.Graph) -> None:
        for body in _nested_graphs(graph):
            self._run(body)
        built = derive_built_lists(graph)
        counters["inductor"]["tree_attn_built"] += built
        rewritten = self._rewrite_calls(graph)
        if (hoist_masks(graph) or rewritten or built) and graph.owning_module is not None:
            graph.owning_module.recompile()

    def _rewrite_calls(self, graph: fx.Graph) -> bool:
        nodes = [
            node
            for node in graph.find_nodes(op="call_function", target=FLEX_ATTENTION)
            if node.meta.get(_KEPT) != self.options
        ]
        if not nodes:
            return False
        _trace("tree_attn_before", graph)
        reports = _GraphRewrite(graph, self.options).run(nodes)
        self.report.extend(reports)
        for report in reports:
            verdict = "tree_attn_rewritten" if report.rewritten else "tree_attn_kept"
            counters["inductor"][verdict] += 1
            log.info("%s (%s)", report, report.source)
        _trace("tree_attn_after", graph)
        _trace("tree_attn_report", Report(reports))
        return any(report.rewritten for report in reports)


@dataclass(frozen=True)
class _SharedMask:
    """A mask's value rows and block lists, as emitted for the call ``first`` from ``sources``."""

    first: fx.Node
    sources: tuple[fx.Node, ...]
    q_vals: fx.Node
    k_vals: fx.Node
    lists: tuple[fx.Node, ...]
    q_block_size: int
    kv_block_size: int


class _GraphRewrite:
    """The rewrite of the calls of one graph, with all that they share."""

    def __init__(self, graph: fx.Graph, options: PassOptions) -> None:
        self._edit = GraphEdit(graph)
        self._graph = graph
        self._options = options
        self._writes: Writes | None = None
        self._lowered: dict[Hashable, Lowered | KeepFlex] = {}
        self._masks: dict[Hashable, list[_SharedMask]] = {}
        self._size_inputs = {
            size.node.expr: node
            for node in graph.find_nodes(op="placeholder")
            if isinstance(size := example_value(node), torch.SymInt)
        }

    def run(self, nodes: list[fx.Node]) -> list[CallReport]:
        """Rewrite the calls that can be, and say for each what became of it."""
        reports = [self._visit(node) for node in nodes]
        replaced = [node for node, report in zip(nodes, reports, strict=True) if report.rewritten]
        if not replaced:
            return reports
        try:
            self._graph.lint()
        except Exception as error:
            log.debug("the rewritten graph is malformed", exc_info=True)
            self._edit.undo()
            failed = _internal_error(error)
            return [
                _kept(node, failed, self._options) if report.rewritten else report
                for node, report in zip(nodes, reports, strict=True)
            ]
        self._edit.sweep(replaced)
        return reports

    def _visit(self, node: fx.Node) -> CallReport:
        try:
            predicate, kernels = self._rewrite(node)
        except KeepFlex as kept:
            return _kept(node, kept, self._options)
        except UnsupportedMask as error:
            return _kept(node, _not_proven(error), self._options)
        except Exception as error:
            log.debug("the rewrite of %s failed", node, exc_info=True)
            return _kept(node, _internal_error(error), self._options)
        return CallReport(
            rewritten=True,
            predicate=predicate,
            kernels=kernels,
            source=source_line(node),
            layer=layer_path(node),
            node=node.name,
        )

    def _rewrite(self, node: fx.Node) -> tuple[str, str]:
        """Replaces a call; the text of its predicate, and what will serve it."""
        call = read_flex_call(node)
        check_call(call)
        if self._options.plan == "lists":
            check_lists(call)
        lowered = self._lower(call)
        if not self._options.rewrite_small:
            check_size(call)
        key = self._mask_key(call, lowered)
        mask = self._find_mask(key, call)
        found = mask is not None
        with self._edit.before(node):
            if mask is None:
                mask = self._emit_mask(call, lowered)
            out, lse = self._emit_attention(call, mask, lowered)
        if not found:
            self._masks.setdefault(key, []).append(mask)
        for item in list(node.users):
            if item.users:
                self._edit.move_users(item, out if item.args[1] == 0 else lse)
        return str(lowered.predicate), describe(
            **self._sizes(call), list_blocks=(mask.q_block_size, mask.kv_block_size)
        )

    def _lower(self, call: FlexCall) -> Lowered:
        key = (graph_structure(call.mask_mod), call.mask_captures)
        if key not in self._lowered:
            try:
                self._lowered[key] = _prove(call)
            except KeepFlex as kept:
                self._lowered[key] = kept
        lowered = self._lowered[key]
        if isinstance(lowered, KeepFlex):
            raise lowered
        return lowered

    def _mask_key(self, call: FlexCall, lowered: Lowered) -> Hashable:
        query, key = example_value(call.query), example_value(call.key)
        lengths = (query.shape[0], query.shape[2], key.shape[2])
        return (
            lowered.fingerprint,
            tuple(map(identity, call.mask_captures)),
            query.device,
            tuple(size if isinstance(size, int) else size.node.expr for size in lengths),
            call.lists if self._options.plan == "lists" else None,
            (call.q_block_size, call.kv_block_size),
            self._list_blocks(call),
        )

    def _find_mask(self, key: Hashable, call: FlexCall) -> _SharedMask | None:
        for mask in self._masks.get(key, ()):
            if self._writes is None:
                self._writes = Writes(self._graph)
            if not self._writes.between(mask.first, call.node, mask.sources):
                return mask
        return None

    def _list_blocks(self, call: FlexCall) -> tuple[int, int]:
        """The block sizes that the kernels want, as far as they divide those given."""
        wanted = preferred_list_blocks(**self._sizes(call))
        if self._options.plan == "predicate":
            return wanted
        return math.gcd(wanted[0], call.q_block_size), math.gcd(wanted[1], call.kv_block_size)

    def _sizes(self, call: FlexCall) -> dict[str, Any]:
        """What the choice of kernels depends on."""
        query, key, value = map(example_value, (call.query, call.key, call.value))
        return {
            "device": query.device,
            "dtype": operand_dtype(call),
            "head_dim": int(query.shape[3]),
            "value_dim": int(value.shape[3]),
            "group": int(query.shape[1] // key.shape[1]),
        }

    def _emit_mask(self, call: FlexCall, lowered: Lowered) -> _SharedMask:
        batch, q_len = self._size(call.query, 0), self._size(call.query, 2)
        kv_len = self._size(call.key, 2)
        device = example_value(call.query).device
        q_vals, k_vals = emit(
            lowered, self._graph, call.mask_captures, batch, q_len, kv_len, device
        )
        sizes = self._list_blocks(call)
        given: tuple[fx.Node | None, ...] = (None, None, None, None)
        given_sizes = sizes
        if self._options.plan == "lists":
            given = self._list_columns(call, kv_len)
            given_sizes = (call.q_block_size, call.kv_block_size)
        self._edit.settle({PREPARES_MASK: True})
        lowered.predicate.check_values(example_value(q_vals), example_value(k_vals))
        refined = self._graph.call_function(
            torch.ops.tree_attn_op.block_lists.default,
            (q_vals, k_vals, str(lowered.predicate), q_len, kv_len, *given, *given_sizes, *sizes),
        )
        lists = tuple(self._edit.getitem(refined, index) for index in range(8))
        self._edit.settle({PREPARES_MASK: True})
        return _SharedMask(
            first=call.node,
            sources=tuple(
                node for node in (*call.mask_captures, *call.lists) if isinstance(node, fx.Node)
            ),
            q_vals=q_vals,
            k_vals=k_vals,
            lists=lists,
            q_block_size=sizes[0],
            kv_block_size=sizes[1],
        )

    def _list_columns(self, call: FlexCall, kv_len: int | fx.Node) -> tuple[fx.Node | None, ...]:
        """The lists, with columns added where they have fewer than there are blocks of keys."""
        lists: list[fx.Node | None] = list(call.lists)
        length = example_value(kv_len)
        for place in (1, 3):
            indices = lists[place]
            if indices is None:
                continue
            width = example_value(indices).shape[3]
            columns = (length + call.kv_block_size - 1) // call.kv_block_size
            if not guard_or_false(width == columns):
                missing = int(columns) - int(width)
                lists[place] = self._graph.call_function(
                    torch.nn.functional.pad, (indices, (0, missing))
                )
        return tuple(lists)

    def _emit_attention(
        self, call: FlexCall, mask: _SharedMask, lowered: Lowered
    ) -> tuple[fx.Node, fx.Node]:
        dtype = operand_dtype(call)
        operands = [
            tensor
            if example_value(tensor).dtype == dtype
            else self._graph.call_method("to", (tensor, dtype))
            for tensor in (call.query, call.key, call.value)
        ]
        attention = self._graph.call_function(
            torch.ops.tree_attn_op.tree_attention.default,
            (
                *operands,
                mask.q_vals,
                mask.k_vals,
                str(lowered.predicate),
                *mask.lists,
                mask.q_block_size,
                mask.kv_block_size,
                call.scale,
            ),
        )
        out = lse = self._edit.getitem(attention, 0)
        self._edit.settle()
        order = order_to_restore(example_value(out), example_value(call.node)[0])
        if order is not None:
            out = self._graph.call_method("permute", (out, order))
            out = self._graph.call_method("contiguous", (out,))
            inverse = sorted(range(len(order)), key=order.__getitem__)
            out = self._graph.call_method("permute", (out, inverse))
        if call.output_users(1):
            lse = self._graph.call_function(torch.div, (self._edit.getitem(attention, 1), LN2))
        return out, lse

    def _size(self, tensor: fx.Node, dim: int) -> int | fx.Node:
        """A size as a number or, if symbolic, as a node: an input of the graph if one has it."""
        size = example_value(tensor).shape[dim]
        known = static_int(size)
        if known is not None:
            return known
        if size.node.expr in self._size_inputs:
            return self._size_inputs[size.node.expr]
        return self._graph.call_method("size", (tensor, dim))


def _prove(call: FlexCall) -> Lowered:
    for capture in call.mask_captures:
        check_capture(capture, call)
    try:
        captured = [CapturedInfo.of(example_value(capture)) for capture in call.mask_captures]
        lowered = lower(call.mask_mod, captured)
    except UnsupportedMask as error:
        raise _not_proven(error) from error
    if not lowered.captures_used:
        raise KeepFlex("its mask reads no tensor, so no prefix is shared")
    return lowered


def _kept(node: fx.Node, kept: KeepFlex, options: PassOptions) -> CallReport:
    # A pass meets a nested graph again from the graph around it; a call is looked at once.
    node.meta[_KEPT] = options
    return CallReport(
        rewritten=False,
        reason=kept.reason,
        hint=kept.hint,
        source=kept.source or source_line(node),
        layer=layer_path(node),
        node=node.name,
        mask_node=kept.node_name,
    )


def _not_proven(error: UnsupportedMask) -> KeepFlex:
    return KeepFlex(
        error.reason,
        hint=error.hint,
        source=with_code(error.source),
        node_name=error.node_name,
    )


def _internal_error(error: Exception) -> KeepFlex:
    return KeepFlex(f"internal error: {type(error).__name__}: {error}")


def _nested_graphs(graph: fx.Graph) -> list[fx.Graph]:
    owner = graph.owning_module
    names = dict.fromkeys(str(node.target) for node in graph.find_nodes(op="get_attr"))
    modules = [getattr(owner, name, None) for name in names if "." not in name]
    return [module.graph for module in modules if isinstance(module, fx.GraphModule)]


def _trace(name: str, content: object) -> None:
    """Record an artifact for tlparse; the content is printed only if a trace is being written."""

    def payload() -> str:
        return str(content)

    trace_structured(
        "artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=payload
    )
