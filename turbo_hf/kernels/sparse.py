"""Decode attention over chosen tokens of the packed cache, in equal shares (SAAP appendix F, LeanAttention).

Each CTA finds the blocks of its share that hold chosen tokens (`turbo_hf.kernels.shares`) and walks over them as over
any others (`turbo_hf.kernels.decode`): the tokens of a bucket stand together, so that most of what is read is asked for.
"""

import triton
import triton.language as tl

from turbo_hf.kernels.block_attention import LOG2_E
from turbo_hf.kernels.decode import combine, finish, leave_part, merge, prepare, walk, walk_open
from turbo_hf.kernels.shares import note_share, outputs_of, share_of, sharers, snapped
from turbo_hf.kernels.unpack import entry


# whatever these are, the code is the same: no user waits for another compilation as a cache grows
@triton.jit(do_not_specialize=["table_stride", "room", "index_cap", "spanned", "window"])
def sparse_decode_kernel(
    q_ptr, out_ptr, lse_ptr, sinks_ptr,  # [B, Hq, M, D] twice, float32 [B, Hq, M], [Hq]
    heads, opened,  # as in `decode_kernel`
    buckets_ptr, spans_ptr,  # int16 [B, Hkv, 1, index_cap], int32 [B, Hkv, spanned]: largest bucket << 16 | smallest
    visited_ptr,  # uint8 [B, Hkv, M, 1, C]
    order_ptr, table_ptr,  # int64 [B, Hkv], [B, blocks]
    starts_ptr, sealed_ptr, open_len_ptr,  # int64 [B]
    numbers_ptr,  # int32 [CTAs, room], blocks found
    parts_ptr,  # float32 [2 * CTAs, N * (DP + 2)]
    arrived_ptr, read_ptr,  # int32 [outputs], zeros before and after; int64 [1]
    q_strides, table_stride, room, cap, index_cap, spanned, queries, outputs, buckets, sink, window, least, slack,
    scaling, softcap, sas_threshold,
    SLOTS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BLOCK: tl.constexpr, NB: tl.constexpr, R: tl.constexpr, SPREAD: tl.constexpr, TURBO: tl.constexpr,
    KV: tl.constexpr, SCAN: tl.constexpr, OUTPUTS: tl.constexpr, INDEX: tl.constexpr,
    STARTS: tl.constexpr, CAPPED: tl.constexpr, SAS: tl.constexpr, SINKS: tl.constexpr,
    READ: tl.constexpr, STAGES: tl.constexpr, PARTS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """An equal share of the work of all outputs: [row, slot, query, part of the query heads].

    Which share that is follows from the lengths of the rows, which every CTA reads: the host knows none of them.
    least: `share_of`. slack: what a CTA takes or leaves for not sharing an output. buckets: flags of a query in
    `visited`, a multiple of 8. OUTPUTS: `outputs`, padded. NB, R, SPREAD: as in `decode_kernel`.
    """
    N: tl.constexpr = R // 2 if SPREAD else R
    cta = tl.program_id(0)
    chunks: tl.constexpr = (GROUP + N - 1) // N
    o = tl.arange(0, OUTPUTS)
    places, closeds, heads_of, costs = outputs_of(
        o, outputs, chunks, queries, sink, window, order_ptr, starts_ptr, sealed_ptr, open_len_ptr, KV, NB, BLOCK,
        INDEX, STARTS,
    )  # fmt: skip
    ends = tl.cumsum(costs, 0)
    begin, left, share, longer, slack = share_of(cta, tl.num_programs(0), tl.sum(costs, 0), outputs, least, slack)
    output = tl.sum((ends <= begin).to(tl.int32), 0)
    while left > 0:
        own = o == output
        cost = tl.sum(tl.where(own, costs, 0), 0)
        origin = tl.sum(tl.where(own, ends, 0), 0) - cost
        taken = tl.minimum(left, origin + cost - begin)
        low, high = snapped(begin - origin, cost, slack), snapped(begin - origin + taken, cost, slack)
        left -= taken
        begin += taken
        if low < high:
            place, closed = tl.sum(tl.where(own, places, 0), 0), tl.sum(tl.where(own, closeds, 0), 0)
            head = tl.sum(tl.where(own, heads_of, 0), 0)
            slot, query = output // chunks // queries, output // chunks % queries
            row = (slot // KV).to(tl.int64)
            slot = slot % KV
            pair = row * KV + head

            # the query as if it were the row's last token
            queries_of, factor, _, _ = prepare(
                q_ptr + query * q_strides[2], q_strides, row, head, output % chunks, place + 1, 0, 1, GROUP, D, DP, R,
                SPREAD, TURBO,
            )  # fmt: skip
            unit = scaling if CAPPED else scaling * LOG2_E
            factor = (factor * unit, tl.full([R], 1.0, tl.float32) * unit)
            visited_at, table = visited_ptr + (pair * queries + query) * buckets, table_ptr + row * table_stride
            buckets_at, visit = buckets_ptr + pair * index_cap, (place, visited_at, sink, window)
            first_cta, shares = sharers(origin, cost, share, longer, slack)
            numbers, found, has_open = note_share(
                numbers_ptr + cta.to(tl.int64) * room, spans_ptr + pair * spanned, spanned,
                visited_at.to(tl.pointer_type(tl.int64)), low, high, shares, place, closed, sink, window, NB, BLOCK,
                SCAN, INDEX,
            )  # fmt: skip
            nb = tl.arange(0, NB)
            page = entry(table + entry(numbers + nb, nb < found, ASM), nb < found, ASM)

            acc = tl.zeros([NB, DP, N], tl.float32)
            m = tl.full([NB, R], -float("inf"), tl.float32)
            mass = tl.zeros([NB, R], tl.float32)
            counted = nb * 0
            for g in tl.static_range(len(SLOTS)):
                if (slot >= 0) & (slot < SLOTS[g]):
                    acc, m, mass, kept = walk(
                        heads[g], slot, table, found, page, found, 0, tl.cdiv(found, NB), queries_of, factor, 0, 0,
                        (numbers, buckets_at, visit), softcap, sas_threshold, acc, m, mass,
                        SLOTS[g], D, BLOCK, BITS[g], TURBO, SAS, CAPPED, SPREAD, STAGES, True, INDEX, ASM,
                    )  # fmt: skip
                    if READ:
                        counted = tl.sum(kept, 1)
                slot -= SLOTS[g]
            if has_open:
                acc, m, mass, more = walk_open(
                    opened, pair, cap, closed // BLOCK, place + 1, queries_of, factor, 0, 0, (buckets_at, visit), softcap,
                    sas_threshold, acc, m, mass, D, BLOCK, TURBO, SAS, CAPPED, SPREAD, True, INDEX, ASM,
                )  # fmt: skip
                counted += more
            if READ:  # noqa: SIM102 - what is known when the kernel is compiled stands alone
                if output % chunks == 0:
                    tl.atomic_add(read_ptr + nb * 0, counted.to(tl.int64), sem="relaxed")

            o_all, top, total = combine(acc, m, mass, SPREAD)
            # of more outputs than one, the next list stands in the place of this one
            tl.debug_barrier()
            whole = high - low == cost
            if not whole:
                leave_part(o_all, top, total, parts_ptr + (2 * cta + (low == 0)).to(tl.int64) * (N * (DP + 2)))
                if tl.atomic_add(arrived_ptr + output, 1, sem="acq_rel") == shares - 1:
                    # every other CTA of this output is done: no one waits, and the order of the sum is that of shares
                    tl.store(arrived_ptr + output, 0)
                    o_all, top, total = merge(parts_ptr, first_cta, shares, N, DP, PARTS)
                    whole = True
            if whole:
                finish(
                    o_all, top, total, out_ptr, lse_ptr, sinks_ptr, row, head, output % chunks, place + 1, 0, 1,
                    KV, query, queries, GROUP, D, SINKS,
                )  # fmt: skip
        output += 1
