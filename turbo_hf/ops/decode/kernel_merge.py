"""Partial results of decode attention: from warps to a CTA, from CTAs to an output (LeanAttention alg. 4)."""

import triton
import triton.language as tl

from turbo_hf.ops.decode.kernel_block import even
from turbo_hf.ops.decode.kernel_queries import rows_of
from turbo_hf.ops.kernel_common import LN_2, LOG2_E

STATS = tl.constexpr(4)
"""Floats behind each row of a partial result: its maximum, its sum, and two that keep rows aligned."""


@triton.jit
def _halves(x):
    """The even and the odd indices of the first of three dimensions."""
    return tl.split(x.reshape(x.shape[0] // 2, 2, x.shape[1], x.shape[2]).permute(0, 2, 3, 1))


@triton.jit
def _added(x):
    """The sum over dimension 0, of length 1, 2, 4 or 8, by halves: `tl.sum` over warps takes twice the instructions."""
    if x.shape[0] > 1:
        a, b = _halves(x)
        x = a + b
    if x.shape[0] > 1:
        a, b = _halves(x)
        x = a + b
    if x.shape[0] > 1:
        a, b = _halves(x)
        x = a + b
    return tl.sum(x, 0)


@triton.jit
def combine(acc, m, denom, SPREAD: tl.constexpr):
    """The warps' sums as one: O [N, DP], maximum [N], sum [N].

    The maximum is rounded up to a whole number. Parts are then scaled by powers of two when they are added, and their
    sum has the same bits whether or not the compiler uses FMA.
    """
    if SPREAD:
        m, denom = even(m), even(denom)
    top = tl.ceil(tl.max(m, 0))
    rest = tl.exp2(m - tl.where(top == -float("inf"), 0.0, top)[None, :])
    return tl.trans(_added(acc * rest[:, None, :])), top, tl.sum(denom * rest, 0)


@triton.jit
def store_part(o, top, total, parts_ptr, place):
    """Store a partial result, completely before this CTA reports its arrival."""
    N: tl.constexpr = o.shape[0]
    DP: tl.constexpr = o.shape[1]
    row = parts_ptr + place.to(tl.int64) * (N * (DP + STATS)) + tl.arange(0, N) * (DP + STATS)
    tl.store(row[:, None] + tl.arange(0, DP)[None, :], o)
    tl.store(row + DP, top)
    tl.store(row + DP + 1, total)
    tl.debug_barrier()


@triton.jit
def merge(parts_ptr, first, count, N: tl.constexpr, DP: tl.constexpr, AT_ONCE: tl.constexpr):
    """The partial results of one output, in places from `first` on: O [N, DP], maximum [N], sum [N].

    AT_ONCE parts per iteration, whose loads are in flight together: the number of waits determines the time. The order
    of the dimensions gives a row of O to one warp, and its maxima to the lanes of one warp (4 rows of 128 channels, 4
    warps): sums stay within a thread, comparisons within a warp.
    """
    i = tl.arange(0, AT_ONCE)
    place = i * (N * (DP + STATS))
    n = tl.arange(0, N) * (DP + STATS)
    stats = place[:, None] + n[None, :] + DP
    values = place[None, :, None] + n[:, None, None] + tl.arange(0, DP)[None, None, :]
    top = tl.full([N], -float("inf"), tl.float32)
    total = tl.zeros([N], tl.float32)
    o = tl.zeros([N, DP], tl.float32)
    for start in tl.range(0, count, AT_ONCE, num_stages=1):
        at = parts_ptr + (first + start).to(tl.int64) * (N * (DP + STATS))
        live = i < count - start
        part = tl.load(at + values, mask=live[None, :, None], other=0.0, cache_modifier=".cg")
        # a barrier for loads: without it a third of them would wait for `found`
        tl.debug_barrier()
        found = tl.load(at + stats, mask=live[:, None], other=-float("inf"), cache_modifier=".cg")
        sums = tl.load(at + 1 + stats, mask=live[:, None], other=0.0, cache_modifier=".cg")
        new = tl.maximum(top, tl.max(found, 0))
        shift = tl.where(new == -float("inf"), 0.0, new)
        share = tl.exp2(found - shift[None, :])
        keep = tl.exp2(top - shift)
        total = total * keep + tl.sum(sums * share, 0)
        o = o * keep[:, None] + tl.sum(part * tl.trans(share)[:, :, None], 1)
        top = new
    return o, top, total


@triton.jit
def with_sinks(o, top, total, sinks_ptr, head_of, live):
    """O [N, DP], maximum [N] and sum [N] of query rows with their heads' sinks, each a logit without a value."""
    sink = tl.load(sinks_ptr + head_of, mask=live, other=0.0).to(tl.float32) * LOG2_E
    new = tl.maximum(top, sink)
    share = tl.exp2(top - new)
    total = total * share + tl.exp2(sink - new)
    return o * share[:, None], new, total


@triton.jit
def finish(o, top, total, result, sinks_ptr, output, FORM: tl.constexpr):
    """Write out and lse of N query rows from their sums. o: [N, DP]; top, total: [N]."""
    GROUP: tl.constexpr = FORM.group
    D: tl.constexpr = FORM.dim
    place, live, query, head_of = rows_of(output, o.shape[0], GROUP, False)
    padding = (place < 0) | (place - output.length + output.tokens < output.start)
    if sinks_ptr is not None:
        o, top, total = with_sinks(o, top, total, sinks_ptr, head_of, live)
    o = o / tl.where(total > 0, total, 1.0)[:, None]
    lse = tl.where(padding | (total == 0), -float("inf"), (top + tl.log2(total)) * LN_2)
    d = tl.arange(0, o.shape[1])
    at = (output.row * (FORM.kv_heads * GROUP) + head_of) * output.columns + output.column + query
    out = tl.where(padding[:, None], 0.0, o).to(result.out.dtype.element_ty)
    tl.store(result.out + (at * D)[:, None] + d[None, :], out, mask=live[:, None] & (d < D)[None, :])
    tl.store(result.lse + at, lse, mask=live)


@triton.jit
def finish_or_merge(state, share, number, workspace, result, sinks_ptr, output, FORM: tl.constexpr):
    """Store what a CTA has computed of output `number`: the whole output, or one part of it.

    The last CTA that arrives adds the parts, in their order. No CTA waits for another.
    """
    acc, m, denom = state
    o, top, total = combine(acc, m, denom, FORM.spread)
    if share.alone:
        finish(o, top, total, result, sinks_ptr, output, FORM)
    else:
        store_part(o, top, total, workspace.parts, share.first + share.part)
        arrived = workspace.arrived + number
        if tl.atomic_add(arrived, 1, sem="acq_rel") == share.parts - 1:
            tl.store(arrived, 0)
            o, top, total = merge(workspace.parts, share.first, share.parts, o.shape[0], o.shape[1], FORM.at_once)
            finish(o, top, total, result, sinks_ptr, output, FORM)
