"""Kernel of attention over named latents: one share of the tokens that a query names, for some of its heads.

As `latent_kernel`, but each token of a tile lies in any page, with ranges of channels of its own, or is open: lines are
gathered, and multiplied by their sizes at once. `merge_kernel` merges the shares.
"""

import triton
import triton.language as tl

from turbo_hf.ops.kernel_common import LOG2_E
from turbo_hf.ops.latent.kernel import _absorb

NOTHING = tl.constexpr(-1e30)
"""Logarithm of the weight of a share that sees nothing: finite, so that a query all of whose shares do gets 0."""


@triton.jit
def _gathered(c, first, source, size, meta, paged, seen, RANK: tl.constexpr, BITS: tl.constexpr):
    """Channels first + c of tokens [T, 1], 0 where not seen.

    source: pointers to the lines of tokens. meta: to the zeros of their pages; spans are RANK further on.
    """
    BYTES: tl.constexpr = RANK if BITS >= 8 else RANK * BITS // 8
    channel = first + c[None, :]
    if BITS < 8:
        # a byte of several channels is read for each, by the load that reads what is open
        codes = tl.load(source + tl.where(paged, channel % BYTES, channel), mask=seen, other=0).to(tl.int32)
        LEVELS: tl.constexpr = (1 << BITS) - 1
        codes = tl.where(paged, codes >> channel // BYTES * BITS & LEVELS, codes).to(tl.float32)
        zero = tl.load(meta + channel, mask=paged, other=0).to(tl.float32)
        span = tl.load(meta + RANK + channel, mask=paged, other=LEVELS).to(tl.int32) & 255
        codes = codes * (span.to(tl.float32) / LEVELS) + zero
    else:
        codes = tl.load(source + channel, mask=seen, other=0).to(tl.float32)
    return codes * size


@triton.jit
def named_kernel(
    q_ptr, qr_ptr,  # [B, H, M, rank] and [B, H, M, R], contiguous
    k_ptr, v_ptr, meta_ptr, size_ptr,  # pages of the one head, as in `PagedHeads`; packed codes as int8
    k_open, v_open, k_scales, v_scales,  # open tokens, as in `KVStore`
    table_ptr, sealed_ptr,  # int64 [B, blocks], [B]
    places_ptr, seen_ptr, sinks_ptr,  # int64 and uint8 [B, M, K], contiguous; float [H] or None
    part_ptr, lse_ptr,  # float32 [B, SHARES, H, M, rank], [B, SHARES, H, M]: log2
    table_stride, cap, unit, heads, columns, named, each,
    RANK: tl.constexpr, ROTARY: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
    TOKENS: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """One share of the K tokens that one of M query tokens names, for HEADS heads, TOKENS at a time.

    columns: M. named: K. each: tokens of a share, a multiple of TOKENS. unit: scaling times log2(e).
    """
    # programs of the same tokens run at once
    group, share, query = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    row = query // columns
    HALF: tl.constexpr = RANK // 2
    BYTES: tl.constexpr = RANK if BITS >= 8 else RANK * BITS // 8
    h = group * HEADS + tl.arange(0, HEADS)
    c, r, t = tl.arange(0, HALF), tl.arange(0, ROTARY), tl.arange(0, TOKENS)
    inside = h < heads
    n = h * columns + query % columns
    at = row * heads * columns + n
    q_low = tl.load(q_ptr + at[:, None] * RANK + c[None, :], mask=inside[:, None], other=0.0)
    q_high = tl.load(q_ptr + at[:, None] * RANK + HALF + c[None, :], mask=inside[:, None], other=0.0)
    q_rotary = tl.load(qr_ptr + at[:, None] * ROTARY + r[None, :], mask=inside[:, None], other=0.0)
    q = (q_low.to(TYPE), q_high.to(TYPE), q_rotary.to(TYPE))
    sealed = tl.load(sealed_ptr + row) * BLOCK
    acc = tl.zeros([HEADS, HALF], tl.float32)
    m, denom = tl.full([HEADS], -float("inf"), tl.float32), tl.zeros([HEADS], tl.float32)
    if sinks_ptr is not None:
        # a token of the first share, without a value
        sink = tl.load(sinks_ptr + h, mask=inside, other=0.0).to(tl.float32) * LOG2_E
        m, denom = tl.where(share == 0, sink, m), tl.where(share == 0, 1.0, denom)
    state = acc, acc, m, denom
    begin = share * each
    for first in tl.range(begin, tl.minimum(begin + each, named), TOKENS, num_stages=1):
        k = query * named + first + t
        live = first + t < named
        place = tl.load(places_ptr + k, mask=live, other=0)
        seen = tl.load(seen_ptr + k, mask=live, other=0) != 0
        paged = seen & (place < sealed)
        opened = seen & (place >= sealed)
        page = tl.load(table_ptr + row * table_stride + (place.to(tl.uint32) // BLOCK), mask=paged, other=0)
        token = place.to(tl.uint32) % BLOCK
        # its place among all open tokens
        spot = row * cap + place - sealed
        k_size = tl.load(k_scales + spot, mask=opened, other=1.0)
        r_size = tl.load(v_scales + spot, mask=opened, other=1.0)
        if BITS < 16:
            size = size_ptr + page * (2 * BLOCK) + token
            k_size = tl.where(paged, tl.load(size, mask=paged, other=0.0).to(tl.float32), k_size)
            r_size = tl.where(paged, tl.load(size + BLOCK, mask=paged, other=0.0).to(tl.float32), r_size)
        line = tl.where(paged, k_ptr + (page * BLOCK + token) * BYTES, k_open + spot * RANK)[:, None]
        meta, sized = (meta_ptr + page * (2 * RANK))[:, None], (line, k_size[:, None])
        low = _gathered(c, 0, *sized, meta, paged[:, None], seen[:, None], RANK, BITS).to(TYPE)
        high = _gathered(c, HALF, *sized, meta, paged[:, None], seen[:, None], RANK, BITS).to(TYPE)
        # where the stored values of a block hold this token (VALUE_ORDER)
        stored = token if BITS == 16 else token // 16 * 16 + token // 2 % 4 * 4 + token // 8 % 2 * 2 + token % 2
        line = tl.where(paged, v_ptr + page * (ROTARY * BLOCK) + stored, v_open + row * cap * (ROTARY - 1) + spot)
        line = line[:, None] + r[None, :] * tl.where(paged, BLOCK, cap)[:, None]
        rotary = (tl.load(line, mask=seen[:, None], other=0).to(tl.float32) * r_size[:, None]).to(TYPE)
        state = _absorb(state, q, low, high, tl.trans(rotary), 1.0, 1.0, seen[None, :], unit, TYPE)
    acc_low, acc_high, m, denom = state
    some = tl.where(denom > 0, denom, 1.0)
    to = (row * tl.num_programs(1) + share) * heads * columns + n
    tl.store(part_ptr + to[:, None] * RANK + c[None, :], acc_low / some[:, None], mask=inside[:, None])
    tl.store(part_ptr + to[:, None] * RANK + HALF + c[None, :], acc_high / some[:, None], mask=inside[:, None])
    tl.store(lse_ptr + to, tl.where(denom > 0, m + tl.log2(some), NOTHING), mask=inside)
