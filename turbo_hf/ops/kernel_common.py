"""What the kernels share."""

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from turbo_hf.layout import CODE_MAX as LARGEST_CODE
from turbo_hf.layout import LEAST as SMALLEST
from turbo_hf.layout import SCORE_LIMIT as LARGEST_SCORE

LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2))
CODE_MAX = tl.constexpr(float(LARGEST_CODE))
LEAST = tl.constexpr(SMALLEST)
SCORE_LIMIT = tl.constexpr(LARGEST_SCORE)
ROUND = tl.constexpr(12582912.0)
"""1.5 * 2^23: added to a number below 2^22, it leaves the nearest integer in the low bits, ties to even."""
ROUND_BITS = tl.constexpr(0x4B400000)
"""The bit pattern of `ROUND`."""


@triton.jit
def counted(largest):
    """The largest |x| of tokens, with 0 for those that count as 0 (`layout.LEAST`); NaN stays."""
    return tl.where(largest < LEAST, 0.0, largest)


@triton.jit
def as_int8(x):
    """Round to the nearest integer without the conversion unit, which exp2 needs: |x| < 2^22; x must fit int8."""
    return (x + ROUND).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def nearest(x):
    """As `as_int8`, to int32."""
    return (x + ROUND).to(tl.int32, bitcast=True) - ROUND_BITS


@triton.jit
def pdl_wait(PDL: tl.constexpr, LAST: tl.constexpr = False):
    """Programmatic dependent launch (PDL): wait for what earlier launches write and, unless LAST, let the next begin.

    Code before this call overlaps with the previous launch. It may read what that launch only reads, provided that it
    waits too before it lets others begin. LAST: the next launch is not ours. PDL: whether launches overlap.
    """
    if PDL:
        gdc_wait()
        if not LAST:
            gdc_launch_dependents()


@triton.jit
def slot_of_width(slot, ok, G: tl.constexpr, FORM: tl.constexpr):
    """A slot's number among those of width G, and whether it is of that width, where ok.

    FORM.slots: of each width. Triton 3.6 takes no tuple out of FORM as an argument.
    """
    for g in tl.static_range(G):
        slot -= FORM.slots[g]
    return slot, ok & (slot >= 0) & (slot < FORM.slots[G])


@triton.jit
def to_l2(pointer, ok):
    """Prefetch to L2 the cache lines that pointers point to, where ok; returns nothing. Not for the interpreter."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
        "=r,l,r",
        [pointer, ok.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def in_value_order(p):
    """Columns of p [M, N] in `layout.VALUE_ORDER`, in which each thread feeds P V with the P that it has computed."""
    m: tl.constexpr = p.shape[0]
    n: tl.constexpr = p.shape[1]
    return p.reshape(m, n // 16, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(m, n)


@triton.jit
def in_time_order(v):
    """Columns of v [M, N], which are in `layout.VALUE_ORDER`, in the order of time."""
    m: tl.constexpr = v.shape[0]
    n: tl.constexpr = v.shape[1]
    return v.reshape(m, n // 16, 4, 2, 2).permute(0, 1, 3, 2, 4).reshape(m, n)


@triton.jit
def value_order(position):
    """The token of its group of 16 that a stored position holds (`layout.VALUE_ORDER`)."""
    inside = position % 16
    return position - inside + (inside // 2 % 2) * 8 + inside // 4 * 2 + inside % 2


@triton.jit
def tanh(x):
    """tanh through exp2; right at both ends."""
    return 1 - 2 / (tl.exp2(x * (2 * LOG2_E)) + 1)


@triton.jit
def sas(x, threshold):
    """SAS exponential of x <= 0; 0 below `threshold` (TurboAttention sec. 4). e^-i is exact enough through exp2."""
    # not maximum, which drops NaN
    y = tl.where(x < threshold, -threshold, -x)
    whole = tl.floor(y)
    f = y - whole
    cubic = ((-0.1025 * f + 0.4626) * f - 0.9922) * f + 0.9996
    return tl.where(x < threshold, 0.0, tl.exp2(whole * -LOG2_E) * cubic)


class Output(NamedTuple):
    """What a program computes: a part of the query rows of one row and KV head, and where they go.

    row, head: row of the batch, and KV head.
    row_part: which part of the query rows.
    length: tokens up to and including the last query's.
    start: the first of the `tokens` columns that holds a token.
    tokens: columns of the queries.
    column: column of the result to which the first query goes.
    columns: columns of the result.
    """

    row: Any
    head: Any
    row_part: Any
    length: Any
    start: Any
    tokens: Any
    column: Any
    columns: Any


class TileRun(NamedTuple):
    """A run of tiles of one row: sealed blocks, then the open tokens.

    table, entries: pages of the row's sealed blocks, and how many entries the table has.
    page: pages of the first tile.
    sealed: sealed blocks of the row.
    begin: first tile.
    steps: number of tiles; None: those of all sealed blocks.
    """

    table: Any
    entries: Any
    page: Any
    sealed: Any
    begin: Any
    steps: Any


class Chosen(NamedTuple):
    """What a query of a sparse step attends to.

    place: the query's place in its row.
    buckets: pointer to the bucket of each token; None without buckets.
    visited: pointer to a flag for each bucket; None without buckets.
    sink, window: how many of the first and of the newest tokens are always read.
    """

    place: Any
    buckets: Any
    visited: Any
    sink: Any
    window: Any


class Share(NamedTuple):
    """The part of an output that a CTA has computed.

    alone: whether it is the whole output.
    first: place of the output's first partial result.
    part, parts: number of this part, and of all parts.
    """

    alone: Any
    first: Any
    part: Any
    parts: Any
