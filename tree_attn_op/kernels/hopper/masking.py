"""Evaluation of a predicate's program inside a Gluon kernel.

The same recursion over a constexpr tuple as ``kernels/masking.py``; Gluon functions cannot call
functions of plain Triton, and literals need no shape here.
"""

from __future__ import annotations

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

from .compat import gl, gluon


@gluon.jit
def _term(KIND: gl.constexpr, NUMBER: gl.constexpr, q, k, q_vals, k_vals, q_stride, k_stride):
    """One operand in the dtype of the values: an index, a row's value or a literal."""
    dtype: gl.constexpr = q_vals.dtype.element_ty
    if KIND == Q_INDEX:
        return q.to(dtype)
    elif KIND == K_INDEX:
        return k.to(dtype)
    elif KIND == Q_ROW:
        return gl.load(q_vals + NUMBER * q_stride + q)
    elif KIND == K_ROW:
        return gl.load(k_vals + NUMBER * k_stride + k)
    else:
        return gl.to_tensor(NUMBER).to(dtype)


@gluon.jit
def _side(PROGRAM: gl.constexpr, AT: gl.constexpr, q, k, q_vals, k_vals, q_stride, k_stride):
    """A term, or the difference of two, wrapping in the dtype of the values."""
    MINUS: gl.constexpr = PROGRAM[AT + 2]
    plus = _term(PROGRAM[AT], PROGRAM[AT + 1], q, k, q_vals, k_vals, q_stride, k_stride)
    if MINUS == NONE:
        return plus
    else:
        minus = _term(MINUS, PROGRAM[AT + 3], q, k, q_vals, k_vals, q_stride, k_stride)
        return plus - minus


@gluon.jit
def evaluate(PROGRAM: gl.constexpr, AT: gl.constexpr, q, k, q_vals, k_vals, q_stride, k_stride):
    """The value of the node at offset ``AT`` for every pair of ``q`` and ``k``.

    Args:
        q, k: token indices, integer tensors whose shapes broadcast to the tile's, both in the
            tile's layout. Row values are read at these indices: they must lie within the lengths.
        q_vals, k_vals: the batch's rows; nothing is read from rows that the program does not name.
        q_stride, k_stride: elements between two rows.

    Returns:
        Boolean tensor that broadcasts to the tile.
    """
    OP: gl.constexpr = PROGRAM[AT]
    if OP == TRUE:
        return q == q
    elif OP == FALSE:
        return q != q
    elif OP == AND or OP == OR:  # noqa: SIM109 - Triton has no `in`
        COUNT: gl.constexpr = PROGRAM[AT + 1]
        result = evaluate(PROGRAM, PROGRAM[AT + 2], q, k, q_vals, k_vals, q_stride, k_stride)
        for i in gl.static_range(1, COUNT):
            part = evaluate(PROGRAM, PROGRAM[AT + 2 + i], q, k, q_vals, k_vals, q_stride, k_stride)
            if OP == AND:  # noqa: SIM108 - a ternary of tensors is a select
                result = result & part
            else:
                result = result | part
        return result
    else:
        lhs = _side(PROGRAM, AT + 1, q, k, q_vals, k_vals, q_stride, k_stride)
        rhs = _side(PROGRAM, AT + 5, q, k, q_vals, k_vals, q_stride, k_stride)
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
