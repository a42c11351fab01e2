"""The normal form of a predicate, and row numbers that do not depend on spelling."""

from __future__ import annotations

from collections.abc import Sequence

from .nodes import (
    FALSE,
    INT32_RANGE,
    MAX_ROWS,
    MIRRORED,
    TRUE,
    And,
    Compare,
    Const,
    Kind,
    Node,
    Op,
    Or,
    Side,
    Term,
    literal,
    negate,
)


def _term_key(term: Term | None, q_key: Sequence[int], k_key: Sequence[int]) -> tuple[int, int]:
    if term is None:
        return (0, 0)
    if term.kind is Kind.Q_ROW:
        return (int(term.kind), q_key[term.number])
    if term.kind is Kind.K_ROW:
        return (int(term.kind), k_key[term.number])
    return (int(term.kind), term.number)


_Key = tuple

_OP_ORDER = {Op.GE: 0, Op.GT: 1, Op.LT: 2, Op.LE: 3, Op.EQ: 4, Op.NE: 5}


def _key(node: Node, q_key: Sequence[int], k_key: Sequence[int]) -> _Key:
    """Sort key of a node; rows are compared through ``q_key`` and ``k_key``."""
    if isinstance(node, Compare):
        sides = tuple(
            _term_key(term, q_key, k_key)
            for side in (node.lhs, node.rhs)
            for term in (side.plus, side.minus)
        )
        return (0, sides, _OP_ORDER[node.op])
    if isinstance(node, Const):
        return (-1, int(node.value))
    return (
        1 if isinstance(node, Or) else 2,
        len(node.parts),
        tuple(sorted(_key(part, q_key, k_key) for part in node.parts)),
    )


IDENTITY = tuple(range(MAX_ROWS))


def _sort(node: Node, q_key: Sequence[int] = IDENTITY, k_key: Sequence[int] = IDENTITY) -> Node:
    if isinstance(node, Compare | Const):
        return node
    parts = [_sort(part, q_key, k_key) for part in node.parts]
    return type(node)(tuple(sorted(parts, key=lambda part: _key(part, q_key, k_key))))


def _side_rank(side: Side) -> tuple[int, _Key]:
    """Differences first, then the query, then the key, then literals."""
    key = tuple(_term_key(term, IDENTITY, IDENTITY) for term in side.terms)
    if side.minus is not None:
        return (0, key)
    return (1 if side.plus.on_query else 2 if side.plus.on_key else 3, key)


def _holds(op: Op, left: int, right: int) -> bool:
    if op in (Op.EQ, Op.NE):
        return (left == right) == (op is Op.EQ)
    if op in (Op.LT, Op.LE):
        return left < right or (left == right and op is Op.LE)
    return left > right or (left == right and op is Op.GE)


def _normalise_compare(node: Compare) -> Node:
    op, lhs, rhs = node.op, node.lhs, node.rhs
    if _side_rank(rhs) < _side_rank(lhs):
        op, lhs, rhs = MIRRORED[op], rhs, lhs
    if lhs == rhs:
        return TRUE if op in (Op.EQ, Op.LE, Op.GE) else FALSE
    if rhs.plus.kind is Kind.LITERAL:
        value = rhs.plus.number
        if lhs.plus.kind is Kind.LITERAL:
            return TRUE if _holds(op, lhs.plus.number, value) else FALSE
        if (
            lhs.minus is not None
            and all(term.is_index for term in lhs.terms)
            and INT32_RANGE[0] < value <= INT32_RANGE[1]
        ):
            # A difference of indices can't wrap: orient it q - k, and compare with zero directly.
            if lhs.plus.on_key:
                op, lhs, value = MIRRORED[op], Side(lhs.minus, lhs.plus), -value
            if value == 0 and lhs.minus is not None:
                return Compare(op, Side(lhs.plus), Side(lhs.minus))
        # Over integers, x <= c is x < c + 1 and x > c is x >= c + 1.
        if op is Op.LE and value < INT32_RANGE[1]:
            op, value = Op.LT, value + 1
        elif op is Op.GT and value < INT32_RANGE[1]:
            op, value = Op.GE, value + 1
        rhs = literal(value)
    return Compare(op, lhs, rhs)


def normalise(node: Node) -> Node:
    """The normal form of ``node``: same meaning, same row numbers, one spelling."""
    if isinstance(node, Compare):
        return _normalise_compare(node)
    if isinstance(node, Const):
        return node
    kind = type(node)
    absorbing, neutral = (FALSE, TRUE) if kind is And else (TRUE, FALSE)
    parts: list[Node] = []
    for part in map(normalise, node.parts):
        parts.extend(part.parts if isinstance(part, kind) else (part,))
    parts = list(dict.fromkeys(_sort(part) for part in parts if part != neutral))
    present = set(parts)
    # The parts are in normal form, and the negation of a normal form needs only sorting to be one.
    if absorbing in present or any(_sort(negate(part)) in present for part in parts):
        return absorbing
    # Absorption: A & (A | B) is A, A | (A & B) is A.
    parts = [
        part
        for part in parts
        if not (isinstance(part, And | Or) and present.intersection(part.parts))
    ]
    if not parts:
        return neutral
    return _sort(parts[0] if len(parts) == 1 else kind(tuple(parts)))


