"""Decode attention over heads kept in 16 bit: LeanAttention itself, a block at a time. Each block:

    S = K q                     [tokens, rows]
    P = exp(S - m)              m: the largest score so far
    O = O exp(m' - m) + V P     [channels, rows]

All warps of a CTA share a block; of four warps, at 64 tokens and 128 channels, each has 16 tokens and 32 channels.
Tokens are the M of the first product and channels the M of the second, so that the few query rows cost little.
"""

import triton
import triton.language as tl

from turbo_hf.ops.decode.kernel_block import even, unit_of
from turbo_hf.ops.decode.kernel_tiles import entry, handed, packed_bytes
from turbo_hf.ops.kernel_common import LOG2_E, tanh

P_SCALE_LOG2 = tl.constexpr(15)
"""P is exp(S - m) times 2^15, because float16 ends at 2^-24: without it the smallest P would become 0."""

P_UNSCALE = tl.constexpr(2.0**-15)
"""Removes that factor from the sums."""


@triton.jit
def _absorb(state, q, keys, values, allowed, unit, softcap, ASM: tl.constexpr):
    """One block's part of the softmax. q: [DP, R]; keys: [T, DP]; values: [DP, T]; allowed: [T, R]; unit: of scores.

    acc and denom hold a factor of 2^P_SCALE_LOG2, which `attend_16bit` takes out. The interpreter's product takes no
    bfloat16, which float32 holds exactly.
    """
    acc, m, denom = state
    if ASM:
        x = tl.dot(keys, q) * unit
    else:
        x = tl.dot(keys.to(tl.float32), q.to(tl.float32)) * unit
    if softcap is not None:
        x = tanh(x / softcap) * (softcap * LOG2_E)
    x = tl.where(allowed, x, -float("inf"))
    new = tl.maximum(m, tl.max(x, 0))
    shift = tl.where(new == -float("inf"), 0.0, new)
    # in this order: added to a large shift, the exponent would be rounded, and P overflow float16
    p = tl.exp2(x - shift[None, :] + P_SCALE_LOG2)
    keep = tl.exp2(m - shift)
    denom = denom * keep + tl.sum(p, 0)
    p = p.to(values.dtype)
    if ASM:
        acc = tl.dot(values, p, acc * keep[None, :])
    else:
        acc = tl.dot(values.to(tl.float32), p.to(tl.float32), acc * keep[None, :])
    return acc, new, denom


@triton.jit
def attend_16bit(cache, slot, at, run, length, q, seen, scoring, FORM: tl.constexpr, ASM: tl.constexpr):
    """A run of tiles of one output; the tile of its open tokens is the last.

    All of one 16-bit type and width. at: row * Hkv + head, int64; run.page: one number; q: [DP, R]; seen: the first
    token that each query row sees, and the one after the last, [R] each.

    Returns O [1, DP, N], the maximum and the sum [1, R], as `attend_sealed` with one block per tile does.
    """
    D: tl.constexpr = FORM.dim
    BLOCK: tl.constexpr = FORM.block
    DP: tl.constexpr = q.shape[0]
    R: tl.constexpr = q.shape[1]
    tl.static_assert(FORM.tile == 1 and len(FORM.slots) == 1 and scoring.sas_threshold is None)
    k_ptr, v_ptr, _, _ = cache.paged[0]
    k_open, v_open, _, _ = cache.opened
    first, last = seen
    unit = unit_of(scoring)
    page, sealed = run.page, run.sealed
    state = tl.zeros([DP, R], tl.float32), tl.full([R], -float("inf"), tl.float32), tl.zeros([R], tl.float32)
    t = tl.arange(0, BLOCK)
    d = tl.arange(0, DP)
    ahead = entry(run.table + run.begin + 1, run.begin + 1 < run.entries, ASM)
    for block in tl.range(run.begin, tl.minimum(run.begin + run.steps, sealed), num_stages=FORM.stages):
        packed = (page * FORM.slots[0] + slot) * (BLOCK * D)
        rows, columns = t[:, None] * D + d[None, :], d[:, None] * BLOCK + t[None, :]
        # t >= 0: each token of a sealed block is there
        keys = packed_bytes(k_ptr + packed + rows, (t >= 0)[:, None], d[None, :], D, DP)
        values = packed_bytes(v_ptr + packed + columns, (t >= 0)[None, :], d[:, None], D, DP)
        page = handed(ahead, ASM)
        # page numbers are loaded two blocks ahead: keys loaded right after them would wait for them
        ahead = entry(run.table + block + 2, block + 2 < run.entries, ASM)
        place = block * BLOCK + t[:, None]
        allowed = (place >= first[None, :]) & (place < last[None, :])
        state = _absorb(state, q, keys, values, allowed, unit, scoring.softcap, ASM)
    count = length - sealed * BLOCK
    for start in tl.range(0, count if run.begin + run.steps > sealed else 0, BLOCK, num_stages=1):
        token = start + t
        live = token < count
        rows = (at * cache.cap + token)[:, None] * D + d[None, :]
        columns = (at * D + d)[:, None] * cache.cap + token[None, :]
        keys = packed_bytes(k_open + rows, live[:, None], d[None, :], D, DP)
        # whole groups of 16, as `cap` is a multiple of 16; numbers past the last token may be NaN
        values = packed_bytes(v_open + columns, (token // 16 * 16 < count)[None, :], d[:, None], D, DP)
        values = tl.where(live[None, :], values, 0.0)
        place = sealed * BLOCK + token[:, None]
        allowed = (place >= first[None, :]) & (place < last[None, :]) & live[:, None]
        state = _absorb(state, q, keys, values, allowed, unit, scoring.softcap, ASM)
    acc, m, denom = state
    if FORM.spread:
        acc = even(acc)
    return (acc * P_UNSCALE)[None], m[None], (denom * P_UNSCALE)[None]
