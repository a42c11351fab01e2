"""A predicate as a flex mask_mod: closures of plain operators, which Dynamo and lowering read."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from .predicate import Compare, Const, Kind, Node, Op, Or, Predicate, Side, Term

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

_OPERATORS: dict[Op, Callable[[Any, Any], Any]] = {
    Op.EQ: operator.eq,
    Op.NE: operator.ne,
    Op.LT: operator.lt,
    Op.LE: operator.le,
    Op.GT: operator.gt,
    Op.GE: operator.ge,
}


def mask_mod_of(predicate: Predicate, q_vals: Tensor, k_vals: Tensor) -> MaskMod:
    """A flex mask_mod that says what the predicate says of these values."""
    return _node_mod(predicate.root, q_vals, k_vals)


def _node_mod(node: Node, q_vals: Tensor, k_vals: Tensor) -> MaskMod:
    if isinstance(node, Compare):
        compare = _OPERATORS[node.op]
        lhs, rhs = (_side_mod(side, q_vals, k_vals) for side in (node.lhs, node.rhs))

        def comparison(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return compare(lhs(b, q, k), rhs(b, q, k))

        return comparison
    if isinstance(node, Const):
        compare = operator.ge if node.value else operator.lt

        def constant(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return compare(q, 0)

        return constant
    parts = tuple(_node_mod(part, q_vals, k_vals) for part in node.parts)
    combine = operator.or_ if isinstance(node, Or) else operator.and_

    def formula(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        result = parts[0](b, h, q, k)
        for part in parts[1:]:
            result = combine(result, part(b, h, q, k))
        return result

    return formula


def _side_mod(side: Side, q_vals: Tensor, k_vals: Tensor) -> Callable[..., Any]:
    plus = _term_mod(side.plus, q_vals, k_vals)
    if side.minus is None:
        return plus
    minus = _term_mod(side.minus, q_vals, k_vals)
    dtype = q_vals.dtype

    def difference(b: Tensor, q: Tensor, k: Tensor) -> Tensor:
        # In the dtype of the values, in which the predicate's arithmetic wraps.
        return plus(b, q, k).to(dtype) - minus(b, q, k).to(dtype)

    return difference


def _term_mod(term: Term, q_vals: Tensor, k_vals: Tensor) -> Callable[..., Any]:
    number = term.number
    if term.kind is Kind.LITERAL:
        return partial(_literal, number)
    if term.kind is Kind.Q_INDEX:
        return _query_index
    if term.kind is Kind.K_INDEX:
        return _key_index
    on_query = term.kind is Kind.Q_ROW
    values = (q_vals if on_query else k_vals)[:, number].contiguous()
    shared = values.shape[0] == 1
    if shared:
        values = values[0]

    def lookup(b: Tensor, q: Tensor, k: Tensor) -> Tensor:
        at = q if on_query else k
        return values[at] if shared else values[b, at]

    return lookup


def _literal(number: int, b: Tensor, q: Tensor, k: Tensor) -> int:
    return number


def _query_index(b: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q


def _key_index(b: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return k
