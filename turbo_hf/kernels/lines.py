"""Lines of single tokens out of token-major pages, unpacked where they were loaded: nothing moves between threads.

Bytes are loaded 4 in a word, and what a word holds comes out side by side. So the channels of a line are in an order of
their own (`order_of`), the same for codes, steps, zeros and open tokens of one width.
"""

import triton
import triton.language as tl

from turbo_hf.kernels.tiles import packed_bytes


@triton.jit
def turns(x, y):
    """x and y [1, T, N], column by column in turn: nothing moves between threads."""
    return tl.join(x, y).reshape(1, x.shape[1], 2 * x.shape[2])


@triton.jit
def order_of(D: tl.constexpr, DP: tl.constexpr, PIECES: tl.constexpr, UNIT: tl.constexpr):
    """The channel at each place of what `signed` and `codes_of` return, D where there is none."""
    i = tl.arange(0, DP)
    byte = i * 0
    if UNIT == 4:
        byte = i % 2 * 2 + i // 2 % 2
    rest = i // UNIT
    piece = i * 0
    if PIECES > 1:
        piece = rest % 2
    if PIECES > 2:
        piece = piece * 2 + rest // 2 % 2
    if PIECES > 4:
        piece = piece * 2 + rest // 4 % 2
    inside = rest // PIECES * UNIT + byte
    return tl.where(inside < D // PIECES, piece * (D // PIECES) + inside, D)


@triton.jit
def words(at, ok, D: tl.constexpr, DP: tl.constexpr, PIECES: tl.constexpr, UNIT: tl.constexpr):
    """D bytes at each of `at` [1, T, 1], UNIT in a number: int32 [1, T, DP // UNIT]; PIECES of them take turns."""
    if PIECES > 1:
        low = words(at, ok, D // 2, DP // 2, PIECES // 2, UNIT)
        return turns(low, words(at + D // 2, ok, D // 2, DP // 2, PIECES // 2, UNIT))
    else:
        c = tl.arange(0, DP // UNIT)[None, None, :]
        if UNIT == 4:
            at = at.to(tl.pointer_type(tl.int32), bitcast=True)
        return packed_bytes(at + c, ok, c, D // UNIT, DP // UNIT).to(tl.int32)


@triton.jit
def _bytes(w):
    """The 4 bytes of each word, below 256."""
    return turns(turns(w & 255, w >> 8 & 255), turns(w >> 16 & 255, w >> 24 & 255))


@triton.jit
def signed(w, UNIT: tl.constexpr):
    """Signed bytes, float32."""
    if UNIT == 4:
        w = turns(turns(w << 24 >> 24, w << 16 >> 24), turns(w << 8 >> 24, w >> 24))
    return w.to(tl.float32)


@triton.jit
def line_of(at, ok, D: tl.constexpr, DP: tl.constexpr, BITS: tl.constexpr):
    """The codes of the tokens whose lines are at `at` [1, T, 1], as they lie: int32 [1, T, N]."""
    if BITS == 3:
        low = words(at, ok, D // 8, DP // 8, 1, 1) & 255
        high = words(at + D // 8, ok, D // 8, DP // 8, 1, 1) & 255
        return low | high << 8 | (words(at + D // 4, ok, D // 8, DP // 8, 1, 1) & 255) << 16
    else:
        return words(at, ok, D * BITS // 8, DP * BITS // 8, 1, 4)


@triton.jit
def _three(w, J: tl.constexpr):
    """The codes of 3 bit of pieces J and J + 1, in turn (`line_of`)."""
    first = w >> J & 3 | (w >> (16 + J) & 1) << 2
    return turns(first, w >> (8 + J) & 3 | (w >> (17 + J) & 1) << 2)


@triton.jit
def codes_of(w, BITS: tl.constexpr):
    """What `line_of` has loaded, unpacked: float32 [1, T, DP]."""
    if BITS == 8:
        return signed(w, 4)
    elif BITS == 4:
        nibbles = turns(w & 0x0F0F0F0F, w >> 4 & 0x0F0F0F0F)
        return _bytes(nibbles).to(tl.float32)
    elif BITS == 2:
        low = turns(w & 0x03030303, w >> 2 & 0x03030303)
        pairs = turns(low, turns(w >> 4 & 0x03030303, w >> 6 & 0x03030303))
        return _bytes(pairs).to(tl.float32)
    else:
        low = turns(_three(w, 0), _three(w, 2))
        return turns(low, turns(_three(w, 4), _three(w, 6))).to(tl.float32)
