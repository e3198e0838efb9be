"""Kernels that store new latents and rotary parts (MLA), and seal whole blocks of them."""

import triton
import triton.language as tl

from turbo_hf.ops.kernel_common import value_order
from turbo_hf.ops.store.kernel_seal import codes_of, move_forward, scale_of, seal_lines, seal_sizes


@triton.jit
def append_latent_kernel(
    k_ptr, v_ptr,  # new latents [B, M, rank] and rotary parts [B, M, R], contiguous
    k_open, v_open, k_scales, v_scales,  # as in `KVStore`
    open_ptr, starts_ptr, nonfinite_ptr,  # int64 [B]; [B] or None; int32 [1]
    tokens, cap,
    RANK: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    """Store one new token of one row behind its open ones."""
    token, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    start = 0
    if starts_ptr is not None:
        start = tl.load(starts_ptr + row).to(tl.int32)
    if token >= start:
        to = tl.load(open_ptr + row) + token - start
        opened = (k_open, v_open, k_scales, v_scales)
        _store_token(k_ptr, v_ptr, row * tokens + token, opened, row, to, cap, nonfinite_ptr, RANK, ROTARY)


@triton.jit
def _store_token(
    k_ptr, v_ptr, token, opened, row, to, cap, nonfinite_ptr, RANK: tl.constexpr, ROTARY: tl.constexpr
):  # fmt: skip
    """Store the new token number `token` to place `to` of a row's open tokens."""
    k_open, v_open, k_scales, v_scales = opened
    c, r = tl.arange(0, RANK), tl.arange(0, ROTARY)
    k = tl.load(k_ptr + token * RANK + c).to(tl.float32)
    v = tl.load(v_ptr + token * ROTARY + r).to(tl.float32)
    if k_open.dtype.element_ty == tl.int8:
        k_scale, v_scale = scale_of(k, 0), scale_of(v, 0)
        k = codes_of(k, tl.broadcast_to(k_scale, k.shape))
        v = codes_of(v, tl.broadcast_to(v_scale, v.shape))
    else:
        k = k.to(k_open.dtype.element_ty)
        v = v.to(v_open.dtype.element_ty)
        k_scale = 1.0 + tl.sum(k.to(tl.float32) * 0.0, 0)
        v_scale = 1.0 + tl.sum(v.to(tl.float32) * 0.0, 0)
    tl.store(k_open + (row * cap + to) * RANK + c, k)
    tl.store(v_open + (row * ROTARY + r) * cap + to, v)
    tl.store(k_scales + row * cap + to, k_scale)
    tl.store(v_scales + row * cap + to, v_scale)
    if (k_scale + v_scale) * 0.0 != 0.0:
        tl.store(nonfinite_ptr, 1)


@triton.jit
def latent_step_kernel(
    k_ptr, v_ptr,  # new latents [B, 1, rank] and rotary parts [B, 1, R], contiguous
    paged,  # (k, v, meta, size), as in `PagedHeads`
    opened,  # (k, v, k_scale, v_scale), as in `KVStore`
    table_ptr, sealed_ptr, open_ptr, nonfinite_ptr,  # int64 [B, blocks], [B], [B]; int32 [1]
    table_stride, cap,
    RANK: tl.constexpr, ROTARY: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For one row: seal its open block if it is full, then store its new token, and count both."""
    row = tl.program_id(0).to(tl.int64)
    held, sealed = tl.load(open_ptr + row), tl.load(sealed_ptr + row)
    is_due = held == BLOCK
    if is_due:
        page = tl.load(table_ptr + row * table_stride + sealed)
        _seal(paged, opened, page, row, 0, cap, RANK, ROTARY, BITS, BLOCK)
        # all threads have now read the place that the new token takes
        tl.debug_barrier()
    at = tl.where(is_due, 0, held)
    _store_token(k_ptr, v_ptr, row, opened, row, at, cap, nonfinite_ptr, RANK, ROTARY)
    tl.store(open_ptr + row, at + 1)
    tl.store(sealed_ptr + row, tl.where(is_due, sealed + 1, sealed))


@triton.jit
def seal_latents_kernel(
    paged, opened,  # as in `latent_step_kernel`
    table_ptr, sealed_ptr, open_ptr,  # int64 [B, blocks], [B], [B]
    table_stride, cap,
    RANK: tl.constexpr, ROTARY: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr, MOVES: tl.constexpr,
):  # fmt: skip
    """Seal the n-th whole block of open tokens of one row, which `sealed` counts already. MOVES: as in `seal_open`."""
    n, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    held = tl.load(open_ptr + row)
    whole = held // BLOCK
    entry = tl.load(sealed_ptr + row) - whole + n
    if (n < whole) & (entry >= 0):
        page = tl.load(table_ptr + row * table_stride + entry)
        _seal(paged, opened, page, row, n * BLOCK, cap, RANK, ROTARY, BITS, BLOCK)
        if MOVES:
            move_forward(opened, row, 0, held, cap, BLOCK, RANK, ROTARY, RANK, ROTARY)


@triton.jit
def _seal(
    paged, opened, page, row, first, cap,
    RANK: tl.constexpr, ROTARY: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Seal the open tokens of a row from place `first` on to page `page`."""
    k_out, v_out, meta_out, size_out = paged
    k_open, v_open, k_scales, v_scales = opened
    at_token = row * cap + first
    k_from, v_from = k_open + at_token * RANK, v_open + row * ROTARY * cap + first
    n, r = tl.arange(0, BLOCK), tl.arange(0, ROTARY)
    to = (page * ROTARY + r)[:, None] * BLOCK + n[None, :]
    token, size, share, sizes = n, n, n, size_out
    if BITS < 16:
        token, sizes = value_order(n), size_out + page * (2 * BLOCK)
        _, size, share, _ = seal_sizes(k_from, RANK, 1, k_scales + at_token, sizes, RANK, RANK, BLOCK, BITS)
        tl.store(sizes + BLOCK + n, tl.load(v_scales + at_token + n).to(tl.bfloat16))
    seal_lines(k_from, size, share, k_out, meta_out + page * 2 * RANK, sizes, page, RANK, RANK, BLOCK, BITS)
    tl.store(v_out + to, tl.load(v_from + r[:, None] * cap + token[None, :]))
