"""Decode attention over chosen tokens of the packed cache (SAAP appendix F, as equal shares of one list).

There is no inverted index. A token keeps the number of its bucket, 2 bytes beside its 136 in a 4-bit page.
`keep_kernel` reads these for the whole row and writes the list of the places to attend to; `sparse_decode_kernel`
shares all lists out equally among its CTAs, from their lengths in memory, and gathers the tokens' lines out of pages.
"""

import triton
import triton.language as tl

from turbo_hf.kernels._common import tanh
from turbo_hf.kernels.block_attention import LN_2, LOG2_E, _float_dot
from turbo_hf.kernels.decode import _leave_part, _merge, _with_sinks
from turbo_hf.kernels.tiles import channels, keys_of, packed_bytes


@triton.jit
def keep_kernel(
    buckets_ptr, visited_ptr,  # int16 [B, Hkv, 1, cap], uint8 [B, Hkv, M, 1, C]
    places_ptr, counts_ptr, ends_ptr,  # int16 [N, segments, TILE], int32 [N, segments] twice; N = B * Hkv * M
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
    length = tl.load(sealed_ptr + row).to(tl.int32) * BLOCK + tl.load(open_len_ptr + row).to(tl.int32)
    place = length - queries + query
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
    tl.store(counts_ptr + list_at, tl.sum(counted, 0))
    tl.debug_barrier()
    if tl.atomic_add(arrived_ptr + n, 1, sem="acq_rel") == segments - 1:
        tl.store(arrived_ptr + n, 0)
        s = tl.arange(0, SEGMENTS)
        counts = tl.load(counts_ptr + n * segments + s, mask=s < segments, other=0, cache_modifier=".cg")
        tl.store(ends_ptr + n * segments + s, tl.cumsum(counts, 0), mask=s < segments)
        if READ:
            tl.atomic_add(read_ptr, tl.sum(counts, 0).to(tl.int64))


@triton.jit
def _places(
    ends, places, position, total, segments, LIST: tl.constexpr, SEARCH: tl.constexpr
):  # fmt: skip
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
def _attend(q, k, v, k_scale, v_scale, live, factor, softcap, acc, top, mass, CAPPED: tl.constexpr, ASM: tl.constexpr):
    """The online softmax over T tokens. q: [R, DP]; k, v: int32 [T, DP]; scales, live: [T]; acc: [R, DP]."""
    x = _float_dot(q, tl.trans(k.to(tl.float32).to(q.dtype)), ASM) * (k_scale * factor)[None, :]
    if CAPPED:
        x = tanh(x / softcap) * (softcap * LOG2_E)
    x = tl.where(live[None, :], x, -float("inf"))
    new = tl.maximum(top, tl.max(x, 1))
    shift = tl.where(new == -float("inf"), 0.0, new)
    p = tl.exp2(x - shift[:, None])
    keep = tl.exp2(top - shift)
    mass = mass * keep + tl.sum(p, 1)
    # values' scales differ from token to token: P takes them, and is rounded relative to its largest
    p = p * v_scale[None, :]
    most = tl.max(p, 1)
    p = p * (1.0 / tl.where(most > 0, most, 1.0))[:, None]
    o = _float_dot(p.to(q.dtype), v.to(tl.float32).to(q.dtype), ASM)
    return acc * keep[:, None] + o * most[:, None], new, mass


@triton.jit
def _gather(
    heads, slot, table, sealed, ends, places, total, segments, begin, end, q, c, factor, softcap, acc, top, mass,
    SLOTS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, T: tl.constexpr, LIST: tl.constexpr,
    SEARCH: tl.constexpr, CAPPED: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Tiles begin to end of one list, T tokens each, those of sealed blocks; and the first tile with an open token.

    heads: (k, v, meta, scale). c: channels of q.
    """
    k_ptr, v_ptr, meta_ptr, scale_ptr = heads
    DP: tl.constexpr = q.shape[1]
    LINE: tl.constexpr = D * BITS // 8
    t = tl.arange(0, T)
    first_open = end
    for tile in tl.range(begin, end, num_stages=STAGES):
        position = tile * T + t
        place = _places(ends, places, position, total, segments, LIST, SEARCH)
        block = place // BLOCK
        live = (position < total) & (block < sealed)
        page = tl.load(table + block, mask=live, other=0)
        at = page * SLOTS + slot
        line = at * (BLOCK * LINE) + (place % BLOCK) * LINE
        k = keys_of(k_ptr + line, live, D, DP, 1, BITS, ASM).reshape(T, DP).to(tl.int32)
        v = keys_of(v_ptr + line, live, D, DP, 1, BITS, ASM).reshape(T, DP).to(tl.int32)
        k_scale = tl.load(scale_ptr + 2 * at, mask=live, other=0.0)
        v_scale = tl.load(scale_ptr + 2 * at + 1, mask=live, other=0.0)
        if BITS != 8:
            meta = (meta_ptr + at * (4 * D))[:, None] + c[None, :]
            shown = live[:, None]
            k_step = packed_bytes(meta, shown, c[None, :], D, DP).to(tl.int32)
            k_zero = packed_bytes(meta + D, shown, c[None, :], D, DP).to(tl.int32)
            v_step = packed_bytes(meta + 2 * D, shown, c[None, :], D, DP).to(tl.int32)
            v_zero = packed_bytes(meta + 3 * D, shown, c[None, :], D, DP).to(tl.int32)
            k = k * k_step + k_zero
            v = v * v_step + v_zero
        acc, top, mass = _attend(q, k, v, k_scale, v_scale, live, factor, softcap, acc, top, mass, CAPPED, ASM)
        # open tokens stand at the end of a list, if anywhere
        first_open = tl.minimum(first_open, tl.where(tl.max(place, 0) >= sealed * BLOCK, tile, end))
    return acc, top, mass, first_open


@triton.jit
def _gather_open(
    opened, pair, cap, sealed, ends, places, total, segments, begin, end, q, c, factor, softcap, acc, top, mass,
    D: tl.constexpr, BLOCK: tl.constexpr, T: tl.constexpr, LIST: tl.constexpr, SEARCH: tl.constexpr,
    CAPPED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The open tokens in tiles begin to end of one list. pair: row * Hkv + head."""
    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr = opened
    t = tl.arange(0, T)
    for tile in tl.range(begin, end, num_stages=1):
        position = tile * T + t
        own = _places(ends, places, position, total, segments, LIST, SEARCH) - sealed * BLOCK
        live = (position < total) & (own >= 0)
        shown = live[:, None] & (c < D)[None, :]
        k = tl.load(k_ptr + (pair * cap + own)[:, None] * D + c[None, :], mask=shown, other=0).to(tl.int32)
        v = tl.load(v_ptr + (pair * D + c)[None, :] * cap + own[:, None], mask=shown, other=0).to(tl.int32)
        k_scale = tl.load(k_scale_ptr + pair * cap + own, mask=live, other=0.0)
        v_scale = tl.load(v_scale_ptr + pair * cap + own, mask=live, other=0.0)
        acc, top, mass = _attend(q, k, v, k_scale, v_scale, live, factor, softcap, acc, top, mass, CAPPED, ASM)
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
    places_ptr, ends_ptr,  # as `keep_kernel` leaves them
    parts_ptr,  # float32 [2 * CTAs, R * (DP + 2)]
    arrived_ptr,  # int32 [outputs], zeros before and after
    q_strides, table_stride, cap, queries, kv_heads, segments, outputs, least, scaling, softcap,
    SLOTS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BLOCK: tl.constexpr, T: tl.constexpr, LIST: tl.constexpr, SEARCH: tl.constexpr, OUTPUTS: tl.constexpr,
    HEADS: tl.constexpr, R: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, PARTS: tl.constexpr,
    STAGES: tl.constexpr, ASM: tl.constexpr,
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

        acc = tl.zeros([R, DP], tl.float32)
        top = tl.full([R], -float("inf"), tl.float32)
        mass = tl.zeros([R], tl.float32)
        c = tl.arange(0, DP)
        own = slot
        for g in tl.static_range(len(SLOTS)):
            if (own >= 0) & (own < SLOTS[g]):
                c = channels(D, DP, 1 if BITS[g] == 8 else (8 if BITS[g] == 3 else 8 // BITS[g]))
                q_at = q_ptr + row * q_strides[0] + query * q_strides[2]
                q_at = q_at + head_of.to(tl.int64)[:, None] * q_strides[1] + c[None, :] * q_strides[3]
                q = tl.load(q_at, mask=live[:, None] & (c < D)[None, :], other=0.0)
                factor = scaling if CAPPED else scaling * LOG2_E
                places = places_ptr + n * segments * LIST
                acc, top, mass, first_open = _gather(
                    heads[g], own, table_ptr + row * table_stride, sealed, ends, places, total, segments, tile,
                    tile + taken, q, c, factor, softcap, acc, top, mass,
                    SLOTS[g], D, BLOCK, BITS[g], T, LIST, SEARCH, CAPPED, STAGES, ASM,
                )  # fmt: skip
                acc, top, mass = _gather_open(
                    opened, pair, cap, sealed, ends, places, total, segments, first_open, tile + taken, q, c, factor,
                    softcap, acc, top, mass, D, BLOCK, T, LIST, SEARCH, CAPPED, ASM,
                )  # fmt: skip
            own -= SLOTS[g]

        whole = taken == count
        if not whole:
            _leave_part(acc, top, mass, parts_ptr + (2 * cta + (tile == 0)) * (R * (DP + 2)))
            first_cta = ((start + 1) * ctas - 1) // steps
            shares = ((start + count) * ctas - 1) // steps - first_cta + 1
            if tl.atomic_add(arrived_ptr + output, 1, sem="acq_rel") == shares - 1:
                # every other CTA of this output is done: no one waits, and the order of the sum is that of the tiles
                tl.store(arrived_ptr + output, 0)
                acc, top, mass = _merge(parts_ptr, first_cta.to(tl.int32), shares.to(tl.int32), R, DP, PARTS)
                whole = True
        if whole:
            at = row * (kv_heads * GROUP) * queries + query
            _write(acc, top, mass, out_ptr, lse_ptr, sinks_ptr, at, head_of, live, c, total == 0, queries, D, SINKS)
        left -= taken
        begin += taken
        output += 1
