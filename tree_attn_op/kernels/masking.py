"""Evaluation of a predicate's program inside a Triton kernel.

The program (``Predicate.program``) is a flat tuple of ints that is a compile-time constant of the
kernel, so evaluation is plain recursion over offsets that leaves only the comparisons behind.
Shapes are the caller's: with query terms ``[M, 1]`` and key terms ``[1, N]`` the result is
``[M, N]``; with ``[1, M]`` and ``[N, 1]`` it is transposed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tree_attn_op.kernels.opcodes import (
    AND,
    EQ,
    FALSE,
    GT,
    K_INDEX,
    K_ROW,
    LE,
    LT,
    NE,
    NONE,
    OR,
    Q_INDEX,
    Q_ROW,
    TRUE,
)


@triton.jit
def _term(
    KIND: tl.constexpr, NUMBER: tl.constexpr, q, k, q_vals, k_vals, q_row_stride, k_row_stride
):
    """One operand in the dtype of the values: an index, a row's value or a literal."""
    dtype: tl.constexpr = q_vals.dtype.element_ty
    if KIND == Q_INDEX:
        return q.to(dtype)
    elif KIND == K_INDEX:
        return k.to(dtype)
    elif KIND == Q_ROW:
        return tl.load(q_vals + NUMBER * q_row_stride + q)
    elif KIND == K_ROW:
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
    if MINUS == NONE:
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
    if OP == TRUE:
        return tl.full([1, 1], True, tl.int1)
    elif OP == FALSE:
        return tl.full([1, 1], False, tl.int1)
    elif OP == AND or OP == OR:  # noqa: SIM109 - Triton has no `in`
        COUNT: tl.constexpr = PROGRAM[AT + 1]
        result = evaluate(
            PROGRAM, PROGRAM[AT + 2], q, k, q_vals, k_vals, q_row_stride, k_row_stride
        )
        for i in tl.static_range(1, COUNT):
            part = evaluate(
                PROGRAM, PROGRAM[AT + 2 + i], q, k, q_vals, k_vals, q_row_stride, k_row_stride
            )
            result = (result & part) if OP == AND else (result | part)
        return result
    else:
        lhs = _side(PROGRAM, AT + 1, q, k, q_vals, k_vals, q_row_stride, k_row_stride)
        rhs = _side(PROGRAM, AT + 5, q, k, q_vals, k_vals, q_row_stride, k_row_stride)
        if OP == EQ:
            return lhs == rhs
        elif OP == NE:
            return lhs != rhs
        elif OP == LT:
            return lhs < rhs
        elif OP == LE:
            return lhs <= rhs
        elif OP == GT:
            return lhs > rhs
        else:
            return lhs >= rhs
