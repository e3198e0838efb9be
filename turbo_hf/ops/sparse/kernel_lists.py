"""Which blocks sparse decode reads, and how the CTAs share them (SAAP appendix F, LeanAttention).

There is no inverted index. For each sealed block its span is known: the smallest and the largest bucket of its tokens,
4 bytes beside the 8,712 of a block in 4 bit. One launch scans the spans and lists the blocks that may hold a visited
bucket. The next launch knows how many blocks each output has, and splits them into shares of whole tiles.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from turbo_hf.ops.kernel_common import pdl_wait, to_l2


class Index(NamedTuple):
    """The buckets of a layer.

    buckets: int16 [B, Hkv, cap], the bucket of each token.
    visited: uint8 [B, Hkv, M, clusters], whether each query visits each bucket.
    clusters: buckets per KV head.
    """

    buckets: Any
    visited: Any
    clusters: int


class Lists(NamedTuple):
    """What `list_kernel` leaves: blocks int64 [lists, capacity], page << 32 | number; counts int32 [lists]."""

    blocks: Any
    counts: Any


@triton.jit
def extent(place, closed, sink, window):
    """What a query at `place` (-1: none) sees of a row with `closed` tokens in sealed blocks.

    Returns numbers of tokens. first: the oldest ones, which are always read. recent: those before the newest ones that
    are always read; between first and recent, buckets decide. sealed: in sealed blocks. opened: in the open buffer.
    """
    seen = place + 1
    sealed = tl.minimum(closed, seen)
    recent = tl.maximum(tl.minimum(seen - window, sealed), 0)
    return tl.minimum(sink, recent), recent, sealed, seen - sealed


@triton.jit
def place_of(query, row, queries, ok, rows, BLOCK: tl.constexpr):
    """A query's place in its row, -1: none; the row's tokens in sealed blocks.

    Loads bypass L1: these were written a few launches ago, and launches overlap.
    """
    closed = tl.load(rows.sealed + row, mask=ok, other=0, cache_modifier=".cg").to(tl.int32) * BLOCK
    place = closed + tl.load(rows.open_len + row, mask=ok, other=0, cache_modifier=".cg").to(tl.int32) - queries + query
    if rows.starts is not None:
        place = tl.where(query < tl.load(rows.starts + row, mask=ok, other=0).to(tl.int32), -1, place)
    return place, closed


@triton.jit
def _blocks_from(start, table, blocks, spans, spanned, begin, end, SCAN: tl.constexpr):
    """SCAN blocks from `start` on: number, page; largest bucket << 16 | smallest of those from `begin` to `end`.

    -1 where these are not known.
    """
    n = start + tl.arange(0, SCAN)
    page = tl.load(table + n, mask=n < blocks, other=0)
    return n, page, tl.load(spans + n, mask=(n >= begin) & (n < tl.minimum(end, spanned)), other=-1)


# not specialized, so that a growing cache causes no further compilation; not in a tuple, whose members Triton 3.6
# specializes nevertheless
@triton.jit(do_not_specialize=["table_stride", "capacity", "spanned", "window"])
def list_kernel(
    spans_ptr,  # int32 [B, Hkv, spanned]: largest bucket << 16 | smallest
    visited_ptr,  # uint8 [B, Hkv, M, buckets]
    rows,  # `Rows`
    table_ptr,  # int64 [B, blocks]
    lists,  # `Lists`
    table_stride, capacity, spanned, window,  # of the table's rows, of a list, blocks with spans
    queries, buckets, sink,
    KV: tl.constexpr, BLOCK: tl.constexpr, SCAN: tl.constexpr, BUCKETS: tl.constexpr, INDEX: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """List the sealed blocks that one [row, slot, query] reads, and count them.

    A block whose buckets are not known is read. BUCKETS: `buckets`, padded. PDL: `pdl_wait`.
    """
    own = tl.program_id(0)
    query, slot = own % queries, own // queries
    row = slot // KV
    if PDL:
        # what will be looked through; if the order has just changed, other lines come, and nothing else follows
        stale = row * KV + tl.minimum(tl.maximum(tl.load(rows.order + slot, cache_modifier=".cg"), 0), KV - 1)
        line = tl.arange(0, (SCAN + 31) // 32) * 32
        if INDEX:
            to_l2(spans_ptr + stale * spanned + line, line < spanned)
        line = tl.arange(0, (SCAN + 15) // 16) * 16
        to_l2(table_ptr + row * table_stride + line, line < table_stride)
    pdl_wait(PDL)
    pair = row * KV + tl.load(rows.order + slot, cache_modifier=".cg")
    place, closed = place_of(query, row, queries, True, rows, BLOCK)
    first, recent, sealed, _ = extent(place, closed, sink, window)
    blocks, begin = tl.cdiv(sealed, BLOCK), tl.cdiv(first, BLOCK)
    end = tl.maximum(recent // BLOCK, begin)
    listed, table = lists.blocks + own.to(tl.int64) * capacity, table_ptr + row * table_stride
    spans = spans_ptr + pair * spanned
    if not INDEX:
        spanned = 0
    n, page, span = _blocks_from(0, table, blocks, spans, spanned, begin, end, SCAN)
    if INDEX:
        c = tl.arange(0, BUCKETS)
        flags = tl.load(visited_ptr + (pair * queries + query) * buckets + c, mask=c < buckets, other=0)
        # how many of the buckets up to each one are visited; in 16 bit, which all buckets' shared memory takes
        upto = tl.cumsum((flags != 0).to(tl.int32), 0).to(tl.uint16)
    listed_count = blocks * 0
    for start in tl.range(0, blocks, SCAN, num_stages=1):
        # the next ones, while these are looked at
        following = _blocks_from(start + SCAN, table, blocks, spans, spanned, begin, end, SCAN)
        kept = (n < begin) | (n >= end)
        if INDEX:
            low = span.to(tl.int16).to(tl.int32)
            hits = tl.gather(upto, tl.maximum(span >> 16, 0), 0).to(tl.int32)
            hits -= tl.where(low > 0, tl.gather(upto, tl.maximum(low - 1, 0), 0).to(tl.int32), 0)
            kept = kept | (low < 0) | (hits > 0)
        kept = (kept & (n < blocks)).to(tl.int32)
        tl.store(listed + listed_count + tl.cumsum(kept, 0) - 1, (page << 32) + n, mask=kept != 0)
        listed_count += tl.sum(kept, 0)
        n, page, span = following
    tl.store(lists.counts + own, listed_count)


@triton.jit
def outputs_of(o, outputs, row_parts: tl.constexpr, queries, rows, KV: tl.constexpr, BLOCK: tl.constexpr):
    """Of outputs o [row, slot, query, row part]: the query's place (-1: none), the row's sealed tokens, the KV head."""
    ok = o < outputs
    own = o // row_parts
    slot = own // queries
    place, closed = place_of(own % queries, slot // KV, queries, ok, rows, BLOCK)
    return place, closed, tl.load(rows.order + slot, mask=ok, other=0, cache_modifier=".cg").to(tl.int32)


@triton.jit
def tiles_of(place, closed, listed_count, ok, NB: tl.constexpr):
    """Tiles of NB blocks of an output: its listed blocks, and one for its open tokens; at least one; 0 if not ok."""
    return tl.where(ok, tl.maximum(tl.cdiv(listed_count, NB) + (place >= closed).to(tl.int32), 1), 0)


@triton.jit
def over(x, y):
    """x / y rounded up, where x + y is below 2^21; beyond that it may be one less. x: a tensor.

    Integer division takes three times as long.
    """
    y = x * 0 + y
    # the division is off by less than the half that is added
    return (((x + y - 1).to(tl.float32) + 0.5) / y.to(tl.float32)).to(tl.int32)


@triton.jit
def tiles_of_share(
    tiles, outputs, ctas, alone, AT_ONCE: tl.constexpr, FILLED: tl.constexpr, SHARES: tl.constexpr
):  # fmt: skip
    """The maximum number of tiles per share. tiles: tiles of each output.

    The smallest number with which every share gets a CTA of its own, or a little more, if that saves the longest output
    an iteration of its merge (AT_ONCE parts). With many outputs, the number with which a CTA gets about SHARES shares.
    Below FILLED tiles per CTA only `alone` CTAs work, so that fewer of them share an SM.
    """
    total = tl.sum(tiles, 0)
    if 2 * outputs > ctas:
        most = tl.maximum(over(total, SHARES * ctas), 1)
    else:
        ctas = tl.where((total < FILLED * ctas) & (outputs <= alone), alone, ctas)
        most = tl.maximum(over(total, ctas), 1)
        while tl.sum(over(tiles, most), 0) > ctas:
            most += 1
        longest = tl.max(tiles, 0)
        fewer = over(longest, most) // AT_ONCE * AT_ONCE
        more = over(longest, tl.maximum(fewer, 1))
        most = tl.where((fewer > 0) & (10 * more <= 11 * most), more, most)
    return most
