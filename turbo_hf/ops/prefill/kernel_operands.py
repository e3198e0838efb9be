"""Quantization of a chunk's keys and values for the flash loop, and unpacking of a past for it."""

import triton
import triton.language as tl

from turbo_hf.ops.kernel_common import as_int8, counted, in_time_order, value_order


@triton.jit
def _scaled(x, largest, TOP: tl.constexpr):
    """x * (TOP / largest), with 0 for a largest of 0. An IEEE division, so that the reference gets equal codes."""
    return x * tl.div_rn(TOP, tl.where(largest > 0, largest, 1.0))


@triton.jit
def channel_range_kernel(
    v_ptr, range_ptr, starts_ptr, stride_b, stride_h, stride_n, tokens,
    HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, STARTS: tl.constexpr,
):  # fmt: skip
    """max|v| of each channel, as the bits of float32 in int32, which have the same order for numbers >= 0."""
    row, head = tl.program_id(1).to(tl.int64) // HEADS, tl.program_id(1).to(tl.int64) % HEADS
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, DP)
    start = 0
    if STARTS:
        start = tl.load(starts_ptr + row).to(tl.int32)
    inside = (n < tokens - start)[:, None] & (d < D)[None, :]
    at = v_ptr + row * stride_b + head * stride_h + (start + n).to(tl.int64)[:, None] * stride_n + d[None, :]
    largest = tl.max(tl.abs(tl.load(at, mask=inside, other=0.0).to(tl.float32)), 0)
    to = range_ptr + (row * HEADS + head) * D + d
    tl.atomic_max(to, largest.to(tl.int32, bitcast=True), mask=d < D, sem="relaxed")


