"""Decode attention over the packed cache: one persistent launch over a list of tiles (LeanAttention alg. 4).

A tile is NB blocks of one row and KV head, one block a warp: nothing in the loop crosses warps. Of a block:

    S  = digits(q * step_k) K + q . zero_k        tensor cores, INT8, exact: the channel steps live in q, as two digits
    P  = round(127 exp(S - max S))                INT8, one scale a query row and block
    O += (V P step_v + sum P zero_v) * scale      tensor cores, then one multiply-add a channel

The query rows stand in the M of the first product and in the N of the second, so that what a thread holds of P is what
it needs of P for the second (`turbo_hf.layout.VALUE_ORDER`).

Heads of 16 bit beside others go through the same loop with their keys, values, queries and P in 16 bit. Where all is
of one such type, `turbo_hf.ops.decode.kernel_16bit` takes the place of the loop.
"""

import triton
import triton.language as tl

from turbo_hf.ops.decode.kernel_16bit import attend_16bit
from turbo_hf.ops.decode.kernel_block import accumulate, block_softmax, scores
from turbo_hf.ops.decode.kernel_merge import finish_or_merge
from turbo_hf.ops.decode.kernel_queries import channels_of, prepare, query_rows
from turbo_hf.ops.decode.kernel_tiles import ask_ahead, channels, keys_of, packed_bytes, to_values, values_of
from turbo_hf.ops.kernel_common import LOG2_E, pdl_wait, tanh
from turbo_hf.ops.kernel_unpack import entry, handed


@triton.jit
def attended(t, live, bucket, place, visited, sink, window, INDEX: tl.constexpr):
    """Which of the tokens at places t, where they are live, a query at `place` attends to. bucket: theirs, if INDEX."""
    live = live & (t <= place)
    kept = (t < sink) | (t > place - window)
    if INDEX:
        bucket = bucket.to(tl.int32)
        kept = kept | (bucket < 0) | (tl.load(visited + tl.maximum(bucket, 0), mask=live, other=0) != 0)
    return live & kept


@triton.jit
def _buckets_of(buckets, listed, live, BLOCK: tl.constexpr, INDEX: tl.constexpr):
    """Buckets [NB, BLOCK] of the tokens of listed blocks; without INDEX nothing that is looked at."""
    t = (listed & 0xFFFFFFFF).to(tl.int32)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    if INDEX:
        return tl.load(buckets + t, mask=live[:, None], other=0).to(tl.int32)
    else:
        return t


