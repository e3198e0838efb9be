"""Kernels that quantize new tokens to INT8, and seal INT8 tokens to pages of 4, 3 or 2 bits."""

import triton
import triton.language as tl

from turbo_hf.ops.kernel_common import CODE_MAX, ROUND, as_int8, counted, value_order
from turbo_hf.ops.store.kernel_arguments import Block

"""The largest number of float16."""


@triton.jit
def _rounded(x):
    """The nearest integer, as a number; |x| < 2^22."""
    return (x + ROUND) - ROUND


@triton.jit
def quantize_tokens_kernel(
    x_ptr, given_ptr, codes_ptr, scale_ptr, stride_b, stride_h, stride_n, tokens,
    HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    """BLOCK tokens of one head to INT8, one scale per token: its own, or a given one."""
    pair = tl.program_id(1).to(tl.int64)
    row, head = pair // HEADS, pair % HEADS
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, DP)
    inside = (n < tokens)[:, None] & (d < D)[None, :]
    at = row * stride_b + head * stride_h + n.to(tl.int64)[:, None] * stride_n + d[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    place = pair * tokens + n
    if GIVEN:
        scale = tl.load(given_ptr + place, mask=n < tokens, other=1.0)
    else:
        # tl.max skips NaN; a token with NaN must get a scale of NaN
        scale = tl.div_rn(counted(tl.max(tl.abs(x), 1)), CODE_MAX) + tl.sum(x * 0.0, 1)
        tl.store(scale_ptr + place, scale, mask=n < tokens)
    codes = tl.div_rn(x, tl.where(scale > 0, scale, 1.0)[:, None])
    codes = tl.minimum(tl.maximum(codes, -CODE_MAX), CODE_MAX)
    tl.store(codes_ptr + place[:, None] * D + d[None, :], as_int8(codes), mask=inside)


@triton.jit
def stage1(codes_ptr, at, inside, ratio):
    """INT8 codes under the block's scale."""
    return _rounded(tl.load(codes_ptr + at, mask=inside, other=0).to(tl.float32) * ratio)


@triton.jit
def ratios(scale_ptr, at, n):
    """The block's scale, which is the largest of its tokens', and each token's share of it."""
    scales = tl.load(scale_ptr + at + n)
    scale = tl.max(scales, 0)
    return scale, tl.div_rn(scales, tl.where(scale > 0, scale, 1.0))


@triton.jit
def _step_and_zero(low, high, LEVELS: tl.constexpr):
    """Stage 2 of a channel whose codes go from low to high: as `ops.store.reference_quantize._stage2`."""
    step = tl.maximum(_rounded(tl.div_rn(high - low, LEVELS)), 1.0)
    zero = low + tl.floor((high - low - LEVELS * step) / 2)
    return step, tl.maximum(zero, -128.0)


@triton.jit
def _codes(q1, step, zero, LEVELS: tl.constexpr):
    return tl.minimum(tl.maximum(_rounded(tl.div_rn(q1 - zero, step)), 0.0), LEVELS).to(tl.int32)


@triton.jit
def _pairs(x):
    """Lines [M, N] of a page, e and o = e + 8 of each 16: both [M / 16, 8, N]."""
    return tl.split(x.reshape(x.shape[0] // 16, 2, 8, x.shape[1]).permute(0, 2, 3, 1))


@triton.jit
def _no_planes(M: tl.constexpr, N: tl.constexpr, BITS: tl.constexpr):
    """The bytes of M lines of N bytes before their first lane, as `_store_lane` takes them."""
    if BITS == 3:
        none = tl.zeros((M // 16, 8, N), tl.int32)
    else:
        none = tl.zeros((M, N), tl.int32)
    return none, none, none


@triton.jit
def _store_lane(
    ptr, page, line, j, codes, inside, lane: tl.constexpr, before, LINES: tl.constexpr, CODES: tl.constexpr,
    BITS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """One lane of half-split lines joins the bytes of the lanes `before`; stores them with the last.

    A lane: the codes that take the same bits of their bytes. Lanes follow each other in a line. A page has LINES lines
    of CODES codes; line, j: places of codes [M, N] in it and in their lane.
    """
    first, second, third = before
    if BITS == 3:
        even, odd = _pairs(codes)
        if lane == 2:
            third = third | even | odd << 3
        elif lane == 3:
            first = first | (even & 3) << 6
            second = second | (odd & 3) << 6
            third = third | (even >> 2) << 6 | (odd >> 2) << 7
        else:
            first = first | even << lane * 3
            second = second | odd << lane * 3
        if lane == LANES - 1:
            PLANE: tl.constexpr = LINES * CODES // 8
            at, _ = _pairs(tl.broadcast_to((line // 16 * 8 + line % 8) * (CODES // 4) + j, codes.shape))
            kept, _ = _pairs(tl.broadcast_to(inside, codes.shape).to(tl.int32))
            to = ptr + page * (3 * PLANE) + at
            tl.store(to, first.to(tl.uint8), mask=kept != 0)
            tl.store(to + PLANE, second.to(tl.uint8), mask=kept != 0)
            tl.store(to + 2 * PLANE, third.to(tl.uint8), mask=kept != 0)
    else:
        first = first | codes << (lane * BITS)
        if lane == LANES - 1:
            to = ptr + page * (LINES * CODES * BITS // 8) + line * (CODES * BITS // 8) + j
            tl.store(to, first.to(tl.uint8), mask=inside)
    return first, second, third


@triton.jit
def seal_lines(
    x_ptr, token, channel, ratio, out_ptr, meta_ptr, page,
    D: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, LANES: tl.constexpr, LANE_WIDTH: tl.constexpr,
):  # fmt: skip
    """A block [BLOCK, D] with strides `token` and `channel` to lines of channels; its steps and zeros to `meta_ptr`."""
    LEVELS: tl.constexpr = 2.0**BITS - 1
    WIDTH: tl.constexpr = D // LANES
    n = tl.arange(0, BLOCK)
    j = tl.arange(0, LANE_WIDTH)
    planes = _no_planes(BLOCK, LANE_WIDTH, BITS)
    for lane in tl.static_range(LANES):
        run = lane * WIDTH + j
        inside = (j < WIDTH)[None, :] & (n >= 0)[:, None]
        q1 = stage1(x_ptr, n[:, None] * token + run[None, :] * channel, inside, ratio[:, None])
        if BITS == 8:
            tl.store(out_ptr + page * BLOCK * D + n[:, None] * D + run[None, :], q1.to(tl.int8), mask=inside)
        else:
            step, zero = _step_and_zero(tl.min(q1, 0), tl.max(q1, 0), LEVELS)
            tl.store(meta_ptr + run, step.to(tl.int8), mask=j < WIDTH)
            tl.store(meta_ptr + D + run, zero.to(tl.int8), mask=j < WIDTH)
            codes = _codes(q1, step[None, :], zero[None, :], LEVELS)
            planes = _store_lane(
                out_ptr, page, n[:, None], j[None, :], codes, inside, lane, planes, BLOCK, D, BITS, LANES
            )


@triton.jit
def seal_block(tokens, pages, page, G: tl.constexpr, FORM: tl.constexpr):
    """One block of one head, `Block`, to page `page`, int64, of width G. pages: (k, v, meta, scale) of that width."""
    k_out, v_out, meta_out, scale_out = pages
    D: tl.constexpr = FORM.dim
    DP: tl.constexpr = FORM.padded_dim
    BLOCK: tl.constexpr = FORM.block
    BITS: tl.constexpr = FORM.bits[G]
    VALUE_BITS: tl.constexpr = FORM.value_bits[G]
    LANES: tl.constexpr = FORM.value_lanes[G]
    LEVELS: tl.constexpr = 2.0**VALUE_BITS - 1
    V_LINE: tl.constexpr = 2 if BITS < 8 else 0
    LINES: tl.constexpr = V_LINE + (2 if VALUE_BITS < 8 else 0)
    n = tl.arange(0, BLOCK)
    k_scale, k_ratio = ratios(tokens.k_scale, 0, n)
    v_scale, v_ratio = ratios(tokens.v_scale, 0, n)
    tl.store(scale_out + page * 2, k_scale)
    tl.store(scale_out + page * 2 + 1, v_scale)
    base = page * BLOCK * D
    meta = meta_out + page * LINES * D
    seal_lines(tokens.k, D, 1, k_ratio, k_out, meta, page, D, BLOCK, BITS, FORM.lanes[G], FORM.lane_width[G])
    d = tl.arange(0, DP)
    step = tl.full((DP,), 1.0, tl.float32)
    zero = step
    if VALUE_BITS != 8:
        at = n[:, None] * tokens.v_token + d[None, :] * tokens.v_channel
        q1 = stage1(tokens.v, at, (d < D)[None, :] & (n >= 0)[:, None], v_ratio[:, None])
        step, zero = _step_and_zero(tl.min(q1, 0), tl.max(q1, 0), LEVELS)
        tl.store(meta + V_LINE * D + d, step.to(tl.int8), mask=d < D)
        tl.store(meta + (V_LINE + 1) * D + d, zero.to(tl.int8), mask=d < D)
    TOKENS: tl.constexpr = BLOCK // LANES
    i = tl.arange(0, TOKENS)
    planes = _no_planes(DP, TOKENS, VALUE_BITS)
    inside = (d < D)[:, None] & (i >= 0)[None, :]
    for lane in tl.static_range(LANES):
        token = value_order(lane * TOKENS + i)
        share = tl.div_rn(tl.load(tokens.v_scale + token), tl.where(v_scale > 0, v_scale, 1.0))
        v_from = token[None, :] * tokens.v_token + d[:, None] * tokens.v_channel
        q1 = stage1(tokens.v, v_from, inside, share[None, :])
        if VALUE_BITS == 8:
            tl.store(v_out + base + d[:, None] * BLOCK + i[None, :], q1.to(tl.int8), mask=inside)
        else:
            codes = _codes(q1, step[:, None], zero[:, None], LEVELS)
            planes = _store_lane(
                v_out, page, d[:, None], i[None, :], codes, inside, lane, planes, D, BLOCK, VALUE_BITS, LANES
            )


@triton.jit
def copy_block(tokens, pages, page, FORM: tl.constexpr):
    """Copy one block of one head, unquantized, to a page of 16 bit."""
    k_out, v_out, _, scale_out = pages
    D: tl.constexpr = FORM.dim
    BLOCK: tl.constexpr = FORM.block
    n = tl.arange(0, BLOCK)
    d = tl.arange(0, FORM.padded_dim)
    inside = (n >= 0)[:, None] & (d < D)[None, :]
    k_at = n[:, None] * D + d[None, :]
    tl.store(k_out + page * BLOCK * D + k_at, tl.load(tokens.k + k_at, mask=inside), mask=inside)
    v = tl.load(tokens.v + n[:, None] * tokens.v_token + d[None, :] * tokens.v_channel, mask=inside)
    tl.store(v_out + page * BLOCK * D + d[None, :] * BLOCK + n[:, None], v, mask=inside)
    tl.store(scale_out + page * 2, 1.0)
    tl.store(scale_out + page * 2 + 1, 1.0)


@triton.jit
def seal_kernel(k_ptr, k_scale_ptr, v_ptr, v_scale_ptr, pages, FORM: tl.constexpr):
    """One block of one head to the page of the same number. pages: (k, v, meta, scale) of the only width."""
    page = tl.program_id(0).to(tl.int64)
    base = page * FORM.block * FORM.dim
    scales = page * FORM.block
    tokens = Block(k_ptr + base, v_ptr + base, k_scale_ptr + scales, v_scale_ptr + scales, FORM.dim, 1)
    seal_block(tokens, pages, page, 0, FORM)
