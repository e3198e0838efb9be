"""Kernels of latent attention: one share of the tokens of a row, and the merging of shares.

A latent of `rank` channels is both key and value. It is read in two halves of channels, which is how 4 bit are packed
(`turbo_hf.layout`): byte j holds channels j and j + rank / 2. In units of their tokens' sizes, numbers are 127 at most.
Both products run on 16-bit tensor cores, which take INT8 codes as they are, and those of 4 bit rounded to 16 bit; sizes
are applied to scores, and to P.

    S = (Q K^T) k_size + (Qr Kr^T) r_size       [rows, tokens]
    P = exp(S - m)                              m: the largest score so far
    O = O exp(m' - m) + (P k_size) K            [rows, rank]
"""

import triton
import triton.language as tl

from turbo_hf.ops.kernel_common import LOG2_E, pdl_wait


@triton.jit
def _absorb(state, q, low, high, rotary, k_size, r_size, allowed, unit, TYPE: tl.constexpr):
    """One tile's part of the softmax. low, high: [T, half]; rotary: [R, T]; sizes: [1, T]; allowed: [N, T]."""
    acc_low, acc_high, m, denom = state
    q_low, q_high, q_rotary = q
    s = tl.dot(q_low, tl.trans(low))
    s = tl.dot(q_high, tl.trans(high), s)
    s = (s * k_size + tl.dot(q_rotary, rotary) * r_size) * unit
    s = tl.where(allowed, s, -float("inf"))
    new = tl.maximum(m, tl.max(s, 1))
    shift = tl.where(new == -float("inf"), 0.0, new)
    p = tl.exp2(s - shift[:, None])
    keep = tl.exp2(m - shift)
    denom = denom * keep + tl.sum(p, 1)
    p = (p * k_size).to(TYPE)
    acc_low = tl.dot(p, low, acc_low * keep[:, None])
    acc_high = tl.dot(p, high, acc_high * keep[:, None])
    return acc_low, acc_high, new, denom


@triton.jit
def _numbers(codes, line, RANK: tl.constexpr):
    """What 4-bit codes [T, half] stand for in units of their token's size. line: zeros; spans are RANK further on."""
    span = (tl.load(line + RANK).to(tl.int32) & 255).to(tl.float32)
    return codes.to(tl.float32) * (span / 15)[None, :] + tl.load(line).to(tl.float32)[None, :]


