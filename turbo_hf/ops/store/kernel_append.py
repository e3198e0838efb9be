"""New tokens into the open buffer, and full blocks out of it, in one launch that waits for nothing."""

import triton
import triton.language as tl

from turbo_hf.ops.kernel_common import CODE_MAX, as_int8
from turbo_hf.ops.store.kernel_rotate import rotated
from turbo_hf.ops.store.kernel_seal import copy_block, seal_block


@triton.jit
def _codes(x, given_scale, GIVEN: tl.constexpr, TYPE: tl.constexpr):
    """INT8 codes of tokens x [T, DP], and their scales: the given one where that is above 0, else their own.

    Of another TYPE the tokens themselves, with scale 1.
    """
    if TYPE != tl.int8:
        codes = x.to(TYPE)
        scale = tl.sum(codes.to(tl.float32) * 0.0, 1) + 1.0
        nonfinite = tl.sum(scale * 0.0, 0) != 0.0
    else:
        # max skips NaN: a token that holds one must show it
        scale = tl.div_rn(tl.max(tl.abs(x), 1), CODE_MAX) + tl.sum(x * 0.0, 1)
        nonfinite = tl.sum(scale * 0.0, 0) != 0.0
        if GIVEN:
            scale = tl.where(given_scale > 0, given_scale, scale)
        codes = tl.div_rn(x, tl.broadcast_to(tl.where(scale > 0, scale, 1.0)[:, None], x.shape))
        codes = as_int8(tl.minimum(tl.maximum(codes, -CODE_MAX), CODE_MAX))
    return codes, scale, nonfinite


