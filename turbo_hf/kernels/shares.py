"""Which blocks a CTA of sparse decode reads: an equal share of an output, found as it goes (SAAP appendix F).

There is no inverted index, and no list that another launch would have to make. Of a sealed block the smallest and the
largest bucket of its tokens are known, 4 bytes beside its 8,712 in 4 bit: a CTA looks through these spans of a row and
notes the blocks in which a visited bucket may be. So each knows how many there are, and which of them are its own.
"""

import triton
import triton.language as tl

from turbo_hf.kernels.unpack import flag


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
def parts_of(place, closed, sink, window, OPEN: tl.constexpr, BLOCK: tl.constexpr, INDEX: tl.constexpr):
    """Of an output, in blocks: how many are always read at its begin, and at its end; between them; what is open.

    Open tokens count as OPEN blocks. Last comes what it all costs, in sixteenths of a block that is read: where buckets
    decide, about so many of the blocks between are; and someone must write the zeros of a query without a token.
    """
    first, recent, sealed, opened = extent(place, closed, sink, window)
    begin = tl.cdiv(first, BLOCK)
    end = tl.cdiv(sealed, BLOCK) - tl.maximum(recent // BLOCK, begin)
    between = tl.cdiv(sealed, BLOCK) - end - begin
    opened = tl.where(opened > 0, OPEN, 0)
    cost = 16 * (begin + end + opened)
    if INDEX:
        cost += between
    return begin, end, between, opened, tl.maximum(cost, 1)


@triton.jit
def outputs_of(
    o, outputs, chunks: tl.constexpr, queries, sink, window, order_ptr, starts_ptr, sealed_ptr, open_len_ptr,
    KV: tl.constexpr, OPEN: tl.constexpr, BLOCK: tl.constexpr, INDEX: tl.constexpr, STARTS: tl.constexpr,
):  # fmt: skip
    """Of outputs o [row, slot, query, chunk]: place of the query in its row, -1: none; tokens in sealed blocks; head.

    Last comes what each costs, 0 from `outputs` on.
    """
    ok = o < outputs
    query, slot = o // chunks % queries, o // chunks // queries
    row = slot // KV
    head = tl.load(order_ptr + slot, mask=ok, other=0).to(tl.int32)
    closed = tl.load(sealed_ptr + row, mask=ok, other=0).to(tl.int32) * BLOCK
    place = closed + tl.load(open_len_ptr + row, mask=ok, other=0).to(tl.int32) - queries + query
    if STARTS:
        place = tl.where(query < tl.load(starts_ptr + row, mask=ok, other=0).to(tl.int32), -1, place)
    _, _, _, _, cost = parts_of(place, closed, sink, window, OPEN, BLOCK, INDEX)
    return place, closed, head, tl.where(ok, cost, 0)


@triton.jit
def attended(t, live, bucket, place, visited, sink, window, INDEX: tl.constexpr, ASM: tl.constexpr):
    """Which of the tokens at places t, where they are live, a query at `place` attends to. bucket: of each, if INDEX."""
    live = live & (t <= place)
    kept = (t < sink) | (t > place - window)
    if INDEX:
        bucket = bucket.to(tl.int32)
        kept = kept | (bucket < 0) | flag(visited + tl.maximum(bucket, 0), live, ASM)
    return live & kept


@triton.jit
def _span(spans, spanned, start, begin, end, SCAN: tl.constexpr):
    """SCAN blocks from `start` on, and what is known of those from `begin` to `end`: largest bucket << 16 | smallest."""
    n = start + tl.arange(0, SCAN)
    return n, tl.load(spans + n, mask=(n >= begin) & (n < tl.minimum(end, spanned)), other=-1)


@triton.jit
def _note(numbers, spans, spanned, visited, blocks, begin, end, SCAN: tl.constexpr):
    """Note which of a row's sealed blocks are read: of those from `begin` to `end` where a visited token may be.

    A block whose buckets are not known, or lie 8 apart and more, is noted without a look. visited: words of 8 flags.
    Returns how many there are.
    """
    found = blocks * 0
    n, span = _span(spans, spanned, 0, begin, end, SCAN)
    for start in tl.range(0, blocks, SCAN, num_stages=1):
        next_n, next_span = _span(spans, spanned, start + SCAN, begin, end, SCAN)
        low = span.to(tl.int16).to(tl.int32)
        apart = (span >> 16) - low
        near = (low >= 0) & (apart < 8)
        # the flags of 8 buckets from the lowest on, out of two words
        word = visited + low // 8
        shift = (low % 8 * 8).to(tl.uint64)
        flags = tl.load(word, mask=near, other=0).to(tl.uint64, bitcast=True) >> shift
        more = tl.load(word + 1, mask=near & (low % 8 + apart > 7), other=0).to(tl.uint64, bitcast=True)
        flags = flags | tl.where(shift > 0, more << (64 - shift) % 64, 0)
        hit = flags << (8 * (7 - tl.where(near, apart, 0))).to(tl.uint64)
        kept = ((n < blocks) & ((hit != 0) | (near == 0))).to(tl.int32)
        tl.store(numbers + found + tl.cumsum(kept, 0) - 1, n, mask=kept != 0)
        found += tl.sum(kept, 0)
        n, span = next_n, next_span
    return found


@triton.jit
def part_of(x, whole, of):
    """x / of of `whole` things: any rounding will do that grows with x and is the same for all CTAs."""
    part = tl.minimum((x.to(tl.float32) * (whole.to(tl.float32) / of.to(tl.float32))).to(tl.int32), whole)
    return tl.where(x == of, whole, part)


@triton.jit
def note_share(
    numbers, spans, spanned, visited, low, high, shares, place, closed, sink, window,
    NB: tl.constexpr, BLOCK: tl.constexpr, SCAN: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Note the numbers of the sealed blocks of a share to read: low to high of what an output costs, of `shares` ones.

    Every CTA looks through the whole row: so it knows how many blocks are read, and takes its part of these, in whole
    tiles. numbers: pointer to room for those of the row; spans, visited: of its row and head, its query. spanned:
    blocks whose span may be known.

    Returns where the numbers stand, how many they are, and whether the share has the open tokens.
    """
    begin, end, between, opened, cost = parts_of(place, closed, sink, window, NB, BLOCK, INDEX)
    found = begin + end
    if INDEX:
        found = _note(numbers, spans, spanned, visited, begin + between + end, begin, begin + between, SCAN)
    # tiles of a CTA: as many in each but the last
    unit = NB * tl.maximum(tl.cdiv(found + opened, NB * shares), 1)
    total = tl.cdiv(found + opened, unit)
    first, last = part_of(low, total, cost) * unit, part_of(high, total, cost) * unit
    if not INDEX:
        n = tl.arange(0, SCAN)
        for start in tl.range(first, tl.minimum(last, found), SCAN, num_stages=1):
            i = start + n
            tl.store(numbers + i, tl.where(i < begin, i, i + between), mask=i < found)
    tl.debug_barrier()
    has_open = (last >= found + opened) & (first < found + opened) & (opened > 0)
    numbers, found = numbers + first, tl.maximum(tl.minimum(last, found) - first, 0)
    # a number read behind the barrier: what is read by it is so too
    found += tl.minimum(tl.load(numbers + tl.maximum(found - 1, 0), mask=found > 0, other=0), 0)
    return numbers, found, has_open


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
def share_of(cta, most, total, outputs, least, slack):
    """The begin and the size of a CTA's share of `total`, one of up to `most` shares of at least `least`.

    There are as many for each of `outputs`, where there are enough. Returns too what `sharers` asks for: the size of a
    share, how many are longer by one, the slack they allow.
    """
    ctas = tl.minimum(most, total // least)
    ctas = tl.maximum(tl.where(ctas > outputs, ctas // outputs * outputs, ctas), 1)
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
