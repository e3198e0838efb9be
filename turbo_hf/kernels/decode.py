"""Decode attention over the packed cache: one persistent launch over a list of tiles (LeanAttention alg. 4).

A tile is NB blocks of one row and KV head, one block a warp: nothing in the loop crosses warps. Of a block:

    S  = digits(q * step_k) K + q . zero_k        tensor cores, INT8, exact: the channel steps live in q, as two digits
    P  = round(119 exp(S - max S))                INT8, one scale a query row and block
    O += (V P step_v + sum P zero_v) * scale      tensor cores, then one multiply-add a channel

The query rows stand in the M of the first product and in the N of the second, so that what a thread holds of P is what
it needs of P for the second (`turbo_hf.layout.VALUE_ORDER`).
"""

import triton
import triton.language as tl

from turbo_hf.kernels.unpack import digits, entry, lanes1, lanes2, lanes4

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
CODE_MAX = tl.constexpr(119)
ROUND = tl.constexpr(12582912.0)


@triton.jit
def _bytes(pointer, row_mask, c, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Bytes at `pointer`, zeros where `row_mask` is False, and where c is not below SIZE (of PADDED) either."""
    if SIZE == PADDED:
        return tl.load(pointer, mask=row_mask, other=0)
    else:
        return tl.load(pointer, mask=row_mask & (c < SIZE), other=0)


@triton.jit
def _merge_keys(x, y):
    """Lanes x and y of channels [NB, C, T], one after the other."""
    return tl.join(x, y).permute(0, 3, 1, 2).reshape(x.shape[0], 2 * x.shape[1], x.shape[2])


@triton.jit
def _merge_values(x, y):
    """Lanes x and y of tokens [NB, D, T], one after the other."""
    return tl.join(x, y).permute(0, 1, 3, 2).reshape(x.shape[0], x.shape[1], 2 * x.shape[2])


@triton.jit
def _keys(base, ok, D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr):
    """Codes int8 [NB, DP, T] of the pages at `base` [NB], zeros where not `ok`; channels in the order of `channels`."""
    t = tl.arange(0, T)[None, None, :]
    at = base[:, None, None] + t * (D * BITS // 8)
    live = ok[:, None, None]
    if BITS == 8:
        c = tl.arange(0, DP)[None, :, None]
        return _bytes(at + c, live, c, D, DP)
    elif BITS == 4:
        c = tl.arange(0, DP // 2)[None, :, None]
        x, y = lanes4(_bytes(at + c, live, c, D // 2, DP // 2), ASM)
        return _merge_keys(x, y)
    elif BITS == 2:
        c = tl.arange(0, DP // 4)[None, :, None]
        x, y, z, w = lanes2(_bytes(at + c, live, c, D // 4, DP // 4), ASM)
        return _merge_keys(_merge_keys(x, y), _merge_keys(z, w))
    else:
        tl.static_assert(BITS == 3)
        c = tl.arange(0, DP // 8)[None, :, None]
        a, b, d, e = lanes2(_bytes(at + c, live, c, D // 8, DP // 8), ASM)
        f, g, h, i = lanes2(_bytes(at + D // 8 + c, live, c, D // 8, DP // 8), ASM)
        p, q, r, s, u, v, w, x = lanes1(_bytes(at + D // 4 + c, live, c, D // 8, DP // 8), ASM)
        low = _merge_keys(_merge_keys(a + p, f + q), _merge_keys(b + r, g + s))
        return _merge_keys(low, _merge_keys(_merge_keys(d + u, h + v), _merge_keys(e + w, i + x)))


@triton.jit
def _values(base, ok, D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr):
    """Codes int8 [NB, DP, T] of the pages at `base` [NB], zeros where not `ok`; tokens in the order of `_to_values`."""
    c = tl.arange(0, DP)[None, :, None]
    at = base[:, None, None] + c * (T * BITS // 8)
    live = ok[:, None, None]
    if BITS == 8:
        return _bytes(at + tl.arange(0, T)[None, None, :], live, c, D, DP)
    elif BITS == 4:
        x, y = lanes4(_bytes(at + tl.arange(0, T // 2)[None, None, :], live, c, D, DP), ASM)
        return _by_thread(_merge_values(x, y))
    elif BITS == 2:
        x, y, z, w = lanes2(_bytes(at + tl.arange(0, T // 4)[None, None, :], live, c, D, DP), ASM)
        return _by_thread(_merge_values(_merge_values(x, y), _merge_values(z, w)))
    else:
        t = tl.arange(0, T // 8)[None, None, :]
        a, b, d, e = lanes2(_bytes(at + t, live, c, D, DP), ASM)
        f, g, h, i = lanes2(_bytes(at + T // 8 + t, live, c, D, DP), ASM)
        p, q, r, s, u, v, w, x = lanes1(_bytes(at + T // 4 + t, live, c, D, DP), ASM)
        low = _merge_values(_merge_values(a + p, f + q), _merge_values(b + r, g + s))
        high = _merge_values(_merge_values(d + u, h + v), _merge_values(e + w, i + x))
        return _by_thread(_merge_values(low, high))


@triton.jit
def _channels(D: tl.constexpr, DP: tl.constexpr, LANES: tl.constexpr):
    """The channel at each place of an unpacked key, D or more where there is none."""
    c = tl.arange(0, DP)
    if D == DP:
        return c
    else:
        inside = c % (DP // LANES)
        return tl.where(inside < D // LANES, c // (DP // LANES) * (D // LANES) + inside, D)


@triton.jit
def _to_values(x, PACKED: tl.constexpr):
    """Columns of scores [NB, R, T] in the order of `_values`; moves nothing between threads."""
    NB: tl.constexpr = x.shape[0]
    R: tl.constexpr = x.shape[1]
    T: tl.constexpr = x.shape[2]
    if PACKED:
        return x.reshape(NB, R, T // 32, 2, 2, 4, 2).permute(0, 1, 2, 5, 3, 4, 6).reshape(NB, R, T)
    else:
        return x.reshape(NB, R, T // 16, 2, 4, 2).permute(0, 1, 2, 4, 3, 5).reshape(NB, R, T)


@triton.jit
def _by_thread(x):
    """Tokens of unpacked values [NB, D, T] so that each 8 in a row are those of one thread of the tensor core.

    That is how Triton lays out an operand which it sees to come from narrower numbers.
    """
    NB: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    T: tl.constexpr = x.shape[2]
    return x.reshape(NB, D, T // 32, 2, 4, 4).permute(0, 1, 2, 4, 3, 5).reshape(NB, D, T)


@triton.jit
def _exp(x, sas_threshold, SAS: tl.constexpr):
    """2^x, or SAS of the same number (TurboAttention eq. 13-15)."""
    if SAS:
        natural = x * LN_2
        clamped = tl.maximum(natural, sas_threshold)
        whole = tl.floor(-clamped)
        fraction = -clamped - whole
        cubic = ((-0.1025 * fraction + 0.4626) * fraction - 0.9922) * fraction + 0.9996
        return tl.where(natural < sas_threshold, 0.0, tl.exp2(-whole * LOG2_E) * cubic)
    else:
        return tl.exp2(x)


@triton.jit
def _softcap(x, cap):
    """cap * tanh(x / cap), in base 2."""
    # tanh by an exponential of a number that is never positive
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E / cap))
    size = (cap * LOG2_E) * (1 - e) / (1 + e)
    return tl.where(x < 0, -size, size)


@triton.jit
def _attend(x, unit, v_scale, m, l, sas_threshold, SAS: tl.constexpr, TOKEN_SCALE: tl.constexpr, DTYPE: tl.constexpr):
    """One block's softmax. x * unit: scores in base 2, x [NB, R, T], -inf where hidden, unit [NB, R] above 0.

    v_scale: [NB], [NB, T] if TOKEN_SCALE. Returns P [NB, R, T] in DTYPE; the sums of P, int32 [NB, R], if DTYPE is int8;
    weight [NB, R], what P's unit is worth; keep [NB, R], what is left of the sums so far; the new maximum and sum.
    """
    top = tl.max(x, 2) * unit
    base = tl.where(top == -float("inf"), 0.0, top)
    p = _exp(x * unit[:, :, None] - base[:, :, None], sas_threshold, SAS)
    new = tl.maximum(m, top)
    shift = tl.where(new == -float("inf"), 0.0, new)
    keep = tl.exp2(m - shift)
    weight = tl.exp2(top - shift)
    l = l * keep + tl.sum(p, 2) * weight
    if TOKEN_SCALE:
        p = p * v_scale[:, None, :]
        most = tl.max(p, 2)
        p = p * (1.0 / tl.where(most > 0, most, 1.0))[:, :, None]
        weight = weight * most
    else:
        weight = weight * v_scale[:, None]
    if DTYPE == tl.int8:
        # adding 1.5 * 2^23 rounds to the nearest, ties to even, and leaves the integer in the low bits
        p = (p * CODE_MAX + ROUND).to(tl.int32, bitcast=True) - 0x4B400000
        weight = weight * (1.0 / CODE_MAX)
        total = tl.sum(p, 2)
    else:
        total = weight
    return p.to(DTYPE), total, weight, keep, new, l


@triton.jit
def _even(x):
    """Columns 0, 2, 4, ... of the last dimension."""
    if len(x.shape) == 2:
        even, odd = tl.split(x.reshape(x.shape[0], x.shape[1] // 2, 2))
    else:
        even, odd = tl.split(x.reshape(x.shape[0], x.shape[1], x.shape[2] // 2, 2))
    return even


@triton.jit
def _float_dot(a, b, ASM: tl.constexpr):
    """a b in float32. The interpreter's product takes no bfloat16, which float32 holds exactly."""
    if ASM:
        return tl.dot(a, b, input_precision="ieee")
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32))


