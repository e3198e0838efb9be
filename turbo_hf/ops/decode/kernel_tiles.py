"""One tile of the packed cache in registers: its bytes loaded and unpacked into INT8 operands of a tensor core."""

import triton
import triton.language as tl

from turbo_hf.ops.kernel_common import slot_of_width, to_l2


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


@triton.jit
def packed_bytes(pointer, row_mask, c, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Bytes at `pointer`, zeros where `row_mask` is False, and where c is not below SIZE (of PADDED) either."""
    if SIZE == PADDED:
        return tl.load(pointer, mask=row_mask, other=0)
    else:
        return tl.load(pointer, mask=row_mask & (c < SIZE), other=0)


@triton.jit
def ranges_of(meta, ok, c, D: tl.constexpr, DP: tl.constexpr):
    """The zeros and the spans int8 [NB, DP] of channels c, two lines of D at `meta` [NB, 1], where ok.

    Loads are pipelined if each thread has 4 bytes, which at 64 channels takes both lines.
    """
    if DP < 128:
        at = meta[:, :, None] + tl.arange(0, 2)[None, :, None] * D + c[None, None, :]
        zero, span = tl.split(packed_bytes(at, ok[:, :, None], c[None, None, :], D, DP).permute(0, 2, 1))
    else:
        zero = packed_bytes(meta + c[None, :], ok, c[None, :], D, DP)
        span = packed_bytes(meta + D + c[None, :], ok, c[None, :], D, DP)
    return zero, span


@triton.jit
def sizes_of(size_ptr, at, ok, T: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr):
    """Sizes of tokens: float32 [NB, T] of the keys and values of pages `at` [NB], 0 where not ok. At 16 bit 1."""
    if BITS == 16:
        k_size = tl.full([at.shape[0], T], 1.0, tl.float32)
        v_size = k_size
    else:
        # both at once, or at 32 tokens the load is not pipelined, as in `ranges_of`
        line = tl.arange(0, 2)[None, :, None] * T + tl.arange(0, T)[None, None, :]
        size = tl.load(size_ptr + (at * (2 * T))[:, None, None] + line, mask=ok[:, None, None], other=0.0)
        k_size, v_size = tl.split(size.permute(0, 2, 1))
        k_size, v_size = widened(k_size, ASM), widened(v_size, ASM)
    return k_size, v_size


@triton.jit
def _merge_keys(x, y):
    """Lanes x and y of channels [NB, C, T], one after the other."""
    return tl.join(x, y).permute(0, 3, 1, 2).reshape(x.shape[0], 2 * x.shape[1], x.shape[2])


@triton.jit
def _interleave_keys(x, y):
    """Lanes x and y of channels [NB, 16, T], four of each in turn: a thread of the product has 8 in a row, and 4 of
    each lane. One after the other, they would have to pass from thread to thread."""
    NB: tl.constexpr = x.shape[0]
    T: tl.constexpr = x.shape[2]
    return tl.join(x, y).reshape(NB, 4, 4, T, 2).permute(0, 1, 4, 2, 3).reshape(NB, 32, T)


@triton.jit
def in_key_order(x):
    """x [NB, DP], by channel, in the order of `_interleave_keys` of each two of four lanes."""
    return x.reshape(x.shape[0], 2, 2, 4, 4).permute(0, 1, 3, 2, 4).reshape(x.shape)


@triton.jit
def _merge_values(x, y):
    """Lanes x and y of tokens [NB, D, T], one after the other."""
    return tl.join(x, y).permute(0, 1, 3, 2).reshape(x.shape[0], x.shape[1], 2 * x.shape[2])


@triton.jit
def _pair_keys(x, y):
    """Tokens x and y [NB, C, T] of each 16, the first 8 and the last 8."""
    NB: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    T: tl.constexpr = x.shape[2]
    return tl.join(x, y).reshape(NB, C, T // 8, 8, 2).permute(0, 1, 2, 4, 3).reshape(NB, C, 2 * T)


@triton.jit
def _pair_values(x, y):
    """Channels x and y [NB, D, T] of each 16, the first 8 and the last 8."""
    NB: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    T: tl.constexpr = x.shape[2]
    return tl.join(x, y).reshape(NB, D // 8, 8, T, 2).permute(0, 1, 4, 2, 3).reshape(NB, 2 * D, T)


@triton.jit
def _planes(at, ok, c, PLANE: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """A byte of each of three planes of PLANE bytes, as `packed_bytes`."""
    first = packed_bytes(at, ok, c, SIZE, PADDED)
    second = packed_bytes(at + PLANE, ok, c, SIZE, PADDED)
    return first, second, packed_bytes(at + 2 * PLANE, ok, c, SIZE, PADDED)


@triton.jit
def keys_of(base, ok, D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr):
    """Codes int8 [NB, DP, T] of the pages at `base` [NB], zeros where not `ok`; channels in the order of `channels`.

    At 16 bit the numbers themselves.
    """
    t = tl.arange(0, T)[None, None, :]
    at = base[:, None, None] + t * (D * min(BITS, 8) // 8)
    live = ok[:, None, None]
    if BITS >= 8:
        c = tl.arange(0, DP)[None, :, None]
        return packed_bytes(at + c, live, c, D, DP)
    elif BITS == 4:
        c = tl.arange(0, DP // 2)[None, :, None]
        x, y = lanes4(packed_bytes(at + c, live, c, D // 2, DP // 2), ASM)
        return _merge_keys(x, y)
    else:
        c = tl.arange(0, DP // 4)[None, :, None]
        if BITS == 2:
            x, y, z, w = lanes2(packed_bytes(at + c, live, c, D // 4, DP // 4), ASM)
        else:
            tl.static_assert(BITS == 3)
            at = base[:, None, None] + tl.arange(0, T // 2)[None, None, :] * (D // 4) + c
            planes = _planes(at, live, c, T * D // 8, D // 4, DP // 4)
            x, y, z, w, x8, y8, z8, w8 = lanes3(planes[0], planes[1], planes[2], ASM)
            x, y, z, w = _pair_keys(x, x8), _pair_keys(y, y8), _pair_keys(z, z8), _pair_keys(w, w8)
        if DP == 64:
            return _merge_keys(_interleave_keys(x, y), _interleave_keys(z, w))
        else:
            return _merge_keys(_merge_keys(x, y), _merge_keys(z, w))


@triton.jit
def values_of(base, ok, D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr):
    """Codes int8 [NB, DP, T] of the pages at `base` [NB], zeros where not `ok`; tokens in the order of `to_values`."""
    c = tl.arange(0, DP)[None, :, None]
    at = base[:, None, None] + c * (T * min(BITS, 8) // 8)
    live = ok[:, None, None]
    if BITS >= 8:
        return packed_bytes(at + tl.arange(0, T)[None, None, :], live, c, D, DP)
    elif BITS == 4:
        x, y = lanes4(packed_bytes(at + tl.arange(0, T // 2)[None, None, :], live, c, D, DP), ASM)
        return _by_thread(_merge_values(x, y))
    else:
        t = tl.arange(0, T // 4)[None, None, :]
        if BITS == 2:
            x, y, z, w = lanes2(packed_bytes(at + t, live, c, D, DP), ASM)
        else:
            tl.static_assert(BITS == 3)
            c = tl.arange(0, DP // 2)[None, :, None]
            planes = _planes(base[:, None, None] + c * (T // 4) + t, live, c, D * T // 8, D // 2, DP // 2)
            x, y, z, w, x8, y8, z8, w8 = lanes3(planes[0], planes[1], planes[2], ASM)
            x, y, z, w = _pair_values(x, x8), _pair_values(y, y8), _pair_values(z, z8), _pair_values(w, w8)
        return _by_thread(_merge_values(_merge_values(x, y), _merge_values(z, w)))


@triton.jit
def channels(D: tl.constexpr, DP: tl.constexpr, LANES: tl.constexpr):
    """The channel at each position of an unpacked key; D or more where there is none."""
    c = tl.arange(0, DP)
    if LANES == 4 and DP == 64:
        # as `_interleave_keys` leaves them
        c = c // 32 * 32 + c % 8 // 4 * 16 + c % 32 // 8 * 4 + c % 4
    if D == DP:
        return c
    else:
        inside = c % (DP // LANES)
        return tl.where(inside < D // LANES, c // (DP // LANES) * (D // LANES) + inside, D)


@triton.jit
def to_values(x, BITS: tl.constexpr):
    """Columns of scores [NB, R, T] in the order of `values_of`; moves nothing between threads."""
    NB: tl.constexpr = x.shape[0]
    R: tl.constexpr = x.shape[1]
    T: tl.constexpr = x.shape[2]
    if BITS == 16:
        return x
    elif BITS < 8:
        return x.reshape(NB, R, T // 32, 2, 2, 4, 2).permute(0, 1, 2, 5, 3, 4, 6).reshape(NB, R, T)
    else:
        return x.reshape(NB, R, T // 16, 2, 4, 2).permute(0, 1, 2, 4, 3, 5).reshape(NB, R, T)


@triton.jit
def _by_thread(x):
    """Tokens of unpacked values [NB, D, T], reordered so that 8 in a row belong to one thread of the tensor core.

    Triton chooses this layout for an operand that is converted from narrower numbers.
    """
    NB: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    T: tl.constexpr = x.shape[2]
    return x.reshape(NB, D, T // 32, 2, 4, 4).permute(0, 1, 2, 4, 3, 5).reshape(NB, D, T)


@triton.jit
def prefetch_pages(cache, slot, page, ok, FORM: tl.constexpr, ASM: tl.constexpr):
    """Prefetch pages [NB] of one slot (where ok) to L2, while queries are prepared."""
    for g in tl.static_range(len(FORM.slots)):
        own, there = slot_of_width(slot, ok, g, FORM)
        _prefetch(cache.paged[g], own, page, there, FORM.slots[g], FORM.bits[g], FORM.value_bits[g], FORM, ASM)


@triton.jit
def _prefetch(
    pages, slot, page, ok, SLOTS: tl.constexpr, BITS: tl.constexpr, VALUE_BITS: tl.constexpr, FORM: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """`prefetch_pages` of one width, which has SLOTS slots."""
    if ASM:
        D: tl.constexpr = FORM.dim
        DP: tl.constexpr = FORM.padded_dim
        k_ptr, v_ptr, meta_ptr, size_ptr = pages
        LINES: tl.constexpr = (2 if BITS < 8 else 0) + (2 if VALUE_BITS < 8 else 0)
        at = page * SLOTS + slot
        _prefetch_codes(k_ptr, at, ok, FORM.block * D, FORM.block * DP, BITS)
        _prefetch_codes(v_ptr, at, ok, FORM.block * D, FORM.block * DP, VALUE_BITS)
        if BITS < 16:
            line = tl.arange(0, FORM.block // 32)[None, :] * 64
            to_l2(size_ptr + (at * (2 * FORM.block))[:, None] + line, ok[:, None] & (line >= 0))
        if LINES:
            line = tl.arange(0, LINES * DP // 128 if LINES * DP > 128 else 1)[None, :] * 128
            to_l2(meta_ptr + (at * (LINES * D))[:, None] + line, ok[:, None] & (line < LINES * D))


@triton.jit
def _prefetch_codes(pointer, at, ok, CODES: tl.constexpr, PADDED_CODES: tl.constexpr, BITS: tl.constexpr):
    """`_prefetch` of the codes of keys or values; CODES: those of a page and slot."""
    PAGE: tl.constexpr = CODES * min(BITS, 8) // 8
    LINE: tl.constexpr = 128 * 8 // pointer.dtype.element_ty.primitive_bitwidth
    PADDED: tl.constexpr = PADDED_CODES * (4 if BITS == 3 else min(BITS, 8)) // 8
    line = tl.arange(0, PADDED // LINE if PADDED > LINE else 1)[None, :] * LINE
    inside = ok[:, None] & (line < PAGE)
    to_l2(pointer + (at * PAGE)[:, None] + line, inside)
