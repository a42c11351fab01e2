"""From a formula to a predicate and its rows of values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import torch

from ..predicate import And as AndNode
from ..predicate import Compare, Const, Kind, Node, Predicate
from ..predicate import Or as OrNode
from ..predicate import Side as PredicateSide
from ..predicate import Term as PredicateTerm
from ..predicate.nodes import INT32_RANGE, MAX_ROWS, Op
from . import reasons
from .formula import (
    And,
    Comparison,
    Connective,
    Fact,
    Formula,
    Side,
    Term,
    Truth,
    all_of,
    any_of,
    fold,
    negated_expr,
)
from .functions import apply
from .values import CapturedInfo, Deps, Expr, bare_index

ValueExpr = Expr


@dataclass(frozen=True)
class Lowered:
    """A mask as a predicate and the expressions of its values.

    Attributes:
        predicate: in canonical normal form: commuted spellings of a mask give the same text.
        q_rows: what the rows ``q0, q1, ...`` of the predicate hold, as functions of (b, q).
        k_rows: what the rows ``k0, k1, ...`` hold, as functions of (b, k).
        value_dtype: dtype of all rows, torch.int32 or torch.int64.
        captured: the descriptions of the captured operands that the mask was lowered with.
    """

    predicate: Predicate
    q_rows: tuple[ValueExpr, ...]
    k_rows: tuple[ValueExpr, ...]
    value_dtype: torch.dtype
    captured: tuple[CapturedInfo, ...]

    @cached_property
    def captures_used(self) -> bool:
        """Whether any captured tensor takes part; a mask without is plain causal or a window."""
        return any(row.uses_captured_tensor for row in (*self.q_rows, *self.k_rows))

    @cached_property
    def fingerprint(self) -> str:
        """Equal for masks that compute the same from operands at the same positions."""
        parts = (
            str(self.predicate),
            self.value_dtype,
            *(tuple(row.digest for row in rows) for rows in (self.q_rows, self.k_rows)),
        )
        return blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def lowered_of(formula: Formula, captured: tuple[CapturedInfo, ...]) -> Lowered:
    """The predicate of a formula, and the rows that it reads.

    Raises:
        UnsupportedMask: more comparisons or rows than are supported.
    """
    formula = _fold_sides(formula)
    comparisons = _comparisons(formula)
    value_dtype = _value_dtype(formula, comparisons)
    if formula.atoms > reasons.MAX_CLAUSES:
        raise reasons.too_many("comparisons", formula.atoms, reasons.MAX_CLAUSES)
    rows = _Rows(value_dtype, _held(formula, comparisons))
    root = rows.node(formula)
    for side in (rows.q, rows.k):
        if len(side) > min(MAX_ROWS, reasons.MAX_ROWS):
            raise reasons.too_many("rows of values", len(side), reasons.MAX_ROWS)
    predicate, q_order, k_order = Predicate(root).canonical()
    q_rows, k_rows = list(rows.q), list(rows.k)
    return Lowered(
        predicate,
        tuple(q_rows[i] for i in q_order),
        tuple(k_rows[i] for i in k_order),
        value_dtype,
        captured,
    )


def _fold_sides(formula: Formula) -> Formula:
    """``formula`` with everything on one side, under one connective, as one fact."""
    if formula.one_sided:
        return formula if isinstance(formula, Truth) else Fact(*fold(formula))
    if not isinstance(formula, Connective):
        return formula
    connect = all_of if isinstance(formula, And) else any_of
    groups: dict[Deps, list[Formula]] = {Deps.Q: [], Deps.K: []}
    rest = []
    for part in formula.parts:
        if part.one_sided:
            groups[Deps.K if part.deps & Deps.K else Deps.Q].append(part)
        else:
            rest.append(_fold_sides(part))
    facts = [_fold_sides(connect(*group)) for group in groups.values()]
    return connect(*facts, *rest)


def _comparisons(formula: Formula) -> list[Comparison]:
    if isinstance(formula, Connective):
        return [found for part in formula.parts for found in _comparisons(part)]
    return [formula] if isinstance(formula, Comparison) else []


def _facts(formula: Formula) -> list[Fact]:
    if isinstance(formula, Connective):
        return [found for part in formula.parts for found in _facts(part)]
    return [formula] if isinstance(formula, Fact) else []


def _held(formula: Formula, comparisons: list[Comparison]) -> set[Expr]:
    """Bool expressions that the formula also uses as they are, not only negated."""
    compared = {t for c in comparisons for t in c.terms if isinstance(t, Expr)}
    return compared | {fact.expr for fact in _facts(formula) if fact.holds}


def _value_dtype(formula: Formula, comparisons: list[Comparison]) -> torch.dtype:
    """int32 if that holds every value and every difference, else int64."""
    for comparison in comparisons:
        if comparison.bits == 64:
            return torch.int64
        for term in comparison.terms:
            if isinstance(term, int):
                if not INT32_RANGE[0] <= term <= INT32_RANGE[1]:
                    return torch.int64
            elif term is not None and not bare_index(term):
                info = None if term.dtype is torch.bool else torch.iinfo(term.dtype)
                if info is not None and info.max > INT32_RANGE[1]:
                    return torch.int64
    return torch.int32


class _Rows:
    """Collects rows while it turns formulas into predicate nodes."""

    def __init__(self, dtype: torch.dtype, held: set[Expr]):
        self.dtype, self.held = dtype, held
        self.q: dict[Expr, int] = {}
        self.k: dict[Expr, int] = {}

    def node(self, formula: Formula) -> Node:
        if isinstance(formula, Truth):
            return Const(formula.value)
        if isinstance(formula, Fact):
            expr, holds = formula.expr, formula.holds
            if not holds and expr not in self.held:
                # Only its negation is used: store that, so that conditions read "row != 0".
                expr, holds = negated_expr(expr), True
            return Compare(Op.NE if holds else Op.EQ, self.row(expr), _literal(0))
        if isinstance(formula, Comparison):
            width = torch.iinfo(self.dtype).bits
            shift = 0 if formula.bits is None else width - formula.bits
            return Compare(
                formula.op, self.side(formula.lhs, shift), self.side(formula.rhs, shift)
            )
        assert isinstance(formula, Connective)
        kind = AndNode if isinstance(formula, And) else OrNode
        return kind(tuple(map(self.node, formula.parts)))

    def side(self, side: Side, shift: int) -> PredicateSide:
        plus, minus = side
        return PredicateSide(
            self.term(plus, shift).plus, None if minus is None else self.term(minus, shift).plus
        )

    def term(self, term: Term, shift: int) -> PredicateSide:
        """One term; a difference of n-bit values wraps like n-bit values in wider rows if every
        term is shifted to the top bits."""
        if isinstance(term, int):
            return _literal(term << shift)
        if shift:
            return self.row(apply("bitwise_left_shift", apply("to", term, self.dtype), shift))
        name = bare_index(term)
        if name is not None:
            return PredicateSide(PredicateTerm(Kind.Q_INDEX if name == "q" else Kind.K_INDEX))
        return self.row(term)

    def row(self, expr: Expr) -> PredicateSide:
        on_key = bool(expr.deps & Deps.K)
        rows = self.k if on_key else self.q
        number = rows.setdefault(expr, len(rows))
        return PredicateSide(PredicateTerm(Kind.K_ROW if on_key else Kind.Q_ROW, number))


def _literal(value: int) -> PredicateSide:
    return PredicateSide(PredicateTerm(Kind.LITERAL, value))
