"""Kernels that quantize new tokens to INT8, and seal INT8 tokens to pages of 4, 3 or 2 bits."""

import triton
import triton.language as tl

from turbo_hf.layout import EDGE as OUTERMOST
from turbo_hf.layout import INSET
from turbo_hf.ops.kernel_common import CODE_MAX, ROUND, as_int8, counted, value_order

EDGE = tl.constexpr(float(OUTERMOST))
INSET_4, INSET_3, INSET_2 = (tl.constexpr(INSET[bits]) for bits in (4, 3, 2))

MOVED = tl.constexpr(16)
"""Open tokens that a program moves at a time."""


@triton.jit
def rounded_up(x):
    """x >= 0 as a number that bfloat16 can hold, not below x. Not of NaN, whose bits may overflow."""
    return ((x.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def scale_of(x, AXIS: tl.constexpr):
    """The scales of tokens x, whose channels are dimension AXIS; NaN of one that is not finite."""
    # tl.max skips NaN
    return rounded_up(tl.div_rn(counted(tl.max(tl.abs(x), AXIS)), CODE_MAX)) + tl.sum(x * 0.0, AXIS)


@triton.jit
def codes_of(x, scale):
    """INT8 codes of numbers x in units of `scale`, of one shape; 0 is no unit."""
    codes = tl.div_rn(x, tl.where(scale > 0, scale, 1.0))
    return as_int8(tl.minimum(tl.maximum(codes, -CODE_MAX), CODE_MAX))


@triton.jit
def _numbers(x_ptr, at, inside):
    """INT8 codes as numbers, 0 where not `inside`."""
    return tl.load(x_ptr + at, mask=inside, other=0).to(tl.float32)


@triton.jit
def _roots(codes, D: tl.constexpr, AXIS: tl.constexpr):
    """Root mean squares of tokens, whose D channels are dimension AXIS. Sums of squares of codes are exact."""
    return tl.sqrt_rn(tl.sum(codes * codes, AXIS) * (1.0 / D))


@triton.jit
def _sizes(codes, scale, unit, D: tl.constexpr, AXIS: tl.constexpr):
    """Sizes of tokens of a block in its unit, and what one of a token's codes is in its size."""
    exact = scale * (_roots(codes, D, AXIS) * unit)
    size = rounded_up(exact)
    # NaN stays
    return size + exact * 0.0, tl.div_rn(scale, tl.where(size > 0, size, 1.0))


@triton.jit
def _fitted(own, stored, size, share, LEVELS: tl.constexpr):
    """Sizes by which sealed tokens are as long in their own direction as before.

    own, stored: int32, sums of products of a token's codes with themselves, and with what is stored (`_stored`).
    """
    own = own.to(tl.float32) * LEVELS * share
    factor = tl.div_rn(own, tl.maximum(tl.maximum(stored.to(tl.float32), own * 0.5), 1.1754944e-38))
    exact = size * factor
    # the nearest number that bfloat16 can hold; NaN stays
    return ((exact.to(tl.int32, bitcast=True) + 0x8000) & -0x10000).to(tl.float32, bitcast=True) + exact * 0.0


@triton.jit
def seal_sizes(
    x_ptr, token, channel, scale_ptr, size_ptr,
    D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """What tokens of a block [BLOCK, D] with strides `token` and `channel` are divided by. Stores sizes at 8 bit alone.

    Returns tokens in units of sizes, sizes and shares as in `_sizes`, and the block's unit: of no use at 8 bit.
    """
    n, d = tl.arange(0, BLOCK), tl.arange(0, DP)
    x = _numbers(x_ptr, n[:, None] * token + d[None, :] * channel, (n >= 0)[:, None] & (d < D)[None, :])
    size = tl.load(scale_ptr + n)
    root = _roots(x, D, 1)
    unit = tl.div_rn(tl.max(tl.div_rn(tl.max(tl.abs(x), 1), tl.where(root > 0, root, 1.0)), 0), EDGE)
    share = size
    if BITS < 8:
        size, share = _sizes(x, size, unit, D, 1)
    else:
        tl.store(size_ptr + n, size.to(tl.bfloat16))
    return x * share[:, None], size, share, unit


@triton.jit
def _seal_ranges(x, meta_ptr, d, inside, D: tl.constexpr, BITS: tl.constexpr):
    """Zeros and spans of channels d of x [BLOCK, ...], in units of sizes; also to their lines of `meta`."""
    OUT: tl.constexpr = INSET_4 if BITS == 4 else (INSET_3 if BITS == 3 else INSET_2)
    low, high = tl.min(x, 0), tl.max(x, 0)
    inset = (high - low) * OUT
    zero = tl.floor(low + inset)
    span = tl.ceil(high - inset) - zero
    tl.store(meta_ptr + d, zero.to(tl.int8), mask=inside)
    # an unsigned byte
    tl.store(meta_ptr + D + d, span.to(tl.int32).to(tl.int8), mask=inside)
    return zero, span


@triton.jit
def _codes(x, zero, span, LEVELS: tl.constexpr):
    codes = tl.div_rn((x - zero) * LEVELS, tl.broadcast_to(tl.maximum(span, 1.0), x.shape))
    codes = (codes + ROUND) - ROUND
    return tl.minimum(tl.maximum(codes, 0.0), LEVELS).to(tl.int32)


@triton.jit
def _stored(codes, zero, span, LEVELS: tl.constexpr):
    """What codes stand for, in units of 1 / LEVELS of a size. int32."""
    return zero.to(tl.int32) * LEVELS + codes * span.to(tl.int32)


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
    x_ptr, size, share, out_ptr, meta_ptr, size_ptr, page,
    D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """A block [BLOCK, D] to lines of channels; zeros and spans to `meta_ptr`.

    size, share: as in `_sizes`. From 8 bit on the block is copied, and sizes are not stored.
    """
    LEVELS: tl.constexpr = 2.0**BITS - 1
    LANES: tl.constexpr = 1 if BITS >= 8 else (2 if BITS == 4 else 4)
    WIDTH: tl.constexpr = D // LANES
    LANE_WIDTH: tl.constexpr = DP // LANES
    n = tl.arange(0, BLOCK)
    j = tl.arange(0, LANE_WIDTH)
    planes = _no_planes(BLOCK, LANE_WIDTH, BITS)
    own, stored = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
    for lane in tl.static_range(LANES):
        run = lane * WIDTH + j
        inside = (j < WIDTH)[None, :] & (n >= 0)[:, None]
        at = n[:, None] * D + run[None, :]
        if BITS >= 8:
            to = out_ptr + page * BLOCK * D + n[:, None] * D + run[None, :]
            tl.store(to, tl.load(x_ptr + at, mask=inside), mask=inside)
        else:
            tokens = _numbers(x_ptr, at, inside)
            x = tokens * share[:, None]
            zero, span = _seal_ranges(x, meta_ptr, run, j < WIDTH, D, BITS)
            codes = _codes(x, zero[None, :], span[None, :], LEVELS)
            own += tl.sum(tokens.to(tl.int32) * tokens.to(tl.int32), 1)
            stored += tl.sum(tokens.to(tl.int32) * _stored(codes, zero[None, :], span[None, :], 2**BITS - 1), 1)
            planes = _store_lane(
                out_ptr, page, n[:, None], j[None, :], codes, inside, lane, planes, BLOCK, D, BITS, LANES
            )
    if BITS < 8:
        tl.store(size_ptr + n, _fitted(own, stored, size, share, LEVELS).to(tl.bfloat16))


@triton.jit
def seal_block(k, v, k_scale, v_scale, v_token, v_channel, pages, page, G: tl.constexpr, FORM: tl.constexpr):
    """One block of one head to page `page`, int64, of width G.

    k, v, k_scale, v_scale: pointers to keys [BLOCK, D], to values with strides `v_token` and `v_channel`, and to their
    scales. pages: (k, v, meta, size) of that width.
    """
    k_out, v_out, meta_out, size_out = pages
    D: tl.constexpr = FORM.dim
    DP: tl.constexpr = FORM.padded_dim
    BLOCK: tl.constexpr = FORM.block
    BITS: tl.constexpr = FORM.bits[G]
    VALUE_BITS: tl.constexpr = FORM.value_bits[G]
    LANES: tl.constexpr = 1 if VALUE_BITS >= 8 else (2 if VALUE_BITS == 4 else 4)
    LEVELS: tl.constexpr = 2.0**VALUE_BITS - 1
    V_LINE: tl.constexpr = 2 if BITS < 8 else 0
    LINES: tl.constexpr = V_LINE + (2 if VALUE_BITS < 8 else 0)
    meta = meta_out + page * LINES * D
    d = tl.arange(0, DP)
    size, share, sizes = d, d, size_out
    if BITS < 16:
        sizes += page * (2 * BLOCK)
        _, size, share, _ = seal_sizes(k, D, 1, k_scale, sizes, D, DP, BLOCK, BITS)
        values, _, _, unit = seal_sizes(v, v_token, v_channel, v_scale, sizes + BLOCK, D, DP, BLOCK, VALUE_BITS)
    seal_lines(k, size, share, k_out, meta, sizes, page, D, DP, BLOCK, BITS)
    if VALUE_BITS < 8:
        zero, span = _seal_ranges(values, meta + V_LINE * D, d, d < D, D, VALUE_BITS)
    TOKENS: tl.constexpr = BLOCK // LANES
    i = tl.arange(0, TOKENS)
    planes = _no_planes(DP, TOKENS, VALUE_BITS)
    inside = (d < D)[:, None] & (i >= 0)[None, :]
    for lane in tl.static_range(LANES):
        token = lane * TOKENS + i
        if VALUE_BITS < 16:
            token = value_order(token)
        at = token[None, :] * v_token + d[:, None] * v_channel
        if VALUE_BITS >= 8:
            to = v_out + page * BLOCK * D + d[:, None] * BLOCK + i[None, :]
            tl.store(to, tl.load(v + at, mask=inside), mask=inside)
        else:
            # sizes are found again, of tokens in another order
            x = _numbers(v, at, inside)
            size, share = _sizes(x, tl.load(v_scale + token), unit, D, 0)
            codes = _codes(x * share[None, :], zero[:, None], span[:, None], LEVELS)
            own = tl.sum(x.to(tl.int32) * x.to(tl.int32), 0)
            stored = tl.sum(x.to(tl.int32) * _stored(codes, zero[:, None], span[:, None], 2**VALUE_BITS - 1), 0)
            tl.store(sizes + BLOCK + token, _fitted(own, stored, size, share, LEVELS).to(tl.bfloat16))
            planes = _store_lane(
                v_out, page, d[:, None], i[None, :], codes, inside, lane, planes, D, BLOCK, VALUE_BITS, LANES
            )


@triton.jit
def move_forward(
    opened, pair, first, held, cap,
    BLOCK: tl.constexpr, D: tl.constexpr, V: tl.constexpr, DP: tl.constexpr, VP: tl.constexpr,
):  # fmt: skip
    """Of the `held` open tokens of one row and head, those behind block [first, first + BLOCK) take its place.

    opened: (k, v, k_scale, v_scale), as in `KVStore`. D, V: channels of keys and of values; DP, VP: padded.
    """
    k, v, k_scale, v_scale = opened
    n, d, c = tl.arange(0, MOVED), tl.arange(0, DP), tl.arange(0, VP)
    # the block has been read
    tl.debug_barrier()
    for at in tl.range(first + BLOCK, held, MOVED, num_stages=1):
        here, token = at + n < held, pair * cap + at + n
        k_from, v_from = k + token[:, None] * D + d[None, :], v + (pair * V + c)[:, None] * cap + (at + n)[None, :]
        k_here, v_here = here[:, None] & (d < D)[None, :], (c < V)[:, None] & here[None, :]
        keys, values = tl.load(k_from, mask=k_here, other=0), tl.load(v_from, mask=v_here, other=0)
        k_size, v_size = tl.load(k_scale + token, mask=here), tl.load(v_scale + token, mask=here)
        tl.store(k_from - BLOCK * D, keys, mask=k_here)
        tl.store(v_from - BLOCK, values, mask=v_here)
        tl.store(k_scale + token - BLOCK, k_size, mask=here)
        tl.store(v_scale + token - BLOCK, v_size, mask=here)
        # these places are the next to be taken
        tl.debug_barrier()
