"""Decode attention over chosen tokens of the packed cache, in equal shares (SAAP appendix F, LeanAttention).

Each CTA walks over listed blocks (`turbo_hf.ops.sparse.kernel_lists`) as over any (`turbo_hf.ops.decode.kernel`).
The tokens of a bucket stand together, so that most of what is read is asked for.
"""

import triton
import triton.language as tl

from turbo_hf.ops.decode.kernel import attend_open, attend_sealed
from turbo_hf.ops.decode.kernel_merge import finish_or_merge
from turbo_hf.ops.decode.kernel_queries import prepare, query_rows
from turbo_hf.ops.decode.kernel_tiles import ask_ahead
from turbo_hf.ops.kernel_common import LOG2_E, pdl_wait, to_l2
from turbo_hf.ops.kernel_unpack import entry
from turbo_hf.ops.sparse.kernel_lists import outputs_of, over, tiles_of, tiles_of_share


# whatever these are, the code is the same: no user waits for another compilation as a cache grows
@triton.jit(do_not_specialize=["room", "index_cap", "window", "outputs"])
def sparse_decode_kernel(
    q_ptr, out_ptr, lse_ptr, sinks_ptr,  # [B, Hq, M, D] twice, float32 [B, Hq, M], [Hq]
    paged, opened,  # as in `decode_kernel`
    buckets_ptr, visited_ptr,  # int16 [B, Hkv, 1, index_cap], uint8 [B, Hkv, M, 1, C]
    order_ptr, starts_ptr, sealed_ptr, open_len_ptr,  # int64 [B, Hkv], [B], [B], [B]
    listed_ptr, listed_count_ptr,  # int64 [lists, room], int32 [lists]: as `list_kernel` leaves them
    parts_ptr,  # float32 [shares, N * (DP + STATS)], as in `merge`
    arrived_ptr, read_ptr,  # int32 [outputs], zeros before and after; int64 [1]
    q_strides, room, cap, index_cap, queries, outputs, buckets, sink, window, scaling, softcap,
    sas_threshold, alone,
    SLOTS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BLOCK: tl.constexpr, NB: tl.constexpr, R: tl.constexpr, SPREAD: tl.constexpr, TURBO: tl.constexpr,
    KV: tl.constexpr, OUTPUTS: tl.constexpr, FILLED: tl.constexpr, SHARES: tl.constexpr, INDEX: tl.constexpr,
    STARTS: tl.constexpr, CAPPED: tl.constexpr, SAS: tl.constexpr, SINKS: tl.constexpr, READ: tl.constexpr,
    STAGES: tl.constexpr, AT_ONCE: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Equal shares of the outputs [row, slot, query, part of the query heads], each of one output.

    The host knows neither the lengths of the rows nor the lists. buckets: flags of a query in `visited`. OUTPUTS:
    `outputs`, padded. NB, R, SPREAD: as in `decode_kernel`. FILLED, SHARES: `tiles_of_share`. PDL: `pdl_wait`.
    """
    N: tl.constexpr = R // 2 if SPREAD else R
    chunks: tl.constexpr = (GROUP + N - 1) // N
    o = tl.arange(0, OUTPUTS)
    nb = tl.arange(0, NB)
    places, closeds, heads_of = outputs_of(
        o, outputs, chunks, queries, order_ptr, starts_ptr, sealed_ptr, open_len_ptr, KV, BLOCK, STARTS
    )
    pdl_wait(PDL, True)
    listed_counts = tl.load(listed_count_ptr + o // chunks, mask=o < outputs, other=0)
    tiles = tiles_of(places, closeds, listed_counts, o < outputs, NB)
    most = tiles_of_share(tiles, outputs, tl.num_programs(0), alone, AT_ONCE, FILLED, SHARES)
    shares_of = over(tiles, most)
    ends = tl.cumsum(shares_of, 0)
    total = tl.sum(shares_of, 0)
    for share in tl.range(tl.program_id(0), total, tl.num_programs(0), num_stages=1, disable_licm=True):
        output = tl.sum((ends <= share).to(tl.int32), 0)
        own = o == output
        place, closed = tl.sum(tl.where(own, places, 0), 0), tl.sum(tl.where(own, closeds, 0), 0)
        head, listed_count = tl.sum(tl.where(own, heads_of, 0), 0), tl.sum(tl.where(own, listed_counts, 0), 0)
        shares = tl.sum(tl.where(own, shares_of, 0), 0)
        first_share = tl.sum(tl.where(own, ends, 0), 0) - shares
        list_at, query = (output // chunks).to(tl.int64), output // chunks % queries
        slot = output // chunks // queries
        row = (slot // KV).to(tl.int64)
        slot = slot % KV
        pair = row * KV + head
        part = share - first_share
        begin = part * (most * NB)
        count = tl.maximum(tl.minimum(listed_count - begin, most * NB), 0)
        at = listed_ptr + list_at * room + begin
        page = entry(at + nb, nb < count, ASM)
        # the query as if it were the row's last token
        rows, _ = query_rows(
            q_ptr + query * q_strides[2], q_strides, row, head, output % chunks, place + 1, 0, 1, GROUP, D, DP, R,
            SPREAD,
        )  # fmt: skip
        own = slot
        for g in tl.static_range(len(SLOTS)):
            there = (nb < count) & (own >= 0) & (own < SLOTS[g])
            ask_ahead(paged[g], own, page >> 32, there, SLOTS[g], D, DP, BLOCK, BITS[g], ASM)
            own -= SLOTS[g]
        buckets_at = buckets_ptr + pair * index_cap
        if INDEX and ASM:
            to_l2(buckets_at + (page & 0xFFFFFFFF) * BLOCK, nb < count)
        queries_of, factor = prepare(rows, TURBO)
        unit = scaling if CAPPED else scaling * LOG2_E
        factor = (factor * unit, tl.full([R], 1.0, tl.float32) * unit)
        visit = (place, visited_ptr + (pair * queries + query) * buckets, sink, window)

        acc = tl.zeros([NB, DP, N], tl.float32)
        m = tl.full([NB, R], -float("inf"), tl.float32)
        denom = tl.zeros([NB, R], tl.float32)
        counted = nb * 0
        for g in tl.static_range(len(SLOTS)):
            if (slot >= 0) & (slot < SLOTS[g]):
                acc, m, denom, kept = attend_sealed(
                    paged[g], slot, at, count, page, count, 0, tl.cdiv(count, NB), queries_of, factor, 0, 0,
                    (buckets_at, visit), softcap, sas_threshold, acc, m, denom,
                    SLOTS[g], D, BLOCK, BITS[g], TURBO, SAS, CAPPED, SPREAD, STAGES, True, INDEX, ASM,
                )  # fmt: skip
                if READ:
                    counted = tl.sum(kept, 1)
            slot -= SLOTS[g]
        if (place >= closed) & (part == shares - 1):
            acc, m, denom, more = attend_open(
                opened, pair, cap, closed // BLOCK, place + 1, queries_of, factor, 0, 0, (buckets_at, visit),
                softcap, sas_threshold, acc, m, denom, D, BLOCK, TURBO, SAS, CAPPED, SPREAD, True, INDEX, ASM,
            )  # fmt: skip
            counted += more
        if READ:  # noqa: SIM102 - what is known when the kernel is compiled stands alone
            if output % chunks == 0:
                tl.atomic_add(read_ptr + nb * 0, counted.to(tl.int64), sem="relaxed")

        finish_or_merge(
            acc, m, denom, shares == 1, parts_ptr, first_share, part, shares, arrived_ptr + output,
            out_ptr, lse_ptr, sinks_ptr, row, head, output % chunks, place + 1, 0, 1, KV, query, queries, GROUP, D,
            SINKS, SPREAD, AT_ONCE,
        )  # fmt: skip
