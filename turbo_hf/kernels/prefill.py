"""Flash attention of a prompt or a chunk over quantized operands: one kernel family, switches by constexpr.

One program computes one tile of queries of one head. It walks up to three runs of keys: the sealed blocks of the past,
its open tokens, and the chunk itself. Scores are in units of log2.

P of a key tile is scaled by the tile's own row maximum, not by the running one, so that INT8 and FP8 keep their
precision in every tile. That is free: `acc` is held in units of 2^unit, and moving it from one tile's unit to the next
is the rescaling that flash attention does anyway.
"""

import triton
import triton.language as tl

from turbo_hf.kernels._common import as_int8, in_value_order, sas, tanh, value_order

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
DEPTH = tl.constexpr(16.0)  # a tile further below the running maximum, in log2, is scaled by what lies this far below


@triton.jit
def _step(
    acc, total, top, ref, unit, q, row_scale, bias, k, k_scale, v, v_scale, allowed, softcap, threshold,
    MASKED: tl.constexpr, K_TOKEN: tl.constexpr, V_TOKEN: tl.constexpr, ORDERED: tl.constexpr, BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr, SAS: tl.constexpr, P_LOG2: tl.constexpr, P_TYPE: tl.constexpr,
):  # fmt: skip
    """One key tile: k [D, N], v [N, D]; k_scale a number, or [N]; v_scale a log2, or [N] as it is.

    State of a row: acc in units of 2^unit, total in units of 2^(ref - P_LOG2), top the running maximum.
    """
    if q.dtype == tl.int8:
        s = tl.dot(q, k, out_dtype=tl.int32).to(tl.float32)
    else:
        s = tl.dot(q, k.to(q.dtype), input_precision="ieee")
    if K_TOKEN:
        s = s * row_scale[:, None] * k_scale[None, :]
    else:
        s = s * (row_scale * k_scale)[:, None]
    if BIAS:
        s += bias[:, None]
    if SOFTCAP:
        s = softcap * tanh(s / softcap)
    if MASKED:
        s = tl.where(allowed, s, float("-inf"))

    here = tl.max(s, 1)
    top_new = tl.maximum(top, here)
    if V_TOKEN or SAS:
        ref_new = top_new
    else:
        ref_new = tl.maximum(here, top_new - DEPTH)
    # a row that has seen no key has a maximum of -inf; its P is 0 whatever is subtracted
    base = tl.where(ref_new == float("-inf"), 0.0, ref_new)
    if SAS:
        p = sas((s - base[:, None]) * LN2, threshold) * tl.exp2(P_LOG2)
    else:
        p = tl.exp2(s - (base - P_LOG2)[:, None])
    total = total * tl.exp2(ref - base) + tl.sum(p, 1)
    unit_new = ref_new
    if V_TOKEN:
        largest = tl.max(v_scale, 0)
        largest = tl.where(largest > 0, largest, 1.0)
        p = p * (v_scale / largest)[None, :]
        unit_new += tl.log2(largest)
    else:
        unit_new += v_scale
    if V_TOKEN or SAS:
        peak = tl.maximum(tl.max(p, 1), tl.exp2(P_LOG2 - DEPTH))
        p = p * (tl.exp2(P_LOG2) / peak)[:, None]
        unit_new += tl.log2(peak) - P_LOG2

    if ORDERED:
        p = in_value_order(p)
    if P_TYPE == tl.int8:
        part = tl.dot(as_int8(p), v, out_dtype=tl.int32).to(tl.float32)
    elif P_TYPE == tl.float8e4nv and v.dtype == tl.int8:
        part = tl.dot(p.to(P_TYPE), v.to(tl.float16).to(P_TYPE))
    else:
        part = tl.dot(p.to(P_TYPE), v.to(P_TYPE), input_precision="ieee")
    # a fresh product each tile, added in float32: Hopper's FP8 accumulator keeps too few bits to run on
    moved = tl.exp2(unit - tl.where(unit_new == float("-inf"), 0.0, unit_new))
    acc = acc * moved[:, None] + part
    return acc, total, top_new, ref_new, unit_new


@triton.jit
def _queries(q_ptr, at, inside, row_scale, INT8: tl.constexpr, WIDE: tl.constexpr):
    """A tile of queries and what a score of each row is multiplied by."""
    x = tl.load(q_ptr + at, mask=inside, other=0.0)
    if INT8:
        x = x.to(tl.float32)
        largest = tl.max(tl.abs(x), 1)
        safe = tl.where(largest > 0, largest, 1.0)
        return as_int8(x * tl.div_rn(127.0, safe)[:, None]), tl.div_rn(largest, 127.0) * row_scale
    return x.to(WIDE), tl.full((x.shape[0],), 1.0, tl.float32) * row_scale


