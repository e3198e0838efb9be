"""Attention over blocks of INT8 keys and values: scores, softmax, weighted sum of values.

Each warp has a block, or all warps share one.
"""

import triton
import triton.language as tl

from turbo_hf.ops.kernel_common import LEAST, LN_2, nearest, sas
from turbo_hf.ops.kernel_unpack import folded


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
