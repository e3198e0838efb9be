"""Which sealed blocks a step reads by the mean keys of their pages: scores of all blocks, then a list of those above a
cut that is found without sorting (`ops.sparse.reference_means`)."""

import triton
import triton.language as tl

from turbo_hf.layout import NOTED_UNIT as SHARE_UNIT
from turbo_hf.ops.kernel_common import LOG2_E, pdl_wait, tanh
from turbo_hf.ops.sparse.kernel_lists import extent, place_of
from turbo_hf.ops.sparse.reference_means import DEEPEST as LOWEST
from turbo_hf.ops.sparse.reference_means import HALVINGS as TIMES

DEEPEST = tl.constexpr(LOWEST)
HALVINGS = tl.constexpr(TIMES)
NOTED_UNIT = tl.constexpr(float(SHARE_UNIT))


@triton.jit(do_not_specialize=["table_stride", "blocks", "capacity"])
def score_means_kernel(
    queries,  # `DecodeQueries`
    means,  # `PageMeans`
    rows,  # `Rows`
    table_ptr,  # int64 [B, blocks]
    scores_ptr,  # float32 [lists, GROUP, capacity], in log2
    scoring,  # `Scoring`
    table_stride, blocks, capacity, tokens,  # of the table's rows, and their blocks; of a list; M
    KV: tl.constexpr, GROUP: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, FROZEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Scores of TILE blocks for the query heads of one [row, slot, query]. G: GROUP, padded. PDL: `pdl_wait`.

    FROZEN: the root of 2 ln BLOCK.
    """
    pdl_wait(PDL)
    own = tl.program_id(0).to(tl.int64)
    query, slot = own % tokens, own // tokens
    row = slot // KV
    first = tl.program_id(1) * TILE
    n = first + tl.arange(0, TILE)
    # any page will do where the row has none: loads should not wait for its length
    page = tl.load(table_ptr + row * table_stride + n, mask=n < blocks, other=0)
    place, closed = place_of(query, row, tokens, True, rows, BLOCK)
    whole = tl.minimum(closed, place + 1) // BLOCK
    if first < whole:
        d = tl.arange(0, DP)
        g = tl.arange(0, G)
        head = tl.load(rows.order + slot, cache_modifier=".cg")
        at = page * KV + slot % KV
        inside = (n < whole)[:, None] & (d < D)[None, :]
        mean = tl.load(means.mean + at[:, None] * D + d[None, :], mask=inside, other=0)
        unit = tl.load(means.scale + 2 * at, mask=n < whole, other=0.0).to(tl.float32)
        spread = tl.load(means.scale + 2 * at + 1, mask=n < whole, other=0.0).to(tl.float32)
        strides = queries.strides
        q_at = queries.data + row * strides[0] + (head * GROUP + g) * strides[1] + query * strides[2]
        shown = (g < GROUP)[:, None] & (d < D)[None, :]
        q = tl.load(q_at[:, None] + d[None, :] * strides[3], mask=shown, other=0.0)
        # codes are exact in every type of q
        x = tl.dot(q, tl.trans(mean.to(q.dtype)), input_precision="ieee") * (unit * scoring.scaling)[None, :]
        wide = q.to(tl.float32)
        deviation = tl.sqrt(tl.sum(wide * wide, 1))[:, None] * (spread * scoring.scaling)[None, :]
        x += tl.where(deviation < FROZEN, deviation * deviation * 0.5, deviation * FROZEN - FROZEN * FROZEN * 0.5)
        if scoring.softcap is not None:
            x = tanh(x / scoring.softcap) * scoring.softcap
        to = scores_ptr + (own * GROUP + g)[:, None] * capacity + n[None, :]
        tl.store(to, x * LOG2_E, mask=(g < GROUP)[:, None] & (n < whole)[None, :])


@triton.jit
def _shares(x):
    """Masses of blocks relative to that of the largest score; x is the difference to it in log2."""
    return tl.where(x > -DEEPEST, tl.exp2(x), 0.0)


@triton.jit
def _add2(a, b, c, d):
    return a + c, b + d


@triton.jit
def _add3(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def _above(p, cut):
    """p where it is at least the cut; as a product, it is added by one instruction."""
    return p * (p >= cut).to(tl.float32)


@triton.jit
def _ones(x):
    """How many bits of each uint32 are 1."""
    x -= (x >> 1) & 0x55555555
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    return ((((x + (x >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit(do_not_specialize=["window"], do_not_specialize_on_alignment=["cuts_ptr", "left_by_head_ptr"])
def cut_by_means_kernel(
    scores_ptr,  # as above, for BLOCKS blocks
    rows,  # `Rows`
    cuts_ptr,  # float32 [lists, GROUP, 2]: the largest score; 1 / mass of all blocks relative to it
    chosen_ptr,  # int32 [lists, GROUP, BLOCKS / 32]: a bit per block, lowest first
    left, left_by_head_ptr,  # as in `ByMeans`
    window, tokens, sink,  # newest tokens always read; M; first tokens always read
    KV: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The blocks that one query head of one [row, slot, query] reads: those above its cut, and those always read.

    BLOCKS: of the table, padded, at least 32. PDL: `pdl_wait`.
    """
    own, head = tl.program_id(0), tl.program_id(1)
    slot = own // tokens
    place, closed = place_of(own % tokens, slot // KV, tokens, True, rows, BLOCK)
    first, recent, sealed, _ = extent(place, closed, sink, window)
    whole, begin = sealed // BLOCK, tl.cdiv(first, BLOCK)
    end = tl.maximum(recent // BLOCK, begin)
    if left_by_head_ptr is not None:
        own_head = tl.load(rows.order + slot, cache_modifier=".cg")
        left = tl.load(left_by_head_ptr + slot // KV * KV + own_head, cache_modifier=".cg")
    pdl_wait(PDL)
    at = own.to(tl.int64) * GROUP + head
    n = tl.arange(0, BLOCKS)
    # loads are vectors where the mask is the same for 16 neighbours
    x = tl.load(scores_ptr + at * BLOCKS + n, mask=n < tl.cdiv(whole, 16) * 16, other=0.0, cache_modifier=".cg")
    x = tl.where(n < whole, x, -float("inf"))
    top = tl.max(x, 0)
    top = tl.where(top == -float("inf"), 0.0, top)
    x -= top
    p = _shares(x)
    # what is left to choose from
    always = (n < begin) | (n >= end)
    free = tl.where(always, 0.0, p)
    total, covered = tl.reduce((p, p - free), 0, _add2)
    need = total * (1 - left)
    low, step = total * 0 - DEEPEST, (DEEPEST + 1) * 0.25
    # two halvings per pass, by the masses above three cuts
    for _ in tl.static_range(HALVINGS // 2):
        a, b, c = tl.exp2(low + step), tl.exp2(low + 2 * step), tl.exp2(low + 3 * step)
        a, b, c = tl.reduce((_above(free, a), _above(free, b), _above(free, c)), 0, _add3)
        times = (covered + a >= need).to(tl.float32) + (covered + b >= need).to(tl.float32)
        low += (times + (covered + c >= need).to(tl.float32)) * step
        step *= 0.25
    # where nothing may be left, every block is read; and what is not a number
    low = tl.where(left > 0, low, -float("inf"))
    chosen = (always | ((x < low) == 0)) & (n < tl.cdiv(sealed, BLOCK))
    bits = tl.reshape(chosen.to(tl.int32), [BLOCKS // 32, 32]) << tl.arange(0, 32)[None, :]
    tl.store(chosen_ptr + at * (BLOCKS // 32) + tl.arange(0, BLOCKS // 32), tl.sum(bits, 1))
    tl.store(cuts_ptr + at * 2, top)
    tl.store(cuts_ptr + at * 2 + 1, tl.where(total > 0, 1 / tl.where(total > 0, total, 1.0), 0.0))


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["cuts_ptr", "chosen_ptr", "read_ptr", "noted_ptr"],
)
def list_by_means_kernel(
    scores_ptr, rows, table_ptr,  # as above; `Rows`; int64 [B, blocks]
    lists,  # `Lists`, of capacity BLOCKS
    cuts_ptr, chosen_ptr,  # as above
    read_ptr, noted_ptr,  # int64 [1], to which the number of tokens read is added, or None; as in `ByMeans`, or None
    table_stride, tokens,  # of the table's rows; M
    KV: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr, SCAN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """List those of SCAN blocks that any query head of one [row, slot, query] reads, and count their tokens.

    Where in the list they stand, each program finds by itself: behind all that are chosen before its own.
    """
    own, start = tl.program_id(0), tl.program_id(1) * SCAN
    row = own // tokens // KV
    place, closed = place_of(own % tokens, row, tokens, True, rows, BLOCK)
    sealed = tl.minimum(closed, place + 1)
    n, word = start + tl.arange(0, SCAN), tl.arange(0, BLOCKS // 32)
    page = tl.load(table_ptr + row * table_stride + n, mask=n * BLOCK < sealed, other=0)
    pdl_wait(PDL)
    if (start * BLOCK < sealed) | (start == 0):
        at = own.to(tl.int64)
        chosen, before, rest = n * 0, word * 0, n.to(tl.float32) * 0
        for head in tl.range(0, GROUP, loop_unroll_factor=4):
            bits = chosen_ptr + (at * GROUP + head) * (BLOCKS // 32)
            before |= tl.load(bits + word, mask=word < start // 32, other=0, cache_modifier=".cg")
            chosen |= tl.load(bits + n // 32, cache_modifier=".cg")
            if noted_ptr is not None:
                cut = cuts_ptr + (at * GROUP + head) * 2
                top, unit = tl.load(cut, cache_modifier=".cg"), tl.load(cut + 1, cache_modifier=".cg")
                x = tl.load(
                    scores_ptr + (at * GROUP + head) * BLOCKS + n, mask=n * BLOCK + BLOCK <= sealed,
                    other=-float("inf"), cache_modifier=".cg",
                )  # fmt: skip
                rest += _shares(x - top) * unit
        ones = (chosen >> (n % 32)) & 1
        listed = tl.sum(_ones(before.to(tl.uint32, bitcast=True)), 0)
        tl.store(lists.blocks + at * BLOCKS + listed + tl.cumsum(ones, 0) - 1, (page << 32) + n, mask=ones != 0)
        more, read, unread = tl.reduce(
            (ones, ones * tl.minimum(sealed - n * BLOCK, BLOCK), tl.where(ones != 0, 0.0, rest)), 0, _add3
        )
        if (start + SCAN) * BLOCK >= sealed:
            tl.store(lists.counts + own, listed + more)
        if start == 0:
            read += place + 1 - sealed
        if read_ptr is not None:
            tl.atomic_add(read_ptr, read.to(tl.int64), sem="relaxed")
        if noted_ptr is not None:
            tl.atomic_add(noted_ptr, (unread * NOTED_UNIT + 0.5).to(tl.int64), sem="relaxed")
            if start == 0:
                tl.atomic_add(noted_ptr + 1, tl.where(place >= 0, GROUP, 0).to(tl.int64), sem="relaxed")
