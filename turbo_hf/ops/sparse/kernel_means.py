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


@triton.jit(do_not_specialize=["table_stride", "capacity"])
def score_means_kernel(
    queries,  # `DecodeQueries`
    means,  # `PageMeans`
    rows,  # `Rows`
    table_ptr,  # int64 [B, blocks]
    scores_ptr,  # float32 [lists, GROUP, capacity], in log2
    scoring,  # `Scoring`
    table_stride, capacity, tokens,  # of the table's rows; of a list; M
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
    place, closed = place_of(query, row, tokens, True, rows, BLOCK)
    whole = tl.minimum(closed, place + 1) // BLOCK
    first = tl.program_id(1) * TILE
    if first < whole:
        n = first + tl.arange(0, TILE)
        d = tl.arange(0, DP)
        g = tl.arange(0, G)
        head = tl.load(rows.order + slot, cache_modifier=".cg")
        page = tl.load(table_ptr + row * table_stride + n, mask=n < whole, other=0)
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


@triton.jit(do_not_specialize=["table_stride", "capacity", "window"])
def list_by_means_kernel(
    scores_ptr,  # as above
    rows,  # `Rows`
    table_ptr,  # int64 [B, blocks]
    lists,  # `Lists`
    noted_ptr,  # int64 [2] as in `ByMeans`, or None
    left,  # as in `ByMeans`
    table_stride, capacity, window,  # of the table's rows, of a list; newest tokens always read
    tokens, sink,  # M; first tokens always read
    KV: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, G: tl.constexpr, BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """List the sealed blocks that one [row, slot, query] reads, and count them. BLOCKS: of the table, padded."""
    pdl_wait(PDL)
    own = tl.program_id(0)
    query, slot = own % tokens, own // tokens
    row = slot // KV
    place, closed = place_of(query, row, tokens, True, rows, BLOCK)
    first, recent, sealed, _ = extent(place, closed, sink, window)
    blocks, whole, begin = tl.cdiv(sealed, BLOCK), sealed // BLOCK, tl.cdiv(first, BLOCK)
    end = tl.maximum(recent // BLOCK, begin)
    n = tl.arange(0, BLOCKS)
    g = tl.arange(0, G)
    live = (g < GROUP)[:, None] & (n < whole)[None, :]
    at = scores_ptr + (own.to(tl.int64) * GROUP + g)[:, None] * capacity + n[None, :]
    x = tl.load(at, mask=live, other=-float("inf"), cache_modifier=".cg")
    page = tl.load(table_ptr + row * table_stride + n, mask=n < blocks, other=0)
    forced = (n < begin) | (n >= end)
    top = tl.max(x, 1)
    x -= tl.where(top == -float("inf"), 0.0, top)[:, None]
    p = tl.where(x > -DEEPEST, tl.exp2(x), 0.0)
    total = tl.sum(p, 1)
    need = total * (1 - left)
    low = tl.full([G], 0.0, tl.float32) - DEEPEST
    high = tl.full([G], 1.0, tl.float32)
    for _ in tl.range(0, HALVINGS, num_stages=1):
        middle = (low + high) * 0.5
        enough = tl.sum(tl.where(forced[None, :] | (x >= middle[:, None]), p, 0.0), 1) >= need
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    # what is not a number is read
    wanted = tl.max((live & ((x < low[:, None]) == 0)).to(tl.int32), 0)
    kept = ((wanted != 0) | forced) & (n < blocks)
    if noted_ptr is not None:
        share = 1 - tl.sum(tl.where(kept[None, :], p, 0.0), 1) / tl.where(total > 0, total, 1.0)
        share = tl.where((total > 0) & (share > 0), share, 0.0)
        tl.atomic_add(noted_ptr, tl.sum((share * NOTED_UNIT + 0.5).to(tl.int64), 0), sem="relaxed")
        tl.atomic_add(noted_ptr + 1, tl.where(place >= 0, GROUP, 0).to(tl.int64), sem="relaxed")
    kept = kept.to(tl.int32)
    listed = lists.blocks + own.to(tl.int64) * capacity
    tl.store(listed + tl.cumsum(kept, 0) - 1, (page << 32) + n, mask=kept != 0)
    tl.store(lists.counts + own, tl.sum(kept, 0))
