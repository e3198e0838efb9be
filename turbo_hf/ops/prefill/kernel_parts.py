"""Partial results of tiles of queries whose past several programs have shared, as one."""

import triton
import triton.language as tl

from turbo_hf.ops.kernel_common import LN_2, LOG2_E


@triton.jit(do_not_specialize=["pairs", "tokens"])
def merge_parts_kernel(
    outs,  # float32 [PARTS, B*Hq, M, D]
    lses,  # float32 [PARTS, B*Hq, M], natural log
    starts,  # int64 [B] or None: what lies before is not read
    out, stride_b, stride_h, stride_m,  # [B, Hq, M, D]
    lse,  # float32 [B*Hq, M]
    pairs, tokens,
    PARTS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Each program merges ROWS queries of one head; 0 and -inf before `starts`."""
    tiles = tl.cdiv(tokens, ROWS)
    pair = (tl.program_id(0) // tiles).to(tl.int64)
    row, head = pair // HEADS, pair % HEADS
    m = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    inside = m < tokens
    seen = inside
    if starts is not None:
        seen &= m >= tl.load(starts + row)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    for part in tl.static_range(PARTS):
        top = tl.maximum(top, tl.load(lses + (part * pairs + pair) * tokens + m, mask=seen, other=float("-inf")))
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DP), tl.float32)
    for part in tl.static_range(PARTS):
        at = (part * pairs + pair) * tokens + m
        weight = tl.exp2((tl.load(lses + at, mask=seen, other=float("-inf")) - base) * LOG2_E)
        total += weight
        values = tl.load(outs + at[:, None] * D + d[None, :], mask=seen[:, None] & (d < D)[None, :], other=0.0)
        acc += values * weight[:, None]
    acc = acc / tl.where(total == 0, 1.0, total)[:, None]
    to = row * stride_b + head * stride_h + m.to(tl.int64)[:, None] * stride_m + d[None, :]
    tl.store(out + to, acc.to(out.dtype.element_ty), mask=inside[:, None] & (d < D)[None, :])
    found = tl.where(total == 0, float("-inf"), base + tl.log2(total) * LN_2)
    tl.store(lse + pair * tokens + m, found, mask=inside)
