"""From queries to outputs: codes of queries; scores, softmax and weighted sum of values of a block; the sum of parts.

Each warp has a block, or all warps share one. The last CTA that has computed a part of an output merges its parts.
"""

import triton
import triton.language as tl

from turbo_hf.layout import QUERY_MAX as LARGEST_QUERY
from turbo_hf.ops.decode.kernel_tiles import folded
from turbo_hf.ops.kernel_common import LEAST, LN_2, LOG2_E, counted, nearest, sas

QUERY_MAX = tl.constexpr(float(LARGEST_QUERY))
STATS = tl.constexpr(4)
"""Floats behind each row of a partial result: its maximum, its sum, and two that keep rows aligned."""

ONE_LEVEL = tl.constexpr(32)
"""Parts of an output that one CTA adds; more are added in groups."""

TOGETHER = tl.constexpr(8)
"""Parts of a group."""


@triton.jit
def rows_of(output, R: tl.constexpr, GROUP: tl.constexpr, SPREAD: tl.constexpr):
    """For R query rows: the token's place in its row, whether there is one, its column, and its query head.

    SPREAD: every other row is empty, and its results are dropped where a thread holds both rows of a pair.
    """
    r = tl.arange(0, R)
    live = r >= 0
    size: tl.constexpr = R // 2 if SPREAD else R
    if SPREAD:
        live = r % 2 == 0
        r = r // 2
    r = output.row_part * size + r
    query = r % output.tokens
    live = live & (r < GROUP * output.tokens)
    return output.length - output.tokens + query, live, query, output.head * GROUP + r // output.tokens


@triton.jit
def query_rows(q_ptr, strides, output, FORM: tl.constexpr):
    """The query rows of an output: numbers, pointers, which rows hold a token; and their places."""
    place, live, query, head_of = rows_of(output, FORM.rows, FORM.group, FORM.spread)
    shown = live & (place >= 0) & (place - output.length + output.tokens >= output.start)
    d = tl.arange(0, FORM.padded_dim)
    at = q_ptr + output.row * strides[0] + head_of * strides[1] + query * strides[2]
    x = tl.load(at[:, None] + d[None, :] * strides[3], mask=shown[:, None] & (d < FORM.dim)[None, :], other=0.0)
    return (x, at, strides[3], shown), place


@triton.jit
def unit_of(scoring):
    """The factor of a product of query and key: scores are in units of log2, unless they will be capped."""
    return scoring.scaling * LOG2_E if scoring.softcap is None else scoring.scaling


@triton.jit
def prepare(rows, scoring, TURBO: tl.constexpr):
    """What `channels_of` needs of `query_rows`, and the factors on scores of the rows, rounded if TURBO."""
    x, at, stride, shown = rows
    factor = tl.full([x.shape[0]], 1.0, tl.float32)
    inverse = factor
    if TURBO:
        wide = x.to(tl.float32)
        # tl.max skips NaN, which codes cannot represent
        largest = counted(tl.max(tl.abs(wide), 1)) + tl.sum(wide * 0.0, 1)
        factor = tl.div_rn(largest, tl.full([x.shape[0]], QUERY_MAX, tl.float32))
        inverse = tl.div_rn(tl.full([x.shape[0]], QUERY_MAX, tl.float32), tl.where(largest > 0, largest, 1.0))
    return (x, at, stride, shown, inverse), factor * unit_of(scoring)


@triton.jit
def channels_of(q, c, ok, TURBO: tl.constexpr, SAME: tl.constexpr):
    """Queries [R, DP] with their channels in the order c, in int16 codes if TURBO. SAME: that is their order."""
    x, rows, stride, shown, inverse = q
    if not SAME:
        x = tl.load(rows[:, None] + c[None, :] * stride, mask=shown[:, None] & ok[None, :], other=0.0)
    if TURBO:
        return nearest(x.to(tl.float32) * inverse[:, None]).to(tl.int16)
    else:
        return x


