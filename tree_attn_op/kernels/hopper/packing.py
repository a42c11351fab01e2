"""Probabilities as packed 16-bit pairs.

A 16-bit tensor that lives across a loop iteration costs a register for each element and two
permutes a pair to get in and out of the matrix units' operand format. Packed into 32-bit words it
costs a register a pair, and nothing to unpack.
"""

from __future__ import annotations

from .compat import gl, gluon


@gluon.jit
def pack_pairs(x, dtype: gl.constexpr):
    """``[M, N]`` float32 to ``[M, N / 2]`` int32 that hold two neighbours in ``dtype`` each."""
    low, high = gl.split(gl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], gl.int32, True, 1
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], gl.int32, True, 1
        )


@gluon.jit
def unpack_pairs(x, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """The inverse of :func:`pack_pairs` but for the precision, in ``LAYOUT``."""
    if dtype == gl.bfloat16:
        low, high = gl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [x], (gl.bfloat16, gl.bfloat16), True, 1
        )
    else:
        low, high = gl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [x], (gl.float16, gl.float16), True, 1
        )
    pairs = gl.reshape(gl.join(low, high), [x.shape[0], x.shape[1] * 2])
    return gl.convert_layout(pairs, LAYOUT)


@gluon.jit
def hidden_from_assembler(number):
    """A scalar that is the same in all threads, as one of which the assembler knows nothing.

    ptxas 12.8 merges the descriptors that two loops of a kernel share into those of the first
    loop, though it does not run when the second one does: the second then multiplies what a stale
    descriptor points at. A shuffle gives each loop a number, and so descriptors, of its own.
    """
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r", [number], gl.int32, False, 1
    )
