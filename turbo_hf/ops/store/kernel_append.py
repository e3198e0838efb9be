"""Kernels that store new tokens in the open buffer and seal whole blocks, in one launch without waiting."""

import triton
import triton.language as tl

from turbo_hf.ops.kernel_common import slot_of_width
from turbo_hf.ops.store.kernel_seal import codes_of, move_forward, scale_of, seal_block

QUERIES = tl.constexpr(4)
"""Query rows that a program balances."""


@triton.jit
def _codes(x, TYPE: tl.constexpr):
    """INT8 codes of tokens x [T, DP], and their scales.

    With another TYPE than int8: the tokens themselves, with scale 1.
    """
    if TYPE != tl.int8:
        codes = x.to(TYPE)
        scale = tl.sum(codes.to(tl.float32) * 0.0, 1) + 1.0
        nonfinite = tl.sum(scale * 0.0, 0) != 0.0
    else:
        scale = scale_of(x, 1)
        nonfinite = tl.sum(scale * 0.0, 0) != 0.0
        codes = codes_of(x, tl.broadcast_to(scale[:, None], x.shape))
    return codes, scale, nonfinite


@triton.jit
def _balanced(k, balance_ptr, head, d, D: tl.constexpr):
    """Channels d of keys [T, DP] of a head, as `ops.maths.balanced_keys` leaves them."""
    if balance_ptr is not None:
        balance = tl.load(balance_ptr + head * D + d, mask=d < D, other=1.0)
        k = tl.div_rn(k, tl.broadcast_to(balance[None, :], k.shape))
    return k


@triton.jit
def _balance_queries(queries, balance_ptr, first, HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """QUERIES rows of `NewQueries`, from row `first` on, as `ops.maths.balanced_queries` leaves them."""
    n = first + tl.arange(0, QUERIES)
    d = tl.arange(0, DP)
    inside = (n < queries.rows)[:, None] & (d < D)[None, :]
    pair, token = n // queries.tokens, n % queries.tokens
    row, head = pair // queries.heads, pair % queries.heads
    x = tl.load(queries.data + _places(queries.strides, row[:, None], head[:, None], token, d), mask=inside, other=0.0)
    kv_head = head // (queries.heads // HEADS)
    balance = tl.load(balance_ptr + kv_head[:, None] * D + d[None, :], mask=inside, other=0.0)
    x = (x.to(tl.float32) * balance).to(queries.out.dtype.element_ty)
    tl.store(queries.out + n[:, None] * D + d[None, :], x, mask=inside)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["nonfinite_ptr"])
