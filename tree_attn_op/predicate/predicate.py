"""The predicate class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ..arguments import check_int, check_tensor
from .intervals import Bounds, compare_bounds, subtract_bounds
from .nodes import (
    INT32_RANGE,
    MAX_TEXT_LENGTH,
    And,
    Compare,
    Const,
    Kind,
    Node,
    Op,
    Or,
    PredicateError,
    Side,
    Term,
)
from .normal_form import canonical_order, normalise, terms_of
from .text import Parser, print_node

_TORCH: dict[Op, Callable[..., Tensor]] = {
    Op.EQ: torch.eq,
    Op.NE: torch.ne,
    Op.LT: torch.lt,
    Op.LE: torch.le,
    Op.GT: torch.gt,
    Op.GE: torch.ge,
}


class Predicate:
    """An immutable predicate in normal form.

    Construction pushes negations into comparisons, puts the query side left, sorts, and drops
    duplicates; row numbers stay as given, so the values keep their places. Equal predicates
    compare and hash equal. ``str(predicate)`` parses back to an equal predicate.

    Args:
        root: the formula's node; :meth:`parse` makes one from text.

    Raises:
        TypeError: root is no node.
    """

    __slots__ = ("__dict__", "_text", "root")

    root: Node
    _text: str

    def __init__(self, root: Node):
        if not isinstance(root, Compare | Const | And | Or):
            hint = "; Predicate.parse takes text" if isinstance(root, str) else ""
            raise TypeError(f"root must be a node, got {type(root).__name__}{hint}")
        object.__setattr__(self, "root", normalise(root))
        # Printed once, here: where torch.compile takes all ints for dynamic, it cannot print them.
        object.__setattr__(self, "_text", print_node(self.root))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a Predicate is immutable")

    def __reduce__(self) -> tuple[Callable[[str], Predicate], tuple[str]]:
        return (Predicate.parse, (str(self),))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Predicate) and self.root == other.root

    def __hash__(self) -> int:
        return hash(self.root)

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"Predicate({str(self)!r})"

    @staticmethod
    def parse(text: str) -> Predicate:
        """The predicate that ``text`` spells, in normal form.

        Raises:
            PredicateError: ``text`` does not follow the grammar (see DESIGN.md); the message shows
                where.
        """
        if not isinstance(text, str):
            raise PredicateError(f"a predicate is text (str), got {type(text).__name__}")
        if len(text) > MAX_TEXT_LENGTH:
            raise PredicateError(
                f"a predicate has at most {MAX_TEXT_LENGTH} characters, got {len(text)}"
            )
        return _parse(text)

    @property
    def terms(self) -> list[Term]:
        """All terms, in the order of the text."""
        return terms_of(self.root)

    @property
    def num_q_rows(self) -> int:
        """Rows of ``q_vals`` that the predicate needs: its greatest query row plus one."""
        return max((t.number + 1 for t in self.terms if t.kind is Kind.Q_ROW), default=0)

    @property
    def num_k_rows(self) -> int:
        """Rows of ``k_vals`` that the predicate needs: its greatest key row plus one."""
        return max((t.number + 1 for t in self.terms if t.kind is Kind.K_ROW), default=0)

    @property
    def num_comparisons(self) -> int:
        """Number of comparisons."""

        def count(node: Node) -> int:
            return sum(map(count, node.parts)) if isinstance(node, And | Or) else 1

        return 0 if isinstance(self.root, Const) else count(self.root)

    @property
    def needs_int64(self) -> bool:
        """Whether a literal does not fit in int32, so that the values must be int64."""
        low, high = INT32_RANGE
        return any(t.kind is Kind.LITERAL and not low <= t.number <= high for t in self.terms)

    def canonical(self) -> tuple[Predicate, tuple[int, ...], tuple[int, ...]]:
        """The same predicate with rows renumbered, so that equal structures print alike.

        Returns:
            ``(predicate, q_order, k_order)``: query row ``i`` of the result reads what row
            ``q_order[i]`` of this predicate read, and so for keys. Unused rows are left out.
        """
        root, q_order, k_order = canonical_order(self.root)
        return Predicate(root), q_order, k_order

    def check_values(self, q_vals: Tensor, k_vals: Tensor) -> None:
        """Check that the values have the rows and the dtype that this predicate needs.

        Raises:
            PredicateError: ``q_vals`` or ``k_vals`` is not int32/int64 ``[B, rows, length]``,
                their dtypes differ, a row is missing, or a literal does not fit their dtype.
        """
        for name, values, need in (
            ("q_vals", q_vals, self.num_q_rows),
            ("k_vals", k_vals, self.num_k_rows),
        ):
            check_tensor(name, values)
            if values.dim() != 3:
                raise PredicateError(
                    f"{name} must be [batch or 1, rows, length], got shape {tuple(values.shape)}"
                )
            if values.dtype not in (torch.int32, torch.int64):
                raise PredicateError(f"{name} must be int32 or int64, got {values.dtype}")
            if values.shape[1] < need:
                raise PredicateError(
                    f"predicate '{self}' reads {need} rows of {name}, got {values.shape[1]}"
                )
        if q_vals.device != k_vals.device:
            raise PredicateError(
                f"q_vals and k_vals must be on one device, got {q_vals.device} and {k_vals.device}"
            )
        if q_vals.dtype != k_vals.dtype:
            raise PredicateError(
                f"q_vals and k_vals must have one dtype, got {q_vals.dtype} and {k_vals.dtype}"
            )
        if self.needs_int64 and q_vals.dtype is not torch.int64:
            raise PredicateError(
                f"predicate '{self}' has a literal beyond int32: q_vals and k_vals must be int64"
            )

    def evaluate(
        self, q: Tensor, k: Tensor, q_rows: Sequence[Tensor], k_rows: Sequence[Tensor]
    ) -> Tensor:
        """The predicate's value for every broadcast pair.

        Args:
            q: query indices, any shape that broadcasts with the rest, integer.
            k: key indices, likewise.
            q_rows: one tensor a query row, the value at ``q``; int32 or int64, all rows alike.
            k_rows: one tensor a key row, the value at ``k``.

        Returns:
            bool tensor of the broadcast shape of all arguments.
        """
        dtype = _common_dtype([*q_rows, *k_rows])
        shape = torch.broadcast_shapes(q.shape, k.shape, *(r.shape for r in [*q_rows, *k_rows]))

        def value(term: Term) -> Tensor | int:
            if term.kind is Kind.Q_INDEX:
                return q.to(dtype)
            if term.kind is Kind.K_INDEX:
                return k.to(dtype)
            if term.kind is Kind.Q_ROW:
                return q_rows[term.number]
            if term.kind is Kind.K_ROW:
                return k_rows[term.number]
            return term.number

        def side(s: Side) -> Tensor | int:
            plus = value(s.plus)
            return plus if s.minus is None else plus - value(s.minus)

        def visit(node: Node) -> Tensor:
            if isinstance(node, Compare):
                return _TORCH[node.op](side(node.lhs), side(node.rhs))
            if isinstance(node, Const):
                return torch.full((), node.value, dtype=torch.bool, device=q.device)
            result = visit(node.parts[0])
            for part in node.parts[1:]:
                result = result & visit(part) if isinstance(node, And) else result | visit(part)
            return result

        return visit(self.root).expand(shape)

    def dense(self, q_vals: Tensor, k_vals: Tensor, q_len: int, kv_len: int) -> Tensor:
        """The whole mask as bool ``[B, q_len, kv_len]`` (B is 1 unless the values have a batch).

        Quadratic in the length: for tests, pictures and small masks.

        Args:
            q_vals, k_vals: ``[B or 1, rows, q_len]`` and ``[B or 1, rows, kv_len]``, both int32
                or both int64.
            q_len, kv_len: the lengths.

        Raises:
            PredicateError: as :meth:`check_values`.
        """
        self.check_values(q_vals, k_vals)
        for name, length, vals in (("q_len", q_len, q_vals), ("kv_len", kv_len, k_vals)):
            check_int(name, length, least=0)
            if vals.shape[1] and vals.shape[2] != length:
                raise PredicateError(
                    f"{name} must be the number of values of a row, {vals.shape[2]}, got {length}"
                )
        if q_vals.shape[0] != k_vals.shape[0] and 1 not in (q_vals.shape[0], k_vals.shape[0]):
            raise PredicateError(
                "the batch sizes of q_vals and k_vals must be equal or 1, got "
                f"{q_vals.shape[0]} and {k_vals.shape[0]}"
            )
        q = torch.arange(q_len, device=q_vals.device).view(1, q_len, 1)
        k = torch.arange(kv_len, device=q_vals.device).view(1, 1, kv_len)
        q_rows = [row.unsqueeze(2) for row in q_vals.unbind(1)]
        k_rows = [row.unsqueeze(1) for row in k_vals.unbind(1)]
        batches = (q_vals.shape[0], k_vals.shape[0])
        batch = max(batches) if min(batches) else 0
        return self.evaluate(q, k, q_rows, k_rows).expand(batch, q_len, kv_len)

    def classify(
        self,
        q: Bounds,
        k: Bounds,
        q_rows: Sequence[Bounds],
        k_rows: Sequence[Bounds],
        dtype: torch.dtype,
    ) -> Tensor:
        """The state of every broadcast tile, from the bounds of its terms.

        Args:
            q, k: least and greatest index of the tile, int64.
            q_rows, k_rows: least and greatest value of each row over the tile, int64.
            dtype: the values' own dtype, in which differences wrap.

        Returns:
            int8, of the shape that all bounds broadcast to: EMPTY (no pair satisfies the
            predicate), FULL (every pair does) or PARTIAL (not decided). EMPTY and FULL are
            certain.
        """
        all_bounds = [q, k, *q_rows, *k_rows]
        shape = torch.broadcast_shapes(*(bound[0].shape for bound in all_bounds))

        def value(term: Term) -> Bounds:
            if term.kind is Kind.LITERAL:
                number = torch.full((), term.number, dtype=torch.int64, device=q[0].device)
                return number, number
            index = {Kind.Q_INDEX: q, Kind.K_INDEX: k}.get(term.kind)
            if index is not None:
                return index
            return (q_rows if term.kind is Kind.Q_ROW else k_rows)[term.number]

        def side(s: Side) -> tuple[Bounds, Tensor | None]:
            if s.minus is None:
                return value(s.plus), None
            return subtract_bounds(value(s.plus), value(s.minus), dtype)

        def visit(node: Node) -> tuple[Tensor, Tensor]:
            if isinstance(node, Compare):
                (lhs, lhs_safe), (rhs, rhs_safe) = side(node.lhs), side(node.rhs)
                may, must = compare_bounds(node.op, lhs, rhs)
                for safe in (lhs_safe, rhs_safe):
                    if safe is not None:
                        may, must = may | ~safe, must & safe
                return may, must
            if isinstance(node, Const):
                constant = torch.full((), node.value, dtype=torch.bool, device=q[0].device)
                return constant, constant
            may, must = visit(node.parts[0])
            for part in node.parts[1:]:
                part_may, part_must = visit(part)
                if isinstance(node, And):
                    may, must = may & part_may, must & part_must
                else:
                    may, must = may | part_may, must | part_must
            return may, must

        may, must = visit(self.root)
        return (may.to(torch.int8) + must.to(torch.int8)).expand(shape)

    @property
    def program(self) -> tuple[int, ...]:
        """The predicate as flat integers for the kernels; the format is in DESIGN.md."""
        cached = self.__dict__.get("_program")
        if cached is None:
            cached = self.__dict__["_program"] = _program(self.root)
        return cached


def _common_dtype(rows: Sequence[Tensor]) -> torch.dtype:
    dtypes = {row.dtype for row in rows}
    if len(dtypes) > 1 or dtypes - {torch.int32, torch.int64}:
        names = ", ".join(sorted(map(str, dtypes)))
        raise PredicateError(f"rows must all be int32 or all int64, got {names}")
    return dtypes.pop() if dtypes else torch.int64


def _program(root: Node) -> tuple[int, ...]:
    code: list[int] = []

    def emit(node: Node) -> int:
        at = len(code)
        if isinstance(node, Const):
            code.extend((Op.TRUE if node.value else Op.FALSE, 0))
        elif isinstance(node, Compare):
            code.append(node.op)
            for side in (node.lhs, node.rhs):
                for term in (side.plus, side.minus or Term(Kind.NONE)):
                    code.extend((term.kind, term.number))
        else:
            code.extend((Op.AND if isinstance(node, And) else Op.OR, len(node.parts)))
            first = len(code)
            code.extend([0] * len(node.parts))
            for i, part in enumerate(node.parts):
                code[first + i] = emit(part)
        return at

    emit(root)
    return tuple(int(number) for number in code)


@lru_cache(maxsize=1024)
def _parse(text: str) -> Predicate:
    return Predicate(Parser(text).parse())
