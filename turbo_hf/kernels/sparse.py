"""Decode attention over chosen tokens of the packed cache, in equal shares (SAAP appendix F, LeanAttention).

Each CTA finds the tokens of its share (`turbo_hf.kernels.shares`) and gathers their lines out of pages.
"""

import triton
import triton.language as tl

from turbo_hf.kernels._common import tanh
from turbo_hf.kernels.block_attention import LN_2, LOG2_E
from turbo_hf.kernels.decode import _leave_part, _merge, _with_sinks
from turbo_hf.kernels.lines import codes_of, line_of, order_of, signed, words
from turbo_hf.kernels.shares import costs_of, note_share, place_of, share_of, sharers, snapped


@triton.jit
def _attend(q, k, v, k_scale, v_scale, live, factor, softcap, acc, top, mass, CAPPED: tl.constexpr):
    """One step of T softmaxes, one a place of the tile: nothing is exchanged between threads but scores.

    q: [R, 1, DP]; k, v: [1, T, DP]; scales, live: [1, T, 1]; acc: [R, T, DP]; top, mass: [R, T, 1].
    """
    x = tl.sum(q * k, 2)[:, :, None] * (k_scale * factor)
    if CAPPED:
        x = tanh(x / softcap) * (softcap * LOG2_E)
    x = tl.where(live, x, -float("inf"))
    new = tl.maximum(top, x)
    shift = tl.where(new == -float("inf"), 0.0, new)
    p = tl.exp2(x - shift)
    keep = tl.exp2(top - shift)
    return acc * keep + (p * v_scale) * v, new, mass * keep + p


@triton.jit
def _together(acc, top, mass):
    """The T softmaxes as one: O [R, DP], maximum [R], sum [R]."""
    most = tl.max(top, 1)
    share = tl.exp2(top - tl.where(most == -float("inf"), 0.0, most)[:, None])
    # selected after the product: one that is fused with the sum would leave other bits in other threads
    total = tl.sum(tl.where(share > 0, mass * share, 0.0), 1)
    o = tl.sum(tl.where(share > 0, acc * share, 0.0), 1)
    return o, tl.reshape(most, most.shape[0]), tl.reshape(total, total.shape[0])


