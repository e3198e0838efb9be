"""Which sealed blocks a step reads by the mean keys of their pages: scores of all blocks, then a list of those above a
cut that is found without sorting (`ops.sparse.reference_means`)."""

import triton
import triton.language as tl

from turbo_hf.layout import NOTED_UNIT as SHARE_UNIT
from turbo_hf.ops.kernel_common import LOG2_E, pdl_wait, tanh, to_l2
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
    """Masses of blocks relative to that of the largest score, of which x is short by so much in log2."""
    return tl.where(x > -DEEPEST, tl.exp2(x), 0.0)


@triton.jit
def _add2(a, b, c, d):
    return a + c, b + d


@triton.jit
def _add3(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def _add7(a, b, c, d, e, f, g, h, i, j, k, m, n, o):
    return a + h, b + i, c + j, d + k, e + m, f + n, g + o


@triton.jit
def _above(p, low, step):
    """Mass at 2^low and more once `step` is added to low 1, 2, ... 7 times: sums of one pass over the program."""
    a, b, c, d = tl.exp2(low + step), tl.exp2(low + 2 * step), tl.exp2(low + 3 * step), tl.exp2(low + 4 * step)
    e, f, g = tl.exp2(low + 5 * step), tl.exp2(low + 6 * step), tl.exp2(low + 7 * step)
    masses = (
        tl.where(p >= a, p, 0.0), tl.where(p >= b, p, 0.0), tl.where(p >= c, p, 0.0), tl.where(p >= d, p, 0.0),
        tl.where(p >= e, p, 0.0), tl.where(p >= f, p, 0.0), tl.where(p >= g, p, 0.0),
    )  # fmt: skip
    return tl.reduce(masses, 0, _add7)


@triton.jit
def _list(
    scores, capacity, cuts, seen, table, listed, BLOCK: tl.constexpr, GROUP: tl.constexpr, SCAN: tl.constexpr,
    NOTED: tl.constexpr,
):  # fmt: skip
    """List the blocks above the cut of any head, and those that are always read.

    seen: tokens of sealed blocks that the query sees, their whole blocks, and the first and last block by choice.
    Returns how many blocks are listed, their tokens, and, if NOTED, the sum over heads of the share that is left.
    """
    sealed, whole, begin, end = seen
    blocks = tl.cdiv(sealed, BLOCK)
    count, read, left = blocks * 0, blocks * 0, blocks.to(tl.float32) * 0
    for start in tl.range(0, blocks, SCAN, num_stages=1):
        n = start + tl.arange(0, SCAN)
        wanted = (n < begin) | (n >= end)
        rest = n.to(tl.float32) * 0
        for head in tl.range(0, GROUP, loop_unroll_factor=4):
            top = tl.load(cuts + 3 * head, cache_modifier=".cg")
            low = tl.load(cuts + 3 * head + 1, cache_modifier=".cg")
            x = tl.load(scores + head * capacity + n, mask=n < whole, other=-float("inf"), cache_modifier=".cg") - top
            # what is not a number is read
            wanted |= (x < low) == 0
            if NOTED:
                rest += _shares(x) * tl.load(cuts + 3 * head + 2, cache_modifier=".cg")
        kept = wanted & (n < blocks)
        page = tl.load(table + n, mask=n < blocks, other=0)
        ones = kept.to(tl.int32)
        tl.store(listed + count + tl.cumsum(ones, 0) - 1, (page << 32) + n, mask=kept)
        more, tokens, unread = tl.reduce(
            (ones, tl.where(kept, tl.minimum(sealed - n * BLOCK, BLOCK), 0), tl.where(kept, 0.0, rest)), 0, _add3
        )
        count, read, left = count + more, read + tokens, left + unread
    return count, read, left


@triton.jit(
    do_not_specialize=["table_stride", "capacity", "list_stride", "window"],
    do_not_specialize_on_alignment=["cuts_ptr", "arrived_ptr", "read_ptr", "noted_ptr", "left_by_head_ptr"],
)
def list_by_means_kernel(
    scores_ptr,  # as above
    rows,  # `Rows`
    table_ptr,  # int64 [B, blocks]
    lists,  # `Lists`
    cuts_ptr, arrived_ptr,  # float32 [lists, GROUP, 3], int32 [lists]: zeros before and after
    read_ptr, noted_ptr,  # int64 [1], to which the number of tokens read is added, or None; as in `ByMeans`, or None
    left, left_by_head_ptr,  # as in `ByMeans`
    table_stride, capacity, list_stride,  # of the table's rows, of a list; scores of a list
    window, tokens, sink,  # newest tokens always read; M; first tokens always read
    KV: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, BLOCKS: tl.constexpr, SCAN: tl.constexpr,
    PDL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The cut of one query head of one [row, slot, query]; the last of its heads to arrive lists and counts the blocks.

    BLOCKS: of the table, padded. SCAN: blocks that are listed at a time. list_stride is GROUP capacity, which Triton
    should not know: it would give four neighbours to a thread, load them one by one, and move all of them again to
    store the list.
    """
    own, head = tl.program_id(0), tl.program_id(1)
    query, slot = own % tokens, own // tokens
    row = slot // KV
    place, closed = place_of(query, row, tokens, True, rows, BLOCK)
    first, recent, sealed, opened = extent(place, closed, sink, window)
    whole, begin = sealed // BLOCK, tl.cdiv(first, BLOCK)
    end = tl.maximum(recent // BLOCK, begin)
    table = table_ptr + row * table_stride
    n = tl.arange(0, BLOCKS)
    if ASM:
        line = tl.arange(0, (BLOCKS + 15) // 16) * 16
        to_l2(table + line, line < tl.cdiv(sealed, BLOCK))
    pdl_wait(PDL)
    scores = scores_ptr + own.to(tl.int64) * list_stride
    x = tl.load(scores + head * capacity + n, mask=n < whole, other=-float("inf"), cache_modifier=".cg")
    top = tl.max(x, 0)
    top = tl.where(top == -float("inf"), 0.0, top)
    p = _shares(x - top)
    # what is left to choose from
    free = tl.where((n < begin) | (n >= end), 0.0, p)
    total, covered = tl.reduce((p, p - free), 0, _add2)
    if left_by_head_ptr is not None:
        own_head = tl.load(rows.order + slot, cache_modifier=".cg")
        left = tl.load(left_by_head_ptr + row * KV + own_head, cache_modifier=".cg")
    need = total * (1 - left)
    low, step = total * 0 - DEEPEST, (DEEPEST + 1) * 0.125
    for _ in tl.static_range(HALVINGS // 3):
        a, b, c, d, e, f, g = _above(free, low, step)
        times = (covered + a >= need).to(tl.float32) + (covered + b >= need).to(tl.float32)
        times += (covered + c >= need).to(tl.float32) + (covered + d >= need).to(tl.float32)
        times += (covered + e >= need).to(tl.float32) + (covered + f >= need).to(tl.float32)
        low += (times + (covered + g >= need).to(tl.float32)) * step
        step *= 0.125
    cuts = cuts_ptr + own * (3 * GROUP)
    tl.store(cuts + 3 * head, top)
    # where nothing may be left, every block is read
    tl.store(cuts + 3 * head + 1, tl.where(left > 0, low, -float("inf")))
    tl.store(cuts + 3 * head + 2, tl.where(total > 0, 1 / tl.where(total > 0, total, 1.0), 0.0))
    tl.debug_barrier()
    if tl.atomic_add(arrived_ptr + own, 1, sem="acq_rel") == GROUP - 1:
        tl.store(arrived_ptr + own, 0)
        seen = sealed, whole, begin, end
        listed = lists.blocks + own.to(tl.int64) * capacity
        count, read, share_left = _list(
            scores, capacity, cuts, seen, table, listed, BLOCK, GROUP, SCAN, noted_ptr is not None
        )
        tl.store(lists.counts + own, count)
        if read_ptr is not None:
            tl.atomic_add(read_ptr, (read + opened).to(tl.int64), sem="relaxed")
        if noted_ptr is not None:
            tl.atomic_add(noted_ptr, (share_left * NOTED_UNIT + 0.5).to(tl.int64), sem="relaxed")
            tl.atomic_add(noted_ptr + 1, tl.where(place >= 0, GROUP, 0).to(tl.int64), sem="relaxed")
