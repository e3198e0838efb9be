"""Decode attention over the packed cache: one persistent launch over a list of tiles (LeanAttention alg. 4).

A tile is NB blocks of one row and KV head, one per warp: nothing in the loop crosses warps. Of wide heads a tile is one
block, which all warps share. For each block:

    S  = (folded(q, span_k) K + L q . zero_k) * size_k      tensor cores, INT8: channels' spans live in q, as two digits
    P  = exp(S - max S) * size_v                            rounded to INT8 codes, one scale per query row and block
    O += (V P span_v + L sum P zero_v) * scale              tensor cores, then one multiply-add per channel

L is 2^bits - 1, by which S and O are divided in the end. Codes of q have 16 bit, as two digits too.

Query rows are the M of the first product and the N of the second, so that each thread already holds the part of P that
it needs for the second (`turbo_hf.layout.VALUE_ORDER`).

Heads of 16 bit go through the same loop, with keys, values, queries and P in 16 bit. Where pages, open tokens and
queries are all of one 16-bit type, `turbo_hf.ops.decode.kernel_16bit` replaces the loop.
"""

import triton
import triton.language as tl

from turbo_hf.ops.decode.kernel_16bit import attend_16bit
from turbo_hf.ops.decode.kernel_block import (
    accumulate,
    block_softmax,
    channels_of,
    finish_or_merge,
    prepare,
    query_rows,
    scores,
)
from turbo_hf.ops.decode.kernel_tiles import (
    channels,
    entry,
    handed,
    in_key_order,
    keys_of,
    packed_bytes,
    prefetch_pages,
    ranges_of,
    sizes_of,
    to_values,
    values_of,
)
from turbo_hf.ops.kernel_common import LOG2_E, Output, Share, TileRun, pdl_wait, slot_of_width, tanh


@triton.jit
def attended(t, live, bucket, chosen):
    """Which of the tokens at places t (where live) a query attends to. bucket: their buckets, if any are visited."""
    place, _, visited, sink, window = chosen
    live = live & (t <= place)
    kept = (t < sink) | (t > place - window)
    if visited is not None:
        bucket = bucket.to(tl.int32)
        kept = kept | (bucket < 0) | (tl.load(visited + tl.maximum(bucket, 0), mask=live, other=0) != 0)
    return live & kept


@triton.jit
def _buckets_of(buckets, listed, live, BLOCK: tl.constexpr):
    """Buckets [NB, BLOCK] of the tokens of listed blocks; without buckets a placeholder."""
    t = (listed & 0xFFFFFFFF).to(tl.int32)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    if buckets is not None:
        return tl.load(buckets + t, mask=live[:, None], other=0).to(tl.int32)
    else:
        return t