@triton.jit
def _rotated_keys(k, LEVELS: tl.constexpr):
    """Keys as `ops.rotate.rotate_keys` leaves them, in runs of 2^LEVELS channels; with LEVELS 0 as they are."""
    return k if LEVELS == 0 else rotated(k, LEVELS) * (1.0 / (1 << (LEVELS // 2)))


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["max_scale_ptr", "nonfinite_ptr"])
def append_kernel(
    k_ptr, v_ptr,  # [B, Hkv, M, D]
    k_open_ptr, v_open_ptr, k_scale_ptr, v_scale_ptr, open_len_ptr,  # as in `KVStore`
    starts_ptr, given_scale_ptr,  # int64 [B], float32 [B, Hkv, 2]
    max_scale_ptr,  # [B, Hkv, 2], the bits of float32 in int32: those of numbers >= 0 stand in the numbers' own order
    nonfinite_ptr, arrived_ptr,  # int32 [1], int32 [B]: zeros before and after
    k_strides, v_strides, tokens, cap,
    HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TOKENS: tl.constexpr, STARTS: tl.constexpr,
    GIVEN: tl.constexpr, MAX_SCALE: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """TOKENS new tokens of one row and head, behind the open ones; the last program of a row to arrive counts all."""
    pair = tl.program_id(1).to(tl.int64)
    row, head = pair // HEADS, pair % HEADS
    held = tl.load(open_len_ptr + row)
    start = tl.load(starts_ptr + row).to(tl.int32) if STARTS else 0
    n = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    d = tl.arange(0, DP)
    live = (n < tokens) & (n >= start)
    inside = live[:, None] & (d < D)[None, :]
    slot = pair * cap + held + n - start
    k_at = row * k_strides[0] + head * k_strides[1] + n[:, None] * k_strides[2] + d[None, :] * k_strides[3]
    v_at = row * v_strides[0] + head * v_strides[1] + n[:, None] * v_strides[2] + d[None, :] * v_strides[3]
    k = tl.load(k_ptr + k_at, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + v_at, mask=inside, other=0.0).to(tl.float32)
    k_given = tl.load(given_scale_ptr + 2 * pair) if GIVEN else 0.0
    v_given = tl.load(given_scale_ptr + 2 * pair + 1) if GIVEN else 0.0
    k, k_scale, k_nonfinite = _codes(_rotated_keys(k, LEVELS), k_given, GIVEN, k_open_ptr.dtype.element_ty)
    v, v_scale, v_nonfinite = _codes(v, v_given, GIVEN, v_open_ptr.dtype.element_ty)
    tl.store(k_open_ptr + slot[:, None] * D + d[None, :], k, mask=inside)
    tl.store(v_open_ptr + (pair * D + d)[None, :] * cap + (held + n - start)[:, None], v, mask=inside)
    tl.store(k_scale_ptr + slot, k_scale, mask=live)
    tl.store(v_scale_ptr + slot, v_scale, mask=live)
    if k_nonfinite | v_nonfinite:
        tl.store(nonfinite_ptr, 1)
    if MAX_SCALE:
        tl.atomic_max(max_scale_ptr + 2 * pair, tl.max(k_scale, 0).to(tl.int32, bitcast=True), sem="relaxed")
        tl.atomic_max(max_scale_ptr + 2 * pair + 1, tl.max(v_scale, 0).to(tl.int32, bitcast=True), sem="relaxed")
    if tl.atomic_add(arrived_ptr + row, 1, sem="acq_rel") == HEADS * tl.num_programs(0) - 1:
        tl.store(arrived_ptr + row, 0)
        tl.store(open_len_ptr + row, held + tokens - start)


@triton.jit(do_not_specialize=["table_stride"])
def seal_open_kernel(
    paged,  # for each bit width (k, v, meta, scale), as in `PagedHeads`
    opened,  # for each bit width (k, v, k_scale, v_scale, v's stride of a token, and of a channel)
    order_ptr, table_ptr, sealed_ptr, open_len_ptr,  # int64 [B, Hkv], [B, blocks], [B], [B]
    table_stride, cap,
    HEADS: tl.constexpr, SLOTS: tl.constexpr, BITS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BLOCK: tl.constexpr, LANES: tl.constexpr, LANE_WIDTH: tl.constexpr,
):  # fmt: skip
    """One whole open block of one slot of one row to its page. The constants are those of `append_step_kernel`."""
    n = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1).to(tl.int64)
    row, slot = program // HEADS, program % HEADS
    whole = tl.load(open_len_ptr + row) // BLOCK
    at = tl.load(sealed_ptr + row) - whole + n
    # blocks that a row does not have, or that have left its window
    if (n < whole) & (at >= 0):
        page = tl.load(table_ptr + row * table_stride + at)
        pair = row * HEADS + tl.load(order_ptr + program)
        own = slot
        for g in tl.static_range(len(SLOTS)):
            if (own >= 0) & (own < SLOTS[g]):
                k_out, v_out, meta, scale = paged[g]
                k, v, k_scale, v_scale, v_token, v_channel = opened[g]
                k += (pair * cap + n * BLOCK) * D
                v += pair * cap * D + n * BLOCK * v_token
                to = page * SLOTS[g] + own
                if BITS[g] == 16:
                    copy_block(k, v, v_token, v_channel, k_out, v_out, scale, to, D, DP, BLOCK)
                else:
                    k_scale += pair * cap + n * BLOCK
                    v_scale += pair * cap + n * BLOCK
                    seal_block(
                        k, k_scale, v, v_scale, v_token, v_channel, k_out, v_out, meta, scale, to, D, DP, BLOCK,
                        BITS[g], LANES[g], LANE_WIDTH[g],
                    )  # fmt: skip
            own -= SLOTS[g]


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["nonfinite_ptr"])
def append_step_kernel(
    k_ptr, v_ptr,  # [B, Hkv, 1, D]
    paged,  # for each bit width (k, v, meta, scale), as in `PagedHeads`
    opened,  # (k_open, v_open, k_scale, v_scale), as in `KVStore`
    order_ptr, table_ptr, sealed_ptr, open_len_ptr,  # int64 [B, Hkv], [B, blocks], [B], [B]
    given_scale_ptr,  # float32 [B, Hkv, 2]
    index_ptr, buckets_ptr,  # int16 [B, Hkv, TABLES, places], [B, Hkv, TABLES, 1]
    nonfinite_ptr, arrived_ptr,  # int32 [1], int32 [B]: zeros before and after
    k_strides, v_strides, table_stride, cap, places,
    HEADS: tl.constexpr, SLOTS: tl.constexpr, BITS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BLOCK: tl.constexpr, LANES: tl.constexpr, LANE_WIDTH: tl.constexpr, GIVEN: tl.constexpr, TABLES: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    """One slot of one row: its block to a page if it is full, then its new token. The last slot of a row counts both.

    SLOTS, BITS: heads of each width, and the width. LANES, LANE_WIDTH: of each width, as in `seal_block`. TABLES:
    buckets of a token, 0 without an index. LEVELS: as in `_rotated_keys`.
    """
    program = tl.program_id(0).to(tl.int64)
    row, slot = program // HEADS, program % HEADS
    head = tl.load(order_ptr + program)
    held = tl.load(open_len_ptr + row)
    sealed = tl.load(sealed_ptr + row)
    k_open, v_open, k_scales, v_scales = opened
    pair = row * HEADS + head
    full = held == BLOCK
    if full:
        page = tl.load(table_ptr + row * table_stride + sealed)
        own = slot
        for g in tl.static_range(len(SLOTS)):
            if (own >= 0) & (own < SLOTS[g]):
                k_out, v_out, meta, scale = paged[g]
                seal_block(
                    k_open + pair * cap * D, k_scales + pair * cap, v_open + pair * D * cap, v_scales + pair * cap, 1,
                    cap, k_out, v_out, meta, scale, page * SLOTS[g] + own, D, DP, BLOCK, BITS[g], LANES[g],
                    LANE_WIDTH[g],
                )  # fmt: skip
            own -= SLOTS[g]
        # the new token takes a place that other threads have read by now
        tl.debug_barrier()
    at = tl.where(full, 0, held)
    d = tl.arange(0, DP)
    inside = (d < D)[None, :]
    k_from = k_ptr + row * k_strides[0] + head * k_strides[1] + d[None, :] * k_strides[3]
    v_from = v_ptr + row * v_strides[0] + head * v_strides[1] + d[None, :] * v_strides[3]
    k = tl.load(k_from, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(v_from, mask=inside, other=0.0).to(tl.float32)
    k_given = tl.load(given_scale_ptr + 2 * pair) if GIVEN else 0.0
    v_given = tl.load(given_scale_ptr + 2 * pair + 1) if GIVEN else 0.0
    k, k_scale, k_nonfinite = _codes(_rotated_keys(k, LEVELS), k_given, GIVEN, tl.int8)
    v, v_scale, v_nonfinite = _codes(v, v_given, GIVEN, tl.int8)
    one = tl.arange(0, 1)
    tl.store(k_open + (pair * cap + at) * D + d[None, :], k, mask=inside)
    tl.store(v_open + (pair * D + d)[None, :] * cap + at, v, mask=inside)
    tl.store(k_scales + pair * cap + at + one, k_scale)
    tl.store(v_scales + pair * cap + at + one, v_scale)
    for table in tl.static_range(TABLES):
        # a token's place in its row is the same before its block is sealed and after
        line = pair * TABLES + table
        tl.store(index_ptr + line * places + sealed * BLOCK + held, tl.load(buckets_ptr + line))
    if k_nonfinite | v_nonfinite:
        tl.store(nonfinite_ptr, 1)
    if tl.atomic_add(arrived_ptr + row, 1, sem="acq_rel") == HEADS - 1:
        tl.store(arrived_ptr + row, 0)
        tl.store(open_len_ptr + row, at + 1)
        tl.store(sealed_ptr + row, tl.where(full, sealed + 1, sealed))
