"""What the prompt kernel for Hopper does with a compressed past, in Triton's Gluon.

`kernel_hopper` has the names. A tile of the past holds two blocks of 64 keys, each with its own scales. The newest, if
it is not full, is masked.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

GUARD = gl.constexpr(16.0)  # the reference of a tile may lie at most this far (log2) under the running maximum


@gluon.jit
def start_of(starts, row):
    """The first token of a row of the batch."""
    start = 0
    if starts is not None:
        start = gl.load(starts + row).to(gl.int32)
    return start


@gluon.jit
def extent(past, bh, row, Hq, starts, M, part, parts):
    """The past's tokens and tiles, and which of these, the newest first, this part reads: from, to."""
    sealed = gl.load(past.sealed + bh // Hq).to(gl.int32) * 64
    tokens = sealed + gl.load(past.open_len + bh // Hq).to(gl.int32)
    newest = gl.cdiv(tokens, 128)
    of_row = newest
    if starts is not None:
        of_row = gl.where(row < M - start_of(starts, bh // Hq), newest, 0)
    begin, end = 0, of_row
    if parts is not None:
        # the first part reads the queries' own tiles besides
        own = row // 128 + 1
        share = gl.cdiv(end + own, parts)
        begin = gl.maximum(part * share - own, 0)
        end = gl.minimum((part + 1) * share - own, end)
    return tokens, newest, begin, end


@gluon.jit
def past_tile(i, newest, room):
    """The tile of the past that is read i-th (past the end: any)."""
    return gl.minimum(gl.maximum(newest - 1 - i, 0), room // 128 - 1)


@gluon.jit
def _of_halves(x, layout: gl.constexpr):
    """A row vector as [64, 1], beside which the halves of a tile stand."""
    return gl.convert_layout(x, gl.SliceLayout(1, gl.SliceLayout(2, layout)), assert_trivial=True)[:, None]


@gluon.jit
def past_scales(scales, j, layout: gl.constexpr):
    """Scales of the two blocks of keys of the past's tile j, and log2 of those of its values."""
    at = scales + j * 4 + 2 * gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    return gl.load(at), gl.load(at + 1)


@gluon.jit
def past_probabilities(
    S,
    q_scale,
    k_scale,
    m,
    tokens,
    first_key,
    OFFSET: gl.constexpr,
    MASK: gl.constexpr,
    layout: gl.constexpr,
    halves: gl.constexpr,
):
    """`_probabilities` of a tile of two blocks, each with its own scale of keys. MASK: keys from `tokens` on."""
    if MASK:
        keep = (first_key + gl.arange(0, 128, layout=gl.SliceLayout(0, layout)))[None, :] < tokens
        S = gl.where(keep, S, -1073741824)
    c = _of_halves(q_scale, halves) * k_scale[None, :]
    S = S.reshape((64, 2, 64))
    top = gl.max(gl.max(S, 2).to(gl.float32) * c, 1)
    top = gl.convert_layout(top, gl.SliceLayout(1, layout), assert_trivial=True)
    m = gl.maximum(m, top)
    ref = gl.maximum(top, m - GUARD)
    P = gl.exp2(S.to(gl.float32) * c[:, :, None] - _of_halves(ref - OFFSET, halves)[:, :, None])
    P = gl.convert_layout(P.reshape((64, 128)), layout, assert_trivial=True)
    if MASK:
        P = gl.where(keep, P, 0.0)
    return P, m, ref


@gluon.jit
def by_worth(P, v_log, v_exp, layout: gl.constexpr):
    """P times what the values of its half are worth beside the tile's larger scale."""
    P = P.reshape((64, 2, 64)) * gl.exp2(v_log - v_exp)[None, :, None]
    return gl.convert_layout(P.reshape((64, 128)), layout, assert_trivial=True)
