"""Partial results of decode attention: from warps to a CTA, from CTAs to an output (LeanAttention alg. 4)."""

import triton
import triton.language as tl

from turbo_hf.kernels.block_attention import LOG2_E, even


@triton.jit
def combine(acc, m, mass, SPREAD: tl.constexpr):
    """The warps' sums as one: O [N, DP], maximum [N], sum [N]."""
    if SPREAD:
        m, mass = even(m), even(mass)
    top = tl.max(m, 0)
    rest = tl.exp2(m - tl.where(top == -float("inf"), 0.0, top)[None, :])
    return tl.trans(tl.sum(acc * rest[:, None, :], 0)), top, tl.sum(mass * rest, 0)


@triton.jit
def leave_part(o, top, total, part):
    """A partial result to memory, complete before this CTA reports it."""
    N: tl.constexpr = o.shape[0]
    DP: tl.constexpr = o.shape[1]
    n = tl.arange(0, N)
    tl.store(part + n[:, None] * DP + tl.arange(0, DP)[None, :], o)
    tl.store(part + N * DP + n, top)
    tl.store(part + N * DP + N + n, total)
    tl.debug_barrier()


@triton.jit
def merge(parts_ptr, first_cta, count, N: tl.constexpr, DP: tl.constexpr, PARTS: tl.constexpr):
    """The partial results of one output, in the order of the CTAs: O [N, DP], maximum [N], sum [N].

    PARTS at a time, all of whose loads are on their way at once: what counts here is the number of waits.
    """
    n = tl.arange(0, N)
    d = tl.arange(0, DP)
    top = tl.full([N], -float("inf"), tl.float32)
    total = tl.zeros([N], tl.float32)
    o = tl.zeros([N, DP], tl.float32)
    for start in tl.range(0, count, PARTS, num_stages=1):
        i = start + tl.arange(0, PARTS)
        # a CTA leaves one part of the output that it ends with, and one of any other
        at = parts_ptr + (2 * (first_cta + i) + (i == 0)).to(tl.int64) * (N * (DP + 2))
        live = (i < count)[:, None]
        stats = at[:, None] + N * DP + n[None, :]
        found = tl.load(stats, mask=live, other=-float("inf"), cache_modifier=".cg")
        sums = tl.load(stats + N, mask=live, other=0.0, cache_modifier=".cg")
        values = at[:, None, None] + n[None, :, None] * DP + d[None, None, :]
        part = tl.load(values, mask=live[:, :, None], other=0.0, cache_modifier=".cg")
        new = tl.maximum(top, tl.max(found, 0))
        shift = tl.where(new == -float("inf"), 0.0, new)
        share = tl.exp2(found - shift[None, :])
        keep = tl.exp2(top - shift)
        # selected after the product: one that is fused with the sum would leave other bits in other threads
        total = total * keep + tl.sum(tl.where(live, sums * share, 0.0), 0)
        o = o * keep[:, None] + tl.sum(tl.where(live[:, :, None], part * share[:, :, None], 0.0), 0)
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
