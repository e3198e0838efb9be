"""Decode attention over chosen tokens of the packed cache (SAAP appendix F, as equal shares of one list).

There is no inverted index. A token keeps the number of its bucket, 2 bytes beside its 136 in a 4-bit page.
`keep_kernel` reads these for the whole row and writes the list of the places to attend to; `sparse_decode_kernel`
shares all lists out equally among its CTAs, from their lengths in memory, and gathers the tokens' lines out of pages.
"""

import triton
import triton.language as tl

from turbo_hf.kernels._common import tanh
from turbo_hf.kernels.block_attention import LN_2, LOG2_E
from turbo_hf.kernels.decode import _leave_part, _merge, _with_sinks
from turbo_hf.kernels.lines import codes_of, line_of, order_of, signed, words


@triton.jit
def keep_kernel(
    buckets_ptr, visited_ptr,  # int16 [B, Hkv, 1, cap], uint8 [B, Hkv, M, 1, C]
    places_ptr, counts_ptr, ends_ptr,  # int16 [N, segments, TILE], int32 [N, segments] twice; N = B * Hkv * M
    open_ptr,  # int32 [N]: the first position of the list whose token is open
    arrived_ptr, read_ptr,  # int32 [N], zeros before and after; int64 [1]
    starts_ptr, sealed_ptr, open_len_ptr,  # int64 [B]
    cap, queries, kv_heads, segments, buckets, sink, window,
    BLOCK: tl.constexpr, TILE: tl.constexpr, SEGMENTS: tl.constexpr, INDEX: tl.constexpr, STARTS: tl.constexpr,
    READ: tl.constexpr,
):  # fmt: skip
    """One segment of TILE tokens of one list: the places kept, from the segment's begin, and how many.

    The last segment of a list to arrive writes where each of them ends in the whole list.
    """
    segment = tl.program_id(0)
    n = tl.program_id(1).to(tl.int64)
    query = (n % queries).to(tl.int32)
    pair = n // queries
    row = pair // kv_heads
    closed = tl.load(sealed_ptr + row).to(tl.int32) * BLOCK
    place = closed + tl.load(open_len_ptr + row).to(tl.int32) - queries + query
    if STARTS:
        place = tl.where(query < tl.load(starts_ptr + row).to(tl.int32), -1, place)
    own = tl.arange(0, TILE)
    t = segment * TILE + own
    seen = t <= place
    kept = seen & ((t < sink) | (t > place - window))
    if INDEX:
        asked = seen & (kept == 0)
        bucket = tl.load(buckets_ptr + pair * cap + t, mask=asked, other=0).to(tl.int32)
        visit = tl.load(visited_ptr + n * buckets + tl.maximum(bucket, 0), mask=asked, other=0)
        kept = kept | (asked & ((bucket < 0) | (visit != 0)))
    counted = kept.to(tl.int32)
    list_at = n * segments + segment
    tl.store(places_ptr + list_at * TILE + tl.cumsum(counted, 0) - 1, own.to(tl.int16), mask=kept)
    # both numbers in one: a segment has fewer tokens than 2^15
    tl.store(counts_ptr + list_at, tl.sum(counted + ((kept & (t < closed)).to(tl.int32) << 16), 0))
    tl.debug_barrier()
    if tl.atomic_add(arrived_ptr + n, 1, sem="acq_rel") == segments - 1:
        tl.store(arrived_ptr + n, 0)
        s = tl.arange(0, SEGMENTS)
        counts = tl.load(counts_ptr + n * segments + s, mask=s < segments, other=0, cache_modifier=".cg")
        tl.store(open_ptr + n, tl.sum(counts >> 16, 0))
        counts = counts & 65535
        tl.store(ends_ptr + n * segments + s, tl.cumsum(counts, 0), mask=s < segments)
        if READ:
            tl.atomic_add(read_ptr, tl.sum(counts, 0).to(tl.int64))


