"""The numbers of the predicate's program (``Predicate.program``), as Triton constants."""

from __future__ import annotations

import triton.language as tl

from tree_attn_op.predicate import Kind, Op

AND = tl.constexpr(int(Op.AND))
OR = tl.constexpr(int(Op.OR))
FALSE = tl.constexpr(int(Op.FALSE))
TRUE = tl.constexpr(int(Op.TRUE))
EQ = tl.constexpr(int(Op.EQ))
NE = tl.constexpr(int(Op.NE))
LT = tl.constexpr(int(Op.LT))
LE = tl.constexpr(int(Op.LE))
GT = tl.constexpr(int(Op.GT))
GE = tl.constexpr(int(Op.GE))

NONE = tl.constexpr(int(Kind.NONE))
Q_INDEX = tl.constexpr(int(Kind.Q_INDEX))
K_INDEX = tl.constexpr(int(Kind.K_INDEX))
Q_ROW = tl.constexpr(int(Kind.Q_ROW))
K_ROW = tl.constexpr(int(Kind.K_ROW))