@triton.jit
def _fetch(
    heads, slot, page, inside, live,
    SLOTS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """All that is stored of tokens of sealed blocks, on its way: codes of K and V, scales, steps and zeros."""
    k_ptr, v_ptr, meta_ptr, scale_ptr = heads
    LINE: tl.constexpr = D * BITS // 8
    at = page * SLOTS + slot
    line = at * (BLOCK * LINE) + inside * LINE
    k, v = line_of(k_ptr + line, live, D, DP, BITS), line_of(v_ptr + line, live, D, DP, BITS)
    k_scale = tl.load(scale_ptr + 2 * at, mask=live, other=0.0)
    v_scale = tl.load(scale_ptr + 2 * at + 1, mask=live, other=0.0)
    if BITS == 8:
        return k, v, k_scale, v_scale, k, k, v, v
    else:
        PIECES: tl.constexpr = 8 if BITS == 3 else 8 // BITS
        UNIT: tl.constexpr = 1 if BITS == 3 else 4
        meta = meta_ptr + at * (4 * D)
        k_step, k_zero = words(meta, live, D, DP, PIECES, UNIT), words(meta + D, live, D, DP, PIECES, UNIT)
        meta += 2 * D
        v_step, v_zero = words(meta, live, D, DP, PIECES, UNIT), words(meta + D, live, D, DP, PIECES, UNIT)
        return k, v, k_scale, v_scale, k_step, k_zero, v_step, v_zero


@triton.jit
def _gather(
    heads, slot, table, noted, count, q, factor, softcap, acc, top, mass,
    SLOTS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, T: tl.constexpr,
    CAPPED: tl.constexpr,
):  # fmt: skip
    """The tokens at `count` noted places, T at a time.

    While one tile is computed, the next one is on its way, and so are the pages of the one after that and the places of
    the third: each is known by what came before.
    """
    UNIT: tl.constexpr = 1 if BITS == 3 else 4
    t = tl.arange(0, T)[None, :, None]
    live, coming = t < count, T + t < count
    place = tl.load(noted + t, mask=live, other=0)
    next_place = tl.load(noted + T + t, mask=coming, other=0)
    page = tl.load(table + place // BLOCK, mask=live, other=0)
    k, v, k_scale, v_scale, k_step, k_zero, v_step, v_zero = _fetch(
        heads, slot, page, place % BLOCK, live, SLOTS, D, DP, BLOCK, BITS
    )
    page, inside = tl.load(table + next_place // BLOCK, mask=coming, other=0), next_place % BLOCK
    place = tl.load(noted + 2 * T + t, mask=2 * T + t < count, other=0)
    for start in tl.range(0, count, T, num_stages=1):
        k2, v2, k_scale2, v_scale2, k_step2, k_zero2, v_step2, v_zero2 = _fetch(
            heads, slot, page, inside, coming, SLOTS, D, DP, BLOCK, BITS
        )
        later = start + 2 * T + t < count
        page, inside = tl.load(table + place // BLOCK, mask=later, other=0), place % BLOCK
        place = tl.load(noted + start + 3 * T + t, mask=start + 3 * T + t < count, other=0)
        keys, values = codes_of(k, BITS), codes_of(v, BITS)
        if BITS != 8:
            keys = keys * signed(k_step, UNIT) + signed(k_zero, UNIT)
            values = values * signed(v_step, UNIT) + signed(v_zero, UNIT)
        acc, top, mass = _attend(q, keys, values, k_scale, v_scale, live, factor, softcap, acc, top, mass, CAPPED)
        k, v, k_scale, v_scale = k2, v2, k_scale2, v_scale2
        k_step, k_zero, v_step, v_zero = k_step2, k_zero2, v_step2, v_zero2
        live, coming = coming, later
    return acc, top, mass


@triton.jit
def _gather_open(
    opened, pair, cap, buckets, visited, closed, place, begin, end, sink, window, q, c, factor, softcap, acc, top, mass,
    D: tl.constexpr, DP: tl.constexpr, BITS: tl.constexpr, T: tl.constexpr, INDEX: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Open tokens begin to end of one row and head, and how many of them are attended to. pair: row * Hkv + head."""
    PIECES: tl.constexpr = 8 if BITS == 3 else 8 // BITS
    UNIT: tl.constexpr = 1 if BITS == 3 else 4
    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr = opened
    counted = tl.zeros([], tl.int32)
    for start in tl.range(begin, end, T, num_stages=1):
        own = start + tl.arange(0, T)[None, :, None]
        t = closed + own
        live = own < end
        kept = (t < sink) | (t > place - window)
        if INDEX:
            bucket = tl.load(buckets + t, mask=live, other=0).to(tl.int32)
            visit = tl.load(visited + tl.maximum(bucket, 0), mask=live, other=0)
            kept = kept | (bucket < 0) | (visit != 0)
        live = live & kept
        counted += tl.sum(live.to(tl.int32))
        at = pair * cap + own
        k = signed(words(k_ptr + at * D, live, D, DP, PIECES, UNIT), UNIT)
        v_at = v_ptr + (pair * D + c[None, None, :]) * cap + own
        v = tl.load(v_at, mask=live & (c < D)[None, None, :], other=0).to(tl.float32)
        k_scale = tl.load(k_scale_ptr + at, mask=live, other=0.0)
        v_scale = tl.load(v_scale_ptr + at, mask=live, other=0.0)
        acc, top, mass = _attend(q, k, v, k_scale, v_scale, live, factor, softcap, acc, top, mass, CAPPED)
    return acc, top, mass, counted


@triton.jit
def _write(
    o, top, total, out_ptr, lse_ptr, sinks_ptr, at, head_of, live, c, empty, stride, D: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """out and lse of one query's heads. at: its first element in lse; stride: from head to head there."""
    if SINKS:
        o, top, total = _with_sinks(o, top, total, sinks_ptr, head_of, live)
    o = o / tl.where(total > 0, total, 1.0)[:, None]
    lse = tl.where(empty, -float("inf"), (top + tl.log2(tl.where(empty, 1.0, total))) * LN_2)
    where = at + head_of.to(tl.int64) * stride
    out = tl.where(empty, 0.0, o).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + where[:, None] * D + c[None, :], out, mask=live[:, None] & (c < D)[None, :])
    tl.store(lse_ptr + where, lse, mask=live)


# whatever these are, the code is the same: no user waits for another compilation as a cache grows
@triton.jit(do_not_specialize=["table_stride", "room", "window"])
def sparse_decode_kernel(
    q_ptr, out_ptr, lse_ptr, sinks_ptr,  # [B, Hq, M, D] twice, float32 [B, Hq, M], [Hq]
    heads, opened,  # as in `decode_kernel`, values token-major
    buckets_ptr, visited_ptr,  # int16 [B, Hkv, 1, index_cap], uint8 [B, Hkv, M, 1, C]
    order_ptr, table_ptr,  # int64 [B, Hkv], [B, blocks]
    starts_ptr, sealed_ptr, open_len_ptr,  # int64 [B]
    noted_ptr,  # int32 [outputs, room], places in the row
    parts_ptr,  # float32 [2 * CTAs, R * (DP + 2)]
    arrived_ptr, read_ptr,  # int32 [outputs], zeros before and after; int64 [1]
    q_strides, table_stride, room, cap, index_cap, queries, kv_heads, outputs, buckets, sink, window, least, slack,
    scaling, softcap,
    SLOTS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BLOCK: tl.constexpr, T: tl.constexpr, SCAN: tl.constexpr, KNOTS: tl.constexpr, OUTPUTS: tl.constexpr,
    HEADS: tl.constexpr, R: tl.constexpr, INDEX: tl.constexpr, STARTS: tl.constexpr, CAPPED: tl.constexpr,
    SINKS: tl.constexpr, READ: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """An equal share of the work of all outputs: [row, KV head, query, part of the query heads].

    Which share that is follows from the lengths of the rows, which every CTA reads: the host knows none of them.
    least: cost of a CTA, where there is a choice. slack: what it takes or leaves for not sharing an output. OUTPUTS,
    HEADS: `outputs` and `kv_heads`, padded.
    """
    cta = tl.program_id(0)
    chunks: tl.constexpr = (GROUP + R - 1) // R
    o = tl.arange(0, OUTPUTS)
    costs = costs_of(
        o, outputs, chunks, queries, kv_heads, sink, window, starts_ptr, sealed_ptr, open_len_ptr, BLOCK, INDEX, STARTS
    )
    ends = tl.cumsum(costs, 0)
    begin, left, share, longer, slack = share_of(cta, tl.num_programs(0), tl.sum(costs, 0), least, slack)
    output = tl.sum((ends <= begin).to(tl.int32), 0)
    r = tl.arange(0, R)
    while left > 0:
        cost = tl.sum(tl.where(o == output, costs, 0), 0)
        origin = tl.sum(tl.where(o == output, ends, 0), 0) - cost
        taken = tl.minimum(left, origin + cost - begin)
        low, high = snapped(begin - origin, cost, slack), snapped(begin - origin + taken, cost, slack)
        left -= taken
        begin += taken
        if low < high:
            n = output // chunks
            place, closed = place_of(n, queries, kv_heads, True, starts_ptr, sealed_ptr, open_len_ptr, BLOCK, STARTS)
            row, head, query = n // queries // kv_heads, n // queries % kv_heads, n % queries
            pair, row = (n // queries).to(tl.int64), row.to(tl.int64)
            h = tl.arange(0, HEADS)
            named = tl.load(order_ptr + row * kv_heads + h, mask=h < kv_heads, other=-1)
            slot = tl.sum(tl.where(named == head, h, 0), 0)
            own_row = output % chunks * R + r
            live = own_row < GROUP
            head_of = head * GROUP + own_row

            buckets_at, visited_at = buckets_ptr + pair * index_cap, visited_ptr + n.to(tl.int64) * buckets
            noted, found, open_begin, open_end = note_share(
                noted_ptr + output.to(tl.int64) * room, buckets_at, visited_at, low, high, cost, place, closed, sink,
                window, BLOCK, SCAN, KNOTS, INDEX,
            )  # fmt: skip

            acc = tl.zeros([R, T, DP], tl.float32)
            top = tl.full([R, T, 1], -float("inf"), tl.float32)
            mass = tl.zeros([R, T, 1], tl.float32)
            c = tl.arange(0, DP)
            counted = found * 0
            q_at = q_ptr + row * q_strides[0] + query * q_strides[2] + head_of.to(tl.int64) * q_strides[1]
            for g in tl.static_range(len(SLOTS)):
                if (slot >= 0) & (slot < SLOTS[g]):
                    c = order_of(D, DP, 8 if BITS[g] == 3 else 8 // BITS[g], 1 if BITS[g] == 3 else 4)
                    shown = live[:, None, None] & (c < D)[None, None, :]
                    q = tl.load(q_at[:, None, None] + c[None, None, :] * q_strides[3], mask=shown, other=0.0)
                    factor = scaling if CAPPED else scaling * LOG2_E
                    acc, top, mass = _gather(
                        heads[g], slot, table_ptr + row * table_stride, noted, found, q.to(tl.float32), factor,
                        softcap, acc, top, mass, SLOTS[g], D, DP, BLOCK, BITS[g], T, CAPPED,
                    )  # fmt: skip
                    acc, top, mass, counted = _gather_open(
                        opened, pair, cap, buckets_at, visited_at, closed, place, open_begin, open_end, sink, window,
                        q.to(tl.float32), c, factor, softcap, acc, top, mass, D, DP, BITS[g], T, INDEX, CAPPED,
                    )  # fmt: skip
                slot -= SLOTS[g]
            if READ:  # noqa: SIM102 - what is known when the kernel is compiled stands alone
                if output % chunks == 0:
                    tl.atomic_add(read_ptr, (found + counted).to(tl.int64))

            o_all, top_all, mass_all = _together(acc, top, mass)
            whole = high - low == cost
            if not whole:
                first_cta, shares = sharers(origin, cost, share, longer, slack)
                _leave_part(o_all, top_all, mass_all, parts_ptr + (2 * cta + (low == 0)).to(tl.int64) * (R * (DP + 2)))
                if tl.atomic_add(arrived_ptr + output, 1, sem="acq_rel") == shares - 1:
                    # every other CTA of this output is done: no one waits, and the order of the sum is that of shares
                    tl.store(arrived_ptr + output, 0)
                    o_all, top_all, mass_all = _merge(parts_ptr, first_cta, shares, R, DP, PARTS)
                    whole = True
            if whole:
                at = row * (kv_heads * GROUP) * queries + query
                _write(
                    o_all, top_all, mass_all, out_ptr, lse_ptr, sinks_ptr, at, head_of, live, c, place < 0, queries, D,
                    SINKS,
                )  # fmt: skip
        output += 1
