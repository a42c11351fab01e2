from __future__ import annotations

import copy
import pickle
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies import K_ROWS, Q_ROWS, nodes, random_values
from tree_attn_op.predicate import (
    EMPTY,
    FULL,
    MAX_ROWS,
    PARTIAL,
    And,
    Compare,
    Const,
    Kind,
    Node,
    Op,
    Or,
    Predicate,
    PredicateError,
    Side,
    Term,
    negate,
)

PYTHON = {
    Op.EQ: lambda a, b: a == b,
    Op.NE: lambda a, b: a != b,
    Op.LT: lambda a, b: a < b,
    Op.LE: lambda a, b: a <= b,
    Op.GT: lambda a, b: a > b,
    Op.GE: lambda a, b: a >= b,
}


def wrap(value: int, dtype: torch.dtype) -> int:
    bits = torch.iinfo(dtype).bits
    return (value + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)


def interpret(node: Node, q: int, k: int, q_vals, k_vals) -> bool:
    """The meaning of a node for one pair, in Python integers; independent of the class."""
    if isinstance(node, Const):
        return node.value
    if isinstance(node, And):
        return all(interpret(part, q, k, q_vals, k_vals) for part in node.parts)
    if isinstance(node, Or):
        return any(interpret(part, q, k, q_vals, k_vals) for part in node.parts)

    def term(t: Term) -> int:
        if t.kind is Kind.Q_INDEX:
            return q
        if t.kind is Kind.K_INDEX:
            return k
        if t.kind is Kind.LITERAL:
            return t.number
        return int(q_vals[0, t.number, q] if t.kind is Kind.Q_ROW else k_vals[0, t.number, k])

    def side(s: Side) -> int:
        if s.minus is None:
            return term(s.plus)
        return wrap(term(s.plus) - term(s.minus), q_vals.dtype)

    return PYTHON[node.op](side(node.lhs), side(node.rhs))


def shuffled(node: Node, rng: random.Random) -> Node:
    """The same formula with operands in another order."""
    if isinstance(node, Compare):
        mirrored = {Op.LT: Op.GT, Op.GT: Op.LT, Op.LE: Op.GE, Op.GE: Op.LE}
        if rng.random() < 0.5:
            return Compare(mirrored.get(node.op, node.op), node.rhs, node.lhs)
        return node
    if isinstance(node, Const):
        return node
    parts = [shuffled(part, rng) for part in node.parts]
    rng.shuffle(parts)
    return type(node)(tuple(parts))


def renumbered(node: Node, q_map: list[int], k_map: list[int]) -> Node:
    if isinstance(node, Const):
        return node
    if isinstance(node, Compare):

        def term(t: Term | None) -> Term | None:
            if t is None or t.kind not in (Kind.Q_ROW, Kind.K_ROW):
                return t
            return Term(t.kind, (q_map if t.kind is Kind.Q_ROW else k_map)[t.number])

        def side(s: Side) -> Side:
            return Side(term(s.plus), term(s.minus))

        return Compare(node.op, side(node.lhs), side(node.rhs))
    return type(node)(tuple(renumbered(part, q_map, k_map) for part in node.parts))


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("(q >= k) & (q0==k0 | q1 == k0)", "q >= k & (q0 == k0 | q1 == k0)"),
        ("k <= q & k0 > q", "q >= k & q < k0"),
        ("~(q<k | k0 <= q)", "q >= k & q < k0"),
        ("~~(q >= k)", "q >= k"),
        ("q - k <= 127 & k <= q", "q >= k & q - k < 128"),
        ("k - q > -128 & q >= k", "q >= k & q - k < 128"),
        ("q - k >= 0", "q >= k"),
        ("q0 - k0 >= 0", "q0 - k0 >= 0"),
        ("k0 - q0 < 5", "k0 - q0 < 5"),
        ("q1 == k1 & q >= k & q1 == k1", "q >= k & q1 == k1"),
        ("q >= k & (q >= k | q0 == k0)", "q >= k"),
        ("q >= k | (q >= k & q0 == k0)", "q >= k"),
        ("q >= k & q < k", "False"),
        ("q >= k | q < k", "True"),
        ("q >= k & True", "q >= k"),
        ("3 < 4 & q == q", "True"),
        ("(q0 != 0 & (k0 != 0 & (q >= k)))", "q >= k & q0 != 0 & k0 != 0"),
    ],
)
def test_normal_form(text: str, normal: str) -> None:
    predicate = Predicate.parse(text)
    assert str(predicate) == normal
    assert Predicate.parse(normal) == predicate
    assert hash(Predicate.parse(normal)) == hash(predicate)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("q0 >= k0 & q1 >= k1 & q1 < k2", "q0 >= k0 & q0 < k1 & q1 >= k2"),
        ("q >= k & (q1 == k0 | q0 == k0)", "(k0 == q0 | k0 == q1) & k <= q"),
        ("q0 - k0 < 5 & q1 != 0", "q0 != 0 & q1 - k3 < 5"),
    ],
)
def test_canonical_numbers_do_not_depend_on_spelling(left: str, right: str) -> None:
    assert str(Predicate.parse(left).canonical()[0]) == str(Predicate.parse(right).canonical()[0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected q, k"),
        ("A", "unexpected 'A' at position 0"),
        ("q <", "expected q, k, q<row>, k<row> or an integer at position 3"),
        ("q k", "expected one of =="),
        ("(q<k", "expected '\\)'"),
        ("q < k)", "unexpected '\\)'"),
        ("q0 - q1 < 3", "one query and one key term"),
        ("q0 - 3 < k0", "one query and one key term"),
        ("q0 == 99999999999999999999", "does not fit in 64 bits"),
        ("q64 == k", "at most 64 rows"),
        ("(" * 70 + "q < k" + ")" * 70, "nested deeper"),
        ("q < k & " * 20000 + "q < k", "at most 65536 characters"),
    ],
)
def test_bad_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(PredicateError, match=message):
        Predicate.parse(text)