@triton.jit
def _largest(a, b):
    """The larger one, or NaN if one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def block_softmax(x, v_size, m, denom, sas_threshold, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """One block's softmax. x: scores in base 2 [NB, R, T], -inf where hidden. v_size: sizes of values [NB, T].

    Returns P times these [NB, R, T] in DTYPE; its sums int32 [NB, R], if DTYPE is int8; weight [NB, R], the value of
    one unit of it; keep [NB, R], the factor on earlier sums; the new m and denom.
    """
    top = tl.max(x, 2)
    p = x - tl.where(top == -float("inf"), 0.0, top)[:, :, None]
    if sas_threshold is not None:
        p = sas(p * LN_2, sas_threshold)
    else:
        p = tl.exp2(p)
    new = tl.maximum(m, top)
    shift = tl.where(new == -float("inf"), 0.0, new)
    keep = tl.exp2(m - shift)
    weight = tl.exp2(top - shift)
    denom = denom * keep + tl.sum(p, 2) * weight
    p = p * v_size[:, None, :]
    # NaN of a size must not become a code
    if ASM:
        most = tl.reduce(p, 2, _largest)
    else:
        most = tl.max(p, 2) + tl.sum(p * 0.0, 2)
    TOP: tl.constexpr = 127.0 if DTYPE == tl.int8 else 1.0
    p = p * (TOP / tl.where(most > LEAST, most, 1.0))[:, :, None]
    weight = weight * most * (1.0 / TOP)
    total = weight
    if DTYPE == tl.int8:
        p = nearest(p)
        total = tl.sum(p, 2)
    return p.to(DTYPE), total, weight, keep, new, denom


@triton.jit
def even(x):
    """Columns 0, 2, 4, ... of the last dimension."""
    if len(x.shape) == 2:
        kept, _ = tl.split(x.reshape(x.shape[0], x.shape[1] // 2, 2))
    else:
        kept, _ = tl.split(x.reshape(x.shape[0], x.shape[1], x.shape[2] // 2, 2))
    return kept


@triton.jit
def _dot(a, b, acc, ACC: tl.constexpr):
    """a b of each block, [NB, m, n], added to acc, or None. A single block is shared by all warps, among which Triton
    divides products of two dimensions alone."""
    if a.shape[0] > 1:
        return tl.dot(a, b, acc, out_dtype=ACC, input_precision="ieee")
    else:
        if acc is not None:
            acc = acc.reshape(acc.shape[1], acc.shape[2])
        a, b = a.reshape(a.shape[1], a.shape[2]), b.reshape(b.shape[1], b.shape[2])
        product = tl.dot(a, b, acc, out_dtype=ACC, input_precision="ieee")
        return product.reshape(1, product.shape[0], product.shape[1])


@triton.jit
def _float_dot(a, b, ASM: tl.constexpr):
    """a b in float32. The interpreter's product takes no bfloat16, which float32 holds exactly."""
    if ASM:
        return _dot(a, b, None, tl.float32)
    else:
        return _dot(a.to(tl.float32), b.to(tl.float32), None, tl.float32)


@triton.jit
def _stack(x, y):
    """x [R, D] above y."""
    return tl.join(x, y).permute(2, 0, 1).reshape(2 * x.shape[0], x.shape[1])


@triton.jit
def _halves(x, R: tl.constexpr):
    """The first R rows of x [N, 2 R, C], and the last."""
    return tl.split(x.reshape(x.shape[0], 2, R, x.shape[2]).permute(0, 2, 3, 1))


@triton.jit
def _ranged(x, weight, zero, span, LEVELS: tl.constexpr):
    """Sums x of weighted codes, int32 [NB, DP, N], as sums of what these stand for, times LEVELS. weight: its sum.

    LEVELS: 2^bits - 1. zero, span: int8 [NB, DP], spans unsigned.
    """
    return x * (span.to(tl.int32) & 255)[:, :, None] + (zero.to(tl.int32) * LEVELS)[:, :, None] * weight


@triton.jit
def _numbers(codes, zero, span, LEVELS: tl.constexpr, DTYPE: tl.constexpr):
    """INT8 codes [NB, DP, T] as in `_ranged`, where LEVELS is not 0, or unquantized numbers, in a floating type."""
    if codes.dtype == tl.int8:
        x = codes.to(tl.int32)
        if LEVELS:
            x = _ranged(x, 1, zero, span, LEVELS)
        x = x.to(tl.float32)
    else:
        x = codes
    return x.to(DTYPE)