@triton.jit
def attend_sealed(
    paged, slot, table, blocks, page, sealed, begin, end, queries, factor, first, last, chosen, softcap,
    sas_threshold, acc, m, denom,
    SLOTS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, TURBO: tl.constexpr,
    SAS: tl.constexpr, CAPPED: tl.constexpr, SPREAD: tl.constexpr, STAGES: tl.constexpr, CHOSEN: tl.constexpr,
    INDEX: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Tiles begin to end of sealed blocks of one slot. paged: (k, v, meta, scale); queries, factor: `prepare`.

    Each query row sees the tokens from `first` to `last`. CHOSEN: `table` is a list of `sealed` blocks, page << 32 |
    number, and all rows see those of their tokens that `attended` keeps by `chosen`, with or without INDEX. `page` is
    the entry of the first tile.

    Returns too how many tokens were kept, by warps and places, if CHOSEN.
    """
    k_ptr, v_ptr, meta_ptr, scale_ptr = paged
    NB: tl.constexpr = acc.shape[0]
    DP: tl.constexpr = acc.shape[1]
    STAGE2: tl.constexpr = BITS < 8
    PLAIN: tl.constexpr = BITS == 16 or not TURBO
    PAGE: tl.constexpr = BLOCK * D * min(BITS, 8) // 8
    nb = tl.arange(0, NB)
    ahead = entry(table + begin * NB + NB + nb, begin * NB + NB + nb < blocks, ASM)
    d = tl.arange(0, DP)
    column = tl.arange(0, BLOCK)[None, None, :]
    c = channels(D, DP, 1 if BITS >= 8 else (8 if BITS == 3 else 8 // BITS))
    q = channels_of(queries, c, c < D, PLAIN, D == DP)
    codes_of, plain_factor = factor
    factor = plain_factor if PLAIN else codes_of
    if not CHOSEN:
        # tiles that every query row sees whole
        inner_begin = tl.cdiv(tl.max(tl.max(tl.max(first, 2), 1), 0), NB * BLOCK)
        nearest = tl.min(tl.min(tl.min(tl.where(last > 0, last, sealed * BLOCK), 2), 1), 0)
        inner_end = tl.minimum(nearest, sealed * BLOCK) // (NB * BLOCK)
        counted, bucket = page, page
    else:
        buckets, visit = chosen
        counted = tl.zeros([NB, BLOCK], tl.int32)
        bucket = _buckets_of(buckets, page, nb < sealed - begin * NB, BLOCK, INDEX)
    for tile in tl.range(begin, end, num_stages=STAGES):
        block = tile * NB + nb
        live = block < sealed
        at = page * SLOTS + slot
        if CHOSEN:
            at = (page >> 32) * SLOTS + slot
        packed = at * PAGE
        keys = keys_of(k_ptr + packed, live, D, DP, BLOCK, BITS, ASM)
        values = values_of(v_ptr + packed, live, D, DP, BLOCK, BITS, ASM)
        if BITS == 16:
            k_scale = tl.full([NB], 1.0, tl.float32)
            v_scale = k_scale
        else:
            k_scale = tl.load(scale_ptr + 2 * at, mask=live, other=0.0)
            v_scale = tl.load(scale_ptr + 2 * at + 1, mask=live, other=0.0)
        if STAGE2:
            meta, shown = (meta_ptr + at * (4 * D))[:, None], live[:, None]
            k_step = packed_bytes(meta + c[None, :], shown, c[None, :], D, DP)
            k_zero = packed_bytes(meta + D + c[None, :], shown, c[None, :], D, DP)
            v_step = packed_bytes(meta + 2 * D + d[None, :], shown, d[None, :], D, DP)
            v_zero = packed_bytes(meta + 3 * D + d[None, :], shown, d[None, :], D, DP)
        else:
            k_step, k_zero, v_step, v_zero = k_scale, k_scale, v_scale, v_scale
        if CHOSEN:
            t = (page & 0xFFFFFFFF).to(tl.int32)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
            kept = attended(t, live[:, None], bucket, *visit, INDEX)
            counted += kept.to(tl.int32)
        page = handed(ahead, ASM)
        # of the tile after the next one: a load whose keys would be asked for at once would be waited for
        ahead = entry(table + block + 2 * NB, block + 2 * NB < blocks, ASM)
        if CHOSEN:
            # a tile ahead too: the pipeline would not
            bucket = _buckets_of(buckets, page, block + NB < sealed, BLOCK, INDEX)
        x = scores(q, keys, k_step, k_zero, STAGE2, ASM)
        # never 0, so that -inf times it is -inf; NaN stays
        unit = k_scale[:, None] * factor[None, :]
        unit = tl.where(unit < 1e-37, 1e-37, unit)
        if CAPPED:
            x = tanh(x * unit[:, :, None] / softcap) * (softcap * LOG2_E)
            unit = unit * 0 + 1
        if CHOSEN:
            x = tl.where(kept[:, None, :], x, -float("inf"))
        elif (tile < inner_begin) | (tile >= inner_end):
            place = block[:, None, None] * BLOCK + column
            x = tl.where((place >= first) & (place < last) & live[:, None, None], x, -float("inf"))
        p, total, weight, keep, m, denom = block_softmax(x, unit, v_scale, m, denom, sas_threshold, SAS, False, q.dtype)
        acc = accumulate(acc, to_values(p, BITS), total, values, v_step, v_zero, weight, keep, STAGE2, SPREAD, ASM)
    return acc, m, denom, counted


@triton.jit
def attend_open(
    opened, at, cap, sealed, length, queries, factor, first, last, chosen, softcap, sas_threshold, acc, m, denom,
    D: tl.constexpr, BLOCK: tl.constexpr, TURBO: tl.constexpr, SAS: tl.constexpr, CAPPED: tl.constexpr,
    SPREAD: tl.constexpr, CHOSEN: tl.constexpr, INDEX: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The open tokens of one row and head: INT8 with one scale a token, or as they are. at: row * Hkv + head, int64.

    CHOSEN: those that `attended` keeps by `chosen`, with or without INDEX. Returns how many these are, too.
    """
    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr = opened
    PLAIN: tl.constexpr = k_ptr.dtype.element_ty != tl.int8
    Q_PLAIN: tl.constexpr = PLAIN or not TURBO
    NB: tl.constexpr = acc.shape[0]
    DP: tl.constexpr = acc.shape[1]
    nb = tl.arange(0, NB)
    d = tl.arange(0, DP)
    q = channels_of(queries, d, d < D, Q_PLAIN, True)
    codes_of, plain_factor = factor
    factor = plain_factor if Q_PLAIN else codes_of
    t = tl.arange(0, BLOCK)
    # keys in such an order that `to_values` brings the probabilities into time order
    column = t if PLAIN else t // 16 * 16 + t % 8 // 2 * 4 + t % 16 // 8 * 2 + t % 2
    channel = d[None, :, None]
    count = length - sealed * BLOCK
    counted = tl.zeros([NB], tl.int32)
    for start in tl.range(0, count, NB * BLOCK, num_stages=1):
        token = start + nb[:, None] * BLOCK + column[None, :]
        place = sealed * BLOCK + token
        live = place < length
        keys = packed_bytes(k_ptr + (at * cap + token)[:, None, :] * D + channel, live[:, None, :], channel, D, DP)
        stored = start + nb[:, None, None] * BLOCK + t[None, None, :]
        # whole groups of 16, as `cap` has them: what lies past the last token has a probability of 0
        values = packed_bytes(v_ptr + (at * D + channel) * cap + stored, stored // 16 * 16 < count, channel, D, DP)
        if PLAIN:
            # 0 * NaN is NaN, so the values are masked too
            values = tl.where(stored < count, values, 0.0)
            k_scale = tl.full([NB, BLOCK], 1.0, tl.float32)
            v_scale = tl.full([NB], 1.0, tl.float32)
        else:
            k_scale = tl.load(k_scale_ptr + at * cap + token, mask=live, other=0.0)
            v_scale = tl.load(v_scale_ptr + at * cap + token, mask=live, other=0.0)
        x = scores(q, keys, k_scale, k_scale, False, ASM) * k_scale[:, None, :] * factor[None, :, None]
        if CAPPED:
            x = tanh(x / softcap) * (softcap * LOG2_E)
        if CHOSEN:
            bucket = place
            if INDEX:
                bucket = tl.load(chosen[0] + place, mask=live, other=0)
            kept = attended(place, live, bucket, *chosen[1], INDEX)
            counted += tl.sum(kept.to(tl.int32), 1)
            x = tl.where(kept[:, None, :], x, -float("inf"))
        else:
            seen = (place[:, None, :] >= first) & (place[:, None, :] < last)
            x = tl.where(seen & live[:, None, :], x, -float("inf"))
        p, total, weight, keep, m, denom = block_softmax(
            x, denom * 0 + 1, v_scale, m, denom, sas_threshold, SAS, not PLAIN, q.dtype
        )
        p = to_values(p, 16 if PLAIN else 8)
        acc = accumulate(acc, p, total, values, k_scale, k_scale, weight, keep, False, SPREAD, ASM)
    return acc, m, denom, counted


@triton.jit
def _row_of(output, wanted, chunks, kv_heads, order_ptr, sealed_ptr, open_len_ptr, groups_ptr):
    """Of an output: its row and slot; from memory, if `wanted`: head, sealed blocks, open tokens, first CTA, parts."""
    row = (output // (kv_heads * chunks)).to(tl.int64)
    slot = output // chunks % kv_heads
    head = tl.load(order_ptr + row * kv_heads + slot, mask=wanted, other=0)
    sealed = tl.load(sealed_ptr + row, mask=wanted, other=0).to(tl.int32)
    opened = tl.load(open_len_ptr + row, mask=wanted, other=0).to(tl.int32)
    first_cta = tl.load(groups_ptr + 2 * output, mask=wanted, other=0)
    count = tl.load(groups_ptr + 2 * output + 1, mask=wanted, other=0)
    return row, slot, head, sealed, opened, first_cta, count


# whatever these are, the code is the same: no user waits for another compilation as a cache grows
@triton.jit(do_not_specialize=["table_stride", "blocks", "window"])
def decode_kernel(
    q_ptr, out_ptr,  # [B, Hq, M, D]
    lse_ptr, starts_ptr, sinks_ptr,  # float32 [B, Hq, M], int64 [B], [Hq]
    paged,  # for each bit width (k, v, meta, scale), as in `PagedHeads`
    opened,  # (k_open, v_open, k_scale, v_scale), as in `KVStore`
    order_ptr, table_ptr, sealed_ptr, open_len_ptr,  # int64 [B, Hkv], [B, blocks], [B], [B]
    plan_ptr,  # int32: 4 a CTA, 2 an output, as in `ops.schedule`
    parts_ptr,  # float32 [CTAs + outputs, N * (DP + STATS)], as in `merge`
    arrived_ptr,  # int32 [outputs], zeros before and after
    q_strides, table_stride, blocks, cap, tokens, window, scaling, softcap, sas_threshold,
    SLOTS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BLOCK: tl.constexpr, NB: tl.constexpr, R: tl.constexpr, SPREAD: tl.constexpr, TURBO: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, SAS: tl.constexpr, STARTS: tl.constexpr, SINKS: tl.constexpr,
    STAGES: tl.constexpr, AT_ONCE: tl.constexpr, ALL_16BIT: tl.constexpr, PDL: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Tiles `plan` gives this CTA. SLOTS, BITS: heads of each width, and the width. R: query rows of a tile, padded.

    The outputs lie [row, slot, part of the query rows]; each has its sealed tiles of NB blocks, then one for its open
    tokens. With SPREAD, R is twice the rows (`rows_of`). ALL_16BIT: all is of the queries' 16-bit type, in
    tiles of one block; without SAS. PDL: `pdl_wait`; only the plan is read before it.
    """
    N: tl.constexpr = R // 2 if SPREAD else R
    cta = tl.program_id(0)
    share = plan_ptr + 4 * cta
    output, tile, left = tl.load(share), tl.load(share + 1), tl.load(share + 2)
    pdl_wait(PDL, True)
    kv_heads = 0
    for g in tl.static_range(len(SLOTS)):
        kv_heads += SLOTS[g]
    chunks = tl.cdiv(GROUP * tokens, N)
    groups_ptr = plan_ptr + 4 * tl.num_programs(0)
    row, slot, head, sealed, opened_len, first_cta, count = _row_of(
        output, True, chunks, kv_heads, order_ptr, sealed_ptr, open_len_ptr, groups_ptr
    )
    # to the interpreter before 3.9 every `tl.condition` is true
    while tl.condition(left > 0, disable_licm=True) if ASM else left > 0:
        table = table_ptr + row * table_stride
        block = tile * NB + tl.arange(0, NB)
        page = entry(table + block, block < blocks, ASM)
        length = sealed * BLOCK + opened_len
        start = tl.load(starts_ptr + row).to(tl.int32) if STARTS else 0
        pages = tl.cdiv(sealed, NB)
        steps = tl.minimum(left, pages + 1 - tile)
        rows, place = query_rows(
            q_ptr, q_strides, row, head, output % chunks, length, start, tokens, GROUP, D, DP, R, SPREAD
        )
        if not ALL_16BIT:
            own = slot
            for g in tl.static_range(len(SLOTS)):
                there = (block < sealed) & (own >= 0) & (own < SLOTS[g])
                ask_ahead(paged[g], own, page, there, SLOTS[g], D, DP, BLOCK, BITS[g], ASM)
                own -= SLOTS[g]
        queries, factor = prepare(rows, TURBO)
        unit = scaling if CAPPED else scaling * LOG2_E
        factor = (factor * unit, tl.full([R], 1.0, tl.float32) * unit)
        last = tl.where(rows[3], place + 1, 0)[None, :, None]
        first = last - window if WINDOW else last * 0

        # while this output is computed, what the next one needs to begin
        following = _row_of(output + 1, left > steps, chunks, kv_heads, order_ptr, sealed_ptr, open_len_ptr, groups_ptr)
        if ALL_16BIT:
            tl.static_assert(NB == 1 and len(SLOTS) == 1 and not SAS)
            acc, m, denom = attend_16bit(
                paged[0], opened, slot, row * kv_heads + head, table, blocks, tl.sum(page, 0), cap, sealed, length,
                tile, steps, tl.trans(rows[0]), unit, first.reshape(R), last.reshape(R), softcap,
                SLOTS[0], D, BLOCK, CAPPED, SPREAD, STAGES, ASM,
            )  # fmt: skip
        else:
            acc = tl.zeros([NB, DP, N], tl.float32)
            m = tl.full([NB, R], -float("inf"), tl.float32)
            denom = tl.zeros([NB, R], tl.float32)
            own = slot
            for g in tl.static_range(len(SLOTS)):
                if (own >= 0) & (own < SLOTS[g]):
                    acc, m, denom, _ = attend_sealed(
                        paged[g], own, table, blocks, page, sealed, tile, tl.minimum(tile + steps, pages), queries,
                        factor, first, last, last, softcap, sas_threshold, acc, m, denom,
                        SLOTS[g], D, BLOCK, BITS[g], TURBO, SAS, CAPPED, SPREAD, STAGES, False, False, ASM,
                    )  # fmt: skip
                own -= SLOTS[g]
            if tile + steps > pages:
                acc, m, denom, _ = attend_open(
                    opened, row * kv_heads + head, cap, sealed, length, queries, factor, first, last, last, softcap,
                    sas_threshold, acc, m, denom, D, BLOCK, TURBO, SAS, CAPPED, SPREAD, False, False, ASM,
                )  # fmt: skip

        finish_or_merge(
            acc, m, denom, (tile == 0) & (steps == pages + 1), parts_ptr, first_cta + output, cta - first_cta, count,
            arrived_ptr + output, out_ptr, lse_ptr, sinks_ptr, row, head, output % chunks, length, start, tokens,
            kv_heads, 0, tokens, GROUP, D, SINKS, SPREAD, AT_ONCE,
        )  # fmt: skip
        left -= steps
        output += 1
        tile = 0
        row, slot, head, sealed, opened_len, first_cta, count = following
