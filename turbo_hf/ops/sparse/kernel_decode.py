"""Decode attention over chosen tokens of the packed cache, in equal shares (SAAP appendix F, LeanAttention).

Each CTA walks over listed blocks (`turbo_hf.ops.sparse.kernel_lists`) as over any (`turbo_hf.ops.decode.kernel`).
The tokens of a bucket lie side by side, so that most of what is read belongs to visited buckets.
"""

import triton
import triton.language as tl

from turbo_hf.ops.decode.kernel import attend_open, attend_sealed
from turbo_hf.ops.decode.kernel_block import finish_or_merge, prepare, query_rows
from turbo_hf.ops.decode.kernel_tiles import entry, prefetch_pages
from turbo_hf.ops.kernel_common import Chosen, Output, Share, TileRun, pdl_wait, to_l2
from turbo_hf.ops.sparse.kernel_lists import outputs_of, over, tiles_of, tiles_of_share


# not specialized, so that a growing cache causes no further compilation; not in a tuple, whose members Triton 3.6
# specializes nevertheless
@triton.jit(do_not_specialize=["capacity", "index_cap", "outputs", "window"])
def sparse_decode_kernel(
    queries, result, cache, rows,  # `DecodeQueries`, `DecodeResult`, `Cache`, `Rows`
    index, lists,  # `Index` or None, `Lists`
    workspace, scoring,  # `Workspace` (parts: of each share), `Scoring`
    read_ptr,  # int64 [1], to which the number of tokens read is added, or None
    capacity, index_cap, outputs, window,  # of a list, of the index in tokens; their number; newest tokens always read
    tokens, sink, alone,  # M; as in `Chosen`; CTAs where there are few tiles
    FORM: tl.constexpr, OUTPUTS: tl.constexpr, FILLED: tl.constexpr, SHARES: tl.constexpr, PDL: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Equal shares, each of one output [row, slot, query, part of the query heads].

    The split is computed here: the host knows neither the lengths of the rows nor the lists. OUTPUTS: `outputs`,
    padded. FILLED, SHARES: as in `tiles_of_share`. PDL: `pdl_wait`.
    """
    KV: tl.constexpr = FORM.kv_heads
    NB: tl.constexpr = FORM.tile
    DP: tl.constexpr = FORM.padded_dim
    R: tl.constexpr = FORM.rows
    N: tl.constexpr = R // 2 if FORM.spread else R
    row_parts: tl.constexpr = (FORM.group + N - 1) // N
    o = tl.arange(0, OUTPUTS)
    nb = tl.arange(0, NB)
    places, closeds, heads_of = outputs_of(o, outputs, row_parts, tokens, rows, KV, FORM.block)
    pdl_wait(PDL, True)
    listed_counts = tl.load(lists.counts + o // row_parts, mask=o < outputs, other=0)
    tiles = tiles_of(places, closeds, listed_counts, o < outputs, NB)
    most = tiles_of_share(tiles, outputs, tl.num_programs(0), alone, FORM.at_once, FILLED, SHARES)
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
        list_at, query = (output // row_parts).to(tl.int64), output // row_parts % tokens
        slot = output // row_parts // tokens
        row = (slot // KV).to(tl.int64)
        slot = slot % KV
        pair = row * KV + head
        part = share - first_share
        begin = part * (most * NB)
        count = tl.maximum(tl.minimum(listed_count - begin, most * NB), 0)
        at = lists.blocks + list_at * capacity + begin
        page = entry(at + nb, nb < count, ASM)
        # the query as if it were the row's last token
        computed = Output(row, head, output % row_parts, place + 1, 0, 1, query, tokens)
        query_row, _ = query_rows(queries.data + query * queries.strides[2], queries.strides, computed, FORM)
        prefetch_pages(cache, slot, page >> 32, nb < count, FORM, ASM)
        chosen = Chosen(place, None, None, sink, window)
        if index is not None:
            buckets = index.buckets + pair * index_cap
            if ASM:
                to_l2(buckets + (page & 0xFFFFFFFF) * FORM.block, nb < count)
            visited = index.visited + (pair * tokens + query) * index.clusters
            chosen = Chosen(place, buckets, visited, sink, window)
        prepared = prepare(query_row, scoring, FORM.turbo)

        acc = tl.zeros([NB, DP, N], tl.float32)
        m = tl.full([NB, R], -float("inf"), tl.float32)
        state = acc, m, tl.zeros([NB, R], tl.float32)
        run = TileRun(at, count, page, count, 0, None)
        state, counted = attend_sealed(state, cache, slot, run, prepared, None, chosen, scoring, FORM, ASM)
        if (place >= closed) & (part == shares - 1):
            state, more = attend_open(
                state, cache, pair, closed // FORM.block, place + 1, prepared, None, chosen, scoring, FORM, ASM
            )
            counted += more
        if read_ptr is not None:  # noqa: SIM102 - what is known when the kernel is compiled stands alone
            if output % row_parts == 0:
                tl.atomic_add(read_ptr + nb * 0, counted.to(tl.int64), sem="relaxed")

        merged = Share(shares == 1, first_share, part, shares)
        finish_or_merge(state, merged, workspace, result, scoring.sinks, computed, FORM)