@triton.jit
def scores(q, codes, zero, span, LEVELS: tl.constexpr, ASM: tl.constexpr):
    """q . k of one block, float32 [NB, R, T], without sizes; q int16: rounded only once, in units of 256 / LEVELS.

    q: [R, DP]; codes: int8 [NB, DP, T], or the keys themselves; zero, span: int8 [NB, DP]; LEVELS: as in `_numbers`.
    """
    NB: tl.constexpr = codes.shape[0]
    R: tl.constexpr = q.shape[0]
    DP: tl.constexpr = codes.shape[1]
    T: tl.constexpr = codes.shape[2]
    if q.dtype == tl.int16:
        digits = _stack((q.to(tl.int32) + 128 >> 8).to(tl.int8), q.to(tl.int8))
        digits = tl.broadcast_to(digits[None], [NB, 2 * R, DP])
        if LEVELS:
            high, low = folded(*tl.broadcast(q[None], span[:, None, :]), ASM)
            # the zeros' product is the same number in all columns: the sum over channels starts from it
            s = _dot(digits, tl.broadcast_to(zero[:, :, None], [NB, DP, 8]), None, tl.int32) * LEVELS
            z_high, z_low = _halves(s, R)
            s = tl.join(z_high * 0, z_high + (z_low + 128 >> 8)).permute(0, 3, 1, 2).reshape(NB, 2 * R, 1, 8)
            s = tl.broadcast_to(s, [NB, 2 * R, T // 8, 8]).reshape(NB, 2 * R, T)
            both = tl.join(high, low).permute(0, 3, 1, 2).reshape(NB, 2 * R, DP)
            high, low = _halves(_dot(both, codes, s, tl.int32), R)
        else:
            high, low = _halves(_dot(digits, codes, None, tl.int32), R)
        return (high * 256 + low).to(tl.float32)
    else:
        return _float_dot(tl.broadcast_to(q[None], [NB, R, DP]), _numbers(codes, zero, span, LEVELS, q.dtype), ASM)


@triton.jit
def accumulate(
    acc, p, total, codes, zero, span, weight, keep, LEVELS: tl.constexpr, SPREAD: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """acc * keep + (V P) * weight, float32 [NB, DP, N]; p: [NB, R, T]; the rest of values as in `scores`."""
    if p.dtype == tl.int8:
        o = _dot(codes, p.permute(0, 2, 1), None, tl.int32)
        if SPREAD:
            o, total = even(o), even(total)
        if LEVELS:
            o = _ranged(o, total[:, None, :], zero, span, LEVELS)
        o = o.to(tl.float32)
    else:
        o = _float_dot(_numbers(codes, zero, span, LEVELS, p.dtype), p.permute(0, 2, 1), ASM)
        if SPREAD:
            o = even(o)
    if SPREAD:
        weight, keep = even(weight), even(keep)
    if LEVELS:
        weight = weight * (1 / LEVELS)
    return acc * keep[:, None, :] + o * weight[:, None, :]


@triton.jit
def _pairs(x):
    """The even and the odd indices of the first of three dimensions."""
    return tl.split(x.reshape(x.shape[0] // 2, 2, x.shape[1], x.shape[2]).permute(0, 2, 3, 1))


@triton.jit
def _added(x):
    """The sum over dimension 0, of length 1, 2, 4 or 8, by halves: `tl.sum` over warps takes twice the instructions."""
    if x.shape[0] > 1:
        a, b = _pairs(x)
        x = a + b
    if x.shape[0] > 1:
        a, b = _pairs(x)
        x = a + b
    if x.shape[0] > 1:
        a, b = _pairs(x)
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
def merge(parts_ptr, first, count, STRIDE: tl.constexpr, N: tl.constexpr, DP: tl.constexpr, AT_ONCE: tl.constexpr):
    """The partial results in `count` places, each STRIDE behind the last: O [N, DP], maximum [N], sum [N].

    AT_ONCE parts per iteration, whose loads are in flight together: the number of waits determines the time. The order
    of the dimensions gives a row of O to one warp, and its maxima to the lanes of one warp (4 rows of 128 channels, 4
    warps): sums stay within a thread, comparisons within a warp.
    """
    i = tl.arange(0, AT_ONCE)
    place = i * (STRIDE * N * (DP + STATS))
    n = tl.arange(0, N) * (DP + STATS)
    stats = place[:, None] + n[None, :] + DP
    values = place[None, :, None] + n[:, None, None] + tl.arange(0, DP)[None, None, :]
    top = tl.full([N], -float("inf"), tl.float32)
    total = tl.zeros([N], tl.float32)
    o = tl.zeros([N, DP], tl.float32)
    for start in tl.range(0, count, AT_ONCE, num_stages=1):
        at = parts_ptr + (first + start * STRIDE).to(tl.int64) * (N * (DP + STATS))
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
def finish_or_merge(state, share, workspace, result, sinks_ptr, output, FORM: tl.constexpr):
    """Store what a CTA has computed of an output: the whole output, or one part of it.

    The last CTA that arrives adds the parts, in their order. Of more than ONE_LEVEL parts, the last CTA of each group
    adds the group, and the last of these CTAs adds the sums: one SM would take too long to read all parts. No CTA waits
    for another.
    """
    acc, m, denom = state
    o, top, total = combine(acc, m, denom, FORM.spread)
    N: tl.constexpr = o.shape[0]
    DP: tl.constexpr = o.shape[1]
    if share.alone:
        finish(o, top, total, result, sinks_ptr, output, FORM)
    else:
        store_part(o, top, total, workspace.parts, share.first + share.part)
        size = tl.where(share.parts > ONE_LEVEL, TOGETHER, share.parts)
        groups = tl.cdiv(share.parts, size)
        begin = share.first + share.part // size * size
        count = tl.minimum(share.first + share.parts - begin, size)
        # counters are numbered like parts: a group has that of its first one
        if _is_last(workspace.arrived + begin, count):
            o, top, total = merge(workspace.parts, begin, count, 1, N, DP, FORM.at_once)
            complete = groups == 1
            if groups > 1:
                # all warps have read the part in whose place the sum goes
                tl.debug_barrier()
                store_part(o, top, total, workspace.parts, begin)
                complete = _is_last(workspace.arrived + share.first + 1, groups)
                if complete:
                    o, top, total = merge(workspace.parts, share.first, groups, TOGETHER, N, DP, FORM.at_once)
            if complete:
                finish(o, top, total, result, sinks_ptr, output, FORM)


@triton.jit
def _is_last(arrived, count):
    """Count an arrival; whether it is the last of `count`. The counter is then 0 again."""
    last = tl.atomic_add(arrived, 1, sem="acq_rel") == count - 1
    if last:
        tl.store(arrived, 0)
    return last
