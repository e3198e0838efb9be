"""Quantization of a chunk's keys and values for the flash loop, and unpacking of a past for it."""

import triton
import triton.language as tl

from turbo_hf.ops.kernel_common import as_int8, counted, in_time_order, value_order


@triton.jit
def _scaled(x, largest, TOP: tl.constexpr):
    """x * (TOP / largest), with 0 for a largest of 0. An IEEE division, so that the reference gets equal codes."""
    return x * tl.div_rn(TOP, tl.where(largest > 0, largest, 1.0))


@triton.jit
def quantize_operands_kernel(
    k_ptr, v_ptr, k_out_ptr, k_scale_ptr, v_out_ptr, v_scale_ptr, v_log2_ptr, broken_ptr, starts_ptr,
    stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn, tokens, padded,
    HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, K_TOKEN: tl.constexpr,
    V_TOP: tl.constexpr,
):  # fmt: skip
    """One block of one KV head: keys [BLOCK, D] to INT8, values to [D, BLOCK] in INT8 or FP8, in VALUE_ORDER."""
    row, head = tl.program_id(1).to(tl.int64) // HEADS, tl.program_id(1).to(tl.int64) % HEADS
    kv_row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0)
    n = block * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, DP)
    start = 0
    if starts_ptr is not None:
        start = tl.load(starts_ptr + row).to(tl.int32)
    count = tokens - start

    inside = (n < count)[:, None] & (d < D)[None, :]
    at = row * stride_kb + head * stride_kh + (start + n).to(tl.int64)[:, None] * stride_kn + d[None, :]
    k = tl.load(k_ptr + at, mask=inside, other=0.0).to(tl.float32)
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
    if v_out_ptr is not None:
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
def _numbers(codes, line, D: tl.constexpr, BITS: tl.constexpr):
    """What codes below 8 bit stand for in units of their token's size. line: their channels' zeros; spans are D on."""
    span = (tl.load(line + D).to(tl.int32) & 255).to(tl.float32)
    return tl.load(line).to(tl.float32) + codes.to(tl.float32) * tl.div_rn(span, 2.0**BITS - 1)


@triton.jit
def _keys_of_page(k_ptr, meta, size, at, n, channel, D: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr):
    """Keys [BLOCK, DP] of page and slot `at`, float32, at 16 bit as stored. meta: its lines; size: [BLOCK]."""
    k = _lane(k_ptr, at, n[:, None], BLOCK, BITS, D, channel[None, :])
    if BITS < 8:
        k = _numbers(k, meta + channel[None, :], D, BITS)
    if BITS < 16:
        k = k.to(tl.float32) * size[:, None]
    return k


@triton.jit
def _values_of_page(
    v_ptr, meta, size, at, stored, channel, D: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
):  # fmt: skip
    """Values [DP, BLOCK] at the places `stored`, whose tokens have these sizes, as `_keys_of_page`."""
    V_LINE: tl.constexpr = 2 if BITS < 8 else 0
    v = _lane(v_ptr, at, channel[:, None], D, VALUE_BITS, BLOCK, stored[None, :])
    if VALUE_BITS < 8:
        v = _numbers(v, meta + V_LINE * D + channel[:, None], D, VALUE_BITS)
    if VALUE_BITS < 16:
        v = v.to(tl.float32) * size[None, :]
    return v


@triton.jit
def _largest(x):
    return tl.max(tl.max(tl.abs(x), 1), 0)


@triton.jit
def _unit(most, size):
    """The scale of INT8 codes of numbers up to `most`; NaN where a token's size is not finite, which max skips."""
    return tl.div_rn(counted(most), 127.0) + tl.sum(size * 0.0, 0)


@triton.jit
def _narrow(x, TYPE: tl.constexpr):
    """x in a 16- or 32-bit type: a rounded code may lie beyond the end of float16's range."""
    if TYPE == tl.float16:
        x = tl.where(x > 65504.0, 65504.0, tl.where(x < -65504.0, -65504.0, x))
    return x.to(TYPE)