@triton.jit
def _places(ends, places, position, total, segments, LIST: tl.constexpr, SEARCH: tl.constexpr):
    """The tokens at these positions of a list, 0 past its end. ends, places: of the list. LIST: its segments' TILE."""
    segment = position * 0
    # the number of segments that end at or before a position, by binary search
    for i in tl.static_range(SEARCH):
        further = segment + (1 << (SEARCH - 1 - i))
        end = tl.load(ends + further - 1, mask=further <= segments, other=2147483647)
        segment = tl.where(end <= position, further, segment)
    live = position < total
    before = tl.load(ends + segment - 1, mask=live & (segment > 0), other=0)
    inside = tl.load(places + segment.to(tl.int64) * LIST + position - before, mask=live, other=0)
    return tl.where(live, segment * LIST + inside.to(tl.int32), 0)


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
    heads, slot, table, ends, places, total, segments, begin, stop, q, factor, softcap, acc, top, mass,
    SLOTS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, T: tl.constexpr,
    LIST: tl.constexpr, SEARCH: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Tiles begin to stop of one list, T tokens each, of which the first `total` are in sealed blocks.

    While one tile is computed, the next one is on its way, and so are the pages of the one after that and the places of
    the third: each is known by what came before.
    """
    UNIT: tl.constexpr = 1 if BITS == 3 else 4
    t = tl.arange(0, T)[None, :, None]
    total = tl.minimum(total, stop * T)
    place = _places(ends, places, begin * T + t, total, segments, LIST, SEARCH)
    live, inside = begin * T + t < total, place % BLOCK
    page = tl.load(table + place // BLOCK, mask=live, other=0)
    k, v, k_scale, v_scale, k_step, k_zero, v_step, v_zero = _fetch(
        heads, slot, page, inside, live, SLOTS, D, DP, BLOCK, BITS
    )
    place = _places(ends, places, begin * T + T + t, total, segments, LIST, SEARCH)
    coming, inside = begin * T + T + t < total, place % BLOCK
    page = tl.load(table + place // BLOCK, mask=coming, other=0)
    place = _places(ends, places, begin * T + 2 * T + t, total, segments, LIST, SEARCH)
    for tile in tl.range(begin, stop, num_stages=1):
        k2, v2, k_scale2, v_scale2, k_step2, k_zero2, v_step2, v_zero2 = _fetch(
            heads, slot, page, inside, coming, SLOTS, D, DP, BLOCK, BITS
        )
        later, inside = tile * T + 2 * T + t < total, place % BLOCK
        page = tl.load(table + place // BLOCK, mask=later, other=0)
        place = _places(ends, places, tile * T + 3 * T + t, total, segments, LIST, SEARCH)
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
    opened, pair, cap, sealed, ends, places, total, open_from, segments, begin, stop, q, c, factor, softcap, acc, top,
    mass, D: tl.constexpr, DP: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, T: tl.constexpr,
    LIST: tl.constexpr, SEARCH: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """The tokens of one list from `open_from` on, which are open, in tiles begin to stop. pair: row * Hkv + head."""
    PIECES: tl.constexpr = 8 if BITS == 3 else 8 // BITS
    UNIT: tl.constexpr = 1 if BITS == 3 else 4
    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr = opened
    for tile in tl.range(tl.maximum(begin, open_from // T), stop, num_stages=1):
        position = tile * T + tl.arange(0, T)[None, :, None]
        live = (position >= open_from) & (position < total)
        own = _places(ends, places, position, total, segments, LIST, SEARCH) - sealed * BLOCK
        at = pair * cap + own
        k = signed(words(k_ptr + at * D, live, D, DP, PIECES, UNIT), UNIT)
        v_at = v_ptr + (pair * D + c[None, None, :]) * cap + own
        v = tl.load(v_at, mask=live & (c < D)[None, None, :], other=0).to(tl.float32)
        k_scale = tl.load(k_scale_ptr + at, mask=live, other=0.0)
        v_scale = tl.load(v_scale_ptr + at, mask=live, other=0.0)
        acc, top, mass = _attend(q, k, v, k_scale, v_scale, live, factor, softcap, acc, top, mass, CAPPED)
    return acc, top, mass


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


@triton.jit
def sparse_decode_kernel(
    q_ptr, out_ptr, lse_ptr, sinks_ptr,  # [B, Hq, M, D] twice, float32 [B, Hq, M], [Hq]
    heads, opened,  # as in `decode_kernel`, values token-major
    order_ptr, table_ptr, sealed_ptr,  # int64 [B, Hkv], [B, blocks], [B]
    places_ptr, ends_ptr, open_ptr,  # as `keep_kernel` leaves them
    parts_ptr,  # float32 [2 * CTAs, R * (DP + 2)]
    arrived_ptr,  # int32 [outputs], zeros before and after
    q_strides, table_stride, cap, queries, kv_heads, segments, outputs, least, scaling, softcap,
    SLOTS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BLOCK: tl.constexpr, T: tl.constexpr, LIST: tl.constexpr, SEARCH: tl.constexpr, OUTPUTS: tl.constexpr,
    HEADS: tl.constexpr, R: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """An equal share of the tiles of all outputs: [row, KV head, query, part of the query heads].

    Which share that is follows from the lengths of the lists, which every CTA reads: the host knows none of them.
    least: tiles of a CTA, where there is a choice. OUTPUTS, HEADS: `outputs` and `kv_heads`, padded.
    """
    cta = tl.program_id(0).to(tl.int64)
    chunks: tl.constexpr = (GROUP + R - 1) // R
    o = tl.arange(0, OUTPUTS)
    # a query without a token has an empty list, and one tile, so that someone writes its zeros
    size = tl.load(ends_ptr + (o // chunks).to(tl.int64) * segments + segments - 1, mask=o < outputs, other=0)
    tiles = tl.where(o < outputs, tl.maximum(tl.cdiv(size, T), 1), 0).to(tl.int64)
    bounds = tl.cumsum(tiles, 0)
    steps = tl.sum(tiles, 0)
    ctas = tl.maximum(tl.minimum(tl.num_programs(0).to(tl.int64), steps // least), 1)
    begin = tl.where(cta < ctas, cta * steps // ctas, steps)
    left = tl.where(cta < ctas, (cta + 1) * steps // ctas, steps) - begin
    output = tl.sum((bounds <= begin).to(tl.int32), 0)
    r = tl.arange(0, R)
    while left > 0:
        count = tl.sum(tl.where(o == output, tiles, 0), 0)
        start = tl.sum(tl.where(o == output, bounds, 0), 0) - count
        tile = (begin - start).to(tl.int32)
        taken = tl.minimum(left, count - tile).to(tl.int32)
        n = (output // chunks).to(tl.int64)
        pair = n // queries
        row, head, query = pair // kv_heads, pair % kv_heads, n % queries
        h = tl.arange(0, HEADS)
        named = tl.load(order_ptr + row * kv_heads + h, mask=h < kv_heads, other=-1)
        slot = tl.sum(tl.where(named == head, h, 0), 0)
        sealed = tl.load(sealed_ptr + row).to(tl.int32)
        ends = ends_ptr + n * segments
        total = tl.load(ends + segments - 1)
        own_row = output % chunks * R + r
        live = own_row < GROUP
        head_of = head.to(tl.int32) * GROUP + own_row

        acc = tl.zeros([R, T, DP], tl.float32)
        top = tl.full([R, T, 1], -float("inf"), tl.float32)
        mass = tl.zeros([R, T, 1], tl.float32)
        c = tl.arange(0, DP)
        own = slot
        open_from = tl.load(open_ptr + n)
        stop = tile + taken
        for g in tl.static_range(len(SLOTS)):
            if (own >= 0) & (own < SLOTS[g]):
                BITS_G: tl.constexpr = BITS[g]
                c = order_of(D, DP, 8 if BITS_G == 3 else 8 // BITS_G, 1 if BITS_G == 3 else 4)
                q_at = q_ptr + row * q_strides[0] + query * q_strides[2]
                q_at = q_at + head_of.to(tl.int64)[:, None, None] * q_strides[1] + c[None, None, :] * q_strides[3]
                q = tl.load(q_at, mask=live[:, None, None] & (c < D)[None, None, :], other=0.0).to(tl.float32)
                factor = scaling if CAPPED else scaling * LOG2_E
                places = places_ptr + n * segments * LIST
                acc, top, mass = _gather(
                    heads[g], own, table_ptr + row * table_stride, ends, places, open_from, segments, tile,
                    tl.minimum(stop, tl.cdiv(open_from, T)), q, factor, softcap, acc, top, mass,
                    SLOTS[g], D, DP, BLOCK, BITS_G, T, LIST, SEARCH, CAPPED,
                )  # fmt: skip
                acc, top, mass = _gather_open(
                    opened, pair, cap, sealed, ends, places, total, open_from, segments, tile, stop, q, c, factor,
                    softcap, acc, top, mass, D, DP, BITS_G, BLOCK, T, LIST, SEARCH, CAPPED,
                )  # fmt: skip
            own -= SLOTS[g]

        o_all, top_all, mass_all = _together(acc, top, mass)
        whole = taken == count
        if not whole:
            _leave_part(o_all, top_all, mass_all, parts_ptr + (2 * cta + (tile == 0)) * (R * (DP + 2)))
            first_cta = ((start + 1) * ctas - 1) // steps
            shares = ((start + count) * ctas - 1) // steps - first_cta + 1
            if tl.atomic_add(arrived_ptr + output, 1, sem="acq_rel") == shares - 1:
                # every other CTA of this output is done: no one waits, and the order of the sum is that of the tiles
                tl.store(arrived_ptr + output, 0)
                o_all, top_all, mass_all = _merge(parts_ptr, first_cta.to(tl.int32), shares.to(tl.int32), R, DP, PARTS)
                whole = True
        if whole:
            at = row * (kv_heads * GROUP) * queries + query
            _write(
                o_all, top_all, mass_all, out_ptr, lse_ptr, sinks_ptr, at, head_of, live, c, total == 0, queries, D,
                SINKS,
            )  # fmt: skip
        left -= taken
        begin += taken
        output += 1