def append_kernel(
    new,  # `NewTokens`
    balance_ptr,  # float32 [Hkv, D] or None
    queries,  # `NewQueries` or None
    opened,  # (k, v, k_scale, v_scale) of the open tokens, as in `KVStore`
    open_len_ptr, starts_ptr,  # int64 [B], and [B] or None
    nonfinite_ptr, arrived_ptr,  # int32 [1], int32 [B]: zeros before and after
    tokens, cap,
    HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Append TOKENS new tokens of one row and head; the last program of a row to arrive updates the row's count.

    With `queries`, the first programs balance those instead, which attention over the tokens takes.
    """
    pair = tl.program_id(1).to(tl.int64)
    if queries is not None:
        pair -= tl.cdiv(queries.rows, QUERIES)
        if pair < 0:
            _balance_queries(queries, balance_ptr, (pair + tl.cdiv(queries.rows, QUERIES)) * QUERIES, HEADS, D, DP)
    if pair >= 0:
        k_open, v_open, k_scales, v_scales = opened
        row, head = pair // HEADS, pair % HEADS
        held = tl.load(open_len_ptr + row)
        start = 0
        if starts_ptr is not None:
            start = tl.load(starts_ptr + row).to(tl.int32)
        n = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
        d = tl.arange(0, DP)
        live = (n < tokens) & (n >= start)
        inside = live[:, None] & (d < D)[None, :]
        place = pair * cap + held + n - start
        k = tl.load(new.k + _places(new.k_strides, row, head, n, d), mask=inside, other=0.0).to(tl.float32)
        v = tl.load(new.v + _places(new.v_strides, row, head, n, d), mask=inside, other=0.0).to(tl.float32)
        k = _balanced(k, balance_ptr, head, d, D)
        k, k_scale, k_nonfinite = _codes(k, k_open.dtype.element_ty)
        v, v_scale, v_nonfinite = _codes(v, v_open.dtype.element_ty)
        tl.store(k_open + place[:, None] * D + d[None, :], k, mask=inside)
        tl.store(v_open + (pair * D + d)[None, :] * cap + (held + n - start)[:, None], v, mask=inside)
        tl.store(k_scales + place, k_scale, mask=live)
        tl.store(v_scales + place, v_scale, mask=live)
        if k_nonfinite | v_nonfinite:
            tl.store(nonfinite_ptr, 1)
        if tl.atomic_add(arrived_ptr + row, 1, sem="acq_rel") == HEADS * tl.num_programs(0) - 1:
            tl.store(arrived_ptr + row, 0)
            tl.store(open_len_ptr + row, held + tokens - start)


@triton.jit
def _places(strides, row, head, n, d):
    """Offsets of channels d of tokens n."""
    return row * strides[0] + head * strides[1] + n[:, None] * strides[2] + d[None, :] * strides[3]


@triton.jit(do_not_specialize=["table_stride"])
def seal_open_kernel(
    paged,  # for each bit width (k, v, meta, size), as in `PagedHeads`
    opened,  # for each bit width (k, v, k_scale, v_scale, v's stride of a token, and of a channel)
    moved,  # (k, v, k_scale, v_scale) of the open tokens, if what is behind the block takes its place, or None
    rows,  # `Rows`
    table_ptr,  # int64 [B, blocks]
    table_stride, cap,
    FORM: tl.constexpr,
):  # fmt: skip
    """Seal one whole open block of one slot of one row to its page."""
    n = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1).to(tl.int64)
    D: tl.constexpr = FORM.dim
    BLOCK: tl.constexpr = FORM.block
    row, slot = program // FORM.heads, program % FORM.heads
    held = tl.load(rows.open_len + row)
    whole = (held - FORM.first - FORM.recent) // BLOCK
    at = tl.load(rows.sealed + row) - whole + n
    # blocks that a row does not have, or that have left its window
    if (n < whole) & (at >= 0):
        page = tl.load(table_ptr + row * table_stride + at)
        pair = row * FORM.heads + tl.load(rows.order + program)
        for g in tl.static_range(len(FORM.slots)):
            own, here = slot_of_width(slot, True, g, FORM)
            if here:
                k, v, k_scale, v_scale, v_token, v_channel = opened[g]
                begin = FORM.first + n * BLOCK
                first = pair * cap + begin
                v += pair * cap * D + begin * v_token
                seal_block(
                    k + first * D, v, k_scale + first, v_scale + first, v_token, v_channel, paged[g],
                    page * FORM.slots[g] + own, g, FORM,
                )  # fmt: skip
        if moved is not None:
            DP: tl.constexpr = FORM.padded_dim
            move_forward(moved, pair, FORM.first, held, cap, BLOCK, D, D, DP, DP)


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["nonfinite_ptr"])
def append_step_kernel(
    new,  # `NewTokens`, one per row
    balance_ptr,  # float32 [Hkv, D] or None
    queries,  # `NewQueries` or None
    cache, rows,  # `Cache`, `Rows`
    table_ptr,  # int64 [B, blocks]
    noted,  # None; or the index int16 [B, Hkv, places], buckets of the new tokens int16 [B, Hkv, 1], and places
    nonfinite_ptr, arrived_ptr,  # int32 [1], int32 [B]: zeros before and after
    table_stride,
    FORM: tl.constexpr,
):  # fmt: skip
    """For one slot of one row: seal its block if due, then append its new token. A row's last slot updates both counts.

    queries: as in `append_kernel`.
    """
    program = tl.program_id(0).to(tl.int64)
    if queries is not None:
        program -= tl.cdiv(queries.rows, QUERIES)
        if program < 0:
            first = (program + tl.cdiv(queries.rows, QUERIES)) * QUERIES
            _balance_queries(queries, balance_ptr, first, FORM.heads, FORM.dim, FORM.padded_dim)
    if program >= 0:
        HEADS: tl.constexpr = FORM.heads
        D: tl.constexpr = FORM.dim
        BLOCK: tl.constexpr = FORM.block
        cap = cache.cap
        row, slot = program // HEADS, program % HEADS
        head = tl.load(rows.order + program)
        held = tl.load(rows.open_len + row)
        sealed = tl.load(rows.sealed + row)
        k_open, v_open, k_scales, v_scales = cache.opened
        pair = row * HEADS + head
        FIRST: tl.constexpr = FORM.first
        is_due = held == FIRST + BLOCK + FORM.recent
        if is_due:
            page = tl.load(table_ptr + row * table_stride + sealed)
            for g in tl.static_range(len(FORM.slots)):
                own, here = slot_of_width(slot, True, g, FORM)
                if here:
                    at = pair * cap + FIRST
                    seal_block(
                        k_open + at * D, v_open + pair * D * cap + FIRST, k_scales + at, v_scales + at, 1, cap,
                        cache.paged[g], page * FORM.slots[g] + own, g, FORM,
                    )  # fmt: skip
            # all threads have then read the place that the new token takes
            move_forward(cache.opened, pair, FIRST, held, cap, BLOCK, D, D, FORM.padded_dim, FORM.padded_dim)
        at = tl.where(is_due, held - BLOCK, held)
        d = tl.arange(0, FORM.padded_dim)
        inside = (d < D)[None, :]
        k_from = new.k + row * new.k_strides[0] + head * new.k_strides[1] + d[None, :] * new.k_strides[3]
        v_from = new.v + row * new.v_strides[0] + head * new.v_strides[1] + d[None, :] * new.v_strides[3]
        k = tl.load(k_from, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(v_from, mask=inside, other=0.0).to(tl.float32)
        k = _balanced(k, balance_ptr, head, d, D)
        k, k_scale, k_nonfinite = _codes(k, tl.int8)
        v, v_scale, v_nonfinite = _codes(v, tl.int8)
        one = tl.arange(0, 1)
        tl.store(k_open + (pair * cap + at) * D + d[None, :], k, mask=inside)
        tl.store(v_open + (pair * D + d)[None, :] * cap + at, v, mask=inside)
        tl.store(k_scales + pair * cap + at + one, k_scale)
        tl.store(v_scales + pair * cap + at + one, v_scale)
        if noted is not None:
            # a token's place in its row is the same before its block is sealed and after
            index, buckets, places = noted
            tl.store(index + pair * places + sealed * BLOCK + held, tl.load(buckets + pair))
        if k_nonfinite | v_nonfinite:
            tl.store(nonfinite_ptr, 1)
        if tl.atomic_add(arrived_ptr + row, 1, sem="acq_rel") == HEADS - 1:
            tl.store(arrived_ptr + row, 0)
            tl.store(rows.open_len + row, at + 1)
            tl.store(rows.sealed + row, tl.where(is_due, sealed + 1, sealed))