@triton.jit
def quantize_operands_kernel(
    k_ptr, v_ptr, mean_ptr, range_ptr, k_out_ptr, k_scale_ptr, v_out_ptr, v_scale_ptr, v_log2_ptr, broken_ptr,
    starts_ptr, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn, tokens, padded,
    HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, K_TOKEN: tl.constexpr,
    SMOOTH: tl.constexpr, V_TOP: tl.constexpr, V_CHANNEL: tl.constexpr, V_OUT: tl.constexpr, STARTS: tl.constexpr,
):  # fmt: skip
    """One block of one KV head: keys [BLOCK, D] to INT8, values to [D, BLOCK] in INT8 or FP8, in VALUE_ORDER."""
    row, head = tl.program_id(1).to(tl.int64) // HEADS, tl.program_id(1).to(tl.int64) % HEADS
    kv_row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0)
    n = block * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, DP)
    start = 0
    if STARTS:
        start = tl.load(starts_ptr + row).to(tl.int32)
    count = tokens - start

    inside = (n < count)[:, None] & (d < D)[None, :]
    at = row * stride_kb + head * stride_kh + (start + n).to(tl.int64)[:, None] * stride_kn + d[None, :]
    k = tl.load(k_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if SMOOTH:
        mean = tl.load(mean_ptr + kv_row * D + d, mask=d < D, other=0.0)
        k = tl.where(inside, k - mean[None, :], 0.0)
    if K_TOKEN:
        largest = counted(tl.max(tl.abs(k), 1))
        codes = _scaled(k, largest[:, None], 127.0)
        tl.store(k_scale_ptr + kv_row * padded + n, tl.div_rn(largest, 127.0))
    else:
        most = counted(tl.max(tl.max(tl.abs(k), 1), 0))
        codes = _scaled(k, most, 127.0)
        tl.store(k_scale_ptr + kv_row * (padded // BLOCK) + block, tl.div_rn(most, 127.0))
    to = kv_row * padded * D + n.to(tl.int64)[:, None] * D + d[None, :]
    tl.store(k_out_ptr + to, as_int8(codes), mask=(d < D)[None, :])

    token = value_order(n)
    inside = (token < count)[:, None] & (d < D)[None, :]
    at = row * stride_vb + head * stride_vh + (start + token).to(tl.int64)[:, None] * stride_vn + d[None, :]
    v = tl.load(v_ptr + at, mask=inside, other=0.0).to(tl.float32)
    # codes cannot represent NaN or Inf, for which alone 0 * x is not 0: such a head is reported
    if tl.sum(tl.sum(k * 0.0 + v * 0.0, 1), 0) != 0.0:
        tl.store(broken_ptr + kv_row, 1)
    if V_OUT:
        if V_CHANNEL:
            ranges = counted(tl.load(range_ptr + kv_row * D + d, mask=d < D, other=0.0))
            codes = _scaled(v, ranges[None, :], V_TOP)
        else:
            most = counted(tl.max(tl.max(tl.abs(v), 1), 0))
            codes = _scaled(v, most, V_TOP)
            scale = tl.div_rn(most, V_TOP)
            to = kv_row * (padded // BLOCK) + block
            tl.store(v_scale_ptr + to, scale)
            # what the flash loop adds up; the unit of a block of zeros does not matter
            tl.store(v_log2_ptr + to, tl.log2(tl.where(scale > 0, scale, 1.0)))
        if v_out_ptr.dtype.element_ty == tl.int8:
            codes = as_int8(codes)
        else:
            codes = codes.to(v_out_ptr.dtype.element_ty)
        to = kv_row * D * padded + d.to(tl.int64)[:, None] * padded + n[None, :]
        tl.store(v_out_ptr + to, tl.trans(codes), mask=(d < D)[:, None])


@triton.jit
def _lane(packed_ptr, page, line, lines: tl.constexpr, bits: tl.constexpr, codes: tl.constexpr, index):
    """Code `index` of a line of a page, which has `lines` lines of `codes` codes (`layout.half_split`)."""
    at = (page * lines + line) * (codes * min(bits, 8) // 8)
    if bits == 16:
        code = tl.load(packed_ptr + at + index)
    elif bits == 8:
        code = tl.load(packed_ptr + at + index).to(tl.int32)
    elif bits == 3:
        odd, lane = line // 8 % 2, index // (codes // 4)
        plane: tl.constexpr = lines * codes // 8
        at = packed_ptr + page * (3 * plane) + (line // 16 * 8 + line % 8) * (codes // 4) + index % (codes // 4)
        byte = tl.load(at + tl.where(lane == 2, 2, odd) * plane).to(tl.int32)
        rest = tl.load(at + 2 * plane).to(tl.int32) >> (6 + odd) & 1
        code = byte >> tl.where(lane == 2, 3 * odd, tl.minimum(3 * lane, 6)) & 7
        code = tl.where(lane == 3, code | rest << 2, code)
    else:
        run: tl.constexpr = codes * bits // 8
        code = tl.load(packed_ptr + at + index % run).to(tl.int32) >> (index // run * bits) & ((1 << bits) - 1)
    return code


@triton.jit
def _keys_of_page(k_ptr, meta, at, n, channel, D: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr):
    """Codes [BLOCK, DP] of the keys of page and slot `at`. meta: its steps and zeros, by channel."""
    k = _lane(k_ptr, at, n[:, None], BLOCK, BITS, D, channel[None, :])
    if BITS < 8:
        k_step, k_zero = tl.load(meta).to(tl.int32), tl.load(meta + D).to(tl.int32)
        k = tl.minimum(tl.maximum(k * k_step[None, :] + k_zero[None, :], -127), 127)
    return k


@triton.jit
def _values_of_page(
    v_ptr, meta, at, stored, channel, D: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr, VALUE_BITS: tl.constexpr
):
    """Codes [DP, BLOCK] of the values at the places `stored`."""
    V_LINE: tl.constexpr = 2 if BITS < 8 else 0
    v = _lane(v_ptr, at, channel[:, None], D, VALUE_BITS, BLOCK, stored[None, :])
    if VALUE_BITS < 8:
        v_step, v_zero = tl.load(meta + V_LINE * D).to(tl.int32), tl.load(meta + (V_LINE + 1) * D).to(tl.int32)
        v = tl.minimum(tl.maximum(v * v_step[:, None] + v_zero[:, None], -127), 127)
    return v


@triton.jit(do_not_specialize=["k_room"])
def unpack_past_kernel(
    k_ptr, v_ptr, meta_ptr, scale_ptr, table_ptr, sealed_ptr, order_ptr, k_out_ptr, v_out_ptr, scale_out_ptr,
    blocks, first_slot, k_room, HEADS: tl.constexpr, SLOTS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BLOCK: tl.constexpr, BITS: tl.constexpr, VALUE_BITS: tl.constexpr, IN_TIME: tl.constexpr,
):  # fmt: skip
    """One sealed block of one slot: codes of keys [BLOCK, D] and of values [D, BLOCK], the scale of keys, and log2
    of that of values.

    Values are in `VALUE_ORDER`, or with IN_TIME in the order of time. Codes are INT8, or in a wider type. Without
    v_out_ptr keys alone, dequantized. k_room: tokens from a head's first key to the next head's.
    """
    block, slot, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    if block >= tl.load(sealed_ptr + row):
        return
    page = tl.load(table_ptr + row * blocks + block)
    kv_row = row * HEADS + tl.load(order_ptr + row * HEADS + first_slot + slot)
    at = page * SLOTS + slot
    n = tl.arange(0, BLOCK)
    d = tl.arange(0, DP)
    kept = (d < D)[None, :]
    channel = tl.minimum(d, D - 1)
    LINES: tl.constexpr = (2 if BITS < 8 else 0) + (2 if VALUE_BITS < 8 else 0)
    meta = meta_ptr + at * LINES * D + channel
    k = _keys_of_page(k_ptr, meta, at, n, channel, D, BLOCK, BITS)
    token = (block * BLOCK + n).to(tl.int64)
    k_to = k_out_ptr + (kv_row * k_room + token)[:, None] * D + d[None, :]
    if v_out_ptr is None:
        tl.store(k_to, (k.to(tl.float32) * tl.load(scale_ptr + at * 2)).to(k_out_ptr.dtype.element_ty), mask=kept)
    else:
        # pages hold values in VALUE_ORDER, unless they are in 16 bit
        stored = value_order(n) if BITS == 16 and not IN_TIME else n
        v = _values_of_page(v_ptr, meta, at, stored, channel, D, BLOCK, BITS, VALUE_BITS)
        tl.store(k_to, k.to(k_out_ptr.dtype.element_ty), mask=kept)
        if IN_TIME and BITS < 16:
            v = in_time_order(v)
        to = (kv_row * D + d)[:, None] * (blocks * BLOCK) + token[None, :]
        tl.store(v_out_ptr + to, v.to(v_out_ptr.dtype.element_ty), mask=tl.trans(kept))
        to = scale_out_ptr + (kv_row * blocks + block) * 2
        v_scale = tl.load(scale_ptr + at * 2 + 1)
        tl.store(to, tl.load(scale_ptr + at * 2))
        # the unit of a block of zeros does not matter
        tl.store(to + 1, tl.log2(tl.where(v_scale > 0, v_scale, 1.0)))


@triton.jit
def _open_values(past, kv_row, place, d, opened, D: tl.constexpr):
    """Values [D, 64] of the open tokens from `place` on, in VALUE_ORDER; 0 past the end."""
    token = value_order(place + tl.arange(0, 64))
    here = token < opened
    v = tl.load(past.v_open + (kv_row * D + d)[:, None] * past.open_room + token[None, :], mask=here[None, :], other=0)
    return (
        v.to(tl.float32) * tl.load(past.v_open_scale + kv_row * past.open_room + token, mask=here, other=0.0)[None, :]
    )


@triton.jit
def _value_scale(past, pages, table, kv_row, slot, block, sealed, d, opened, SLOTS: tl.constexpr, D: tl.constexpr):
    """The scale of a block's values: that of its page, or what makes INT8 of open tokens; 0 past the end."""
    if block < sealed:
        scale = tl.load(pages.scale + (tl.load(table + block) * SLOTS + slot) * 2 + 1)
    else:
        v = tl.abs(_open_values(past, kv_row, (block - sealed) * 64, d, opened, D))
        scale = tl.div_rn(tl.max(tl.max(v, 1), 0), 127.0)
    return scale


@triton.jit(do_not_specialize=["blocks", "first_slot"])
def unpack_tiles_kernel(
    past, pages, table, order, blocks, first_slot, HEADS: tl.constexpr, SLOTS: tl.constexpr, D: tl.constexpr,
    BITS: tl.constexpr, VALUE_BITS: tl.constexpr,
):  # fmt: skip
    """One tile of 128 tokens of one slot, its open tokens in the blocks that they would fill, to past.k, .v and .scale.

    past: `Past`; pages: `PagedHeads` of blocks of 64. INT8 codes of pages stay as they are. In FP8, values have one
    scale a tile. A tile's second block may lie past the row's end: its codes are 0, its scales those of the first.
    """
    tile, slot, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    sealed = tl.load(past.sealed + row).to(tl.int32)
    opened = tl.load(past.open_len + row).to(tl.int32)
    if tile * 128 >= sealed * 64 + opened:
        return
    table += row * blocks
    kv_row = row * HEADS + tl.load(order + row * HEADS + first_slot + slot)
    n, d = tl.arange(0, 64), tl.arange(0, D)
    FP8: tl.constexpr = past.v.dtype.element_ty == tl.float8e4nv
    LINES: tl.constexpr = (2 if BITS < 8 else 0) + (2 if VALUE_BITS < 8 else 0)
    one = _value_scale(past, pages, table, kv_row, slot, 2 * tile, sealed, d, opened, SLOTS, D)
    other = _value_scale(past, pages, table, kv_row, slot, 2 * tile + 1, sealed, d, opened, SLOTS, D)
    largest = tl.maximum(one, other)
    largest = tl.where(largest > 0, largest, 1.0)
    # channels, and tokens, that lie in the same bits of neighbouring bytes
    K_RUN: tl.constexpr = D // 4 if BITS == 3 else D * BITS // 8
    V_RUN: tl.constexpr = 16 if VALUE_BITS == 3 else 64 * VALUE_BITS // 8
    k_scale = 0.0
    for half in tl.static_range(2):
        block = 2 * tile + half
        v_scale = one if half == 0 else other
        v_unit = largest if FP8 else tl.where(v_scale > 0, v_scale, largest)
        k_to = past.k + (kv_row * past.sealed_room + block * 64 + n)[:, None] * D
        v_to = past.v + (kv_row * D + d)[:, None] * past.sealed_room + block * 64
        if block < sealed:
            at = tl.load(table + block) * SLOTS + slot
            meta = pages.meta + at * LINES * D
            k_scale = tl.load(pages.scale + at * 2)
            for first in tl.static_range(0, D, K_RUN):
                c = first + tl.arange(0, K_RUN)
                k = _keys_of_page(pages.k, meta + c, at, n, c, D, 64, BITS)
                tl.store(k_to + c[None, :], k.to(tl.int8))
            for first in tl.static_range(0, 64, V_RUN):
                t = first + tl.arange(0, V_RUN)
                v = _values_of_page(pages.v, meta + d, at, t, d, D, 64, BITS, VALUE_BITS)
                if FP8:
                    tl.store(v_to + t[None, :], (v.to(tl.float32) * (v_scale / v_unit)).to(tl.float8e4nv))
                else:
                    tl.store(v_to + t[None, :], v.to(tl.int8))
        else:
            place = (block - sealed) * 64
            here = place + n < opened
            at = kv_row * past.open_room + place
            x = tl.load(past.k_open + (at + n)[:, None] * D + d[None, :], mask=here[:, None], other=0).to(tl.float32)
            x *= tl.load(past.k_open_scale + at + n, mask=here, other=0.0)[:, None]
            most = tl.max(tl.max(tl.abs(x), 1), 0)
            k_scale = tl.where(place < opened, tl.div_rn(most, 127.0), k_scale)
            tl.store(k_to + d[None, :], as_int8(_scaled(x, most, 127.0)))
            y = _open_values(past, kv_row, place, d, opened, D) / v_unit
            if FP8:
                tl.store(v_to + n[None, :], y.to(tl.float8e4nv))
            else:
                tl.store(v_to + n[None, :], as_int8(y))
        scales = past.scale + (kv_row * (past.sealed_room // 64) + block) * 2
        tl.store(scales, k_scale)
        tl.store(scales + 1, tl.log2(v_unit))
