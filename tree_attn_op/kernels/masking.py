"""Evaluation of a predicate's program inside a Triton kernel.

The program (``Predicate.program``) is a flat tuple of ints that is a compile-time constant of the
kernel, so evaluation is plain recursion over offsets that leaves only the comparisons behind.
Shapes are the caller's: with query terms ``[M, 1]`` and key terms ``[1, N]`` the result is
``[M, N]``; with ``[1, M]`` and ``[N, 1]`` it is transposed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tree_attn_op.predicate import Kind, Op

_AND = tl.constexpr(int(Op.AND))
_OR = tl.constexpr(int(Op.OR))
_FALSE = tl.constexpr(int(Op.FALSE))
_TRUE = tl.constexpr(int(Op.TRUE))
_EQ = tl.constexpr(int(Op.EQ))
_NE = tl.constexpr(int(Op.NE))
_LT = tl.constexpr(int(Op.LT))
_LE = tl.constexpr(int(Op.LE))
_GT = tl.constexpr(int(Op.GT))
_GE = tl.constexpr(int(Op.GE))
_NONE = tl.constexpr(int(Kind.NONE))
_Q_INDEX = tl.constexpr(int(Kind.Q_INDEX))
_K_INDEX = tl.constexpr(int(Kind.K_INDEX))
_Q_ROW = tl.constexpr(int(Kind.Q_ROW))
_K_ROW = tl.constexpr(int(Kind.K_ROW))


@triton.jit
def _term(
    KIND: tl.constexpr, NUMBER: tl.constexpr, q, k, q_vals, k_vals, q_row_stride, k_row_stride
):
    """One operand in the dtype of the values: an index, a row's value or a literal."""
    dtype: tl.constexpr = q_vals.dtype.element_ty
    if KIND == _Q_INDEX:
        return q.to(dtype)
    elif KIND == _K_INDEX:
        return k.to(dtype)
    elif KIND == _Q_ROW:
        return tl.load(q_vals + NUMBER * q_row_stride + q)
    elif KIND == _K_ROW:
        return tl.load(k_vals + NUMBER * k_row_stride + k)
    else:
        return tl.full([1, 1], NUMBER, dtype)


@triton.jit
def _side(
    PROGRAM: tl.constexpr, AT: tl.constexpr, q, k, q_vals, k_vals, q_row_stride, k_row_stride
):
    """A term, or the difference of two, wrapping in the dtype of the values."""
    MINUS: tl.constexpr = PROGRAM[AT + 2]
    plus = _term(PROGRAM[AT], PROGRAM[AT + 1], q, k, q_vals, k_vals, q_row_stride, k_row_stride)
    if MINUS == _NONE:
        return plus
    else:
        minus = _term(MINUS, PROGRAM[AT + 3], q, k, q_vals, k_vals, q_row_stride, k_row_stride)
        return plus - minus


@triton.jit
def evaluate(
    PROGRAM: tl.constexpr, AT: tl.constexpr, q, k, q_vals, k_vals, q_row_stride, k_row_stride
):
    """The value of the node at offset ``AT`` for every pair of ``q`` and ``k``.

    Args:
        q, k: token indices, integer tensors of shapes that broadcast to the tile's. Row values are
            read at these indices, so they must lie within the sequences.
        q_vals, k_vals: the batch's rows; nothing is read from rows that the program does not name.
        q_row_stride, k_row_stride: elements between two rows.

    Returns:
        Boolean tensor that broadcasts to the tile.
    """
    OP: tl.constexpr = PROGRAM[AT]
    if OP == _TRUE:
        return tl.full([1, 1], True, tl.int1)
    elif OP == _FALSE:
        return tl.full([1, 1], False, tl.int1)
    elif OP == _AND or OP == _OR:  # noqa: SIM109 - Triton has no `in`
        COUNT: tl.constexpr = PROGRAM[AT + 1]
        result = evaluate(
            PROGRAM, PROGRAM[AT + 2], q, k, q_vals, k_vals, q_row_stride, k_row_stride
        )
        for i in tl.static_range(1, COUNT):
            part = evaluate(
                PROGRAM, PROGRAM[AT + 2 + i], q, k, q_vals, k_vals, q_row_stride, k_row_stride
            )
            result = (result & part) if OP == _AND else (result | part)
        return result
    else:
        lhs = _side(PROGRAM, AT + 1, q, k, q_vals, k_vals, q_row_stride, k_row_stride)
        rhs = _side(PROGRAM, AT + 5, q, k, q_vals, k_vals, q_row_stride, k_row_stride)
        if OP == _EQ:
            return lhs == rhs
        elif OP == _NE:
            return lhs != rhs
        elif OP == _LT:
            return lhs < rhs
        elif OP == _LE:
            return lhs <= rhs
        elif OP == _GT:
            return lhs > rhs
        else:
            return lhs >= rhs
