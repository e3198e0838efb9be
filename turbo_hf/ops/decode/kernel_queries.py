"""The query rows of an output of decode attention: which they are, and what the products take of them."""

import triton
import triton.language as tl

from turbo_hf.layout import QUERY_MAX as LARGEST_QUERY
from turbo_hf.ops.kernel_common import LOG2_E, counted, nearest

QUERY_MAX = tl.constexpr(float(LARGEST_QUERY))


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
    """What `channels_of` needs of `query_rows`, and the factors on scores of rounded rows and of unquantized rows."""
    x, at, stride, shown = rows
    factor = tl.full([x.shape[0]], 1.0, tl.float32)
    inverse = factor
    if TURBO:
        wide = x.to(tl.float32)
        # tl.max skips NaN, which codes cannot represent
        largest = counted(tl.max(tl.abs(wide), 1)) + tl.sum(wide * 0.0, 1)
        factor = tl.div_rn(largest, tl.full([x.shape[0]], QUERY_MAX, tl.float32))
        inverse = tl.div_rn(tl.full([x.shape[0]], QUERY_MAX, tl.float32), tl.where(largest > 0, largest, 1.0))
    unit = unit_of(scoring)
    return (x, at, stride, shown, inverse), (factor * unit, tl.full([x.shape[0]], 1.0, tl.float32) * unit)


@triton.jit
def channels_of(q, c, ok, PLAIN: tl.constexpr, SAME: tl.constexpr):
    """Queries [R, DP] with their channels in the order c, in int16 codes unless PLAIN. SAME: that is their order."""
    x, rows, stride, shown, inverse = q
    if not SAME:
        x = tl.load(rows[:, None] + c[None, :] * stride, mask=shown[:, None] & ok[None, :], other=0.0)
    if PLAIN:
        return x
    else:
        return nearest(x.to(tl.float32) * inverse[:, None]).to(tl.int16)
