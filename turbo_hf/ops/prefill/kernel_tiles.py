"""Which key tiles each tile of queries of a long prompt reads: scores by mean keys, the cut, the list, and the audit.

Tiles have TILE queries and keys. What belongs to pairs of tiles lies in the order of a triangle: the row of queries t
begins at t (t - 1) / 2 and holds the t tiles before its own, which is always read. Over a past of P whole tiles each
row begins with these: it begins at t P + t (t - 1) / 2, and holds P + t tiles.
"""

import triton
import triton.language as tl

from turbo_hf.layout import PROMPT_TILE
from turbo_hf.ops.kernel_common import LOG2_E, tanh

TILE = tl.constexpr(PROMPT_TILE)
LOG2_TILE = tl.constexpr(float(PROMPT_TILE.bit_length() - 1))


@triton.jit
def row_of(pair, tile, tiles, past):
    """Where a row of the triangle of one row and head begins. past: key tiles before the first query."""
    whole = pair.to(tl.int64) * tiles * (tiles - 1) // 2 + tile.to(tl.int64) * (tile - 1) // 2
    return whole + (pair.to(tl.int64) * tiles + tile) * past


@triton.jit
def _means(means, first, tile, d, D: tl.constexpr, BLOCK: tl.constexpr):
    """The mean keys [BLOCK, DP] of the tiles from `first` on, their numbers, and which of them lie before `tile`."""
    b = first + tl.arange(0, BLOCK)
    here = b < tile
    return tl.load(means + b[:, None] * D + d[None, :], mask=here[:, None] & (d < D)[None, :], other=0.0), b, here


@triton.jit
def _scores(a, b, scoring):
    """a [M, D] times b [D, N], scaled and capped, in log2."""
    s = tl.dot(a, b, input_precision="ieee")
    if scoring.softcap is None:
        return s * (scoring.scaling * LOG2_E)
    else:
        return tanh(s * scoring.scaling / scoring.softcap) * (scoring.softcap * LOG2_E)


