"""Flash attention of a prompt or a chunk over quantized operands: one kernel family, switches by constexpr.

One program computes one tile of queries of one head. It walks up to three runs of keys: the sealed blocks of the past,
its open tokens, and the chunk itself. Scores are in units of log2. The chunk's `k_tiles` and `v_tiles` are descriptors
of quantized operands ([B*Hkv*T, D] and [B*Hkv*D, T]) or pointers to the model's own tensors.

P of a key tile is scaled by the tile's own row maximum, not by the running one, so that INT8 and FP8 keep their
precision in every tile. That is free: `acc` is held in units of 2^(ref + worth), and moving it to the next tile's
is the rescaling that flash attention does anyway.
"""

import triton
import triton.language as tl

from turbo_hf.kernels._common import LN_2, LOG2_E, SCORE_LIMIT, as_int8, in_value_order, sas, tanh, value_order

DEPTH = tl.constexpr(16.0)  # a tile further below the running maximum, in log2, is scaled by what lies this far below


@triton.jit
def _step(
    acc, total, top, ref, worth, q, row_scale, bias, k, k_scale, v, v_scale, allowed, softcap, threshold,
    MASKED: tl.constexpr, K_TOKEN: tl.constexpr, V_TOKEN: tl.constexpr, ORDERED: tl.constexpr, BIAS: tl.constexpr,
    CLEAN: tl.constexpr, SOFTCAP: tl.constexpr, SAS: tl.constexpr, P_LOG2: tl.constexpr, P_TYPE: tl.constexpr,
):  # fmt: skip
    """One key tile: k [D, N], v [N, D]; k_scale a number, or [N]; v_scale a log2, or [N] as it is.

    State of a row: acc in units of 2^(ref + worth), total in units of 2^(ref - P_LOG2), top the running maximum.
    ref and worth are not added up: what V's scale is worth would be lost beside a large score.
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
    if CLEAN:
        # 0 * NaN is NaN: a value that is not finite must reach the queries that see it and no other
        finite = v * 0.0 == 0.0
        broken = tl.min(finite.to(tl.int32), 1) == 0
        v = tl.where(finite, v, 0.0)
        s = tl.where(broken[None, :], float("nan"), s)
    if MASKED:
        s = tl.where(allowed, s, float("-inf"))

    here = tl.max(s, 1)
    top_new = tl.maximum(top, here)
    ref_new = tl.maximum(here, top_new - DEPTH)
    # a row that has seen no key has a maximum of -inf; its P is 0 whatever is subtracted
    base = tl.where(ref_new == float("-inf"), 0.0, ref_new)
    if SAS:
        own = tl.where(here == float("-inf"), base, here)
        p = sas((s - own[:, None]) * LN_2, threshold) * tl.exp2(own - base + P_LOG2)[:, None]
    else:
        p = tl.exp2(s - (base - P_LOG2)[:, None])
    total = total * tl.exp2(ref - base) + tl.sum(p, 1)
    worth_new = tl.zeros_like(ref_new)
    if V_TOKEN:
        largest = tl.max(v_scale, 0)
        largest = tl.where(largest > 0, largest, 1.0)
        p = p * (v_scale / largest)[None, :]
        worth_new += tl.log2(largest)
    else:
        worth_new += v_scale
    if V_TOKEN or SAS:
        peak = tl.maximum(tl.max(p, 1), tl.exp2(P_LOG2 - DEPTH))
        p = p * (tl.exp2(P_LOG2) / peak)[:, None]
        worth_new += tl.log2(peak) - P_LOG2

    if ORDERED:
        p = in_value_order(p)
    if tl.int8 == P_TYPE:
        part = tl.dot(as_int8(p), v, out_dtype=tl.int32).to(tl.float32)
    elif tl.float8e4nv == P_TYPE and v.dtype == tl.int8:
        part = tl.dot(p.to(P_TYPE), v.to(tl.float16).to(P_TYPE))
    else:
        part = tl.dot(p.to(P_TYPE), v.to(P_TYPE), input_precision="ieee")
    # a fresh product each tile, added in float32: Hopper's FP8 accumulator keeps too few bits to run on
    moved = tl.exp2((ref - base) + (worth - worth_new))
    acc = acc * moved[:, None] + part
    return acc, total, top_new, ref_new, worth_new


@triton.jit
def _queries(q_ptr, at, inside, row_scale, broken_ptr, INT8: tl.constexpr, WIDE: tl.constexpr):
    """A tile of queries and what a score of each row is multiplied by. INT8 has no NaN: such a tile is reported."""
    x = tl.load(q_ptr + at, mask=inside, other=0.0)
    if INT8:
        x = x.to(tl.float32)
        if tl.sum(tl.sum(x * 0.0, 1), 0) != 0.0:
            tl.store(broken_ptr, 1)
        largest = tl.max(tl.abs(x), 1)
        safe = tl.where(largest > 0, largest, 1.0)
        codes = as_int8(x * tl.div_rn(127.0, safe)[:, None])
        scale = tl.div_rn(largest, 127.0) * row_scale
    else:
        codes = x.to(WIDE)
        scale = tl.full((x.shape[0],), 1.0, tl.float32) * row_scale
    return codes, scale


@triton.jit
def _load_raw(at, channel, token_seen, MASKED: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """A tile of the model's own keys or values, which are not padded to whole tiles."""
    if MASKED:
        x = tl.load(at, mask=(channel < D) & token_seen, other=0.0)
    elif DP != D:
        x = tl.load(at, mask=channel < D, other=0.0)
    else:
        x = tl.load(at)
    return x


