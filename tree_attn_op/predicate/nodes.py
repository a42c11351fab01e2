"""The syntax of predicates: terms, comparisons and connectives."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Union

EMPTY, PARTIAL, FULL = 0, 1, 2
"""States of a tile."""

INT32_RANGE = (-(2**31), 2**31 - 1)
INT64_RANGE = (-(2**63), 2**63 - 1)

MAX_TEXT_LENGTH = 1 << 16
MAX_DEPTH = 64
MAX_ROWS = 64


class PredicateError(ValueError):
    """Text that is no predicate, or values that do not fit a predicate."""


class Kind(IntEnum):
    """What a term reads. The numbers are part of the kernels' program format."""

    NONE = 0
    Q_INDEX = 1
    K_INDEX = 2
    Q_ROW = 3
    K_ROW = 4
    LITERAL = 5


class Op(IntEnum):
    """Node kinds of a program. The numbers are part of the kernels' program format."""

    AND = 0
    OR = 1
    FALSE = 2
    TRUE = 3
    EQ = 4
    NE = 5
    LT = 6
    LE = 7
    GT = 8
    GE = 9


SYMBOLS = {Op.EQ: "==", Op.NE: "!=", Op.LT: "<", Op.LE: "<=", Op.GT: ">", Op.GE: ">="}
NEGATED = {
    Op.EQ: Op.NE,
    Op.NE: Op.EQ,
    Op.LT: Op.GE,
    Op.GE: Op.LT,
    Op.GT: Op.LE,
    Op.LE: Op.GT,
}
MIRRORED = {
    Op.EQ: Op.EQ,
    Op.NE: Op.NE,
    Op.LT: Op.GT,
    Op.GT: Op.LT,
    Op.LE: Op.GE,
    Op.GE: Op.LE,
}


class Term(NamedTuple):
    """One operand: an index, a row of values (``number`` is the row) or a literal (its value)."""

    kind: Kind
    number: int = 0

    def __str__(self) -> str:
        names = {Kind.Q_INDEX: "q", Kind.K_INDEX: "k"}
        rows = {Kind.Q_ROW: "q", Kind.K_ROW: "k", Kind.LITERAL: ""}
        return names.get(self.kind) or f"{rows[self.kind]}{self.number}"

    @property
    def on_query(self) -> bool:
        return self.kind in (Kind.Q_INDEX, Kind.Q_ROW)

    @property
    def on_key(self) -> bool:
        return self.kind in (Kind.K_INDEX, Kind.K_ROW)

    @property
    def is_index(self) -> bool:
        return self.kind in (Kind.Q_INDEX, Kind.K_INDEX)


class Side(NamedTuple):
    """One side of a comparison: a term, or a term minus a term of the other sequence."""

    plus: Term
    minus: Term | None = None

    def __str__(self) -> str:
        return str(self.plus) if self.minus is None else f"{self.plus} - {self.minus}"

    @property
    def terms(self) -> tuple[Term, ...]:
        return (self.plus,) if self.minus is None else (self.plus, self.minus)


@dataclass(frozen=True)
class Compare:
    op: Op
    lhs: Side
    rhs: Side


@dataclass(frozen=True)
class And:
    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Or:
    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Const:
    value: bool


Node = Union[Compare, And, Or, Const]  # noqa: UP007 - evaluated at run time on Python 3.10

Q_INDEX = Side(Term(Kind.Q_INDEX))
K_INDEX = Side(Term(Kind.K_INDEX))
TRUE = Const(True)
FALSE = Const(False)


def q_row(number: int) -> Side:
    """The side that reads row ``number`` of ``q_vals``."""
    return Side(Term(Kind.Q_ROW, number))


def k_row(number: int) -> Side:
    """The side that reads row ``number`` of ``k_vals``."""
    return Side(Term(Kind.K_ROW, number))


def literal(value: int) -> Side:
    """The side that is the integer ``value``."""
    return Side(Term(Kind.LITERAL, value))


def difference(plus: Side, minus: Side) -> Side:
    """``plus - minus``, one of them on the query and the other on the key."""
    if plus.minus is not None or minus.minus is not None:
        raise PredicateError(f"a difference has two terms, got ({plus}) - ({minus})")
    return Side(plus.plus, minus.plus)


def negate(node: Node) -> Node:
    """The negation of ``node``, pushed into its comparisons."""
    if isinstance(node, Compare):
        return Compare(NEGATED[node.op], node.lhs, node.rhs)
    if isinstance(node, Const):
        return FALSE if node.value else TRUE
    parts = tuple(negate(part) for part in node.parts)
    return Or(parts) if isinstance(node, And) else And(parts)
