"""Which tokens a CTA of sparse decode attends to: an equal share of an output, found as it goes (SAAP appendix F).

There is no inverted index, and no list that another launch would have to make. A token keeps the number of its bucket,
2 bytes beside its 136 in a 4-bit page. A CTA looks through its share of the buckets of a row and notes where the tokens
to attend to lie. Its blocks stand far apart in the row: wherever visited keys crowd, all CTAs have about as many.
"""

import triton
import triton.language as tl


@triton.jit
def extent(place, closed, sink, window):
    """What a query at `place` (-1: none) sees of a row with `closed` tokens in sealed blocks.

    Returns numbers of tokens: first: of the first ones, that are always attended to; recent: before the newest ones,
    of which the same holds; sealed, opened: in sealed blocks, and open. Between first and recent, buckets decide.
    """
    seen = place + 1
    sealed = tl.minimum(closed, seen)
    recent = tl.maximum(tl.minimum(seen - window, sealed), 0)
    return tl.minimum(sink, recent), recent, sealed, seen - sealed


@triton.jit
def size(first, recent, sealed, opened, BLOCK: tl.constexpr, INDEX: tl.constexpr):
    """Of an output: tokens that are attended to, or open; blocks to look through; what these cost, in tokens."""
    always = first + sealed - recent + opened
    blocks = always * 0
    if INDEX:
        blocks = tl.where(recent > first, tl.cdiv(recent, BLOCK) - first // BLOCK, 0)
    # a sixteenth of their tokens, or so; a query without a token too has someone who writes its zeros
    return always, blocks, tl.maximum(always + blocks * (BLOCK // 16), 1)


@triton.jit
def place_of(n, queries, kv_heads, ok, starts_ptr, sealed_ptr, open_len_ptr, BLOCK: tl.constexpr, STARTS: tl.constexpr):
    """Of lists n [row, KV head, query]: the query's place in its row, -1: none; the row's tokens in sealed blocks."""
    row, query = n // queries // kv_heads, n % queries
    closed = tl.load(sealed_ptr + row, mask=ok, other=0).to(tl.int32) * BLOCK
    place = closed + tl.load(open_len_ptr + row, mask=ok, other=0).to(tl.int32) - queries + query
    if STARTS:
        place = tl.where(query < tl.load(starts_ptr + row, mask=ok, other=0).to(tl.int32), -1, place)
    return place, closed


@triton.jit
def costs_of(
    o, outputs, chunks: tl.constexpr, queries, kv_heads, sink, window, starts_ptr, sealed_ptr, open_len_ptr,
    BLOCK: tl.constexpr, INDEX: tl.constexpr, STARTS: tl.constexpr,
):  # fmt: skip
    """What each of the outputs o [row, KV head, query, chunk] costs, 0 from `outputs` on."""
    place, closed = place_of(
        o // chunks, queries, kv_heads, o < outputs, starts_ptr, sealed_ptr, open_len_ptr, BLOCK, STARTS
    )
    first, recent, sealed, opened = extent(place, closed, sink, window)
    _, _, cost = size(first, recent, sealed, opened, BLOCK, INDEX)
    return tl.where(o < outputs, cost, 0)


@triton.jit
def note_always(lines, table, begin, end, first, recent, BLOCK: tl.constexpr, SCAN: tl.constexpr):
    """Note the lines of tokens begin to end of those that are attended to without a question; returns how many."""
    for start in tl.range(begin, end, SCAN, num_stages=1):
        i = start + tl.arange(0, SCAN)
        t = tl.where(i < first, i, recent + i - first)
        page = tl.load(table + t // BLOCK, mask=i < end, other=0)
        tl.store(lines + i - begin, (page * BLOCK + t % BLOCK).to(tl.int32), mask=i < end)
    return tl.maximum(end - begin, 0)


@triton.jit
def note_visited(
    lines, table, buckets, visited, begin, end, blocks, first, recent, found,
    BLOCK: tl.constexpr, SCAN: tl.constexpr, STRANDS: tl.constexpr,
):  # fmt: skip
    """Note, behind `found` lines, those of visited tokens of blocks begin to end; returns how many there are in all.

    The blocks are counted strand by strand, each of which takes every STRANDS-th of the row's.
    """
    longer, size = blocks % STRANDS, blocks // STRANDS
    i = tl.arange(0, BLOCK)[None, :]
    for start in tl.range(begin, end, SCAN // BLOCK, num_stages=1):
        b = start + tl.arange(0, SCAN // BLOCK)
        live = (b < end)[:, None]
        rest = b - longer * (size + 1)
        strand = tl.where(rest < 0, b // (size + 1), longer + rest // tl.maximum(size, 1))
        knot = tl.where(rest < 0, b % (size + 1), rest % tl.maximum(size, 1))
        block = (first // BLOCK + knot * STRANDS + strand)[:, None]
        t = block * BLOCK + i
        asked = live & (t >= first) & (t < recent)
        # of whole sealed blocks, so that 8 tokens' are one load
        bucket = tl.load(buckets + t, mask=live, other=0).to(tl.int32)
        page = tl.load(table + block, mask=live, other=0).to(tl.int32)
        visit = tl.load(visited + tl.maximum(bucket, 0), mask=asked, other=0)
        kept = asked & ((bucket < 0) | (visit != 0))
        counted = kept.to(tl.int32)
        each = tl.sum(counted, 1)
        at = found + (tl.cumsum(each, 0) - each)[:, None] + tl.cumsum(counted, 1) - 1
        tl.store(lines + at, page * BLOCK + i, mask=kept)
        found += tl.sum(each, 0)
    return found


@triton.jit
def part_of(x, whole, of):
    """x / of of `whole` things, rounded down."""
    return (x.to(tl.int64) * whole // of).to(tl.int32)


@triton.jit
def cta_at(cost, share, longer):
    """The CTA that has this unit of cost, where the first `longer` of them have share + 1 and the others share."""
    rest = cost - longer * (share + 1)
    return tl.where(rest < 0, cost // (share + 1), longer + rest // share)