@triton.jit
def latent_kernel(
    q_ptr, qr_ptr,  # [B, N, rank] and [B, N, R], N = heads * tokens, contiguous
    k_ptr, v_ptr, meta_ptr, size_ptr,  # pages of the one head, as in `PagedHeads`
    k_open, v_open, k_scales, v_scales,  # open tokens, as in `KVStore`
    table_ptr, sealed_ptr, open_ptr, starts_ptr,  # int64 [B, blocks], [B], [B]; starts [B] or None
    part_ptr, lse_ptr,  # float32 [B, SHARES, N, rank], [B, SHARES, N]: log2
    table_stride, cap, unit, count,
    RANK: tl.constexpr, ROTARY: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr, SHARES: tl.constexpr, TYPE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One share of the blocks of one row, for ROWS of its N queries (head-major); the last share has the open tokens.

    count: N. unit: scaling times log2(e).
    """
    share, group = tl.program_id(0), tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    HALF: tl.constexpr = RANK // 2
    n = group * ROWS + tl.arange(0, ROWS)
    c, r, t = tl.arange(0, HALF), tl.arange(0, ROTARY), tl.arange(0, BLOCK)
    inside = (n < count)[:, None]
    at = (row * count + n)[:, None] * RANK + c[None, :]
    q_low = tl.load(q_ptr + at, mask=inside, other=0.0).to(TYPE)
    q_high = tl.load(q_ptr + at + HALF, mask=inside, other=0.0).to(TYPE)
    q_rotary = tl.load(qr_ptr + (row * count + n)[:, None] * ROTARY + r[None, :], mask=inside, other=0.0).to(TYPE)
    q = (q_low, q_high, q_rotary)
    sealed = tl.load(sealed_ptr + row).to(tl.int32)
    opened = tl.load(open_ptr + row).to(tl.int32)
    # a query sees the tokens up to its own; padding sees what the row's first token sees, and is dropped by the caller
    last = sealed * BLOCK + opened - TOKENS + n % TOKENS
    if starts_ptr is not None:
        last = tl.maximum(last, sealed * BLOCK + opened - TOKENS + tl.load(starts_ptr + row).to(tl.int32))
    last = tl.maximum(last, 0)
    each = tl.cdiv(sealed, SHARES)
    begin = tl.minimum(share * each, sealed)
    end = tl.minimum(begin + each, sealed)
    acc = tl.zeros([ROWS, HALF], tl.float32)
    state = acc, acc, tl.full([ROWS], -float("inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    # where the stored values of a block hold token t (VALUE_ORDER)
    stored = t if BITS == 16 else t // 16 * 16 + t // 2 % 4 * 4 + t // 8 % 2 * 2 + t % 2
    for block in tl.range(begin, end, num_stages=STAGES):
        page = tl.load(table_ptr + row * table_stride + block)
        k_size = tl.full([1, BLOCK], 1.0, tl.float32)
        r_size = k_size
        if BITS < 16:
            k_size = tl.load(size_ptr + page * (2 * BLOCK) + t).to(tl.float32)[None, :]
            r_size = tl.load(size_ptr + page * (2 * BLOCK) + BLOCK + t).to(tl.float32)[None, :]
        rotary = tl.load(v_ptr + (page * ROTARY + r)[:, None] * BLOCK + stored[None, :]).to(TYPE)
        if BITS == 4:
            packed = tl.load(k_ptr + (page * BLOCK + t)[:, None] * HALF + c[None, :])
            meta = meta_ptr + page * 2 * RANK + c
            low = _numbers(packed & 15, meta, RANK).to(TYPE)
            high = _numbers(packed >> 4, meta + HALF, RANK).to(TYPE)
        else:
            place = (page * BLOCK + t)[:, None] * RANK + c[None, :]
            low = tl.load(k_ptr + place).to(TYPE)
            high = tl.load(k_ptr + place + HALF).to(TYPE)
        allowed = (block * BLOCK + t)[None, :] <= last[:, None]
        state = _absorb(state, q, low, high, rotary, k_size, r_size, allowed, unit, TYPE)
    for first in tl.range(0, opened if share == SHARES - 1 else 0, BLOCK, num_stages=1):
        token = first + t
        live = token < opened
        place = (row * cap + token)[:, None] * RANK + c[None, :]
        low = tl.load(k_open + place, mask=live[:, None], other=0.0).to(TYPE)
        high = tl.load(k_open + place + HALF, mask=live[:, None], other=0.0).to(TYPE)
        rotary = tl.load(v_open + (row * ROTARY + r)[:, None] * cap + token[None, :], mask=live[None, :], other=0.0).to(
            TYPE
        )
        k_size = tl.load(k_scales + row * cap + token, mask=live, other=0.0)[None, :]
        r_size = tl.load(v_scales + row * cap + token, mask=live, other=0.0)[None, :]
        allowed = ((sealed * BLOCK + token)[None, :] <= last[:, None]) & live[None, :]
        state = _absorb(state, q, low, high, rotary, k_size, r_size, allowed, unit, TYPE)
    acc_low, acc_high, m, denom = state
    some = tl.where(denom > 0, denom, 1.0)
    to = (row * SHARES + share) * count + n
    place = to[:, None] * RANK + c[None, :]
    tl.store(part_ptr + place, acc_low / some[:, None], mask=inside)
    tl.store(part_ptr + place + HALF, acc_high / some[:, None], mask=inside)
    tl.store(lse_ptr + to, tl.where(denom > 0, m + tl.log2(some), -float("inf")), mask=n < count)


@triton.jit
def merge_kernel(
    part_ptr, lse_ptr, out_ptr, out_lse_ptr, count, shares,
    RANK: tl.constexpr, MOST: tl.constexpr, CHANNELS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge the shares of CHANNELS channels of one query, all at once: one load after another waits for memory.

    out: [B, N, rank]; out_lse: float32 [B, N], natural log. MOST: the power of two from `shares` up. PDL: `pdl_wait`.
    """
    pdl_wait(PDL, True)
    n, row = tl.program_id(0), tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    every = tl.arange(0, MOST)
    live, share = every < shares, row * shares + every
    at = share * count + n
    lse = tl.load(lse_ptr + at, mask=live, other=-float("inf"))
    largest = tl.max(lse, 0)
    weight = tl.exp2(lse - largest)
    total = tl.sum(weight, 0)
    part = tl.load(part_ptr + at[:, None] * RANK + c[None, :], mask=live[:, None], other=0.0)
    acc = tl.sum(part * weight[:, None], 0)
    tl.store(out_ptr + (row * count + n) * RANK + c, (acc / total).to(out_ptr.dtype.element_ty))
    tl.store(out_lse_ptr + row * count + n, (largest + tl.log2(total)) / LOG2_E)