@triton.jit(do_not_specialize=["tokens", "tiles", "past", "whole", "last"])
def score_tiles_kernel(
    q_ptr,  # [B, Hq, M, D]
    means,  # [B, Hkv, whole tiles, D], in q's dtype, those of the past first
    scores,  # float32 [B*Hq, triangle]
    scoring,  # `Scoring`
    stride_b, stride_h, stride_m, tokens, tiles, past, whole, last, peak, first_head,
    heads_ptr,  # float32 [Hq, 2], mass and peak of each head; None: `peak`
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Per tile of queries before `last` and tile of keys: the mean over the queries of their estimated share of it,
    negative where one query alone gives it at least `peak`. Two passes over each row of key tiles: sums, then shares.

    first_head: the number of the first of these heads, for `scoring.sinks`.
    """
    # the longest rows first; without a past, no tile lies before the first one
    rows = tl.where(past > 0, last, last - 1)
    tile = last - 1 - tl.program_id(0) % rows
    pair = tl.program_id(0) // rows
    own = past + tile
    row, head = pair // HEADS, pair % HEADS
    if heads_ptr is not None:
        peak = tl.load(heads_ptr + 2 * head + 1)
    m = tile * TILE + tl.arange(0, TILE)
    d = tl.arange(0, DP)
    base = q_ptr + row.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
    q = tl.load(
        base + m.to(tl.int64)[:, None] * stride_m + d[None, :], mask=(m < tokens)[:, None] & (d < D)[None, :], other=0.0
    )
    means += (row * (HEADS // GROUP) + head // GROUP).to(tl.int64) * whole * D
    top = tl.full((TILE,), float("-inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    if scoring.sinks is not None:
        # a score counts for each key of its tile
        top = total + tl.load(scoring.sinks + first_head + head).to(tl.float32) * LOG2_E - LOG2_TILE
        total += 1.0
    for first in range(0, own, BLOCK):
        mean, _, here = _means(means, first, own, d, D, BLOCK)
        s = _scores(q, tl.trans(mean), scoring)
        s = tl.where(here[None, :], s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        total = total * tl.exp2(top - higher) + tl.sum(tl.exp2(s - higher[:, None]), 1)
        top = higher
    log_total = top + tl.log2(total)
    inside = m < tokens
    count = tl.minimum(tokens - tile * TILE, TILE).to(tl.float32)
    out = scores + row_of(pair, tile, tiles, past)
    # here a tile is a row, so that sums over queries stay within a warp, too
    for first in range(0, own, BLOCK):
        mean, b, here = _means(means, first, own, d, D, BLOCK)
        s = _scores(mean, tl.trans(q), scoring)
        share = tl.where(inside[None, :], tl.exp2(s - log_total[None, :]), 0.0)
        average = tl.sum(share, 1) / count
        tl.store(out + b, tl.where(tl.max(share, 1) >= peak, -average, average), mask=here)


@triton.jit(do_not_specialize=["tiles", "past", "tail", "sink", "window"])
def keep_tiles_kernel(
    scores,  # float32 [B*Hq, triangle]
    kept,  # uint8 [B*Hq, triangle]
    tiles, past, tail, sink, window, mass, most_density, heads_ptr, ALL: tl.constexpr,
):  # fmt: skip
    """1 for each tile that is read: forced, wanted by one query, or among the fewest that cover `mass` (ties: all); for
    all of them where these are more than `most_density`.

    tail: the first tile of queries that reads every key. sink, window: tiles. ALL: a power of two, at least `past`
    + `tiles`.

    The cut is found without a sort: by bisection on the bits of positive numbers, which are ordered like the numbers.
    """
    tile = tl.program_id(0) % tiles
    pair = tl.program_id(0) // tiles
    at = row_of(pair, tile, tiles, past)
    own = past + tile
    e = tl.arange(0, ALL)
    inside = e < own
    keep = inside
    if tile < tail:
        raw = tl.load(scores + at + e, mask=inside, other=0.0)
        mean = tl.abs(raw)
        if heads_ptr is not None:
            mass = tl.load(heads_ptr + 2 * pair)
        goal = mass * tl.sum(mean, 0)
        low = tl.zeros((1,), tl.int32)
        high = tl.full((1,), 0x40000000, tl.int32)
        for _ in range(30):
            middle = (low + high) // 2
            cut = middle.to(tl.float32, bitcast=True)
            covers = tl.sum(tl.where(mean >= cut, mean, 0.0), 0) >= goal
            low = tl.where(covers, middle, low)
            high = tl.where(covers, high, middle)
        # what is not a number is read
        over = (mean < low.to(tl.float32, bitcast=True)) == 0
        keep = inside & (over | (raw < 0) | (e < sink) | (e >= own - window))
        if tl.sum(keep.to(tl.int32), 0) > most_density * own:
            keep = inside
    tl.store(kept + at + e, keep.to(tl.uint8), mask=inside)


@triton.jit(do_not_specialize=["tiles", "past"])
def list_tiles_kernel(
    kept,  # uint8 [B*Hq, triangle]
    listed,  # `Listed`
    sealed,  # int64 [B], blocks of BLOCK tokens in each row's past, or None
    tiles, past, HEADS: tl.constexpr, BLOCK: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """The tiles that each tile of queries reads, the newest first, and how many; behind them zeros."""
    tile = tl.program_id(0) % tiles
    pair = tl.program_id(0) // tiles
    at = row_of(pair, tile, tiles, past)
    e = tl.arange(0, ALL)
    keep = tl.load(kept + at + e, mask=e < past + tile, other=0).to(tl.int32)
    number = e
    place = pair.to(tl.int64) * tiles + tile
    earlier = 0
    if sealed is not None:
        # what a shorter row's past does not have is in no list
        whole = (tl.load(sealed + pair // HEADS) * BLOCK // TILE).to(tl.int32)
        keep = tl.where((e < whole) | (e >= past), keep, 0)
        number = tl.where(e >= past, e - past, e)
        earlier = tl.sum(tl.where(e < past, keep, 0), 0)
        tl.store(listed.of_past + place, earlier)
    count = tl.sum(keep, 0)
    tl.store(listed.tiles + at + count - tl.cumsum(keep, 0), number.to(tl.int16), mask=keep != 0)
    tl.store(listed.tiles + at + e, tl.zeros_like(e).to(tl.int16), mask=(e >= count) & (e < past + tile))
    tl.store(listed.count + place, count - earlier)


@triton.jit(do_not_specialize=["count", "tokens", "tiles", "past", "part"])
def dropped_mass_kernel(
    q_ptr,  # [B, Hq, R, D], contiguous
    places,  # int64 [R]
    k_ptr,  # [B, Hkv, P TILE + M, D]
    kept,  # uint8 [B*Hq, triangle]
    found,  # float32 [3, parts, B*Hq, R]
    scoring,  # `Scoring`
    stride_b, stride_h, stride_m, count, tokens, tiles, past, part, HEADS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The softmax of some queries over `part` key tiles: its maximum, its sum, and the share of tiles that are not read
    in that sum, both relative to the maximum. In units of log2."""
    blocks = tl.cdiv(count, BLOCK_R)
    block = tl.program_id(0) % blocks
    pair = tl.program_id(0) // blocks
    row, head = pair // HEADS, pair % HEADS
    r = block * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.arange(0, DP)
    place = tl.load(places + r, mask=r < count, other=0).to(tl.int32)
    q = tl.load(
        q_ptr + (pair.to(tl.int64) * count + r)[:, None] * D + d[None, :],
        mask=(r < count)[:, None] & (d < D)[None, :], other=0.0,
    )  # fmt: skip
    at = kept + row_of(pair, place // TILE, tiles, past)
    # from here on among all keys
    place += past * TILE
    tokens += past * TILE
    own = place // TILE
    base = k_ptr + row.to(tl.int64) * stride_b + (head // GROUP).to(tl.int64) * stride_h
    top = tl.full((BLOCK_R,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_R,), tl.float32)
    gone = tl.zeros((BLOCK_R,), tl.float32)
    first = tl.program_id(1) * part
    for n0 in range(first * TILE, tl.minimum(first + part, tl.max(own, 0) + 1) * TILE, BLOCK):
        key = n0 + tl.arange(0, BLOCK)
        k = tl.load(
            base + key.to(tl.int64)[None, :] * stride_m + d[:, None],
            mask=(key < tokens)[None, :] & (d < D)[:, None], other=0.0,
        )  # fmt: skip
        s = _scores(q, k, scoring)
        s = tl.where(key[None, :] <= place[:, None], s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        # a query before all of these keys
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        here = tl.sum(tl.exp2(s - safe[:, None]), 1)
        moved = tl.exp2(top - safe)
        read = tl.load(at + n0 // TILE, mask=n0 // TILE < own, other=1)
        total = total * moved + here
        gone = gone * moved + tl.where(read == 0, here, 0.0)
        top = higher
    pairs = tl.num_programs(0) // blocks
    to = found + (tl.program_id(1) * pairs + pair).to(tl.int64) * count + r
    field = tl.num_programs(1).to(tl.int64) * pairs * count
    tl.store(to, top, mask=r < count)
    tl.store(to + field, total, mask=r < count)
    tl.store(to + 2 * field, gone, mask=r < count)
