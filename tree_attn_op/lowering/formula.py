"""Boolean formulas over facts (of the query, or of the key) and comparisons of the two.

Formulas are immutable, in negation normal form, flattened and sorted; equal ones compare equal.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from hashlib import blake2b

import torch

from ..predicate.nodes import MIRRORED, NEGATED, SYMBOLS, Op
from . import reasons
from .functions import INVERSE_COMPARISON, apply
from .values import Deps, Expr, bare_index, common_deps, constant, is_integer, one_sided

Term = Expr | int
Side = tuple[Term, Expr | None]
"""``plus`` and ``minus`` of one side of a comparison; the side is ``plus - minus``."""


class Formula:
    """A Boolean formula; see the subclasses.

    Attributes:
        digest: identifies the formula by structure.
        atoms: how many facts and comparisons it has, as a tree.
        deps: the indices that it depends on.
        depth: how deep its connectives nest.
    """

    digest: str
    atoms: int
    deps: Deps
    depth: int

    def _identify(self, *content: object) -> None:
        text = repr((type(self).__name__, content))
        self.digest = blake2b(text.encode(), digest_size=16).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Formula) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def order(self) -> tuple[int, str]:
        """A sort key that does not depend on how a mask is spelled."""
        return (self.atoms, self.digest)

    @cached_property
    def negation(self) -> Formula:
        result = _negation(self)
        result.__dict__["negation"] = self
        return result

    @property
    def one_sided(self) -> bool:
        """Whether it has one value for each query, or one for each key."""
        return one_sided(self.deps)


class Truth(Formula):
    """True or False."""

    def __init__(self, value: bool):
        self.value = value
        self.atoms, self.deps, self.depth = 0, Deps.NONE, 0
        self._identify(value)


class Fact(Formula):
    """A bool expression of one side, or its negation."""

    def __init__(self, expr: Expr, holds: bool = True):
        self.expr, self.holds = expr, holds
        self.atoms, self.deps, self.depth = 1, common_deps([expr]), 0
        self._identify(expr.digest, holds)


class Comparison(Formula):
    """A comparison of sides that involve both the query and the key.

    Attributes:
        bits: width of the arithmetic in which its differences wrap; None if it has no difference
            that could wrap.
    """

    def __init__(self, op: Op, lhs: Side, rhs: Side, bits: int | None = None):
        if _side_order(rhs) < _side_order(lhs):
            op, lhs, rhs = MIRRORED[op], rhs, lhs
        self.op, self.lhs, self.rhs, self.bits = op, lhs, rhs, bits
        self.atoms, self.deps, self.depth = 1, Deps.Q | Deps.K, 0
        common_deps([term for term in self.terms if isinstance(term, Expr)])
        self._identify(SYMBOLS[op], *(_term_key(term) for term in self.terms), bits)

    @property
    def terms(self) -> tuple[Term | None, ...]:
        return (*self.lhs, *self.rhs)


def _term_key(term: Term | None) -> str:
    return term.digest if isinstance(term, Expr) else repr(term)


def _side_order(side: Side) -> int:
    """Differences first, then the query, then the key, then numbers."""
    plus, minus = side
    if minus is not None:
        return 0
    if not isinstance(plus, Expr):
        return 3
    return 2 if plus.deps & Deps.K else 1


class Connective(Formula):
    def __init__(self, parts: tuple[Formula, ...]):
        self.parts = parts
        self.atoms = sum(part.atoms for part in parts)
        if self.atoms > reasons.MAX_FORMULA:
            raise reasons.too_many("comparisons", self.atoms, reasons.MAX_FORMULA)
        self.depth = 1 + max(part.depth for part in parts)
        if self.depth > reasons.MAX_DEPTH:
            raise reasons.too_many("levels of and/or", self.depth, reasons.MAX_DEPTH)
        self.deps = Deps.NONE
        for part in parts:
            self.deps |= part.deps
        self._identify(*(part.digest for part in parts))

    @cached_property
    def members(self) -> frozenset[Formula]:
        return frozenset(self.parts)


class And(Connective):
    """All of its parts, at least two."""


class Or(Connective):
    """Any of its parts, at least two."""


TRUE, FALSE = Truth(True), Truth(False)


def negate(formula: Formula) -> Formula:
    """The negation, pushed into facts and comparisons."""
    return formula.negation


def _negation(formula: Formula) -> Formula:
    if isinstance(formula, Truth):
        return FALSE if formula.value else TRUE
    if isinstance(formula, Fact):
        return Fact(formula.expr, not formula.holds)
    if isinstance(formula, Comparison):
        return Comparison(NEGATED[formula.op], formula.lhs, formula.rhs, formula.bits)
    assert isinstance(formula, Connective)
    # What was simplified stays simple under negation: only the order of the parts changes.
    dual = Or if isinstance(formula, And) else And
    return dual(tuple(sorted(map(negate, formula.parts), key=lambda part: part.order)))


def all_of(*parts: Formula) -> Formula:
    """The conjunction."""
    return _connect(And, parts)


def any_of(*parts: Formula) -> Formula:
    """The disjunction."""
    return _connect(Or, parts)


def exclusive(a: Formula, b: Formula) -> Formula:
    """``a ^ b``."""
    return any_of(all_of(a, negate(b)), all_of(negate(a), b))


def _connect(kind: type[Connective], given: Iterable[Formula]) -> Formula:
    dual = Or if kind is And else And
    neutral, absorbing = (TRUE, FALSE) if kind is And else (FALSE, TRUE)
    parts: dict[Formula, None] = {}
    for part in given:
        parts.update(dict.fromkeys(part.parts if isinstance(part, kind) else (part,)))
    parts.pop(neutral, None)
    # Facts and comparisons that are known to hold (in a conjunction; to fail, in a disjunction)
    # decide the same atoms inside the other parts, which may give new ones to flatten.
    while True:
        atoms = [p for p in parts if isinstance(p, (Fact, Comparison))]
        if absorbing in parts or any(negate(atom) in parts for atom in atoms):
            return absorbing
        opposite = frozenset(map(negate, atoms))
        changed = False
        simpler: dict[Formula, None] = {}
        for part in parts:
            if isinstance(part, dual):
                if not part.members.isdisjoint(parts):  # a & (a | b) is a
                    changed = True
                    continue
                if not part.members.isdisjoint(opposite):  # a & (~a | b) is a & b
                    part = _connect(dual, (p for p in part.parts if p not in opposite))
                    changed = True
            simpler.update(dict.fromkeys(part.parts if isinstance(part, kind) else (part,)))
        simpler.pop(neutral, None)
        parts = simpler
        if not changed:
            break
    ordered = sorted(parts, key=lambda part: part.order)
    if any(isinstance(p, Connective) and negate(p) in parts for p in ordered):
        return absorbing
    if len(ordered) < 2:
        return ordered[0] if ordered else neutral
    common = frozenset.intersection(
        *(part.members if isinstance(part, dual) else frozenset() for part in ordered)
    )
    if common:  # (a & b) | (a & c) is a & (b | c)
        rests = [
            _connect(dual, (p for p in part.parts if p not in common))
            for part in ordered
            if isinstance(part, dual)
        ]
        return _connect(dual, [*common, _connect(kind, rests)])
    return kind(tuple(ordered))


def fact(expr: Expr) -> Formula:
    """The formula that says that a bool expression is true."""
    if expr.op == "constant":
        return TRUE if expr.args[0] else FALSE
    if expr.op == "logical_not" or (expr.op == "bitwise_not" and expr.dtype is torch.bool):
        inner = expr.args[0]
        if inner.dtype is torch.bool:
            return negate(fact(inner))
    if expr.op in ("ne", "ge", "gt") and _total_order(expr):
        # One comparison and its inverse are one expression.
        return Fact(apply(INVERSE_COMPARISON[expr.op], *expr.args), holds=False)
    return Fact(expr)


def _total_order(comparison: Expr) -> bool:
    """Whether the inverse comparison is the negation: not so for NaN."""

    def integral(arg: object) -> bool:
        if isinstance(arg, Expr):
            return arg.dtype in (torch.bool, bool, int) or is_integer(arg.dtype)
        return isinstance(arg, int)

    return all(map(integral, comparison.args))


def fold(formula: Formula) -> tuple[Expr, bool]:
    """A one-sided formula as (bool expression, whether the formula is it or its negation).

    A formula and its negation give the same expression.
    """
    if isinstance(formula, Truth):
        return constant(True, torch.bool), formula.value
    if isinstance(formula, Fact):
        return formula.expr, formula.holds
    assert isinstance(formula, Connective)
    literals = [fold(part) for part in formula.parts]
    conjunction = isinstance(formula, And)
    negated = sum(holds is not conjunction for _, holds in literals)
    as_conjunction = 2 * negated <= len(literals)
    # In the complementary form every literal is flipped; the form with fewer negations is chosen.
    wanted = conjunction == as_conjunction
    exprs = sorted(
        {expr if holds is wanted else negated_expr(expr) for expr, holds in literals},
        key=lambda expr: expr.order,
    )
    result = exprs[0]
    for expr in exprs[1:]:
        result = apply("logical_and" if as_conjunction else "logical_or", result, expr)
    return result, wanted


def as_expr(formula: Formula) -> Expr:
    """A one-sided formula as a bool expression."""
    expr, holds = fold(formula)
    return expr if holds else negated_expr(expr)


def negated_expr(expr: Expr) -> Expr:
    """The negation of a bool expression, in its simplest spelling."""
    if expr.op in INVERSE_COMPARISON and _total_order(expr):
        return apply(INVERSE_COMPARISON[expr.op], *expr.args)
    if expr.op in ("logical_and", "logical_or"):
        inner = map(negated_expr, expr.args)
        return apply("logical_or" if expr.op == "logical_and" else "logical_and", *inner)
    if expr.op == "logical_not" and expr.args[0].dtype is torch.bool:
        return expr.args[0]
    return apply("logical_not", expr)


def select(condition: Formula, yes: Formula, no: Formula) -> Formula:
    """``where(condition, yes, no)``.

    Where the branches have the same form, the condition selects between their values and the form
    is kept: batch rows with different masks stay one mask whose values differ by row.
    """
    if isinstance(condition, Truth):
        return yes if condition.value else no
    if yes == no:
        return yes
    for kind, connect in ((And, all_of), (Or, any_of)):
        # where(c, a & x, a & y) is a & where(c, x, y), and so for |.
        left, right = _parts(kind, yes), _parts(kind, no)
        common = [part for part in left if part in right]
        if common:
            rest = select(
                condition,
                connect(*(part for part in left if part not in common)),
                connect(*(part for part in right if part not in common)),
            )
            return connect(*common, rest)
    if condition.one_sided and (yes.deps | no.deps) & Deps.Q and (yes.deps | no.deps) & Deps.K:
        merged = _merge(condition, yes, no)
        if merged is not None:
            return merged
    return any_of(all_of(condition, yes), all_of(negate(condition), no))


def _parts(kind: type[Connective], formula: Formula) -> tuple[Formula, ...]:
    return formula.parts if isinstance(formula, kind) else (formula,)


def _merge(condition: Formula, yes: Formula, no: Formula) -> Formula | None:
    if yes == no:
        return yes
    if isinstance(yes, Comparison) and isinstance(no, Comparison):
        return _merge_comparisons(condition, yes, no)
    kind = Or if isinstance(yes, Or) or isinstance(no, Or) else And
    if (isinstance(yes, And) or isinstance(no, And)) and kind is Or:
        kind = And
    left, right = _parts(kind, yes), _parts(kind, no)
    parts: list[Formula] = []
    # Conditions on one side are one condition, there or not there.
    for side in (Deps.Q, Deps.K):
        pair = [
            _connect(kind, [p for p in group if p.one_sided and _side(p) is side])
            for group in (left, right)
        ]
        if not one_sided(condition.deps | pair[0].deps | pair[1].deps):
            if pair[0] != pair[1]:
                return None
            parts.append(pair[0])
        else:
            parts.append(any_of(all_of(condition, pair[0]), all_of(negate(condition), pair[1])))
    both = [
        sorted((p for p in group if not p.one_sided), key=lambda p: (shape(p), p.order))
        for group in (left, right)
    ]
    if not both[0] or [shape(p) for p in both[0]] != [shape(p) for p in both[1]]:
        return None
    for a, b in zip(*both, strict=True):
        if a is yes and b is no:
            return None
        merged = _merge(condition, a, b)
        if merged is None:
            return None
        parts.append(merged)
    return _connect(kind, parts)


def _merge_comparisons(condition: Formula, yes: Comparison, no: Comparison) -> Formula | None:
    if shape(yes) != shape(no):
        return None
    terms: list[Term | None] = []
    for a, b in zip(yes.terms, no.terms, strict=True):
        if a == b:
            terms.append(a)
            continue
        assert isinstance(a, Expr)
        assert isinstance(b, Expr)
        if not one_sided(condition.deps | a.deps | b.deps):
            return None
        terms.append(apply("where", as_expr(condition), a, b))
    plus, minus, rhs_plus, rhs_minus = terms
    assert plus is not None
    assert rhs_plus is not None
    assert not isinstance(minus, int)
    assert not isinstance(rhs_minus, int)
    return Comparison(yes.op, (plus, minus), (rhs_plus, rhs_minus), yes.bits)


def _side(formula: Formula) -> Deps:
    return Deps.K if formula.deps & Deps.K else Deps.Q


def shape(formula: Formula) -> str:
    """What a formula looks like without its values."""
    if isinstance(formula, Comparison):
        return f"({' '.join(map(_term_shape, formula.terms))} {formula.op:d} {formula.bits})"
    if isinstance(formula, Connective):
        mixed = sorted(shape(part) for part in formula.parts if not part.one_sided)
        return f"{type(formula).__name__}({','.join(mixed)})"
    return "fact"


def _term_shape(term: Term | None) -> str:
    if not isinstance(term, Expr):
        return repr(term)
    return bare_index(term) or ("k." if term.deps & Deps.K else "q.")
