"""Packed codes to INT8, in registers (layout: `turbo_hf.layout`).

Each function splits bytes into lanes, 4 bytes at a time, by an and and a shift of whole words. Triton's own `b >> 4` on
8-bit tensors is expanded byte by byte and costs three times the instructions. ASM is False in the interpreter, which
runs no assembly; both ways give the same numbers.
"""

import triton
import triton.language as tl


@triton.jit
def lanes4(w, ASM: tl.constexpr):
    """The 2 codes of 4 bit in each byte, as int8."""
    if ASM:
        return tl.inline_asm_elementwise(
            "and.b32 $0, $2, 0x0F0F0F0F; shr.u32 $1, $2, 4; and.b32 $1, $1, 0x0F0F0F0F;",
            "=&r,=&r,r",
            [w],
            dtype=(tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )
    else:
        return (w & 15).to(tl.int8), (w >> 4).to(tl.int8)


@triton.jit
def lanes2(w, ASM: tl.constexpr):
    """The 4 codes of 2 bit in each byte, as int8."""
    if ASM:
        return tl.inline_asm_elementwise(
            "and.b32 $0, $4, 0x03030303; shr.u32 $1, $4, 2; and.b32 $1, $1, 0x03030303; shr.u32 $2, $4, 4;"
            "and.b32 $2, $2, 0x03030303; shr.u32 $3, $4, 6; and.b32 $3, $3, 0x03030303;",
            "=&r,=&r,=&r,=&r,r",
            [w],
            dtype=(tl.int8, tl.int8, tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )
    else:
        return (w & 3).to(tl.int8), (w >> 2 & 3).to(tl.int8), (w >> 4 & 3).to(tl.int8), (w >> 6).to(tl.int8)


@triton.jit
def lanes3(first, second, third, ASM: tl.constexpr):
    """The 4 codes of 3 bit of the one line, then the 4 of the other, of which each has a byte in three planes; int8."""
    if ASM:
        return tl.inline_asm_elementwise(
            # 0xEA: (a & b) | c
            "{ .reg .b32 a; and.b32 $0, $8, 0x07070707; shr.u32 $1, $8, 3; and.b32 $1, $1, 0x07070707;"
            "and.b32 $2, $10, 0x07070707; shr.u32 $3, $8, 6; shr.u32 a, $10, 4; and.b32 a, a, 0x04040404;"
            "lop3.b32 $3, $3, 0x03030303, a, 0xEA;"
            "and.b32 $4, $9, 0x07070707; shr.u32 $5, $9, 3; and.b32 $5, $5, 0x07070707;"
            "shr.u32 $6, $10, 3; and.b32 $6, $6, 0x07070707; shr.u32 $7, $9, 6; shr.u32 a, $10, 5;"
            "and.b32 a, a, 0x04040404; lop3.b32 $7, $7, 0x03030303, a, 0xEA; }",
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r",
            [first, second, third],
            dtype=(tl.int8, tl.int8, tl.int8, tl.int8, tl.int8, tl.int8, tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )
    else:
        return (
            (first & 7).to(tl.int8),
            (first >> 3 & 7).to(tl.int8),
            (third & 7).to(tl.int8),
            (first >> 6 | (third >> 4 & 4)).to(tl.int8),
            (second & 7).to(tl.int8),
            (second >> 3 & 7).to(tl.int8),
            (third >> 3 & 7).to(tl.int8),
            (second >> 6 | (third >> 5 & 4)).to(tl.int8),
        )


@triton.jit
def folded(q, span, ASM: tl.constexpr):
    """q * span / 256, rounded, as two INT8 digits, 256 * first + second; q int16, span an unsigned byte, of one shape.

    A channel's span is thus multiplied into the query instead of every key, and the product of codes stays in INT8.
    """
    if ASM:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 a, b, c, d, e, o;"
            # of two spans one is 0, so that each dot product is a single product
            "and.b32 e, $4, 0x00FF00FF; and.b32 o, $4, 0xFF00FF00;"
            # plus 128 to round to 256, and 128 * 256 for the first digit: digits are bytes 2 and 1
            "dp2a.hi.s32.u32 c, $3, e, 0x8080; dp2a.hi.s32.u32 d, $3, o, 0x8080;"
            "dp2a.lo.s32.u32 b, $2, o, 0x8080; dp2a.lo.s32.u32 a, $2, e, 0x8080;"
            "prmt.b32 a, a, b, 0x6251; prmt.b32 c, c, d, 0x6251;"
            "prmt.b32 $0, a, c, 0x7632; prmt.b32 $1, a, c, 0x5410; xor.b32 $1, $1, 0x80808080; }",
            "=&r,=&r,r,r,r",
            [q, span],
            dtype=(tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )
    else:
        x = (q.to(tl.int32) * (span.to(tl.int32) & 255) + 128 >> 8) + 128
        return (x >> 8).to(tl.int8), ((x & 255) - 128).to(tl.int8)


@triton.jit
def widened(x, ASM: tl.constexpr):
    """bfloat16 as float32. A plain conversion takes three instructions for two numbers."""
    if ASM:
        bits = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;", "=&r,=r,r", [x], dtype=tl.int32, is_pure=True, pack=2
        )
        return bits.to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def entry(pointer, mask, ASM: tl.constexpr):
    """One int64 per pointer, 0 where masked, by a load that software pipelining does not move."""
    if ASM:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.b64 $0, 0; @p ld.global.b64 $0, [$1]; }",
            "=&l,l,r",
            [pointer, mask.to(tl.int32)],
            dtype=tl.int64,
            is_pure=True,
            pack=1,
        )
    else:
        return tl.load(pointer, mask=mask, other=0)


@triton.jit
def handed(x, ASM: tl.constexpr):
    """Pass x, int64, from one iteration of a loop to the next. A plain copy would keep Triton from pipelining it."""
    if ASM:
        return tl.inline_asm_elementwise("mov.b64 $0, $1;", "=l,l", [x], dtype=tl.int64, is_pure=True, pack=1)
    else:
        return x
