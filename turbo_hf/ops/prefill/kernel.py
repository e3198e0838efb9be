"""Flash attention of a prompt or a chunk over quantized operands: one kernel family, switches by constexpr.

One program computes one tile of queries of one head. It walks up to three runs of keys: the sealed blocks of the past,
its open tokens, and the chunk itself. Scores are in units of log2.

P of a key tile is scaled by the tile's own row maximum, not by the running one, so that INT8 and FP8 keep their
precision in every tile. That is free: `acc` is held in units of 2^(ref + worth), and moving it to the next tile's
is the rescaling that flash attention does anyway.
"""

import triton
import triton.language as tl

from turbo_hf.ops.kernel_common import (
    LN_2,
    LOG2_E,
    SCORE_LIMIT,
    as_int8,
    counted,
    in_value_order,
    sas,
    tanh,
    value_order,
)

DEPTH = tl.constexpr(16.0)  # log2: how far below the running maximum a tile's reference may lie


@triton.jit
def _step(
    state, query, k, k_scale, v, v_scale, allowed, scoring, FORM: tl.constexpr,
    MASKED: tl.constexpr, K_TOKEN: tl.constexpr, V_TOKEN: tl.constexpr, ORDERED: tl.constexpr, CLEAN: tl.constexpr,
):  # fmt: skip
    """One key tile: k [D, N], v [N, D]; k_scale: a number, or [N]; v_scale: a log2, or the scales [N].

    query: codes, and the scale of each row.
    state: per row, acc in units of 2^(ref + worth), total in units of 2^(ref - p_log2), the running maximum top, ref,
    worth. `ref` (of scores) and `worth` (of V's scale) are kept apart: in their sum, worth would be rounded away beside
    a large score.
    """
    acc, total, top, ref, worth = state
    q, row_scale = query
    P_LOG2: tl.constexpr = FORM.p_log2
    P_TYPE: tl.constexpr = FORM.p_type
    if q.dtype == tl.int8:
        s = tl.dot(q, k, out_dtype=tl.int32).to(tl.float32)
    else:
        s = tl.dot(q, k.to(q.dtype), input_precision="ieee")
    if K_TOKEN:
        s = s * row_scale[:, None] * k_scale[None, :]
    else:
        s = s * (row_scale * k_scale)[:, None]
    if scoring.softcap is not None:
        s = scoring.softcap * tanh(s / scoring.softcap)
    if CLEAN:
        # 0 * NaN is NaN: a value that is not finite must reach only the queries that see it
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
    if scoring.sas_threshold is not None:
        own = tl.where(here == float("-inf"), base, here)
        p = sas((s - own[:, None]) * LN_2, scoring.sas_threshold) * tl.exp2(own - base + P_LOG2)[:, None]
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
    if V_TOKEN or scoring.sas_threshold is not None:
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
def _queries(view, row, head, column, d, inside, scaling, broken_ptr, INT8: tl.constexpr):
    """A tile of queries, and the factor on each row's scores. INT8 has no NaN: a tile with NaN is reported."""
    stride_b, stride_h, stride_m = view.strides
    at = row * stride_b + head * stride_h + column[:, None] * stride_m + d[None, :]
    row_scale = scaling * LOG2_E
    x = tl.load(view.data + at, mask=inside, other=0.0)
    if INT8:
        x = x.to(tl.float32)
        if tl.sum(tl.sum(x * 0.0, 1), 0) != 0.0:
            tl.store(broken_ptr, 1)
        largest = counted(tl.max(tl.abs(x), 1))
        safe = tl.where(largest > 0, largest, 1.0)
        codes = as_int8(x * tl.div_rn(127.0, safe)[:, None])
        scale = tl.div_rn(largest, 127.0) * row_scale
    else:
        codes = x
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
    state, query, k_tiles, v_tiles, chunk, k_base, v_base, kv_row, m, d, from_n, to_n, count, scoring,
    MASKED: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """The key tiles of the chunk from `from_n` to `to_n`; without MASKED every query sees every one of their keys."""
    BLOCK: tl.constexpr = FORM.block
    for n0 in range(from_n, to_n, BLOCK):
        n = tl.arange(0, BLOCK)
        place = (n0 + n).to(tl.int64)
        here = n0 + n < count
        if chunk.k is None:
            k = tl.trans(k_tiles.load([(kv_row * chunk.padded).to(tl.int32) + n0, 0]))
        else:
            at = chunk.k.data + k_base + place[None, :] * chunk.k.strides[2] + d[:, None]
            k = _load_raw(at, d[:, None], here[None, :], MASKED, FORM.dim, FORM.padded_dim)
        if chunk.v is None:
            v = tl.trans(v_tiles.load([(kv_row * FORM.dim).to(tl.int32), n0]))
        else:
            at = chunk.v.data + v_base + place[:, None] * chunk.v.strides[2] + d[None, :]
            v = _load_raw(at, d[None, :], here[:, None], MASKED, FORM.dim, FORM.padded_dim)
        k_scale = 1.0
        if FORM.k_token:
            k_scale = tl.load(chunk.k_scale + kv_row * chunk.padded + place)
        elif chunk.k is None:
            k_scale = tl.load(chunk.k_scale + kv_row * (chunk.padded // BLOCK) + n0 // BLOCK)
        v_scale = 0.0
        if chunk.v_scale is not None:
            v_scale = tl.load(chunk.v_scale + kv_row * (chunk.padded // BLOCK) + n0 // BLOCK)
        allowed = here[None, :] & ((n0 + n)[None, :] <= m[:, None])
        if FORM.window > 0:
            allowed &= (n0 + n)[None, :] > m[:, None] - FORM.window
        state = _step(
            state, query, k, k_scale, v, v_scale, allowed, scoring, FORM, MASKED, FORM.k_token, V_TOKEN=False,
            ORDERED=chunk.v is None, CLEAN=MASKED and chunk.k is not None,
        )  # fmt: skip
    return state


@triton.jit
def _past(state, query, past, row, kv_row, m, d, first, part, parts, scoring, FORM: tl.constexpr):
    """Sealed blocks (one scale per block) and open tokens (one scale per token). Every query comes after them.

    Of several parts each reads a share of the sealed blocks; the last one, whose share is smaller, the open tokens.
    """
    D: tl.constexpr = FORM.dim
    BLOCK: tl.constexpr = FORM.past_block
    STEP: tl.constexpr = FORM.past_tile
    WINDOW: tl.constexpr = FORM.window
    sealed = tl.load(past.sealed + row).to(tl.int32) * BLOCK
    opened = tl.load(past.open_len + row).to(tl.int32)
    tokens = sealed + opened
    n = tl.arange(0, STEP)
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(tokens + first - WINDOW + 1, 0)
    begin, end, open_end = lowest // STEP * STEP, sealed, opened
    if FORM.split:
        # the open tokens and the chunk are read besides by the last part
        rest = (first + FORM.block_m) // STEP + 1
        share = tl.cdiv(tl.maximum(sealed - begin, 0) // STEP + rest, parts) * STEP
        begin += part * share
        if part < parts - 1:
            end = tl.minimum(begin + share, sealed)
            open_end = 0
    k_base = past.k + kv_row * past.sealed_room * D
    v_base = past.v + kv_row * past.sealed_room * D
    scales = past.scale + kv_row * (past.sealed_room // BLOCK) * 2
    # the pipeline of loads leaves it out: it is loaded one tile ahead
    v_next = tl.load(scales + begin // BLOCK * 2 + 1, mask=begin < end, other=0.0)
    for n0 in range(begin, end, STEP):
        v_scale = v_next
        v_next = tl.load(scales + (n0 + STEP) // BLOCK * 2 + 1, mask=n0 + STEP < end, other=0.0)
        place = (n0 + n).to(tl.int64)
        k = tl.load(k_base + place[None, :] * D + d[:, None], mask=(d < D)[:, None], other=0)
        v_at = v_base + place[:, None] + d[None, :].to(tl.int64) * past.sealed_room
        v = tl.load(v_at, mask=(d < D)[None, :], other=0.0)
        k_scale = tl.load(scales + n0 // BLOCK * 2)
        allowed = (n0 + n)[None, :] > (tokens + m)[:, None] - WINDOW
        state = _step(
            state, query, k, k_scale, v, v_scale, allowed, scoring, FORM, MASKED=WINDOW > 0, K_TOKEN=False,
            V_TOKEN=False, ORDERED=not FORM.in_time, CLEAN=False,
        )  # fmt: skip
    k_base = past.k_open + kv_row * past.open_room * D
    v_base = past.v_open + kv_row * past.open_room * D
    for n0 in range(tl.maximum(lowest - sealed, 0) // STEP * STEP, open_end, STEP):
        place = (n0 + n).to(tl.int64)
        here = n0 + n < opened
        k = tl.load(k_base + place[None, :] * D + d[:, None], mask=(d < D)[:, None] & here[None, :], other=0)
        # the open tokens stand in time order
        from_place = value_order(place)
        seen = (from_place < opened)[:, None] & (d < D)[None, :]
        v = tl.load(v_base + from_place[:, None] + d[None, :] * past.open_room, mask=seen, other=0)
        k_scale = tl.load(past.k_open_scale + kv_row * past.open_room + place, mask=here, other=0.0)
        v_scale = tl.load(past.v_open_scale + kv_row * past.open_room + place, mask=here, other=0.0)
        allowed = here[None, :] & (m >= 0)[:, None]
        if WINDOW > 0:
            allowed &= (sealed + n0 + n)[None, :] > (tokens + m)[:, None] - WINDOW
        state = _step(
            state, query, k, k_scale, v, v_scale, allowed, scoring, FORM, MASKED=True, K_TOKEN=True, V_TOKEN=True,
            ORDERED=True, CLEAN=False,
        )  # fmt: skip
    return state


@triton.jit
def _finish(state, sink, P_LOG2: tl.constexpr):
    """Output and natural log of the sum of a tile. The sink is one more logit: part of the maximum and of the sum."""
    acc, total, _, ref, worth = state
    highest = tl.maximum(ref, sink)
    safe = tl.where(highest == float("-inf"), 0.0, highest)
    kept = tl.exp2(ref - safe)
    total = total * kept + tl.exp2(sink - safe + P_LOG2)
    gain = kept * tl.exp2(worth) / tl.where(total > 0, total, 1.0)
    return acc * gain[:, None], (safe - P_LOG2 + tl.log2(total)) * LN_2


@triton.jit
def _edges(first, count, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr):
    """First key tile of a query tile, the two edges between which tiles need no mask, and the end."""
    last = tl.minimum(first + BLOCK_M, count)
    clear_to = tl.minimum(count // BLOCK * BLOCK, (first + 1) // BLOCK * BLOCK)
    lowest = 0
    clear_from = 0
    if WINDOW > 0:
        lowest = tl.maximum(first - WINDOW + 1, 0) // BLOCK * BLOCK
        clear_from = tl.minimum(tl.cdiv(tl.maximum(first + BLOCK_M - WINDOW, 0), BLOCK) * BLOCK, last)
        clear_from = tl.maximum(clear_from, lowest)
    return lowest, clear_from, tl.maximum(clear_to, clear_from), last


@triton.jit
def _of_head(view, row, head, start, STARTS: tl.constexpr):
    """Offset of a head's first token in the model's own keys or values; 0 if these are not read."""
    base = 0
    if view is not None:
        base = row * view.strides[0] + head * view.strides[1]
        if STARTS:
            base += start.to(tl.int64) * view.strides[2]
    return base


@triton.jit
def _attend(
    tile, row_head, part, parts, queries, k_tiles, v_tiles, chunk, past, scoring, result, pairs, tokens,
    FORM: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head, or one of the parts of it."""
    GROUP: tl.constexpr = FORM.group
    D: tl.constexpr = FORM.dim
    DP: tl.constexpr = FORM.padded_dim
    BLOCK_M: tl.constexpr = FORM.block_m
    INT8: tl.constexpr = chunk.k is None
    row, head = row_head // FORM.heads, row_head % FORM.heads
    kv_row = row * (FORM.heads // GROUP) + head // GROUP
    start = 0
    if chunk.starts is not None:
        start = tl.load(chunk.starts + row).to(tl.int32)
    count = tokens - start
    first = tile * BLOCK_M
    if first < count:
        m = first + tl.arange(0, BLOCK_M)
        d = tl.arange(0, DP)
        inside = (m < count)[:, None] & (d < D)[None, :]
        column = (start + m).to(tl.int64)
        broken = result.broken + row_head
        q, row_scale = _queries(queries, row, head, column, d, inside, scoring.scaling, broken, INT8)

        acc = tl.zeros((BLOCK_M, DP), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        state = acc, total, top, top, total
        if past is not None:
            state = _past(state, (q, row_scale), past, row, kv_row, m, d, first, part, parts, scoring, FORM)

        lowest, clear_from, clear_to, last = _edges(first, count, BLOCK_M, FORM.block, FORM.window)
        if FORM.split:
            # the last part alone reads the chunk
            last = tl.where(part < parts - 1, lowest, last)
            clear_from, clear_to = tl.minimum(clear_from, last), tl.minimum(clear_to, last)
        k_base = _of_head(chunk.k, row, head // GROUP, start, chunk.starts is not None)
        v_base = _of_head(chunk.v, row, head // GROUP, start, chunk.starts is not None)
        query = q, row_scale
        if FORM.window > 0:
            state = _chunk(
                state, query, k_tiles, v_tiles, chunk, k_base, v_base, kv_row, m, d, lowest, clear_from, count,
                scoring, True, FORM,
            )  # fmt: skip
        state = _chunk(
            state, query, k_tiles, v_tiles, chunk, k_base, v_base, kv_row, m, d, clear_from, clear_to, count,
            scoring, False, FORM,
        )  # fmt: skip
        state = _chunk(
            state, query, k_tiles, v_tiles, chunk, k_base, v_base, kv_row, m, d, clear_to, last, count,
            scoring, True, FORM,
        )  # fmt: skip

        sink = float("-inf")
        if scoring.sinks is not None:
            sink = tl.load(scoring.sinks + head).to(tl.float32) * LOG2_E
            if FORM.split:
                sink = tl.where(part < parts - 1, float("-inf"), sink)
        out, lse = _finish(state, sink, FORM.p_log2)
        if INT8:
            too_large = (m < count) & (tl.abs(lse) > SCORE_LIMIT) & (tl.abs(lse) < float("inf"))
            tl.store(broken, 1, mask=tl.max(too_large.to(tl.int32), 0) != 0)
        if FORM.split:
            at = (part * pairs + row_head) * tokens + column
            tl.store(result.out.data + at[:, None] * D + d[None, :], out, mask=inside)
            tl.store(result.lse + at, lse, mask=m < count)
        else:
            stride_b, stride_h, stride_m = result.out.strides
            to = row * stride_b + head * stride_h + column[:, None] * stride_m + d[None, :]
            tl.store(result.out.data + to, out.to(result.out.data.dtype.element_ty), mask=inside)
            tl.store(result.lse + row_head * tokens + column, lse, mask=m < count)


@triton.jit(do_not_specialize=["parts"])
def prefill_kernel(
    queries, k_tiles, v_tiles, chunk, past, scoring, result, pairs, tokens, parts,
    FORM: tl.constexpr, REPAIR: tl.constexpr, FLAGS: tl.constexpr,
):  # fmt: skip
    """Each program computes one tile; with REPAIR, a few compute all tiles of the heads in `result.broken`.

    With `FORM.split`, `parts` programs share the past of a tile, and the result is [parts, B*Hq, M, D] and
    [parts, B*Hq, M], contiguous (`merge_parts_kernel`).

    `result.broken`: int32 [B*Hq + B*Hkv], not 0 for a head whose queries hold NaN or Inf or whose scores are too large
    for INT8, and then for one whose keys or values hold NaN or Inf; FLAGS: a power of two that covers them.

    queries: a `View`. Of `Chunk`, `Past` (or None), `Scoring` (softcap in units of log2), `PrefillResult`,
    `PrefillForm`. k_tiles, v_tiles: descriptors of the quantized operands, [B*Hkv*T, D] and
    [B*Hkv*D, T], or None. pairs: B*Hq. tokens: M.
    """
    tiles = tl.cdiv(tokens, FORM.block_m)
    # heads that share keys run side by side, and the longest tiles of each first
    if not REPAIR:
        program = tl.program_id(0)
        part = 0
        if FORM.split:
            part, program = program % parts, program // parts
        tile = tiles - 1 - program % tiles
        row_head = (program // tiles).to(tl.int64)
        _attend(
            tile, row_head, part, parts, queries, k_tiles, v_tiles, chunk, past, scoring, result, pairs,
            tokens, FORM,
        )  # fmt: skip
    else:
        n = tl.arange(0, FLAGS)
        kv_heads = pairs // FORM.group
        if tl.sum(tl.load(result.broken + n, mask=n < pairs + kv_heads, other=0), 0) != 0:
            for at in range(tl.program_id(0), pairs * tiles, tl.num_programs(0)):
                row_head = (at // tiles).to(tl.int64)
                kv_row = row_head // FORM.heads * (FORM.heads // FORM.group) + row_head % FORM.heads // FORM.group
                if tl.load(result.broken + row_head) + tl.load(result.broken + pairs + kv_row) != 0:
                    _attend(
                        at % tiles, row_head, 0, 1, queries, k_tiles, v_tiles, chunk, past, scoring,
                        result, pairs, tokens, FORM,
                    )  # fmt: skip


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
