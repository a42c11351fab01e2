"""Masking of scores by a predicate's program inside a Gluon kernel."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tree_attn_op.kernels.opcodes import (
    AND,
    FALSE,
    K_INDEX,
    K_ROW,
    NONE,
    OR,
    Q_INDEX,
    Q_ROW,
    TRUE,
)
from tree_attn_op.predicate import Op

from .compat import gl, gluon

_WORDS = {Op.EQ: "eq", Op.NE: "ne", Op.LT: "lt", Op.LE: "le", Op.GT: "gt", Op.GE: "ge"}


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
def _operands(PROGRAM: gl.constexpr, AT: gl.constexpr, q, k, q_vals, k_vals, q_stride, k_stride):
    """Both sides of every comparison at or below the node at offset ``AT``, in their order."""
    OP: gl.constexpr = PROGRAM[AT]
    if OP == TRUE or OP == FALSE:  # noqa: SIM109 - Triton has no `in`
        return ()
    elif OP == AND or OP == OR:  # noqa: SIM109
        COUNT: gl.constexpr = PROGRAM[AT + 1]
        result = _operands(PROGRAM, PROGRAM[AT + 2], q, k, q_vals, k_vals, q_stride, k_stride)
        for i in gl.static_range(1, COUNT):
            result = result + _operands(
                PROGRAM, PROGRAM[AT + 2 + i], q, k, q_vals, k_vals, q_stride, k_stride
            )
        return result
    else:
        lhs = _side(PROGRAM, AT + 1, q, k, q_vals, k_vals, q_stride, k_stride)
        rhs = _side(PROGRAM, AT + 5, q, k, q_vals, k_vals, q_stride, k_stride)
        return (lhs, rhs)


@gluon.constexpr_function
def select_text(program: Sequence[int], wide: bool, gated: bool) -> str:
    """PTX that keeps a score that is seen and makes any other -inf.

    Args:
        program: ``Predicate.program``.
        wide: whether values are 64 bits wide instead of 32.
        gated: whether an int32 comes with the scores, of which 0 hides them.

    Operands are the result, the score, the gate if there is one, and both sides of each comparison
    in the order of the program.
    """
    lines: list[str] = []
    width = "s64" if wide else "s32"
    places = itertools.count(3 if gated else 2)
    names = itertools.count()

    def emit(at: int, before: str = "", joined: str = "") -> str:
        """Lines for a node, whose value is ``joined`` (and, or) with an earlier predicate."""
        op = Op(program[at])
        if op in (Op.AND, Op.OR):
            word = "and" if op == Op.AND else "or"
            parts = program[at + 2 : at + 2 + program[at + 1]]
            if word == joined:
                name = emit(parts[0], before, joined)
                before = ""
            else:
                name = emit(parts[0])
            for part in parts[1:]:
                name = emit(part, name, word)
            if before:
                lines.append(f"{joined}.pred {name}, {name}, {before};")
            return name
        name = f"p{next(names)}"
        if op in (Op.TRUE, Op.FALSE):
            lines.append(f"mov.pred {name}, {int(op == Op.TRUE)};")
            if before:
                lines.append(f"{joined}.pred {name}, {name}, {before};")
        elif before:
            sides = f"${next(places)}, ${next(places)}"
            lines.append(f"setp.{_WORDS[op]}.{joined}.{width} {name}, {sides}, {before};")
        else:
            sides = f"${next(places)}, ${next(places)}"
            lines.append(f"setp.{_WORDS[op]}.{width} {name}, {sides};")
        return name

    if gated:
        # The assembler compares it once for all scores.
        open_ = f"p{next(names)}"
        lines.append(f"setp.ne.s32 {open_}, $2, 0;")
        seen = emit(0, open_, "and")
    else:
        seen = emit(0)
    lines.append(f"selp.b32 $0, $1, 0xff800000, {seen};")
    return "\n".join(["{", f".reg .pred p<{next(names)}>;", *lines, "}"])


@gluon.constexpr_function
def _assembly(program, wide, gated):
    """The text, and the constraints on its operands."""
    text = select_text(program, wide, gated)
    sides = text.count("$") - (3 if gated else 2)
    constraints = ["=r", "r", *(["r"] * gated), *(["l" if wide else "r"] * sides)]
    return text, ",".join(constraints)


@gluon.jit
def _select(PROGRAM: gl.constexpr, scores, gate, operands, GATED: gl.constexpr):
    """The scores that are seen, -inf in place of the others.

    In assembly, because the compiler would select once for each comparison, and because the
    assembler takes a long time over predicates that are all computed before the first is used.
    """
    WIDE: gl.constexpr = len(operands) > 0 and operands[0].dtype == gl.int64
    ASSEMBLY: gl.constexpr = _assembly(PROGRAM, WIDE, GATED)
    given = (scores, gate) if GATED else (scores,)
    return gl.inline_asm_elementwise(
        ASSEMBLY[0], ASSEMBLY[1], given + operands, gl.float32, True, 1
    )


@gluon.jit
def seen_scores(
    PROGRAM: gl.constexpr, scores, q, k, gate, q_vals, k_vals, q_stride, k_stride,
    GATED: gl.constexpr,
):  # fmt: skip
    """Scores of pairs that the predicate lets see, -inf in place of the others.

    Args:
        scores: float32 tile.
        q, k: token indices, integer tensors whose shapes broadcast to the tile's, both in the
            tile's layout. Row values are read at these indices: they must lie within the lengths.
        gate: if ``GATED``, an int32, 0 to hide all.
        q_vals, k_vals: the batch's rows; nothing is read from rows that the program does not name.
        q_stride, k_stride: elements between two rows.
    """
    operands = _operands(PROGRAM, 0, q, k, q_vals, k_vals, q_stride, k_stride)
    return _select(PROGRAM, scores, gate, operands, GATED)
