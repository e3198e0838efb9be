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
def _shares(x, top):
    """Masses of blocks relative to that of the largest score."""
    x -= tl.where(top == -float("inf"), 0.0, top)
    return tl.where(x > -DEEPEST, tl.exp2(x), 0.0)


@triton.jit
def _list(
    scores, capacity, cuts, seen, table, listed, BLOCK: tl.constexpr, GROUP: tl.constexpr, G: tl.constexpr,
    SCAN: tl.constexpr,
):  # fmt: skip
    """List the blocks above the cut of any head, and those that are always read.

    seen: tokens of sealed blocks that the query sees, their whole blocks, and the first and last block by choice.
    Returns how many blocks are listed, their tokens, and the share that is left of each head's mass, [G].
    """
    sealed, whole, begin, end = seen
    blocks = tl.cdiv(sealed, BLOCK)
    g = tl.arange(0, G)
    tops = tl.load(cuts + 2 * g, mask=g < GROUP, other=0.0, cache_modifier=".cg")
    lowest = tl.load(cuts + 2 * g + 1, mask=g < GROUP, other=1.0, cache_modifier=".cg")
    total = tl.zeros([G], tl.float32)
    covered = tl.zeros([G], tl.float32)
    count, read = blocks * 0, blocks * 0
    for start in tl.range(0, blocks, SCAN, num_stages=1):
        n = start + tl.arange(0, SCAN)
        page = tl.load(table + n, mask=n < blocks, other=0)
        live = (g < GROUP)[:, None] & (n < whole)[None, :]
        x = tl.load(scores + g[:, None] * capacity + n[None, :], mask=live, other=-float("inf"), cache_modifier=".cg")
        p = _shares(x, tops[:, None])
        # what is not a number is read
        wanted = tl.max((live & ((p < lowest[:, None]) == 0)).to(tl.int32), 0)
        kept = ((wanted != 0) | (n < begin) | (n >= end)) & (n < blocks)
        total += tl.sum(p, 1)
        covered += tl.sum(tl.where(kept[None, :], p, 0.0), 1)
        read += tl.sum(tl.where(kept, tl.minimum(sealed - n * BLOCK, BLOCK), 0), 0)
        ones = kept.to(tl.int32)
        tl.store(listed + count + tl.cumsum(ones, 0) - 1, (page << 32) + n, mask=kept)
        count += tl.sum(ones, 0)
    share = 1 - covered / tl.where(total > 0, total, 1.0)
    return count, read, tl.where((total > 0) & (share > 0), share, 0.0)


@triton.jit(
    do_not_specialize=["table_stride", "capacity", "window"],
    do_not_specialize_on_alignment=["cuts_ptr", "arrived_ptr", "read_ptr", "noted_ptr", "lefts_ptr"],
)
def list_by_means_kernel(
    scores_ptr,  # as above
    rows,  # `Rows`
    table_ptr,  # int64 [B, blocks]
    lists,  # `Lists`
    cuts_ptr, arrived_ptr,  # float32 [lists, GROUP, 2], int32 [lists]: zeros before and after
    read_ptr, noted_ptr,  # int64 [1], to which the number of tokens read is added, or None; as in `ByMeans`, or None
    left, lefts_ptr,  # as in `ByMeans`
    table_stride, capacity, window,  # of the table's rows, of a list; newest tokens always read
    tokens, sink,  # M; first tokens always read
    KV: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, G: tl.constexpr, BLOCKS: tl.constexpr,
    SCAN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The cut of one query head of one [row, slot, query]; the last of its heads to arrive lists and counts the blocks.

    BLOCKS: of the table, padded. SCAN: blocks that are listed at a time.
    """
    pdl_wait(PDL)
    own = tl.program_id(0)
    query, slot = own % tokens, own // tokens
    row = slot // KV
    place, closed = place_of(query, row, tokens, True, rows, BLOCK)
    first, recent, sealed, opened = extent(place, closed, sink, window)
    whole, begin = sealed // BLOCK, tl.cdiv(first, BLOCK)
    end = tl.maximum(recent // BLOCK, begin)
    n = tl.arange(0, BLOCKS)
    scores = scores_ptr + own.to(tl.int64) * GROUP * capacity
    head = tl.program_id(1)
    x = tl.load(scores + head * capacity + n, mask=n < whole, other=-float("inf"), cache_modifier=".cg")
    top = tl.max(x, 0)
    p = _shares(x, top)
    if lefts_ptr is not None:
        left = tl.load(lefts_ptr + row * KV + tl.load(rows.order + slot))
    need = tl.sum(p, 0) * (1 - left)
    forced = (n < begin) | (n >= end)
    low = need * 0 - DEEPEST
    high = need * 0 + 1
    for _ in tl.range(0, HALVINGS, num_stages=1):
        middle = (low + high) * 0.5
        enough = tl.sum(tl.where(forced | (p >= tl.exp2(middle)), p, 0.0), 0) >= need
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    cuts = cuts_ptr + own * (2 * GROUP)
    tl.store(cuts + 2 * head, top)
    # below any share: every block is read
    tl.store(cuts + 2 * head + 1, tl.where(left > 0, tl.exp2(low), -1.0))
    tl.debug_barrier()
    if tl.atomic_add(arrived_ptr + own, 1, sem="acq_rel") == GROUP - 1:
        tl.store(arrived_ptr + own, 0)
        seen = sealed, whole, begin, end
        listed, table = lists.blocks + own.to(tl.int64) * capacity, table_ptr + row * table_stride
        listed_count, read, share = _list(scores, capacity, cuts, seen, table, listed, BLOCK, GROUP, G, SCAN)
        tl.store(lists.counts + own, listed_count)
        if read_ptr is not None:
            tl.atomic_add(read_ptr, (read + opened).to(tl.int64), sem="relaxed")
        if noted_ptr is not None:
            tl.atomic_add(noted_ptr, tl.sum((share * NOTED_UNIT + 0.5).to(tl.int64), 0), sem="relaxed")
            tl.atomic_add(noted_ptr + 1, tl.where(place >= 0, GROUP, 0).to(tl.int64), sem="relaxed")