def test_not_text_is_refused() -> None:
    with pytest.raises(PredicateError, match="got int"):
        Predicate.parse(3)  # type: ignore[arg-type]


@settings(deadline=None, max_examples=200)
@given(nodes, st.integers(0, 2**31), st.sampled_from([torch.int32, torch.int64]))
def test_evaluate_is_the_meaning(node: Node, seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    q_len, kv_len = 4, 5
    q_vals = random_values(generator, Q_ROWS, q_len, dtype)
    k_vals = random_values(generator, K_ROWS, kv_len, dtype)
    expected = [
        [interpret(node, q, k, q_vals, k_vals) for k in range(kv_len)] for q in range(q_len)
    ]
    for predicate in (Predicate(node), Predicate.parse(str(Predicate(node)))):
        assert predicate.dense(q_vals, k_vals, q_len, kv_len)[0].tolist() == expected
    inverse = Predicate(negate(node)).dense(q_vals, k_vals, q_len, kv_len)[0]
    assert (~inverse).tolist() == expected


@settings(deadline=None, max_examples=200)
@given(nodes, st.integers(0, 2**31))
def test_canonical_keeps_the_meaning(node: Node, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    predicate = Predicate(node)
    q_vals = random_values(generator, Q_ROWS, 4, torch.int64)
    k_vals = random_values(generator, K_ROWS, 5, torch.int64)
    canonical, q_order, k_order = predicate.canonical()
    assert canonical.num_q_rows == len(q_order)
    assert canonical.num_k_rows == len(k_order)
    dense = canonical.dense(q_vals[:, list(q_order)], k_vals[:, list(k_order)], 4, 5)
    assert torch.equal(dense, predicate.dense(q_vals, k_vals, 4, 5))


@settings(deadline=None, max_examples=200)
@given(nodes, st.integers(0, 2**31))
def test_canonical_text_survives_commuting_and_renumbering(node: Node, seed: int) -> None:
    rng = random.Random(seed)
    q_map = rng.sample(range(MAX_ROWS), Q_ROWS)
    k_map = rng.sample(range(MAX_ROWS), K_ROWS)
    other = renumbered(shuffled(node, rng), q_map, k_map)
    assert str(Predicate(other).canonical()[0]) == str(Predicate(node).canonical()[0])


@settings(deadline=None, max_examples=200)
@given(nodes, st.integers(0, 2**31), st.sampled_from([torch.int32, torch.int64]))
def test_classify_is_never_wrong(node: Node, seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    predicate = Predicate(node)
    length, tile = 12, 4
    q_vals = random_values(generator, Q_ROWS, length, dtype).sort(-1).values
    k_vals = random_values(generator, K_ROWS, length, dtype).sort(-1).values

    def bounds(values: torch.Tensor, dim: int):
        tiles = values.long().view(-1, tile)
        return tuple(x.values.unsqueeze(dim) for x in (tiles.min(1), tiles.max(1)))

    index = torch.arange(length)
    states = predicate.classify(
        bounds(index, 1),
        bounds(index, 0),
        [bounds(row, 1) for row in q_vals[0]],
        [bounds(row, 0) for row in k_vals[0]],
        dtype,
    )
    tiles = (
        predicate.dense(q_vals, k_vals, length, length)[0]
        .view(length // tile, tile, length // tile, tile)
        .transpose(1, 2)
        .flatten(2)
    )
    assert states.shape == tiles.shape[:2]
    assert tiles[states == FULL].all()
    assert not tiles[states == EMPTY].any()
    assert ((states >= EMPTY) & (states <= FULL)).all()


def test_classify_decides_trees_exactly() -> None:
    """On DFS pre-order a tile is FULL or EMPTY whenever it really is."""
    end = torch.tensor([16] * 4 + [10] * 6 + [16] * 6)
    predicate = Predicate.parse("q >= k & q < k0")
    dense = predicate.dense(torch.empty(1, 0, 16).long(), end.view(1, 1, 16), 16, 16)[0]
    index = torch.arange(16).view(8, 2)
    low_high = (index.min(1).values, index.max(1).values)
    states = predicate.classify(
        tuple(x.view(8, 1) for x in low_high),
        tuple(x.view(1, 8) for x in low_high),
        [],
        [(end.view(8, 2).min(1).values.view(1, 8), end.view(8, 2).max(1).values.view(1, 8))],
        torch.int64,
    )
    tiles = dense.view(8, 2, 8, 2).transpose(1, 2).flatten(2)
    expected = torch.where(tiles.all(-1), FULL, torch.where(tiles.any(-1), PARTIAL, EMPTY))
    assert torch.equal(states.long(), expected)


def run_program(program: tuple[int, ...], q: int, k: int, q_vals, k_vals, at: int = 0) -> bool:
    """A second reader of the program format, as written in DESIGN.md."""
    op = Op(program[at])
    if op in (Op.TRUE, Op.FALSE):
        return op is Op.TRUE
    if op in (Op.AND, Op.OR):
        offsets = program[at + 2 : at + 2 + program[at + 1]]
        results = [run_program(program, q, k, q_vals, k_vals, offset) for offset in offsets]
        return all(results) if op is Op.AND else any(results)

    def term(kind: int, number: int) -> int:
        return {
            Kind.NONE: lambda: 0,
            Kind.Q_INDEX: lambda: q,
            Kind.K_INDEX: lambda: k,
            Kind.Q_ROW: lambda: int(q_vals[0, number, q]),
            Kind.K_ROW: lambda: int(k_vals[0, number, k]),
            Kind.LITERAL: lambda: number,
        }[Kind(kind)]()

    a, b, c, d = (term(*program[at + 1 + 2 * i : at + 3 + 2 * i]) for i in range(4))
    return PYTHON[op](wrap(a - b, torch.int64), wrap(c - d, torch.int64))


@settings(deadline=None, max_examples=100)
@given(nodes, st.integers(0, 2**31))
def test_program_is_the_predicate(node: Node, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    predicate = Predicate(node)
    q_vals = random_values(generator, Q_ROWS, 3, torch.int64)
    k_vals = random_values(generator, K_ROWS, 4, torch.int64)
    program = predicate.program
    assert all(type(number) is int for number in program)
    found = [[run_program(program, q, k, q_vals, k_vals) for k in range(4)] for q in range(3)]
    assert found == predicate.dense(q_vals, k_vals, 3, 4)[0].tolist()


def test_immutable_hashable_copyable() -> None:
    predicate = Predicate.parse("q >= k & q < k0")
    with pytest.raises(AttributeError):
        predicate.root = predicate.root
    assert pickle.loads(pickle.dumps(predicate)) == predicate
    assert copy.deepcopy(predicate) == predicate
    assert repr(predicate) == "Predicate('q >= k & q < k0')"


@pytest.mark.parametrize(
    ("q_vals", "k_vals", "message"),
    [
        (torch.zeros(1, 1, 4), torch.zeros(1, 1, 4).int(), "q_vals must be int32 or int64"),
        (torch.zeros(1, 4).int(), torch.zeros(1, 1, 4).int(), "q_vals must be \\[batch"),
        (torch.zeros(1, 0, 4).int(), torch.zeros(1, 1, 4).int(), "reads 1 rows of q_vals, got 0"),
        (torch.zeros(1, 1, 4).int(), torch.zeros(1, 0, 4).int(), "reads 1 rows of k_vals, got 0"),
        (torch.zeros(1, 1, 4).int(), torch.zeros(1, 1, 4).long(), "must have one dtype"),
    ],
)
def test_values_that_do_not_fit(q_vals, k_vals, message: str) -> None:
    with pytest.raises(PredicateError, match=message):
        Predicate.parse("q0 == k0").check_values(q_vals, k_vals)


def test_wide_literal_needs_wide_values() -> None:
    predicate = Predicate.parse(f"k0 < {2**40}")
    with pytest.raises(PredicateError, match="beyond int32"):
        predicate.check_values(torch.zeros(1, 0, 4).int(), torch.zeros(1, 1, 4).int())
    predicate.check_values(torch.zeros(1, 0, 4).long(), torch.zeros(1, 1, 4).long())


def test_deep_alternation_is_not_exponential() -> None:
    text = "q0 == k0"
    for i in range(30):
        text = f"({text}) {'&|'[i % 2]} q{i} >= k{i}"
    assert Predicate.parse(text).num_comparisons == 31