def _map_rows(node: Node, q_map: Sequence[int], k_map: Sequence[int]) -> Node:
    def term(old: Term | None) -> Term | None:
        if old is None or old.kind not in (Kind.Q_ROW, Kind.K_ROW):
            return old
        return Term(old.kind, (q_map if old.kind is Kind.Q_ROW else k_map)[old.number])

    def side(old: Side) -> Side:
        plus = term(old.plus)
        assert plus is not None
        return Side(plus, term(old.minus))

    if isinstance(node, Compare):
        return Compare(node.op, side(node.lhs), side(node.rhs))
    if isinstance(node, Const):
        return node
    return type(node)(tuple(_map_rows(part, q_map, k_map) for part in node.parts))


def terms_of(node: Node) -> list[Term]:
    if isinstance(node, Compare):
        return [*node.lhs.terms, *node.rhs.terms]
    if isinstance(node, Const):
        return []
    return [term for part in node.parts for term in terms_of(part)]


def _refine_colours(root: Node, rows: list[Term], colour: dict[Term, int]) -> dict[Term, int]:
    """Colour refinement: rows stay alike while the formula, seen from them, looks alike."""

    def keys(marked: Term | None) -> tuple[list[int], list[int]]:
        q_key, k_key = [0] * MAX_ROWS, [0] * MAX_ROWS
        for row in rows:
            value = -1 if row == marked else colour[row]
            (q_key if row.kind is Kind.Q_ROW else k_key)[row.number] = value
        return q_key, k_key

    while True:
        view = {row: (colour[row], _key(root, *keys(row))) for row in rows}
        order = {seen: i for i, seen in enumerate(sorted(set(view.values())))}
        refined = {row: order[view[row]] for row in rows}
        if len(set(refined.values())) == len(set(colour.values())):
            return refined
        colour = refined


def _canonical_colours(root: Node, rows: list[Term], budget: int = 32) -> dict[Term, int]:
    """A colour of its own for each row, independent of the rows' numbers where those don't matter.

    Colour refinement, then individualisation of the first tie (the usual scheme for graph
    canonicalisation); ``budget`` bounds the ties tried, beyond which rows keep their given order.
    """
    best: tuple[_Key, dict[Term, int]] | None = None
    stack = [_refine_colours(root, rows, {row: int(row.kind) for row in rows})]
    while stack:
        colour = stack.pop()
        classes: dict[int, list[Term]] = {}
        for row in rows:
            classes.setdefault(colour[row], []).append(row)
        tie = next((c for c in sorted(classes) if len(classes[c]) > 1), None)
        if tie is None:
            q_key, k_key = [0] * MAX_ROWS, [0] * MAX_ROWS
            for row in rows:
                (q_key if row.kind is Kind.Q_ROW else k_key)[row.number] = colour[row]
            key = _key(root, q_key, k_key)
            if best is None or key < best[0]:
                best = (key, colour)
            continue
        members = classes[tie] if budget > 0 else classes[tie][:1]
        budget -= len(members)
        for row in reversed(members):
            split = {r: 2 * c + 1 for r, c in colour.items()}
            split[row] = 2 * tie
            stack.append(_refine_colours(root, rows, split))
    assert best is not None
    return best[1]


def canonical_order(root: Node) -> tuple[Node, tuple[int, ...], tuple[int, ...]]:
    """``root`` with rows numbered by structure, and the old number of each new row.

    Two formulas that differ only in row numbers and in the order of operands give the same result
    (as long as few rows look alike, see :func:`_canonical_colours`).
    """
    rows = sorted({t for t in terms_of(root) if t.kind in (Kind.Q_ROW, Kind.K_ROW)})
    if not rows:
        return root, (), ()
    colour = _canonical_colours(root, rows)
    q_key, k_key = [0] * MAX_ROWS, [0] * MAX_ROWS
    for row in rows:
        (q_key if row.kind is Kind.Q_ROW else k_key)[row.number] = colour[row]
    root = _sort(root, q_key, k_key)
    q_order: list[int] = list(IDENTITY)
    k_order: list[int] = list(IDENTITY)
    # Numbering by first appearance can move operands, hence a few rounds; the start is canonical,
    # so the result is, whether or not they reach a fixed point.
    for _ in range(4):
        orders, maps = [], []
        for kind in (Kind.Q_ROW, Kind.K_ROW):
            order = list(dict.fromkeys(t.number for t in terms_of(root) if t.kind is kind))
            inverse = [0] * MAX_ROWS
            for new, old in enumerate(order):
                inverse[old] = new
            orders.append(order)
            maps.append(inverse)
        q_order = [q_order[old] for old in orders[0]]
        k_order = [k_order[old] for old in orders[1]]
        root = normalise(_map_rows(root, maps[0], maps[1]))
        if all(order == sorted(order) for order in orders):
            break
    return root, tuple(q_order), tuple(k_order)
