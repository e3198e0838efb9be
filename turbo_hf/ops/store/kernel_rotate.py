"""Hadamard rotation by sums and differences, each in the order of the reference: the same bits."""

import triton
import triton.language as tl


@triton.jit
def _level(x, HALF: tl.constexpr):
    """Sums and differences of channels that lie HALF apart."""
    ROWS: tl.constexpr = x.shape[0]
    SIZE: tl.constexpr = x.shape[1]
    a, b = tl.split(x.reshape(ROWS, SIZE // (2 * HALF), 2, HALF).permute(0, 1, 3, 2))
    return tl.join(a + b, a - b).permute(0, 1, 3, 2).reshape(ROWS, SIZE)


@triton.jit
def rotated(x, LEVELS: tl.constexpr):
    """Runs of 2^LEVELS channels times the Hadamard matrix (entries +-1), by sums and differences in a fixed order."""
    ROWS: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = x.shape[1]
    SIZE: tl.constexpr = 1 << LEVELS
    x = x.reshape(ROWS * (WIDTH // SIZE), SIZE)
    for level in tl.static_range(LEVELS):
        x = _level(x, SIZE >> (level + 1))
    return x.reshape(ROWS, WIDTH)


@triton.jit
def rotate_kernel(
    x_ptr, out_ptr,  # [B, H, M, D], the second contiguous
    stride_b, stride_h, stride_m, heads, tokens, runs, scale,
    RUNS_PER_TOKEN: tl.constexpr, SIZE: tl.constexpr, LEVELS: tl.constexpr, ROWS: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    """ROWS runs of SIZE = 2^LEVELS channels, RUNS_PER_TOKEN of them per token. TOP: what is clamped to, or None."""
    run = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token = run // RUNS_PER_TOKEN
    row_head = token // tokens
    at = row_head // heads * stride_b + row_head % heads * stride_h + token % tokens * stride_m
    at += run % RUNS_PER_TOKEN * SIZE
    d = tl.arange(0, SIZE)
    inside = (run < runs)[:, None]
    x = tl.load(x_ptr + at[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
    x = rotated(x, LEVELS) * scale
    if TOP is not None:
        # not minimum, which drops NaN
        x = tl.where(x > TOP, TOP, tl.where(x < -TOP, -TOP, x))
    tl.store(out_ptr + (run * SIZE)[:, None] + d[None, :], x.to(out_ptr.dtype.element_ty), mask=inside)
