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
    """Of an output: tokens attended to, or open; blocks to look through; what these cost, in tokens, at least 1."""
    always = first + sealed - recent + opened
    blocks = always * 0
    if INDEX:
        blocks = tl.where(recent > first, tl.cdiv(recent, BLOCK) - first // BLOCK, 0)
    # of blocks to look through about a sixteenth of the tokens is visited; and someone must write the zeros of a query
    # without a token
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
def note_always(noted, begin, end, first, recent, SCAN: tl.constexpr):
    """Note the places of tokens begin to end of those that are attended to without a question; returns how many."""
    for start in tl.range(begin, end, SCAN, num_stages=1):
        i = start + tl.arange(0, SCAN)
        tl.store(noted + i - begin, tl.where(i < first, i, recent + i - first), mask=i < end)
    return tl.maximum(end - begin, 0)


@triton.jit
def _look(buckets, start, end, strands, first, recent, BLOCK: tl.constexpr, SCAN: tl.constexpr, KNOTS: tl.constexpr):
    """Of SCAN tokens of blocks from `start` on: their places, whether they are asked for, their buckets on the way."""
    b = start + tl.arange(0, SCAN // BLOCK)[:, None]
    i = tl.arange(0, BLOCK)[None, :]
    # threads side by side look at as many blocks, whose lines are then there for the other tokens, one after the other;
    # in an order in which no thread loads two at once, for those would have to change places before the next load
    t = (first // BLOCK + b % KNOTS * strands + b // KNOTS) * BLOCK + i % 8 * (BLOCK // 8) + i // 8
    asked = (b < end) & ((t - first).to(tl.uint32, bitcast=True) < (recent - first).to(tl.uint32, bitcast=True))
    return t, asked, tl.load(buckets + t, mask=asked, other=0)


@triton.jit
def note_visited(
    noted, buckets, visited, begin, end, strands, first, recent, found,
    BLOCK: tl.constexpr, SCAN: tl.constexpr, KNOTS: tl.constexpr,
):  # fmt: skip
    """Note, behind `found` places, those of visited tokens of blocks begin to end; returns how many there are in all.

    The blocks are counted strand by strand, of KNOTS blocks each, which take every strands-th of the row's.
    """
    t, asked, bucket = _look(buckets, begin, end, strands, first, recent, BLOCK, SCAN, KNOTS)
    for start in tl.range(begin, end, SCAN // BLOCK, num_stages=1):
        next_t, next_asked, next_bucket = _look(
            buckets, start + SCAN // BLOCK, end, strands, first, recent, BLOCK, SCAN, KNOTS
        )
        at = bucket.to(tl.int32)
        kept = asked & (tl.load(visited + at, mask=asked & (at >= 0), other=1) != 0)
        counted = kept.to(tl.int32)
        each = tl.sum(counted, 1)
        to = found + (tl.cumsum(each, 0) - each)[:, None] + tl.cumsum(counted, 1) - 1
        tl.store(noted + to, t, mask=kept)
        found += tl.sum(each, 0)
        t, asked, bucket = next_t, next_asked, next_bucket
    return found


@triton.jit
def part_of(x, whole, of):
    """x / of of `whole` things: any rounding will do that grows with x and is the same for all CTAs."""
    part = tl.minimum((x.to(tl.float32) * (whole.to(tl.float32) / of.to(tl.float32))).to(tl.int32), whole)
    return tl.where(x == of, whole, part)


@triton.jit
def note_share(
    noted, buckets, visited, low, high, cost, place, closed, sink, window,
    BLOCK: tl.constexpr, SCAN: tl.constexpr, KNOTS: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Note the places of the sealed tokens of a share, low to high of an output that costs `cost`.

    Of an output it takes as large a part of the tokens that are always attended to as of the blocks to look through.
    noted, buckets, visited: pointers of the output, of its row and head, of its query.

    Returns where the places stand, how many they are, and the begin and end of its open tokens.
    """
    first, recent, sealed, opened = extent(place, closed, sink, window)
    always, blocks, _ = size(first, recent, sealed, opened, BLOCK, INDEX)
    before_open = always - opened
    from_always, to_always = part_of(low, always, cost), part_of(high, always, cost)
    begin, end = tl.minimum(from_always, before_open), tl.minimum(to_always, before_open)
    strands = tl.cdiv(blocks, KNOTS)
    from_block = part_of(low, strands * KNOTS, cost)
    noted += begin + from_block * BLOCK
    found = note_always(noted, begin, end, first, recent, SCAN)
    if INDEX:
        found = note_visited(
            noted, buckets, visited, from_block, part_of(high, strands * KNOTS, cost), strands, first, recent, found,
            BLOCK, SCAN, KNOTS,
        )  # fmt: skip
    tl.debug_barrier()
    return noted, found, tl.maximum(from_always - before_open, 0), to_always - before_open


@triton.jit
def snapped(x, cost, slack):
    """Where a share ends at x of an output: at its begin or end, if that is not more than `slack` away."""
    nearest = tl.where(x <= cost - x, 0, cost)
    return tl.where(tl.abs(x - nearest) <= slack, nearest, x)


@triton.jit
def begin_of(cta, share, longer):
    """Where a CTA's share begins, of which the first `longer` are share + 1 and the others share."""
    return cta * share + tl.minimum(cta, longer)


@triton.jit
def share_of(cta, most, total, least, slack):
    """The begin and the size of a CTA's share of `total`, one of up to `most` shares of at least `least`.

    Returns too what `sharers` asks for: the size of a share, how many are longer by one, the slack they allow.
    """
    ctas = tl.maximum(tl.minimum(most, total // least), 1)
    share, longer = total // ctas, total % ctas
    begin = tl.where(cta < ctas, begin_of(cta, share, longer), total)
    left = tl.where(cta < ctas, begin_of(cta + 1, share, longer), total) - begin
    return begin, left, share, longer, tl.minimum((share - 1) // 2, slack)


@triton.jit
def sharers(origin, cost, share, longer, slack):
    """The first CTA that has a part of an output, and how many have."""
    last_at = origin + cost - 1
    rest = longer * (share + 1)
    first = tl.where(origin < rest, origin // (share + 1), longer + (origin - rest) // share)
    last = tl.where(last_at < rest, last_at // (share + 1), longer + (last_at - rest) // share)
    end = tl.minimum(begin_of(first + 1, share, longer) - origin, cost)
    first += (snapped(end, cost, slack) == 0).to(tl.int32)
    begin = tl.maximum(begin_of(last, share, longer) - origin, 0)
    last -= (snapped(begin, cost, slack) == cost).to(tl.int32)
    return first, last - first + 1
