"""The query rows of an output of decode attention: which they are, and what the products take of them."""

import triton
import triton.language as tl

from turbo_hf.ops.decode.kernel_block import INT8_MAX
from turbo_hf.ops.kernel_common import as_int8


@triton.jit
def rows_of(chunk, length, head, tokens, GROUP: tl.constexpr, R: tl.constexpr, SPREAD: tl.constexpr):
    """Of R places of query rows: the token's place in its row, whether there is one, its column, its query head.

    SPREAD: every other place is empty. What is computed of those is left out wherever a thread has both of a pair.
    """
    r = tl.arange(0, R)
    live = r >= 0
    size: tl.constexpr = R // 2 if SPREAD else R
    if SPREAD:
        live = r % 2 == 0
        r = r // 2
    r = chunk * size + r
    query = r % tokens
    live = live & (r < GROUP * tokens)
    return length - tokens + query, live, query, head * GROUP + r // tokens


@triton.jit
def query_rows(
    q_ptr, q_strides, row, head, chunk, length, start, tokens,
    GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """The query rows of an output: as they are, where they lie, which hold a token; and their places."""
    place, live, query, head_of = rows_of(chunk, length, head, tokens, GROUP, R, SPREAD)
    shown = live & (place >= 0) & (place - length + tokens >= start)
    d = tl.arange(0, DP)
    at = q_ptr + row * q_strides[0] + head_of * q_strides[1] + query * q_strides[2]
    x = tl.load(at[:, None] + d[None, :] * q_strides[3], mask=shown[:, None] & (d < D)[None, :], other=0.0)
    return (x, at, q_strides[3], shown), place


@triton.jit
def prepare(rows, TURBO: tl.constexpr):
    """What `channels_of` needs of `query_rows`, and their INT8 scales."""
    x, at, stride, shown = rows
    factor = tl.full([x.shape[0]], 1.0, tl.float32)
    inverse = factor
    if TURBO:
        wide = x.to(tl.float32)
        # max skips NaN, and codes cannot say it
        largest = tl.max(tl.abs(wide), 1) + tl.sum(wide * 0.0, 1)
        factor = tl.div_rn(largest, tl.full([x.shape[0]], INT8_MAX, tl.float32))
        inverse = tl.div_rn(tl.full([x.shape[0]], INT8_MAX, tl.float32), tl.where(largest > 0, largest, 1.0))
    return (x, at, stride, shown, inverse), factor


@triton.jit
def channels_of(q, c, ok, PLAIN: tl.constexpr, SAME: tl.constexpr):
    """Queries [R, DP] with their channels in the order c, in INT8 unless PLAIN. SAME: that is the order they have."""
    x, rows, stride, shown, inverse = q
    if not SAME:
        x = tl.load(rows[:, None] + c[None, :] * stride, mask=shown[:, None] & ok[None, :], other=0.0)
    if PLAIN:
        return x
    else:
        return as_int8(x.to(tl.float32) * inverse[:, None])