@triton.jit
def _chunk(
    acc, total, top, ref, worth, q, row_scale, bias, k_tiles, k_base, k_scale_ptr, v_tiles, v_base, v_scale_ptr, m, d,
    kv_row, from_n, to_n, count, padded, stride_kn, stride_vn, softcap, threshold, MASKED: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr,
    QK_INT8: tl.constexpr, P_TYPE: tl.constexpr, P_LOG2: tl.constexpr, K_TOKEN: tl.constexpr, V_RAW: tl.constexpr,
    V_CHANNEL: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, SAS: tl.constexpr,
):  # fmt: skip
    """The key tiles of the chunk from `from_n` to `to_n`; without MASKED every query sees every one of their keys."""
    n = tl.arange(0, BLOCK)
    for n0 in range(from_n, to_n, BLOCK):
        slot = (n0 + n).to(tl.int64)
        here = n0 + n < count
        if QK_INT8:
            k = tl.trans(k_tiles.load([(kv_row * padded).to(tl.int32) + n0, 0]))
        else:
            at = k_tiles + k_base + slot[None, :] * stride_kn + d[:, None]
            k = _load_raw(at, d[:, None], here[None, :], MASKED, D, DP)
        if V_RAW:
            at = v_tiles + v_base + slot[:, None] * stride_vn + d[None, :]
            v = _load_raw(at, d[None, :], here[:, None], MASKED, D, DP)
        else:
            v = tl.trans(v_tiles.load([(kv_row * D).to(tl.int32), n0]))
        k_scale = 1.0
        if K_TOKEN:
            k_scale = tl.load(k_scale_ptr + kv_row * padded + slot)
        elif QK_INT8:
            k_scale = tl.load(k_scale_ptr + kv_row * (padded // BLOCK) + n0 // BLOCK)
        v_scale = 0.0
        if not V_RAW and not V_CHANNEL:
            v_scale = tl.load(v_scale_ptr + kv_row * (padded // BLOCK) + n0 // BLOCK)
        allowed = here[None, :]
        if CAUSAL:
            allowed &= (n0 + n)[None, :] <= m[:, None]
        if WINDOW > 0:
            allowed &= (n0 + n)[None, :] > m[:, None] - WINDOW
        acc, total, top, ref, worth = _step(
            acc, total, top, ref, worth, q, row_scale, bias, k, k_scale, v, v_scale, allowed, softcap, threshold,
            MASKED, K_TOKEN, False, not V_RAW, BIAS, MASKED and not QK_INT8, SOFTCAP, SAS, P_LOG2, P_TYPE,
        )  # fmt: skip
    return acc, total, top, ref, worth


@triton.jit
def _log2_scale(scale):
    """log2 of a scale; a block of zeros has scale 0, and its worth does not matter."""
    return tl.log2(tl.where(scale > 0, scale, 1.0))


@triton.jit
def _past(
    acc, total, top, ref, worth, q, row_scale, m, d, row, kv_row, first,
    past_k_ptr, past_v_ptr, past_scale_ptr, sealed_ptr, open_k_ptr, open_v_ptr, open_k_scale_ptr, open_v_scale_ptr,
    open_len_ptr, past_slots, capacity, softcap, threshold, D: tl.constexpr, PAST_BLOCK: tl.constexpr,
    PAST_TILE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SAS: tl.constexpr, P_LOG2: tl.constexpr,
    P_TYPE: tl.constexpr,
):  # fmt: skip
    """The sealed blocks, one scale a block, and the open tokens, one scale a token. Every query stands behind them."""
    sealed = tl.load(sealed_ptr + row).to(tl.int32) * PAST_BLOCK
    opened = tl.load(open_len_ptr + row).to(tl.int32)
    past = sealed + opened
    n = tl.arange(0, PAST_TILE)
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(past + first - WINDOW + 1, 0)
    k_base = past_k_ptr + kv_row * past_slots * D
    v_base = past_v_ptr + kv_row * past_slots * D
    scales = past_scale_ptr + kv_row * (past_slots // PAST_BLOCK) * 2
    for n0 in range(lowest // PAST_TILE * PAST_TILE, sealed, PAST_TILE):
        slot = (n0 + n).to(tl.int64)
        k = tl.load(k_base + slot[None, :] * D + d[:, None], mask=(d < D)[:, None], other=0)
        v_at = v_base + slot[:, None] + d[None, :].to(tl.int64) * past_slots
        v = tl.load(v_at, mask=(d < D)[None, :], other=0)
        k_scale = tl.load(scales + n0 // PAST_BLOCK * 2)
        v_scale = _log2_scale(tl.load(scales + n0 // PAST_BLOCK * 2 + 1))
        allowed = (n0 + n)[None, :] > (past + m)[:, None] - WINDOW
        acc, total, top, ref, worth = _step(
            acc, total, top, ref, worth, q, row_scale, 0.0, k, k_scale, v, v_scale, allowed, softcap, threshold,
            WINDOW > 0, False, False, True, False, False, SOFTCAP, SAS, P_LOG2, P_TYPE,
        )  # fmt: skip
    k_base = open_k_ptr + kv_row * capacity * D
    v_base = open_v_ptr + kv_row * capacity * D
    for n0 in range(tl.maximum(lowest - sealed, 0) // PAST_TILE * PAST_TILE, opened, PAST_TILE):
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
        acc, total, top, ref, worth = _step(
            acc, total, top, ref, worth, q, row_scale, 0.0, k, k_scale, v, v_scale, allowed, softcap, threshold,
            True, True, True, True, False, False, SOFTCAP, SAS, P_LOG2, P_TYPE,
        )  # fmt: skip
    return acc, total, top, ref, worth


@triton.jit
def _finish(acc, total, ref, worth, sink, P_LOG2: tl.constexpr):
    """Output and natural log of the sum of a tile. The sink is one more logit: part of the maximum and of the sum."""
    highest = tl.maximum(ref, sink)
    safe = tl.where(highest == float("-inf"), 0.0, highest)
    kept = tl.exp2(ref - safe)
    total = total * kept + tl.exp2(sink - safe + P_LOG2)
    gain = kept * tl.exp2(worth) / tl.where(total > 0, total, 1.0)
    return acc * gain[:, None], (safe - P_LOG2 + tl.log2(total)) * LN_2


@triton.jit
def _edges(
    first, count, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr
):  # fmt: skip
    """First key tile of a query tile, the two edges between which tiles need no mask, and the end."""
    last = count
    clear_to = count // BLOCK * BLOCK
    if CAUSAL:
        last = tl.minimum(first + BLOCK_M, count)
        clear_to = tl.minimum(clear_to, (first + 1) // BLOCK * BLOCK)
    lowest = 0
    clear_from = 0
    if WINDOW > 0:
        lowest = tl.maximum(first - WINDOW + 1, 0) // BLOCK * BLOCK
        clear_from = tl.minimum(tl.cdiv(tl.maximum(first + BLOCK_M - WINDOW, 0), BLOCK) * BLOCK, last)
        clear_from = tl.maximum(clear_from, lowest)
    return lowest, clear_from, tl.maximum(clear_to, clear_from), last


@triton.jit
def _attend(
    tile, row_head,
    q_ptr, q_rotated_ptr, bias_ptr, k_tiles, k_scale_ptr, v_tiles, v_scale_ptr, channel_ptr, sinks_ptr, starts_ptr,
    past_k_ptr, past_v_ptr, past_scale_ptr, sealed_ptr, open_k_ptr, open_v_ptr, open_k_scale_ptr, open_v_scale_ptr,
    open_len_ptr, broken_ptr, out_ptr, lse_ptr, stride_qb, stride_qh, stride_qm, stride_rb, stride_rh, stride_rm,
    stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn, stride_ob, stride_oh, stride_om, tokens, padded,
    past_slots, capacity, scaling, softcap, threshold,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr, PAST_BLOCK: tl.constexpr, PAST_TILE: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr,
    QK_INT8: tl.constexpr, P_TYPE: tl.constexpr, WIDE: tl.constexpr, P_LOG2: tl.constexpr, K_TOKEN: tl.constexpr,
    V_RAW: tl.constexpr, V_CHANNEL: tl.constexpr, BIAS: tl.constexpr, ROTATED: tl.constexpr, SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr, SAS: tl.constexpr, STARTS: tl.constexpr, PAST: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head."""
    row, head = row_head // HEADS, row_head % HEADS
    kv_row = row * (HEADS // GROUP) + head // GROUP
    start = 0
    if STARTS:
        start = tl.load(starts_ptr + row).to(tl.int32)
    count = tokens - start
    first = tile * BLOCK_M
    if first < count:
        m = first + tl.arange(0, BLOCK_M)
        d = tl.arange(0, DP)
        inside = (m < count)[:, None] & (d < D)[None, :]
        column = (start + m).to(tl.int64)
        at = row * stride_qb + head * stride_qh + column[:, None] * stride_qm + d[None, :]
        q, row_scale = _queries(q_ptr, at, inside, scaling * LOG2_E, broken_ptr + row_head, QK_INT8, WIDE)

        acc = tl.zeros((BLOCK_M, DP), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        ref = top
        worth = total
        bias = total
        if PAST:
            acc, total, top, ref, worth = _past(
                acc, total, top, ref, worth, q, row_scale, m, d, row, kv_row, first, past_k_ptr, past_v_ptr,
                past_scale_ptr, sealed_ptr, open_k_ptr, open_v_ptr, open_k_scale_ptr, open_v_scale_ptr, open_len_ptr,
                past_slots, capacity, softcap, threshold, D, PAST_BLOCK, PAST_TILE, WINDOW, SOFTCAP, SAS, P_LOG2,
                P_TYPE,
            )  # fmt: skip

        if ROTATED:
            at = row * stride_rb + head * stride_rh + column[:, None] * stride_rm + d[None, :]
            q, row_scale = _queries(q_rotated_ptr, at, inside, scaling * LOG2_E, broken_ptr + row_head, QK_INT8, WIDE)
        if BIAS:
            bias = tl.load(bias_ptr + row_head * tokens + column, mask=m < count, other=0.0) * LOG2_E
        if V_CHANNEL:
            channel = tl.load(channel_ptr + kv_row * D + d, mask=d < D, other=1.0)
            if PAST:
                # from here on a channel of acc is in units of its own scale
                acc = acc / channel[None, :]

        lowest, clear_from, clear_to, last = _edges(first, count, BLOCK_M, BLOCK, WINDOW, CAUSAL)
        k_base = row * stride_kb + (head // GROUP) * stride_kh
        v_base = row * stride_vb + (head // GROUP) * stride_vh
        if STARTS:
            k_base += start.to(tl.int64) * stride_kn
            v_base += start.to(tl.int64) * stride_vn
        if WINDOW > 0:
            acc, total, top, ref, worth = _chunk(
                acc, total, top, ref, worth, q, row_scale, bias, k_tiles, k_base, k_scale_ptr, v_tiles, v_base,
                v_scale_ptr, m, d, kv_row, lowest, clear_from, count, padded, stride_kn, stride_vn, softcap, threshold,
                True, D, DP, BLOCK, WINDOW, CAUSAL, QK_INT8, P_TYPE, P_LOG2, K_TOKEN, V_RAW, V_CHANNEL, BIAS, SOFTCAP,
                SAS,
            )  # fmt: skip
        acc, total, top, ref, worth = _chunk(
            acc, total, top, ref, worth, q, row_scale, bias, k_tiles, k_base, k_scale_ptr, v_tiles, v_base,
            v_scale_ptr, m, d, kv_row, clear_from, clear_to, count, padded, stride_kn, stride_vn, softcap, threshold,
            False, D, DP, BLOCK, WINDOW, CAUSAL, QK_INT8, P_TYPE, P_LOG2, K_TOKEN, V_RAW, V_CHANNEL, BIAS, SOFTCAP, SAS,
        )  # fmt: skip
        acc, total, top, ref, worth = _chunk(
            acc, total, top, ref, worth, q, row_scale, bias, k_tiles, k_base, k_scale_ptr, v_tiles, v_base,
            v_scale_ptr, m, d, kv_row, clear_to, last, count, padded, stride_kn, stride_vn, softcap, threshold, True,
            D, DP, BLOCK, WINDOW, CAUSAL, QK_INT8, P_TYPE, P_LOG2, K_TOKEN, V_RAW, V_CHANNEL, BIAS, SOFTCAP, SAS,
        )  # fmt: skip

        sink = float("-inf")
        if SINKS:
            sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
        out, lse = _finish(acc, total, ref, worth, sink, P_LOG2)
        if QK_INT8:
            wild = (m < count) & (tl.abs(lse) > SCORE_LIMIT) & (tl.abs(lse) < float("inf"))
            tl.store(broken_ptr + row_head, 1, mask=tl.max(wild.to(tl.int32), 0) != 0)
        if V_CHANNEL:
            out = out * channel[None, :]
        to = row * stride_ob + head * stride_oh + column[:, None] * stride_om + d[None, :]
        tl.store(out_ptr + to, out.to(out_ptr.dtype.element_ty), mask=inside)
        tl.store(lse_ptr + row_head * tokens + column, lse, mask=m < count)


@triton.jit
def prefill_kernel(
    pairs,
    q_ptr, q_rotated_ptr, bias_ptr, k_tiles, k_scale_ptr, v_tiles, v_scale_ptr, channel_ptr, sinks_ptr, starts_ptr,
    past_k_ptr, past_v_ptr, past_scale_ptr, sealed_ptr, open_k_ptr, open_v_ptr, open_k_scale_ptr, open_v_scale_ptr,
    open_len_ptr, broken_ptr, out_ptr, lse_ptr, stride_qb, stride_qh, stride_qm, stride_rb, stride_rh, stride_rm,
    stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn, stride_ob, stride_oh, stride_om, tokens, padded,
    past_slots, capacity, scaling, softcap, threshold,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr, PAST_BLOCK: tl.constexpr, PAST_TILE: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr,
    QK_INT8: tl.constexpr, P_TYPE: tl.constexpr, WIDE: tl.constexpr, P_LOG2: tl.constexpr, K_TOKEN: tl.constexpr,
    V_RAW: tl.constexpr, V_CHANNEL: tl.constexpr, BIAS: tl.constexpr, ROTATED: tl.constexpr, SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr, SAS: tl.constexpr, STARTS: tl.constexpr, PAST: tl.constexpr, REPAIR: tl.constexpr,
    FLAGS: tl.constexpr,
):  # fmt: skip
    """Each program one tile; with REPAIR, few programs all tiles of the heads that `broken_ptr` names.

    `broken_ptr`: int32 [B*Hq + B*Hkv], not 0 for a head whose queries hold NaN or Inf or whose scores are too large for
    INT8, and then for one whose keys or values hold NaN or Inf. v_scale_ptr: log2 of the scales. PAST_TILE: tokens of
    the past at a time, fewer than PAST_BLOCK only where P has no scale of its tile.
    """
    tiles = tl.cdiv(tokens, BLOCK_M)
    # heads that share keys run side by side, and the longest tiles of each first
    if not REPAIR:
        tile = tiles - 1 - tl.program_id(0) % tiles
        row_head = (tl.program_id(0) // tiles).to(tl.int64)
        _attend(
            tile, row_head,
            q_ptr, q_rotated_ptr, bias_ptr, k_tiles, k_scale_ptr, v_tiles, v_scale_ptr, channel_ptr, sinks_ptr,
            starts_ptr, past_k_ptr, past_v_ptr, past_scale_ptr, sealed_ptr, open_k_ptr, open_v_ptr, open_k_scale_ptr,
            open_v_scale_ptr, open_len_ptr, broken_ptr, out_ptr, lse_ptr, stride_qb, stride_qh, stride_qm, stride_rb,
            stride_rh, stride_rm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn, stride_ob,
            stride_oh, stride_om, tokens, padded, past_slots, capacity, scaling, softcap, threshold, HEADS, GROUP, D,
            DP, BLOCK_M, BLOCK, PAST_BLOCK, PAST_TILE, WINDOW, CAUSAL, QK_INT8, P_TYPE, WIDE, P_LOG2, K_TOKEN, V_RAW,
            V_CHANNEL, BIAS, ROTATED, SOFTCAP, SINKS, SAS, STARTS, PAST,
        )  # fmt: skip
    else:
        n = tl.arange(0, FLAGS)
        kv_heads = pairs // GROUP
        if tl.sum(tl.load(broken_ptr + n, mask=n < pairs + kv_heads, other=0), 0) != 0:
            for at in range(tl.program_id(0), pairs * tiles, tl.num_programs(0)):
                row_head = (at // tiles).to(tl.int64)
                kv_row = row_head // HEADS * (HEADS // GROUP) + row_head % HEADS // GROUP
                if tl.load(broken_ptr + row_head) + tl.load(broken_ptr + pairs + kv_row) != 0:
                    _attend(
                        at % tiles, row_head,
                        q_ptr, q_rotated_ptr, bias_ptr, k_tiles, k_scale_ptr, v_tiles, v_scale_ptr, channel_ptr,
                        sinks_ptr, starts_ptr, past_k_ptr, past_v_ptr, past_scale_ptr, sealed_ptr, open_k_ptr,
                        open_v_ptr, open_k_scale_ptr, open_v_scale_ptr, open_len_ptr, broken_ptr, out_ptr, lse_ptr,
                        stride_qb, stride_qh, stride_qm, stride_rb, stride_rh, stride_rm, stride_kb, stride_kh,
                        stride_kn, stride_vb, stride_vh, stride_vn, stride_ob, stride_oh, stride_om, tokens, padded,
                        past_slots, capacity, scaling, softcap, threshold, HEADS, GROUP, D, DP, BLOCK_M, BLOCK,
                        PAST_BLOCK, PAST_TILE, WINDOW, CAUSAL, QK_INT8, P_TYPE, WIDE, P_LOG2, K_TOKEN, V_RAW,
                        V_CHANNEL, BIAS, ROTATED, SOFTCAP, SINKS, SAS, STARTS, PAST,
                    )  # fmt: skip