@triton.jit
def _scores(q, q_unit, codes, step, zero, STAGE2: tl.constexpr, ASM: tl.constexpr):
    """q . k of one block, float32 [NB, R, T], exact where q is INT8.

    q: [R, DP]; q_unit: int8 [2 * R, DP], the digits of q * 1; codes: int8 [NB, DP, T]; step, zero: int8 [NB, DP].
    """
    NB: tl.constexpr = codes.shape[0]
    R: tl.constexpr = q.shape[0]
    DP: tl.constexpr = codes.shape[1]
    T: tl.constexpr = codes.shape[2]
    if q.dtype == tl.int8:
        unit = tl.broadcast_to(q_unit[None], [NB, 2 * R, DP])
        if STAGE2:
            # all columns of the zero points' product are the same number: it is where the sum over channels begins
            s = tl.dot(unit, tl.broadcast_to(zero[:, :, None], [NB, DP, 8]), out_dtype=tl.int32)
            s = tl.broadcast_to(s[:, :, None, :], [NB, 2 * R, T // 8, 8]).reshape(NB, 2 * R, T)
            high, low = digits(*tl.broadcast(q[None], step[:, None, :]), ASM)
            folded = tl.join(high, low).permute(0, 3, 1, 2).reshape(NB, 2 * R, DP)
            s = tl.dot(folded, codes, s, out_dtype=tl.int32)
        else:
            s = tl.dot(unit, codes, out_dtype=tl.int32)
        high, low = tl.split(s.reshape(NB, 2, R, T).permute(0, 2, 3, 1))
        return (high * 256 + low).to(tl.float32)
    else:
        k = codes.to(tl.int32)
        if STAGE2:
            k = k * step.to(tl.int32)[:, :, None] + zero.to(tl.int32)[:, :, None]
        return _float_dot(tl.broadcast_to(q[None], [NB, R, DP]), k.to(tl.float32).to(q.dtype), ASM)


@triton.jit
def _accumulate(acc, p, total, codes, step, zero, weight, keep, STAGE2: tl.constexpr, SPREAD: tl.constexpr, ASM: tl.constexpr):
    """acc * keep + (V P) * weight, float32 [NB, DP, N]; p: [NB, R, T]; codes: int8 [NB, DP, T]; step: [NB, DP]."""
    if p.dtype == tl.int8:
        o = tl.dot(codes, p.permute(0, 2, 1), out_dtype=tl.int32)
        if SPREAD:
            o, total = _even(o), _even(total)
        if STAGE2:
            o = o * step.to(tl.int32)[:, :, None] + zero.to(tl.int32)[:, :, None] * total[:, None, :]
        o = o.to(tl.float32)
    else:
        v = codes.to(tl.int32)
        if STAGE2:
            v = v * step.to(tl.int32)[:, :, None] + zero.to(tl.int32)[:, :, None]
        o = _float_dot(v.to(tl.float32).to(p.dtype), p.permute(0, 2, 1), ASM)
        if SPREAD:
            o = _even(o)
    if SPREAD:
        weight, keep = _even(weight), _even(keep)
    return acc * keep[:, None, :] + o * weight[:, None, :]


@triton.jit
def _walk(
    heads, slot, table, blocks, page, sealed, begin, end, q_at, factor, first, last, softcap, sas_threshold, acc, m, l,
    SLOTS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, SAS: tl.constexpr,
    CAPPED: tl.constexpr, SPREAD: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Tiles begin to end of sealed blocks of one slot. heads: (k, v, meta, scale); q_at: the query in scratch."""
    k_ptr, v_ptr, meta_ptr, scale_ptr = heads
    NB: tl.constexpr = acc.shape[0]
    DP: tl.constexpr = acc.shape[1]
    R: tl.constexpr = m.shape[1]
    STAGE2: tl.constexpr = BITS != 8
    BYTES: tl.constexpr = BLOCK * D * BITS // 8
    nb = tl.arange(0, NB)
    d = tl.arange(0, DP)
    column = tl.arange(0, BLOCK)[None, None, :]
    c = _channels(D, DP, 1 if BITS == 8 else (8 if BITS == 3 else 8 // BITS))
    q, q_unit = _query(q_at, c, c < D, R, D)
    # tiles that every query row sees whole
    inner_begin = tl.cdiv(tl.max(tl.max(tl.max(first, 2), 1), 0), NB * BLOCK)
    nearest = tl.min(tl.min(tl.min(tl.where(last > 0, last, sealed * BLOCK), 2), 1), 0)
    inner_end = tl.minimum(nearest, sealed * BLOCK) // (NB * BLOCK)
    for tile in tl.range(begin, end, num_stages=STAGES):
        block = tile * NB + nb
        live = block < sealed
        at = page * SLOTS + slot
        packed = at * BYTES
        keys = _keys(k_ptr + packed, live, D, DP, BLOCK, BITS, ASM)
        values = _values(v_ptr + packed, live, D, DP, BLOCK, BITS, ASM)
        k_scale = tl.load(scale_ptr + 2 * at, mask=live, other=0.0)
        v_scale = tl.load(scale_ptr + 2 * at + 1, mask=live, other=0.0)
        if STAGE2:
            meta, shown = (meta_ptr + at * (4 * D))[:, None], live[:, None]
            k_step = _bytes(meta + c[None, :], shown, c[None, :], D, DP)
            k_zero = _bytes(meta + D + c[None, :], shown, c[None, :], D, DP)
            v_step = _bytes(meta + 2 * D + d[None, :], shown, d[None, :], D, DP)
            v_zero = _bytes(meta + 3 * D + d[None, :], shown, d[None, :], D, DP)
        else:
            k_step, k_zero, v_step, v_zero = k_scale, k_scale, v_scale, v_scale
        # the next tile's pages, while this one's keys are on their way
        page = entry(table + block + NB, block + NB < blocks, ASM)
        x = _scores(q, q_unit, keys, k_step, k_zero, STAGE2, ASM)
        # never 0, so that -inf times it is -inf
        unit = tl.maximum(k_scale[:, None] * factor[None, :], 1e-37)
        if CAPPED:
            x = _softcap(x * unit[:, :, None], softcap)
            unit = unit * 0 + 1
        if (tile < inner_begin) | (tile >= inner_end):
            place = block[:, None, None] * BLOCK + column
            x = tl.where((place >= first) & (place < last) & live[:, None, None], x, -float("inf"))
        p, total, weight, keep, m, l = _attend(x, unit, v_scale, m, l, sas_threshold, SAS, False, q.dtype)
        acc = _accumulate(acc, _to_values(p, STAGE2), total, values, v_step, v_zero, weight, keep, STAGE2, SPREAD, ASM)
    return acc, m, l


@triton.jit
def _rows(chunk, length, head, tokens, GROUP: tl.constexpr, R: tl.constexpr, SPREAD: tl.constexpr):
    """Of R places of query rows: the token's place in its row, whether there is one, its column, its query head."""
    r = tl.arange(0, R)
    live = r >= 0
    size: tl.constexpr = R // 2 if SPREAD else R
    if SPREAD:
        live = r % 2 == 0
        r = r // 2
    r = chunk * size + r
    query = r % tokens
    live = live & (r < GROUP * tokens)
    return length - tokens + query, live, query, head * GROUP + r // tokens


@triton.jit
def _query(q_at, c, ok, R: tl.constexpr, D: tl.constexpr):
    """q [R, DP] from scratch with its channels in the order c, and the digits [2 * R, DP] of q * 1: 0, then q.

    Both are loads, and nothing but loads: so the compiler gives them the layout of a tensor core operand at once.
    """
    r = tl.arange(0, R)
    q = tl.load(q_at + r[:, None] * D + c[None, :], mask=ok[None, :], other=0)
    r = tl.arange(0, 2 * R) - R
    return q, tl.load(q_at + r[:, None] * D + c[None, :], mask=(r >= 0)[:, None] & ok[None, :], other=0)


@triton.jit
def _open(
    opened, at, cap, sealed, length, q_at, factor, first, last, softcap, sas_threshold, acc, m, l,
    D: tl.constexpr, BLOCK: tl.constexpr, SAS: tl.constexpr, CAPPED: tl.constexpr, SPREAD: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The open tokens of one row and head: INT8 with one scale a token. at: row * Hkv + head, int64."""
    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr = opened
    NB: tl.constexpr = acc.shape[0]
    DP: tl.constexpr = acc.shape[1]
    R: tl.constexpr = m.shape[1]
    nb = tl.arange(0, NB)
    d = tl.arange(0, DP)
    q, q_unit = _query(q_at, d, d < D, R, D)
    # keys in such an order that `_to_values` brings the probabilities into time order
    t = tl.arange(0, BLOCK)
    column = t // 16 * 16 + t % 8 // 2 * 4 + t % 16 // 8 * 2 + t % 2
    channel = d[None, :, None]
    count = length - sealed * BLOCK
    for start in tl.range(0, count, NB * BLOCK, num_stages=1):
        token = start + nb[:, None] * BLOCK + column[None, :]
        place = sealed * BLOCK + token
        live = place < length
        keys = _bytes(k_ptr + (at * cap + token)[:, None, :] * D + channel, live[:, None, :], channel, D, DP)
        stored = start + nb[:, None, None] * BLOCK + t[None, None, :]
        # whole groups of 16, as `cap` has them: what lies past the last token meets a probability of 0
        values = _bytes(v_ptr + (at * D + channel) * cap + stored, stored // 16 * 16 < count, channel, D, DP)
        k_scale = tl.load(k_scale_ptr + at * cap + token, mask=live, other=0.0)
        v_scale = tl.load(v_scale_ptr + at * cap + token, mask=live, other=0.0)
        x = _scores(q, q_unit, keys, k_scale, k_scale, False, ASM) * k_scale[:, None, :] * factor[None, :, None]
        if CAPPED:
            x = _softcap(x, softcap)
        seen = (place[:, None, :] >= first) & (place[:, None, :] < last)
        x = tl.where(seen & live[:, None, :], x, -float("inf"))
        p, total, weight, keep, m, l = _attend(x, l * 0 + 1, v_scale, m, l, sas_threshold, SAS, True, q.dtype)
        acc = _accumulate(acc, _to_values(p, False), total, values, k_scale, k_scale, weight, keep, False, SPREAD, ASM)
    return acc, m, l


@triton.jit
def _merge(parts_ptr, first_cta, count, N: tl.constexpr, DP: tl.constexpr, PARTS: tl.constexpr):
    """The partial results of one output, in the order of its tiles: O [N, DP], maximum [N], sum [N]."""
    SIZE: tl.constexpr = N * (DP + 2)
    n = tl.arange(0, N)
    d = tl.arange(0, DP)
    many = tl.arange(0, 4 * PARTS)
    top = tl.full([N], -float("inf"), tl.float32)
    for start in tl.range(0, count, 4 * PARTS, num_stages=1):
        i = start + many
        stats = parts_ptr + _part(first_cta, i)[:, None] * SIZE + N * DP + n[None, :]
        found = tl.load(stats, mask=(i < count)[:, None], other=-float("inf"), cache_modifier=".cg")
        top = tl.maximum(top, tl.max(found, 0))
    shift = tl.where(top == -float("inf"), 0.0, top)
    total = tl.zeros([N], tl.float32)
    o = tl.zeros([N, DP], tl.float32)
    for start in tl.range(0, count, PARTS, num_stages=3):
        i = start + tl.arange(0, PARTS)
        at = parts_ptr + _part(first_cta, i) * SIZE
        live = i < count
        stats = at[:, None] + N * DP + n[None, :]
        found = tl.load(stats, mask=live[:, None], other=-float("inf"), cache_modifier=".cg")
        sums = tl.load(stats + N, mask=live[:, None], other=0.0, cache_modifier=".cg")
        values = at[:, None, None] + n[None, :, None] * DP + d[None, None, :]
        part = tl.load(values, mask=live[:, None, None], other=0.0, cache_modifier=".cg")
        share = tl.exp2(found - shift[None, :])
        total += tl.sum(sums * share, 0)
        o += tl.sum(part * share[:, :, None], 0)
    return o, top, total


@triton.jit
def _part(first_cta, i):
    """Where part i of an output lies: a CTA leaves one of the output that it ends with, and one of any other."""
    return (2 * (first_cta + i) + (i == 0)).to(tl.int64)


@triton.jit
def _finish(
    o, top, total, out_ptr, lse_ptr, sinks_ptr, row, head, chunk, length, start, tokens, kv_heads,
    GROUP: tl.constexpr, D: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Write out and lse of N query rows from their sums. o: [N, DP]; top, total: [N]."""
    place, live, query, head_of = _rows(chunk, length, head, tokens, GROUP, o.shape[0], False)
    padding = (place < 0) | (place - length + tokens < start)
    if SINKS:
        sink = tl.load(sinks_ptr + head_of, mask=live, other=0.0).to(tl.float32) * LOG2_E
        new = tl.maximum(top, sink)
        share = tl.exp2(top - new)
        total = total * share + tl.exp2(sink - new)
        o = o * share[:, None]
        top = new
    o = o / tl.where(total > 0, total, 1.0)[:, None]
    lse = tl.where(padding | (total == 0), -float("inf"), (top + tl.log2(total)) * LN_2)
    d = tl.arange(0, o.shape[1])
    at = (row * (kv_heads * GROUP) + head_of) * tokens + query
    out = tl.where(padding[:, None], 0.0, o).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (at * D)[:, None] + d[None, :], out, mask=live[:, None] & (d < D)[None, :])
    tl.store(lse_ptr + at, lse, mask=live)


@triton.jit
def decode_kernel(
    q_ptr,  # [B, Hq, M, D]
    out_ptr,  # [B, Hq, M, D]
    lse_ptr,  # float32 [B, Hq, M]
    starts_ptr,  # int64 [B]
    sinks_ptr,  # [Hq]
    heads,  # for each bit width (k, v, meta, scale), as in `PagedHeads`
    opened,  # (k_open, v_open, k_scale, v_scale), as in `KVStore`
    order_ptr,  # int64 [B, Hkv]
    table_ptr,  # int64 [B, blocks]
    sealed_ptr,  # int64 [B]
    open_len_ptr,  # int64 [B]
    plan_ptr,  # int32: 4 a CTA, 2 an output, as in `ops.schedule`
    parts_ptr,  # float32 [2 * CTAs, N * (DP + 2)]
    arrived_ptr,  # int32 [outputs], zeros before and after
    scratch_ptr,  # [CTAs, R * D], int8 in mode "turbo", else as q
    q_strides,
    table_stride,
    cap,
    tokens,
    window,
    scaling,
    softcap,
    sas_threshold,
    SLOTS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK: tl.constexpr,
    NB: tl.constexpr,
    R: tl.constexpr,
    SPREAD: tl.constexpr,
    TURBO: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    SAS: tl.constexpr,
    STARTS: tl.constexpr,
    SINKS: tl.constexpr,
    STAGES: tl.constexpr,
    PARTS: tl.constexpr,
    ASM: tl.constexpr,
):
    N: tl.constexpr = R // 2 if SPREAD else R
    cta = tl.program_id(0)
    share = plan_ptr + 4 * cta
    output, tile, left = tl.load(share), tl.load(share + 1), tl.load(share + 2)
    q_at = scratch_ptr + cta.to(tl.int64) * (R * D)
    kv_heads = 0
    for g in tl.static_range(len(SLOTS)):
        kv_heads += SLOTS[g]
    chunks = tl.cdiv(GROUP * tokens, N)
    d = tl.arange(0, DP)
    while left > 0:
        row = (output // (kv_heads * chunks)).to(tl.int64)
        slot = output // chunks % kv_heads
        head = tl.load(order_ptr + row * kv_heads + slot)
        table = table_ptr + row * table_stride
        block = tile * NB + tl.arange(0, NB)
        page = entry(table + block, block < table_stride, ASM)
        sealed = tl.load(sealed_ptr + row).to(tl.int32)
        length = sealed * BLOCK + tl.load(open_len_ptr + row).to(tl.int32)
        start = tl.load(starts_ptr + row).to(tl.int32) if STARTS else 0
        pages = tl.cdiv(sealed, NB)
        steps = tl.minimum(left, pages + 1 - tile)

        # query rows as the tensor cores see them: with 4 or fewer every other one is empty, and costs nothing after
        place, live, query, head_of = _rows(output % chunks, length, head, tokens, GROUP, R, SPREAD)
        shown = live & (place >= 0) & (place - length + tokens >= start)
        at = q_ptr + row * q_strides[0] + head_of * q_strides[1] + query * q_strides[2]
        x = tl.load(at[:, None] + d[None, :] * q_strides[3], mask=shown[:, None] & (d < D)[None, :], other=0.0)
        factor = tl.full([R], 1.0, tl.float32)
        if TURBO:
            x = x.to(tl.float32)
            factor = tl.max(tl.abs(x), 1) * (1.0 / CODE_MAX)
            x = tl.div_rn(x, tl.broadcast_to(tl.where(factor > 0, factor, 1.0)[:, None], [R, DP])) + ROUND
            x = tl.minimum(tl.maximum(x - ROUND, -CODE_MAX), CODE_MAX).to(tl.int8)
        tl.debug_barrier()
        tl.store(q_at + tl.arange(0, R)[:, None] * D + d[None, :], x, mask=(d < D)[None, :])
        tl.debug_barrier()
        factor = factor * (scaling if CAPPED else scaling * LOG2_E)
        last = tl.where(shown, place + 1, 0)[None, :, None]
        first = last - window if WINDOW else last * 0

        acc = tl.zeros([NB, DP, N], tl.float32)
        m = tl.full([NB, R], -float("inf"), tl.float32)
        l = tl.zeros([NB, R], tl.float32)
        own = slot
        for g in tl.static_range(len(SLOTS)):
            if (own >= 0) & (own < SLOTS[g]):
                acc, m, l = _walk(
                    heads[g], own, table, table_stride, page, sealed, tile, tl.minimum(tile + steps, pages), q_at, factor,
                    first, last, softcap, sas_threshold, acc, m, l,
                    SLOTS[g], D, BLOCK, BITS[g], SAS, CAPPED, SPREAD, STAGES, ASM,
                )  # fmt: skip
            own -= SLOTS[g]
        if tile + steps > pages:
            acc, m, l = _open(
                opened, row * kv_heads + head, cap, sealed, length, q_at, factor, first, last, softcap, sas_threshold,
                acc, m, l, D, BLOCK, SAS, CAPPED, SPREAD, ASM,
            )  # fmt: skip

        if SPREAD:
            m, l = _even(m), _even(l)
        top = tl.max(m, 0)
        rest = tl.exp2(m - tl.where(top == -float("inf"), 0.0, top)[None, :])
        total = tl.sum(l * rest, 0)
        o = tl.trans(tl.sum(acc * rest[:, None, :], 0))
        n = tl.arange(0, N)
        whole = (tile == 0) & (steps == pages + 1)
        if not whole:
            part = parts_ptr + (2 * cta + (tile == 0)).to(tl.int64) * (N * (DP + 2))
            tl.store(part + n[:, None] * DP + d[None, :], o)
            tl.store(part + N * DP + n, top)
            tl.store(part + N * DP + N + n, total)
            tl.debug_barrier()
            group = plan_ptr + 4 * tl.num_programs(0) + 2 * output
            count = tl.load(group + 1)
            if tl.atomic_add(arrived_ptr + output, 1, sem="acq_rel") == count - 1:
                # every other CTA of this output is done: no one waits, and the order of the sum is that of the tiles
                tl.store(arrived_ptr + output, 0)
                o, top, total = _merge(parts_ptr, tl.load(group), count, N, DP, PARTS)
                whole = True
        if whole:
            _finish(
                o, top, total, out_ptr, lse_ptr, sinks_ptr, row, head, output % chunks, length, start, tokens,
                kv_heads, GROUP, D, SINKS,
            )  # fmt: skip
        left -= steps
        output += 1
        tile = 0
