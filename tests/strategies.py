"""Hypothesis strategies for predicates and values."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from tree_attn_op.predicate import (
    K_INDEX,
    Q_INDEX,
    And,
    Compare,
    Const,
    Node,
    Op,
    Or,
    Side,
    difference,
    k_row,
    literal,
    q_row,
)

Q_ROWS, K_ROWS = 3, 3
COMPARISONS = (Op.EQ, Op.NE, Op.LT, Op.LE, Op.GT, Op.GE)

query_sides = st.one_of(st.just(Q_INDEX), st.integers(0, Q_ROWS - 1).map(q_row))
key_sides = st.one_of(st.just(K_INDEX), st.integers(0, K_ROWS - 1).map(k_row))
differences = st.one_of(
    st.builds(difference, query_sides, key_sides), st.builds(difference, key_sides, query_sides)
)
literals = st.integers(-3, 6).map(literal)
sides: st.SearchStrategy[Side] = st.one_of(query_sides, key_sides, differences, literals)
comparisons = st.builds(Compare, st.sampled_from(COMPARISONS), sides, sides)
nodes: st.SearchStrategy[Node] = st.recursive(
    st.one_of(comparisons, comparisons, comparisons, st.booleans().map(Const)),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: And(tuple(parts))),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: Or(tuple(parts))),
    ),
    max_leaves=8,
)


def random_values(
    generator: torch.Generator, rows: int, length: int, dtype: torch.dtype, batch: int = 1
) -> torch.Tensor:
    """Rows of ids: small and repeated, or spread over the whole range of the dtype."""
    small = torch.randint(-3, 7, (batch, rows, length), generator=generator).to(dtype)
    info = torch.iinfo(dtype)
    wide = torch.randint(info.min, info.max, (batch, rows, length), generator=generator).to(dtype)
    pick = torch.rand((batch, rows, 1), generator=generator) < 0.25
    return torch.where(pick, wide, small)