@triton.jit
def unpack_past_kernel(
    k_ptr, v_ptr, meta_ptr, size_ptr, table_ptr, sealed_ptr, order_ptr, k_out_ptr, v_out_ptr, scale_out_ptr,
    blocks, first_slot, HEADS: tl.constexpr, SLOTS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BLOCK: tl.constexpr, BITS: tl.constexpr, VALUE_BITS: tl.constexpr, IN_TIME: tl.constexpr,
):  # fmt: skip
    """One sealed block of one slot: keys [BLOCK, D] and values [D, BLOCK], the scale of keys, and log2 of that of
    values.

    Where the output is INT8, these are codes with one scale for the block; else the numbers themselves, with a scale
    of 1. Values are in `VALUE_ORDER`, or with IN_TIME in the order of time.
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
    meta = meta_ptr + at * LINES * D
    sizes = size_ptr + at * (2 * BLOCK)
    K_TYPE: tl.constexpr = k_out_ptr.dtype.element_ty
    size = n.to(tl.float32)
    if BITS < 16:
        size = tl.load(sizes + n).to(tl.float32)
    k = _keys_of_page(k_ptr, meta, size, at, n, channel, D, BLOCK, BITS)
    k_scale = 1.0
    if K_TYPE == tl.int8:
        most = _largest(k)
        k, k_scale = as_int8(_scaled(k, most, 127.0)), _unit(most, size)
    else:
        k = _narrow(k, K_TYPE)
    token = (block * BLOCK + n).to(tl.int64)
    tl.store(k_out_ptr + (kv_row * (blocks * BLOCK) + token)[:, None] * D + d[None, :], k, mask=kept)
    V_TYPE: tl.constexpr = v_out_ptr.dtype.element_ty
    # pages hold values in VALUE_ORDER, unless they are in 16 bit
    stored = value_order(n) if BITS == 16 and not IN_TIME else n
    if BITS < 16:
        size = tl.load(sizes + BLOCK + value_order(n)).to(tl.float32)
    v = _values_of_page(v_ptr, meta, size, at, stored, channel, D, BLOCK, BITS, VALUE_BITS)
    v_log2 = 0.0
    if V_TYPE == tl.int8:
        most = _largest(v)
        v, v_scale = as_int8(_scaled(v, most, 127.0)), _unit(most, size)
        # the unit of a block of zeros does not matter
        v_log2 = tl.log2(tl.where(v_scale == 0, 1.0, v_scale))
    else:
        v = _narrow(v, V_TYPE)
    if IN_TIME and BITS < 16:
        v = in_time_order(v)
    to = (kv_row * D + d)[:, None] * (blocks * BLOCK) + token[None, :]
    tl.store(v_out_ptr + to, v, mask=tl.trans(kept))
    to = scale_out_ptr + (kv_row * blocks + block) * 2
    tl.store(to, k_scale)
    tl.store(to + 1, v_log2)


@triton.jit
def _open_values(past, kv_row, place, d, opened, D: tl.constexpr):
    """Values [D, 64] of the open tokens from `place` on, in VALUE_ORDER, and their scales; 0 past the end."""
    token = value_order(place + tl.arange(0, 64))
    here = token < opened
    v = tl.load(past.v_open + (kv_row * D + d)[:, None] * past.open_room + token[None, :], mask=here[None, :], other=0)
    size = tl.load(past.v_open_scale + kv_row * past.open_room + token, mask=here, other=0.0)
    return v.to(tl.float32) * size[None, :], size


@triton.jit
def _value_unit(
    past, pages, table, kv_row, slot, block, sealed, d, opened, SLOTS: tl.constexpr, D: tl.constexpr,
    BITS: tl.constexpr, VALUE_BITS: tl.constexpr, V_RUN: tl.constexpr,
):  # fmt: skip
    """What makes INT8 of a block's values; 0 past the row's end."""
    if block < sealed:
        at = tl.load(table + block) * SLOTS + slot
        most = 0.0
        for first in tl.static_range(0, 64, V_RUN):
            most = tl.maximum(most, _largest(_run_of_values(pages, at, first, d, D, BITS, VALUE_BITS, V_RUN)))
        unit = _unit(most, tl.load(pages.size + at * 128 + 64 + tl.arange(0, 64)).to(tl.float32))
    else:
        v, size = _open_values(past, kv_row, (block - sealed) * 64, d, opened, D)
        unit = _unit(_largest(v), size)
    return unit


@triton.jit
def _run_of_values(
    pages, at, first: tl.constexpr, d, D: tl.constexpr, BITS: tl.constexpr, VALUE_BITS: tl.constexpr,
    V_RUN: tl.constexpr,
):  # fmt: skip
    """Values [D, V_RUN] of page and slot `at` from the place `first` on."""
    LINES: tl.constexpr = (2 if BITS < 8 else 0) + (2 if VALUE_BITS < 8 else 0)
    t = first + tl.arange(0, V_RUN)
    size = tl.load(pages.size + at * 128 + 64 + value_order(t)).to(tl.float32)
    return _values_of_page(pages.v, pages.meta + at * LINES * D, size, at, t, d, D, 64, BITS, VALUE_BITS)


@triton.jit
def _run_of_keys(
    pages, size, at, first: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, VALUE_BITS: tl.constexpr,
    K_RUN: tl.constexpr,
):  # fmt: skip
    """Channels [64, K_RUN] of the keys of page and slot `at` from `first` on."""
    LINES: tl.constexpr = (2 if BITS < 8 else 0) + (2 if VALUE_BITS < 8 else 0)
    c = first + tl.arange(0, K_RUN)
    return _keys_of_page(pages.k, pages.meta + at * LINES * D, size, at, tl.arange(0, 64), c, D, 64, BITS)


@triton.jit(do_not_specialize=["blocks", "first_slot"])
def unpack_tiles_kernel(
    past, pages, table, order, blocks, first_slot, HEADS: tl.constexpr, SLOTS: tl.constexpr, D: tl.constexpr,
    BITS: tl.constexpr, VALUE_BITS: tl.constexpr,
):  # fmt: skip
    """One tile of 128 tokens of one slot, its open tokens in the blocks that they would fill, to past.k, .v and .scale.

    past: `Past`; pages: `PagedHeads` of blocks of 64. Codes have one scale a block; in FP8, values have one scale a
    tile. A tile's second block may lie past the row's end: its codes are 0, its scales those of the first.
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
    # channels, and tokens, that lie in the same bits of neighbouring bytes
    K_RUN: tl.constexpr = D // 4 if BITS == 3 else D * BITS // 8
    V_RUN: tl.constexpr = 16 if VALUE_BITS == 3 else 64 * VALUE_BITS // 8
    one = _value_unit(past, pages, table, kv_row, slot, 2 * tile, sealed, d, opened, SLOTS, D, BITS, VALUE_BITS, V_RUN)
    other = _value_unit(
        past, pages, table, kv_row, slot, 2 * tile + 1, sealed, d, opened, SLOTS, D, BITS, VALUE_BITS, V_RUN
    )
    # not maximum, which drops NaN
    largest = tl.where(other <= one, one, other) + one * 0.0
    largest = tl.where(largest == 0, 1.0, largest)
    k_scale = 0.0
    for half in tl.static_range(2):
        block = 2 * tile + half
        v_scale = one if half == 0 else other
        v_unit = largest if FP8 else tl.where(v_scale == 0, largest, v_scale)
        k_to = past.k + (kv_row * past.sealed_room + block * 64 + n)[:, None] * D
        v_to = past.v + (kv_row * D + d)[:, None] * past.sealed_room + block * 64
        if block < sealed:
            at = tl.load(table + block) * SLOTS + slot
            size = tl.load(pages.size + at * 128 + n).to(tl.float32)
            most = 0.0
            for first in tl.static_range(0, D, K_RUN):
                most = tl.maximum(most, _largest(_run_of_keys(pages, size, at, first, D, BITS, VALUE_BITS, K_RUN)))
            k_scale = _unit(most, size)
            for first in tl.static_range(0, D, K_RUN):
                k = _run_of_keys(pages, size, at, first, D, BITS, VALUE_BITS, K_RUN)
                c = first + tl.arange(0, K_RUN)
                tl.store(k_to + c[None, :], as_int8(_scaled(k, most, 127.0)))
            for first in tl.static_range(0, 64, V_RUN):
                v = _run_of_values(pages, at, first, d, D, BITS, VALUE_BITS, V_RUN) / v_unit
                t = first + tl.arange(0, V_RUN)
                if FP8:
                    tl.store(v_to + t[None, :], v.to(tl.float8e4nv))
                else:
                    tl.store(v_to + t[None, :], as_int8(v))
        else:
            place = (block - sealed) * 64
            here = place + n < opened
            at = kv_row * past.open_room + place
            x = tl.load(past.k_open + (at + n)[:, None] * D + d[None, :], mask=here[:, None], other=0).to(tl.float32)
            size = tl.load(past.k_open_scale + at + n, mask=here, other=0.0)
            x *= size[:, None]
            most = _largest(x)
            k_scale = tl.where(place < opened, _unit(most, size), k_scale)
            tl.store(k_to + d[None, :], as_int8(_scaled(x, most, 127.0)))
            y = _open_values(past, kv_row, place, d, opened, D)[0] / v_unit
            if FP8:
                tl.store(v_to + n[None, :], y.to(tl.float8e4nv))
            else:
                tl.store(v_to + n[None, :], as_int8(y))
        scales = past.scale + (kv_row * (past.sealed_room // 64) + block) * 2
        tl.store(scales, k_scale)
        tl.store(scales + 1, tl.log2(v_unit))