@triton.jit
def _chunk(
    acc, total, top, ref, unit, q, row_scale, bias, k_base, k_scale_ptr, v_base, v_scale_ptr, m, d, kv_row,
    from_n, to_n, count, padded, stride_kn, stride_vn, stride_vd, softcap, threshold, MASKED: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr,
    QK_INT8: tl.constexpr, P_TYPE: tl.constexpr, P_LOG2: tl.constexpr, K_TOKEN: tl.constexpr, V_RAW: tl.constexpr,
    V_CHANNEL: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, SAS: tl.constexpr,
):  # fmt: skip
    """The key tiles of the chunk from `from_n` to `to_n`; without MASKED every query sees every one of their keys."""
    n = tl.arange(0, BLOCK)
    for n0 in range(from_n, to_n, BLOCK):
        slot = (n0 + n).to(tl.int64)
        here = n0 + n < count
        k_at = k_base + slot[None, :] * stride_kn + d[:, None]
        v_at = v_base + slot[:, None] * stride_vn + d[None, :] * stride_vd
        # quantized operands are padded to whole tiles; the model's own tensors are not
        if MASKED and not QK_INT8:
            k = tl.load(k_at, mask=(d < D)[:, None] & here[None, :], other=0.0)
        elif DP != D:
            k = tl.load(k_at, mask=(d < D)[:, None], other=0)
        else:
            k = tl.load(k_at)
        if MASKED and V_RAW:
            v = tl.load(v_at, mask=(d < D)[None, :] & here[:, None], other=0.0)
        elif DP != D:
            v = tl.load(v_at, mask=(d < D)[None, :], other=0)
        else:
            v = tl.load(v_at)
        k_scale = 1.0
        if K_TOKEN:
            k_scale = tl.load(k_scale_ptr + kv_row * padded + slot)
        elif QK_INT8:
            k_scale = tl.load(k_scale_ptr + kv_row * (padded // BLOCK) + n0 // BLOCK)
        v_scale = 0.0
        if not V_RAW and not V_CHANNEL:
            v_scale = _log2_scale(tl.load(v_scale_ptr + kv_row * (padded // BLOCK) + n0 // BLOCK))
        allowed = here[None, :]
        if CAUSAL:
            allowed &= (n0 + n)[None, :] <= m[:, None]
        if WINDOW > 0:
            allowed &= (n0 + n)[None, :] > m[:, None] - WINDOW
        acc, total, top, ref, unit = _step(
            acc, total, top, ref, unit, q, row_scale, bias, k, k_scale, v, v_scale, allowed, softcap, threshold,
            MASKED, K_TOKEN, False, not V_RAW, BIAS, SOFTCAP, SAS, P_LOG2, P_TYPE,
        )  # fmt: skip
    return acc, total, top, ref, unit


@triton.jit
def _log2_scale(scale):
    """log2 of a scale; a block of zeros has scale 0, and its unit does not matter."""
    return tl.log2(tl.where(scale > 0, scale, 1.0))


@triton.jit
def prefill_kernel(
    q_ptr, q_rotated_ptr, bias_ptr, k_ptr, k_scale_ptr, v_ptr, v_scale_ptr, channel_ptr, sinks_ptr, starts_ptr,
    past_k_ptr, past_v_ptr, past_scale_ptr, sealed_ptr, open_k_ptr, open_v_ptr, open_k_scale_ptr, open_v_scale_ptr,
    open_len_ptr, out_ptr, lse_ptr,
    stride_qb, stride_qh, stride_qm, stride_rb, stride_rh, stride_rm, stride_kb, stride_kh, stride_kn, stride_vb,
    stride_vh, stride_vn, stride_vd, stride_ob, stride_oh, stride_om,
    tokens, padded, past_slots, capacity, scaling, softcap, threshold,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, PAST_BLOCK: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr,
    QK_INT8: tl.constexpr, P_TYPE: tl.constexpr, WIDE: tl.constexpr, P_LOG2: tl.constexpr, K_TOKEN: tl.constexpr,
    V_RAW: tl.constexpr, V_CHANNEL: tl.constexpr, BIAS: tl.constexpr, ROTATED: tl.constexpr, SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr, SAS: tl.constexpr, STARTS: tl.constexpr, PAST: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(tokens, BLOCK_M)
    # heads that share keys run side by side, and the longest tiles of each first
    tile = tiles - 1 - tl.program_id(0) % tiles
    row_head = (tl.program_id(0) // tiles).to(tl.int64)
    row, head = row_head // HEADS, row_head % HEADS
    kv_row = row * (HEADS // GROUP) + head // GROUP
    start = 0
    if STARTS:
        start = tl.load(starts_ptr + row).to(tl.int32)
    count = tokens - start
    first = tile * BLOCK_M
    if first >= count:
        return

    m = first + tl.arange(0, BLOCK_M)
    d = tl.arange(0, DP)
    inside = (m < count)[:, None] & (d < D)[None, :]
    column = (start + m).to(tl.int64)
    at = row * stride_qb + head * stride_qh + column[:, None] * stride_qm + d[None, :]
    q, row_scale = _queries(q_ptr, at, inside, scaling * LOG2E, QK_INT8, WIDE)

    acc = tl.zeros((BLOCK_M, DP), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    ref = top
    unit = top
    bias = total

    past = 0
    if PAST:
        sealed = tl.load(sealed_ptr + row).to(tl.int32) * PAST_BLOCK
        opened = tl.load(open_len_ptr + row).to(tl.int32)
        past = sealed + opened
        n = tl.arange(0, PAST_BLOCK)
        lowest = 0
        if WINDOW > 0:
            lowest = tl.maximum(past + first - WINDOW + 1, 0)
        k_base = past_k_ptr + kv_row * past_slots * D
        v_base = past_v_ptr + kv_row * past_slots * D
        scales = past_scale_ptr + kv_row * (past_slots // PAST_BLOCK) * 2
        for n0 in range(lowest // PAST_BLOCK * PAST_BLOCK, sealed, PAST_BLOCK):
            slot = (n0 + n).to(tl.int64)
            k = tl.load(k_base + slot[None, :] * D + d[:, None], mask=(d < D)[:, None], other=0)
            v = tl.load(v_base + slot[:, None] + d[None, :].to(tl.int64) * past_slots, mask=(d < D)[None, :], other=0)
            k_scale = tl.load(scales + n0 // PAST_BLOCK * 2)
            v_scale = _log2_scale(tl.load(scales + n0 // PAST_BLOCK * 2 + 1))
            allowed = (n0 + n)[None, :] > (past + m)[:, None] - WINDOW
            acc, total, top, ref, unit = _step(
                acc, total, top, ref, unit, q, row_scale, bias, k, k_scale, v, v_scale, allowed, softcap, threshold,
                WINDOW > 0, False, False, True, False, SOFTCAP, SAS, P_LOG2, P_TYPE,
            )  # fmt: skip
        k_base = open_k_ptr + kv_row * capacity * D
        v_base = open_v_ptr + kv_row * capacity * D
        for n0 in range(tl.maximum(lowest - sealed, 0) // PAST_BLOCK * PAST_BLOCK, opened, PAST_BLOCK):
            slot = (n0 + n).to(tl.int64)
            here = n0 + n < opened
            k = tl.load(k_base + slot[None, :] * D + d[:, None], mask=(d < D)[:, None] & here[None, :], other=0)
            # the open tokens stand in time order
            from_slot = value_order(slot)
            seen = (from_slot < opened)[:, None] & (d < D)[None, :]
            v = tl.load(v_base + from_slot[:, None] + d[None, :] * capacity, mask=seen, other=0)
            k_scale = tl.load(open_k_scale_ptr + kv_row * capacity + slot, mask=here, other=0.0)
            v_scale = tl.load(open_v_scale_ptr + kv_row * capacity + slot, mask=here, other=0.0)
            allowed = here[None, :] & (m >= 0)[:, None]
            if WINDOW > 0:
                allowed &= (sealed + n0 + n)[None, :] > (past + m)[:, None] - WINDOW
            acc, total, top, ref, unit = _step(
                acc, total, top, ref, unit, q, row_scale, bias, k, k_scale, v, v_scale, allowed, softcap, threshold,
                True, True, True, True, False, SOFTCAP, SAS, P_LOG2, P_TYPE,
            )  # fmt: skip

    if ROTATED:
        at = row * stride_rb + head * stride_rh + column[:, None] * stride_rm + d[None, :]
        q, row_scale = _queries(q_rotated_ptr, at, inside, scaling * LOG2E, QK_INT8, WIDE)
    if BIAS:
        bias = tl.load(bias_ptr + row_head * tokens + column, mask=m < count, other=0.0) * LOG2E
    if V_CHANNEL:
        channel = tl.load(channel_ptr + kv_row * D + d, mask=d < D, other=1.0)
        if PAST:
            # from here on a channel of acc is in units of its own scale
            acc = acc / channel[None, :]

    last = count
    if CAUSAL:
        last = tl.minimum(first + BLOCK_M, count)
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(first - WINDOW + 1, 0) // BLOCK * BLOCK
    # tiles between these two edges need no mask
    clear_from = lowest
    if WINDOW > 0:
        clear_from = tl.minimum(tl.cdiv(tl.maximum(first + BLOCK_M - WINDOW, 0), BLOCK) * BLOCK, last)
        clear_from = tl.maximum(clear_from, lowest)
    clear_to = count // BLOCK * BLOCK
    if CAUSAL:
        clear_to = tl.minimum(clear_to, (first + 1) // BLOCK * BLOCK)
    clear_to = tl.maximum(clear_to, clear_from)
    k_base = k_ptr + row * stride_kb + (head // GROUP) * stride_kh
    v_base = v_ptr + row * stride_vb + (head // GROUP) * stride_vh
    if not QK_INT8:
        k_base += start.to(tl.int64) * stride_kn if STARTS else 0
    if V_RAW:
        v_base += start.to(tl.int64) * stride_vn if STARTS else 0
    if WINDOW > 0:
        acc, total, top, ref, unit = _chunk(
            acc, total, top, ref, unit, q, row_scale, bias, k_base, k_scale_ptr, v_base, v_scale_ptr, m, d, kv_row,
            lowest, clear_from, count, padded, stride_kn, stride_vn, stride_vd, softcap, threshold, True, D, DP,
            BLOCK, WINDOW, CAUSAL, QK_INT8, P_TYPE, P_LOG2, K_TOKEN, V_RAW, V_CHANNEL, BIAS, SOFTCAP, SAS,
        )  # fmt: skip
    acc, total, top, ref, unit = _chunk(
        acc, total, top, ref, unit, q, row_scale, bias, k_base, k_scale_ptr, v_base, v_scale_ptr, m, d, kv_row,
        clear_from, clear_to, count, padded, stride_kn, stride_vn, stride_vd, softcap, threshold, False, D, DP,
        BLOCK, WINDOW, CAUSAL, QK_INT8, P_TYPE, P_LOG2, K_TOKEN, V_RAW, V_CHANNEL, BIAS, SOFTCAP, SAS,
    )  # fmt: skip
    acc, total, top, ref, unit = _chunk(
        acc, total, top, ref, unit, q, row_scale, bias, k_base, k_scale_ptr, v_base, v_scale_ptr, m, d, kv_row,
        clear_to, last, count, padded, stride_kn, stride_vn, stride_vd, softcap, threshold, True, D, DP,
        BLOCK, WINDOW, CAUSAL, QK_INT8, P_TYPE, P_LOG2, K_TOKEN, V_RAW, V_CHANNEL, BIAS, SOFTCAP, SAS,
    )  # fmt: skip

    # the sink is one more logit: it takes part in the maximum and in the sum
    highest = ref
    if SINKS:
        highest = tl.maximum(ref, tl.load(sinks_ptr + head).to(tl.float32) * LOG2E)
    safe = tl.where(highest == float("-inf"), 0.0, highest)
    kept = tl.exp2(ref - safe)
    total = total * kept
    if SINKS:
        total += tl.exp2(tl.load(sinks_ptr + head).to(tl.float32) * LOG2E - safe + P_LOG2)
    gain = kept * tl.exp2(tl.where(unit == float("-inf"), 0.0, unit - ref)) / tl.where(total > 0, total, 1.0)
    out = acc * gain[:, None]
    if V_CHANNEL:
        out = out * channel[None, :]
    to = row * stride_ob + head * stride_oh + column[:, None] * stride_om + d[None, :]
    tl.store(out_ptr + to, out.to(out_ptr.dtype.element_ty), mask=inside)
    lse = (safe - P_LOG2 + tl.log2(total)) * LN2
    tl.store(lse_ptr + row_head * tokens + column, lse, mask=m < count)