@triton.jit
def attend_sealed(
    state, cache, slot, run, prepared, seen, chosen, scoring, FORM: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """A run of tiles of sealed blocks of one slot. state: O [NB, DP, N], maximum and sum [NB, R]; prepared: `prepare`.

    Dense: each query row sees the tokens from `seen[0]` to `seen[1]`. Sparse: `seen` is None, `chosen` is a `Chosen`,
    `run.table` lists blocks as page << 32 | number, and all rows see those of their tokens that `attended` keeps.

    Returns the state, and in the sparse case how many tokens were kept of each block of a tile.
    """
    NB: tl.constexpr = FORM.tile
    counted = tl.zeros([NB], tl.int32)
    for g in tl.static_range(len(FORM.slots)):
        own, here = slot_of_width(slot, True, g, FORM)
        if here:
            state, kept = _attend_width(
                state, cache.paged[g], own, run, prepared, seen, chosen, scoring,
                FORM.slots[g], FORM.bits[g], FORM.value_bits[g], FORM, ASM,
            )  # fmt: skip
            if seen is None:
                counted = tl.sum(kept, 1)
    return state, counted


@triton.jit
def _attend_width(
    state, pages, slot, run, prepared, seen, chosen, scoring, SLOTS: tl.constexpr, BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr, FORM: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """`attend_sealed` in pages of one width, which has SLOTS slots; counts kept tokens by block and place."""
    k_ptr, v_ptr, meta_ptr, size_ptr = pages
    table, blocks, page, sealed, begin, steps = run
    acc, m, denom = state
    D: tl.constexpr = FORM.dim
    BLOCK: tl.constexpr = FORM.block
    CHOSEN: tl.constexpr = seen is None
    NB: tl.constexpr = acc.shape[0]
    DP: tl.constexpr = acc.shape[1]
    LEVELS: tl.constexpr = 2**BITS - 1 if BITS < 8 else 0
    V_LEVELS: tl.constexpr = 2**VALUE_BITS - 1 if VALUE_BITS < 8 else 0
    V_LINE: tl.constexpr = 2 if LEVELS else 0
    LINES: tl.constexpr = V_LINE + (2 if V_LEVELS else 0)
    K_PAGE: tl.constexpr = BLOCK * D * min(BITS, 8) // 8
    V_PAGE: tl.constexpr = BLOCK * D * min(VALUE_BITS, 8) // 8
    nb = tl.arange(0, NB)
    ahead = entry(table + begin * NB + NB + nb, begin * NB + NB + nb < blocks, ASM)
    d = tl.arange(0, DP)
    column = tl.arange(0, BLOCK)[None, None, :]
    c = channels(D, DP, 1 if BITS >= 8 else (2 if BITS == 4 else 4))
    # whether their lanes are interleaved, as `keys_of` says
    IN_TURN: tl.constexpr = BITS < 4 and DP == 64
    queries, row_unit = prepared
    q = channels_of(queries, c, c < D, FORM.turbo, D == DP and not IN_TURN)
    P_TYPE: tl.constexpr = tl.int8 if FORM.turbo else q.dtype
    if LEVELS:
        row_unit *= (256 if FORM.turbo else 1) / LEVELS
    if not CHOSEN:
        first, last = seen
        # tiles that every query row sees whole
        inner_begin = tl.cdiv(tl.max(tl.max(tl.max(first, 2), 1), 0), NB * BLOCK)
        nearest = tl.min(tl.min(tl.min(tl.where(last > 0, last, sealed * BLOCK), 2), 1), 0)
        inner_end = tl.minimum(nearest, sealed * BLOCK) // (NB * BLOCK)
        counted, bucket = page, page
    else:
        buckets = chosen.buckets
        counted = tl.zeros([NB, BLOCK], tl.int32)
        bucket = _buckets_of(buckets, page, nb < sealed - begin * NB, BLOCK)
    end = tl.cdiv(sealed, NB)
    if steps is not None:
        end = tl.minimum(begin + steps, end)
    for tile in tl.range(begin, end, num_stages=FORM.stages):
        block = tile * NB + nb
        live = block < sealed
        at = page * SLOTS + slot
        if CHOSEN:
            at = (page >> 32) * SLOTS + slot
        keys = keys_of(k_ptr + at * K_PAGE, live, D, DP, BLOCK, BITS, ASM)
        values = values_of(v_ptr + at * V_PAGE, live, D, DP, BLOCK, VALUE_BITS, ASM)
        k_size, v_size = sizes_of(size_ptr, at, live, BLOCK, BITS, ASM)
        meta, shown = (meta_ptr + at * (LINES * D))[:, None], live[:, None]
        k_zero, k_span, v_zero, v_span = at, at, at, at
        if LEVELS:
            # side by side in memory, or the loads are not pipelined
            k_zero, k_span = ranges_of(meta, shown, d if D == DP else c, D, DP)
            if IN_TURN and D == DP:
                k_zero, k_span = in_key_order(k_zero), in_key_order(k_span)
        if V_LEVELS:
            v_zero, v_span = ranges_of(meta + V_LINE * D, shown, d, D, DP)
        if CHOSEN:
            t = (page & 0xFFFFFFFF).to(tl.int32)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
            kept = attended(t, live[:, None], bucket, chosen)
            counted += kept.to(tl.int32)
        page = handed(ahead, ASM)
        # page numbers are loaded two tiles ahead: keys loaded right after them would wait for them
        ahead = entry(table + block + 2 * NB, block + 2 * NB < blocks, ASM)
        if CHOSEN:
            # loaded one tile ahead by hand: the pipeliner does not
            bucket = _buckets_of(buckets, page, block + NB < sealed, BLOCK)
        x = scores(q, keys, k_zero, k_span, LEVELS, ASM) * k_size[:, None, :] * row_unit[None, :, None]
        if scoring.softcap is not None:
            x = tanh(x / scoring.softcap) * (scoring.softcap * LOG2_E)
        if CHOSEN:
            x = tl.where(kept[:, None, :], x, -float("inf"))
        elif (tile < inner_begin) | (tile >= inner_end):
            place = block[:, None, None] * BLOCK + column
            x = tl.where((place >= first) & (place < last) & live[:, None, None], x, -float("inf"))
        p, total, weight, keep, m, denom = block_softmax(x, v_size, m, denom, scoring.sas_threshold, P_TYPE, ASM)
        p = to_values(p, VALUE_BITS)
        acc = accumulate(acc, p, total, values, v_zero, v_span, weight, keep, V_LEVELS, FORM.spread, ASM)
    return (acc, m, denom), counted


@triton.jit
def attend_open(
    state, cache, at, sealed, length, prepared, seen, chosen, scoring, FORM: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """The open tokens of one row and head: INT8 with one scale per token, or unquantized. at: row * Hkv + head, int64.

    A scale of P is that of TOKENS tokens. The rest is as in `attend_sealed`.
    """
    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr = cache.opened
    cap = cache.cap
    acc, m, denom = state
    D: tl.constexpr = FORM.dim
    CHOSEN: tl.constexpr = seen is None
    PLAIN: tl.constexpr = k_ptr.dtype.element_ty != tl.int8
    NB: tl.constexpr = acc.shape[0]
    DP: tl.constexpr = acc.shape[1]
    # of one warp at a time: few, so that a block of them is shared by several warps
    TOKENS: tl.constexpr = 32 if NB > 1 else min(FORM.block, 64)
    nb = tl.arange(0, NB)
    d = tl.arange(0, DP)
    queries, row_unit = prepared
    q = channels_of(queries, d, d < D, FORM.turbo, True)
    P_TYPE: tl.constexpr = tl.int8 if FORM.turbo else q.dtype
    if CHOSEN:
        buckets = chosen.buckets
    else:
        first, last = seen
    t = tl.arange(0, TOKENS)
    # keys are permuted so that `to_values` puts the probabilities into time order
    column = t if PLAIN else t // 16 * 16 + t % 8 // 2 * 4 + t % 16 // 8 * 2 + t % 2
    channel = d[None, :, None]
    count = length - sealed * FORM.block
    counted = tl.zeros([NB], tl.int32)
    for start in tl.range(0, count, NB * TOKENS, num_stages=1):
        token = start + nb[:, None] * TOKENS + column[None, :]
        place = sealed * FORM.block + token
        live = place < length
        k_at = k_ptr + (at * cap + token)[:, None, :] * D
        keys = packed_bytes(k_at + channel, live[:, None, :], channel, D, DP)
        stored = start + nb[:, None, None] * TOKENS + t[None, None, :]
        # whole groups of 16, as `cap` is a multiple of 16: tokens past the last one have a probability of 0
        values = packed_bytes(v_ptr + (at * D + channel) * cap + stored, stored // 16 * 16 < count, channel, D, DP)
        if PLAIN:
            # 0 * NaN is NaN, so the values are masked too
            values = tl.where(stored < count, values, 0.0)
            k_scale = tl.full([NB, TOKENS], 1.0, tl.float32)
            v_scale = k_scale
        else:
            k_scale = tl.load(k_scale_ptr + at * cap + token, mask=live, other=0.0)
            v_scale = tl.load(v_scale_ptr + at * cap + token, mask=live, other=0.0)
        x = scores(q, keys, at, at, 0, ASM) * k_scale[:, None, :] * row_unit[None, :, None]
        if scoring.softcap is not None:
            x = tanh(x / scoring.softcap) * (scoring.softcap * LOG2_E)
        if CHOSEN:
            bucket = place
            if buckets is not None:
                bucket = tl.load(buckets + place, mask=live, other=0)
            kept = attended(place, live, bucket, chosen)
            counted += tl.sum(kept.to(tl.int32), 1)
            x = tl.where(kept[:, None, :], x, -float("inf"))
        else:
            allowed = (place[:, None, :] >= first) & (place[:, None, :] < last)
            x = tl.where(allowed & live[:, None, :], x, -float("inf"))
        p, total, weight, keep, m, denom = block_softmax(x, v_scale, m, denom, scoring.sas_threshold, P_TYPE, ASM)
        p = to_values(p, 16 if PLAIN else 8)
        acc = accumulate(acc, p, total, values, at, at, weight, keep, 0, FORM.spread, ASM)
    return (acc, m, denom), counted


@triton.jit
def _row_of(output, wanted, row_parts, rows, groups_ptr, FORM: tl.constexpr):
    """An output's row and slot; loaded if `wanted`: head, sealed blocks, open tokens, first CTA, number of parts."""
    row = (output // (FORM.kv_heads * row_parts)).to(tl.int64)
    slot = output // row_parts % FORM.kv_heads
    head = tl.load(rows.order + row * FORM.kv_heads + slot, mask=wanted, other=0)
    sealed = tl.load(rows.sealed + row, mask=wanted, other=0).to(tl.int32)
    opened = tl.load(rows.open_len + row, mask=wanted, other=0).to(tl.int32)
    first_cta = tl.load(groups_ptr + 2 * output, mask=wanted, other=0)
    count = tl.load(groups_ptr + 2 * output + 1, mask=wanted, other=0)
    return row, slot, head, sealed, opened, first_cta, count


# not specialized, so that a growing cache causes no further compilation; not in a tuple, whose members Triton 3.6
# specializes nevertheless
@triton.jit(do_not_specialize=["table_stride", "blocks", "window"])
def decode_kernel(
    queries, result, cache, rows,  # `DecodeQueries`, `DecodeResult`, `Cache`, `Rows`
    table_ptr,  # int64 [B, blocks]
    plan_ptr,  # int32: 4 per CTA, 2 per output, as in `stream_k.Plan`
    workspace, scoring,  # `Workspace`, `Scoring`
    table_stride, blocks, window,  # stride of the table's rows, their blocks, window or None
    tokens,  # M
    FORM: tl.constexpr, PDL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Attention over the tiles that the plan gives this CTA.

    Outputs are numbered [row, slot, part of the query rows]. Each has tiles of NB sealed blocks, then one tile for its
    open tokens. PDL: `pdl_wait`; only the plan is read before it.
    """
    NB: tl.constexpr = FORM.tile
    DP: tl.constexpr = FORM.padded_dim
    R: tl.constexpr = FORM.rows
    N: tl.constexpr = R // 2 if FORM.spread else R
    cta = tl.program_id(0)
    share = plan_ptr + 4 * cta
    output, tile, left = tl.load(share), tl.load(share + 1), tl.load(share + 2)
    pdl_wait(PDL, True)
    row_parts = tl.cdiv(FORM.group * tokens, N)
    groups_ptr = plan_ptr + 4 * tl.num_programs(0)
    row, slot, head, sealed, opened_len, first_cta, count = _row_of(output, True, row_parts, rows, groups_ptr, FORM)
    # in the interpreter before Triton 3.9, every `tl.condition` is true
    while tl.condition(left > 0, disable_licm=True) if ASM else left > 0:
        table = table_ptr + row * table_stride
        block = tile * NB + tl.arange(0, NB)
        page = entry(table + block, block < blocks, ASM)
        length = sealed * FORM.block + opened_len
        start = 0
        if rows.starts is not None:
            start = tl.load(rows.starts + row).to(tl.int32)
        pages = tl.cdiv(sealed, NB)
        steps = tl.minimum(left, pages + 1 - tile)
        own = Output(row, head, output % row_parts, length, start, tokens, 0, tokens)
        query, place = query_rows(queries.data, queries.strides, own, FORM)
        if not FORM.all_16bit:
            prefetch_pages(cache, slot, page, block < sealed, FORM, ASM)
        prepared = prepare(query, scoring, FORM.turbo)
        last = tl.where(query[3], place + 1, 0)[None, :, None]
        first = last * 0 if window is None else last - window

        # loaded while this output is computed: what the next one needs to begin
        following = _row_of(output + 1, left > steps, row_parts, rows, groups_ptr, FORM)
        at = row * FORM.kv_heads + head
        if FORM.all_16bit:
            run = TileRun(table, blocks, tl.sum(page, 0), sealed, tile, steps)
            seen = first.reshape(R), last.reshape(R)
            state = attend_16bit(cache, slot, at, run, length, tl.trans(query[0]), seen, scoring, FORM, ASM)
        else:
            acc = tl.zeros([NB, DP, N], tl.float32)
            m = tl.full([NB, R], -float("inf"), tl.float32)
            state = acc, m, tl.zeros([NB, R], tl.float32)
            run = TileRun(table, blocks, page, sealed, tile, steps)
            seen = first, last
            state, _ = attend_sealed(state, cache, slot, run, prepared, seen, None, scoring, FORM, ASM)
            if tile + steps > pages:
                state, _ = attend_open(state, cache, at, sealed, length, prepared, seen, None, scoring, FORM, ASM)

        merged = Share((tile == 0) & (steps == pages + 1), first_cta + output, cta - first_cta, count)
        finish_or_merge(state, merged, workspace, result, scoring.sinks, own, FORM)
        left -= steps
        output += 1
        tile = 0
        row, slot, head, sealed, opened_len, first_cta, count = following
