"""Steps of up to 16 queries over 4-bit latents, with all operands of the products in registers, in Gluon.

It computes what `ops.latent.kernel` does, for a latent of 512 channels and a rotary part of 64, in blocks of 64 tokens.
Four warps share a block: each multiplies its own quarter of the channels into the scores of all tokens; their sums are
added up through shared memory, where each warp turns its own quarter of the tokens into probabilities; then each
multiplies all of these with its own quarter of the channels.

The next page is copied to shared memory meanwhile. Codes are read from there twice, in the two orders in which the
products want them, and become float16 two at a time. A code masked out of its byte is a subnormal number, which
products take as it is: steps are multiplied into the queries, zeros have a product of their own. Which element of a
tensor holds which channel or token is what the instructions find at hand, not what its index says; whoever meets it
(queries, outputs, addresses) follows the same order.

    label    of                        holds
    k        a product's 16 channels   word k / 2 % 4 * 4 + k / 8 * 2 (+ 1 for j >= 4) of the warp's 16, byte
                                       k % 2 * 2 + j / 2 % 2 of it; j % 2: the second half of the channels
    n        64 tokens                 place n % 16 * 4 + n / 16 of the stored rotary parts
    word     4 bytes of a token        channels 4 * word to 4 * word + 3, and those 256 further; of open tokens,
                                       which have 8 bit, the first
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

LIFT = gl.constexpr(15.0)

S = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8]))
S_A = gl.constexpr(gl.DotOperandLayout(0, S, 2))
S_B = gl.constexpr(gl.DotOperandLayout(1, S, 2))
OUT = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 4], [16, 8]))
OUT_A = gl.constexpr(gl.DotOperandLayout(0, OUT, 2))
OUT_B = gl.constexpr(gl.DotOperandLayout(1, OUT, 2))
# [warp, token, word], [warp, word], [warp, word, channel]: operands of the scores as they are found in shared memory
K_WORDS = gl.constexpr(gl.DistributedLinearLayout(
    [[0, 0, 1], [0, 0, 2], [0, 8, 0], [0, 16, 0], [0, 32, 0]], [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
    [[1, 0, 0], [2, 0, 0]], [], [4, 64, 16]))
K_META = gl.constexpr(gl.DistributedLinearLayout(
    [[0, 1], [0, 2]], [[0, 4], [0, 8], [0, 0], [0, 0], [0, 0]], [[1, 0], [2, 0]], [], [4, 16]))
R_WORDS = gl.constexpr(gl.DistributedLinearLayout(
    [[0, 0, 1], [0, 0, 8], [0, 8, 0]], [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
    [[1, 0, 0], [2, 0, 0]], [], [4, 16, 16]))
# the same with one index for warp and word, or warp and channel: [token, word], [word], [channel, word]
K_LOAD = gl.constexpr(gl.DistributedLinearLayout(
    [[0, 1], [0, 2], [8, 0], [16, 0], [32, 0]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [[0, 16], [0, 32]], [],
    [64, 64]))
M_LOAD = gl.constexpr(gl.DistributedLinearLayout(
    [[1], [2]], [[4], [8], [0], [0], [0]], [[16], [32]], [], [64]))
R_LOAD = gl.constexpr(gl.DistributedLinearLayout(
    [[1, 0], [8, 0], [0, 8]], [[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]], [[16, 0], [32, 0]], [], [64, 16]))
# [token, word]: the same block for the outputs, and a quarter of it
V_LOAD = gl.constexpr(gl.DistributedLinearLayout(
    [[0, 1], [1, 0], [8, 0], [16, 0], [32, 0]], [[2, 0], [4, 0], [0, 2], [0, 4], [0, 8]], [[0, 16], [0, 32]], [],
    [64, 64]))
V_WORDS = gl.constexpr(gl.DistributedLinearLayout(
    [[0, 1], [1, 0], [8, 0]], [[2, 0], [4, 0], [0, 2], [0, 4], [0, 8]], [[0, 16], [0, 32]], [], [16, 64]))
# [part, query, token] and [query, quarter of the tokens, token]: sums of scores
PARTS = gl.constexpr(gl.DistributedLinearLayout(
    [[0, 0, 1], [0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0]],
    [[0, 1, 0], [0, 2, 0], [0, 4, 0], [0, 8, 0], [0, 0, 8]], [[0, 0, 16], [0, 0, 32]], [], [4, 16, 64]))
QUARTERS = gl.constexpr(gl.DistributedLinearLayout(
    [[0, 0, 1], [0, 0, 2], [0, 0, 4]], [[1, 0, 0], [2, 0, 0], [4, 0, 0], [8, 0, 0], [0, 0, 8]],
    [[0, 1, 0], [0, 2, 0]], [], [16, 4, 16]))
# [quarter, query, token]: probabilities as an operand
P_A = gl.constexpr(gl.DistributedLinearLayout(
    [[0, 0, 1], [0, 8, 0], [0, 0, 8], [1, 0, 0], [2, 0, 0]], [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
    [[0, 0, 0], [0, 0, 0]], [], [4, 16, 16]))
# shared memory, in such orders that no two threads meet in a bank
K_SMEM = gl.constexpr(gl.SharedLinearLayout(
    [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [0, 32], [1, 16], [2, 8], [4, 16], [8, 0], [16, 0], [32, 0]]))
R_SMEM = gl.constexpr(gl.SharedLinearLayout(
    [[0, 1], [0, 2], [0, 4], [0, 8], [1, 0], [2, 8], [5, 0], [8, 0], [16, 0], [32, 0]]))
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
Q_SMEM = gl.constexpr(gl.SharedLinearLayout(
    [[0, 0, 1], [0, 8, 0], [0, 0, 8], [0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0], [1, 0, 0], [2, 0, 0],
     [4, 0, 0], [8, 0, 0], [16, 0, 0]]))
PARTS_SMEM = gl.constexpr(gl.SharedLinearLayout(
    [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [0, 0, 16], [0, 0, 32], [0, 1, 8], [0, 2, 16], [0, 4, 4], [0, 8, 0],
     [1, 0, 0], [2, 0, 0]]))
P_SMEM = gl.constexpr(gl.SharedLinearLayout(
    [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0], [0, 0, 8], [0, 8, 0], [1, 0, 0], [2, 0, 0]]))
K_COPY = gl.constexpr(gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0]))
R_COPY = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0]))
M_COPY = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))
ROW = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0]))


@gluon.jit
def _raw_codes(words):
    """4-bit codes of 2 words, as subnormal float16: 8 pairs (j), each of two bytes of one word (low or high codes)."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 a, b; shr.u32 a, $8, 8; shr.u32 b, $9, 8;"
        "and.b32 $0, $8, 0x000F000F; and.b32 $1, $8, 0x00F000F0; and.b32 $2, a, 0x000F000F; and.b32 $3, a, 0x00F000F0;"
        "and.b32 $4, $9, 0x000F000F; and.b32 $5, $9, 0x00F000F0; and.b32 $6, b, 0x000F000F; and.b32 $7, b, 0x00F000F0;"
        "}", "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r", [words], dtype=(gl.float16,) * 8, is_pure=True, pack=2)


@gluon.jit
def _int8_pairs(words):
    """int8 of 2 words as float16: bytes 0 and 2, 1 and 3 of the first, then of the second. 0x64uu is 1024 + u."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 a, b, k, m; xor.b32 a, $4, 0x80808080; xor.b32 b, $5, 0x80808080;"
        "mov.b32 k, 0x64646464; mov.b32 m, 0xE480E480;"
        "prmt.b32 $0, a, k, 0x4240; prmt.b32 $1, a, k, 0x4341; prmt.b32 $2, b, k, 0x4240; prmt.b32 $3, b, k, 0x4341;"
        "add.rn.f16x2 $0, $0, m; add.rn.f16x2 $1, $1, m; add.rn.f16x2 $2, $2, m; add.rn.f16x2 $3, $3, m; }",
        "=&r,=&r,=&r,=&r,r,r", [words], dtype=(gl.float16,) * 4, is_pure=True, pack=2)


@gluon.jit
def _turned_pairs(words):
    """int8 of 2 words as float16: byte b of both, for the 4 b."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 a, b, c, k, m; xor.b32 a, $4, 0x80808080; xor.b32 b, $5, 0x80808080;"
        "mov.b32 k, 0x64646464; mov.b32 m, 0xE480E480; prmt.b32 c, a, b, 0x5140; prmt.b32 b, a, b, 0x7362;"
        "prmt.b32 $0, c, k, 0x4140; prmt.b32 $1, c, k, 0x4342; prmt.b32 $2, b, k, 0x4140; prmt.b32 $3, b, k, 0x4342;"
        "add.rn.f16x2 $0, $0, m; add.rn.f16x2 $1, $1, m; add.rn.f16x2 $2, $2, m; add.rn.f16x2 $3, $3, m; }",
        "=&r,=&r,=&r,=&r,r,r", [words], dtype=(gl.float16,) * 4, is_pure=True, pack=2)


@gluon.jit
def _times(a, b):
    return gl.inline_asm_elementwise("mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.float16, is_pure=True,
                                     pack=2)


@gluon.jit
def _twice(x, byte: gl.constexpr, bias: gl.constexpr, factor: gl.constexpr):
    """Byte + bias - 128 of each word, times a factor (the bits of two float16), twice in 32 bits."""
    SELECT: gl.constexpr = 0x4040 + 0x101 * byte
    if bias:
        return gl.inline_asm_elementwise(
            "{ .reg .b32 a, k, m; mov.b32 k, 0x64646464; mov.b32 m, 0xE400E400; prmt.b32 a, $1, k, $2;"
            "add.rn.f16x2 a, a, m; mul.rn.f16x2 $0, a, $3; }", "=r,r,r,r",
            [x, gl.full_like(x, SELECT), gl.full_like(x, factor)], dtype=gl.int32, is_pure=True, pack=1)
    else:
        return gl.inline_asm_elementwise(
            "{ .reg .b32 a, k, m; mov.b32 k, 0x64646464; mov.b32 m, 0xE480E480; xor.b32 a, $1, 0x80808080;"
            "prmt.b32 a, a, k, $2; add.rn.f16x2 a, a, m; mul.rn.f16x2 $0, a, $3; }", "=r,r,r,r",
            [x, gl.full_like(x, SELECT), gl.full_like(x, factor)], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _code_values(words, byte: gl.constexpr, s_low, z_low, s_high, z_high):
    """(code * step + zero) / 2^13 of a byte's low and high codes, pairs of two tokens, for 2 words."""
    SELECT: gl.constexpr = 0x0400 + 0x101 * byte
    like = gl.full_like(words, SELECT)
    a, _ = gl.broadcast(s_low[None, :], words)
    b, _ = gl.broadcast(z_low[None, :], words)
    c, _ = gl.broadcast(s_high[None, :], words)
    d, _ = gl.broadcast(z_high[None, :], words)
    low, high = gl.inline_asm_elementwise(
        "{ .reg .b32 a, b, c; prmt.b32 a, $4, $6, $24; prmt.b32 b, $5, $7, $24;"
        "and.b32 c, a, 0x000F000F; fma.rn.f16x2 $0, c, $8, $12; and.b32 c, b, 0x000F000F; fma.rn.f16x2 $1, c, $9, $13;"
        "and.b32 c, a, 0x00F000F0; fma.rn.f16x2 $2, c, $16, $20; and.b32 c, b, 0x00F000F0;"
        "fma.rn.f16x2 $3, c, $17, $21; }",
        "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r", [words, a, b, c, d, like],
        dtype=(gl.float16, gl.float16), is_pure=True, pack=4)
    return _output_operand(low), _output_operand(high)


@gluon.jit
def _byte_values(words, byte: gl.constexpr):
    """int8 as float16: a byte of each word, pairs of two tokens, for 2 words."""
    SELECT: gl.constexpr = 0x0400 + 0x101 * byte
    x = gl.inline_asm_elementwise(
        "{ .reg .b32 a, b, m; prmt.b32 a, $2, $4, $6; prmt.b32 b, $3, $5, $6;"
        "mov.b32 m, 0xE480E480; and.b32 a, a, 0x00FF00FF; xor.b32 a, a, 0x64806480; and.b32 b, b, 0x00FF00FF;"
        "xor.b32 b, b, 0x64806480; add.rn.f16x2 $0, a, m; add.rn.f16x2 $1, b, m; }",
        "=&r,=&r,r,r,r,r,r,r,r,r", [words, gl.full_like(words, SELECT)], dtype=gl.float16, is_pure=True, pack=4)
    return _output_operand(x)


@gluon.jit
def _score_operand(x):
    """[4, 64 tokens, 16 words] -> [4, 16, 64]: label k of a word's index."""
    x = x.reshape((4, 64, 4, 2, 2)).permute((0, 3, 2, 4, 1)).reshape((4, 16, 64))
    return gl.convert_layout(x, S_B, assert_trivial=True)


@gluon.jit
def _meta_operand(x, like: gl.constexpr):
    """[4, 16 words] -> [4, 16], label k of a word's index."""
    x = x.reshape((4, 4, 2, 2)).permute((0, 2, 1, 3)).reshape((4, 16))
    return gl.convert_layout(x, like, assert_trivial=True)


@gluon.jit
def _output_operand(x):
    """[16 tokens, 64 words] with pairs of tokens where its words 2 w and 2 w + 1 should be -> [16, 64]."""
    x = x.reshape((8, 2, 32, 2)).permute((0, 3, 2, 1)).reshape((16, 4, 8, 2)).permute((0, 3, 1, 2)).reshape((16, 64))
    return gl.convert_layout(x, OUT_B, assert_trivial=True)


@gluon.jit
def _stored_order(n):
    """The token in place n of the stored values of a block (`layout.VALUE_ORDER`)."""
    return n // 16 * 16 + n // 4 % 4 * 2 + n // 2 % 2 * 8 + n % 2


@gluon.jit
def _place(n):
    """The place of label n among 64 stored tokens."""
    return n % 16 * 4 + n // 16


@gluon.jit
def _rotary(words, qr):
    """Products of rotary parts [4, 16 words of places, 16 channels] with queries [4, 16, 16]: [4, 16, 64 tokens]."""
    a, b, c, d = _turned_pairs(words)
    zero = gl.zeros((4, 16, 16), gl.float32, S)
    a = mma_v2(qr, gl.convert_layout(a.permute((0, 2, 1)), S_B, assert_trivial=True), zero)
    b = mma_v2(qr, gl.convert_layout(b.permute((0, 2, 1)), S_B, assert_trivial=True), zero)
    c = mma_v2(qr, gl.convert_layout(c.permute((0, 2, 1)), S_B, assert_trivial=True), zero)
    d = mma_v2(qr, gl.convert_layout(d.permute((0, 2, 1)), S_B, assert_trivial=True), zero)
    x = gl.join(gl.join(a, b), gl.join(c, d)).permute((0, 1, 4, 3, 2)).reshape((4, 16, 64))
    return gl.convert_layout(x, S, assert_trivial=True)


@gluon.jit
def _query(q, j: gl.constexpr):
    """[4, 16, 16], in registers."""
    return q.slice(4 * j, 4).load(S_A)


@gluon.jit
def _by_warp(words):
    """[64 tokens, 64 words] -> [4, 64, 16]."""
    return gl.convert_layout(words.reshape((64, 4, 16)).permute((1, 0, 2)), K_WORDS, assert_trivial=True)


@gluon.jit
def _turned_by_warp(words):
    """[64 channels, 16 words] -> [4, 16, 16 channels]."""
    return gl.convert_layout(words.reshape((4, 16, 16)).permute((0, 2, 1)), R_WORDS, assert_trivial=True)


@gluon.jit
def _byte_scores(q, low, high, acc):
    """Adds products of queries with int8 words [64 tokens, 64] of both halves to acc, in units of 2^-7."""
    a, b, c, d = _int8_pairs(_by_warp(low))
    acc = mma_v2(_query(q, 0), _score_operand(a), acc * 16.0)
    acc = mma_v2(_query(q, 2), _score_operand(b), acc)
    acc = mma_v2(_query(q, 4), _score_operand(c), acc)
    acc = mma_v2(_query(q, 6), _score_operand(d), acc) * 0.0625
    a, b, c, d = _int8_pairs(_by_warp(high))
    acc = mma_v2(_query(q, 1), _score_operand(a), acc)
    acc = mma_v2(_query(q, 3), _score_operand(b), acc)
    acc = mma_v2(_query(q, 5), _score_operand(c), acc)
    return mma_v2(_query(q, 7), _score_operand(d), acc)


@gluon.jit
def _line_of(meta, line: gl.constexpr):
    """Steps or zeros of half the channels, for the scores."""
    x = gl.convert_layout(_meta_of(meta, line, M_LOAD).reshape((4, 16)), K_META, assert_trivial=True)
    return _int8_pairs(x)


@gluon.jit
def _zeros(q, meta):
    """Products of queries with a block's zeros, 8 times the same [4, 16, 8], in units of 2^13."""
    low = gl.zeros((4, 16, 8), gl.float32, S)
    high = low
    like = gl.zeros((4, 16, 8), gl.float16, S_B)
    a, b = _line_of(meta, 2), _line_of(meta, 3)
    for i in gl.static_range(4):
        x = _meta_operand(a[i], gl.SliceLayout(2, S_B)).expand_dims(2)
        low = mma_v2(_query(q, 2 * i), gl.broadcast(x, like)[0], low)
        x = _meta_operand(b[i], gl.SliceLayout(2, S_B)).expand_dims(2)
        high = mma_v2(_query(q, 2 * i + 1), gl.broadcast(x, like)[0], high)
    return low * 2.0**-24 + high * 2.0**-20


@gluon.jit
def _added(s, factor, zeros):
    """s [4, 16, 64] times a factor, plus what is the same for all tokens [4, 16, 8]."""
    x = s.reshape((4, 16, 8, 8))
    zeros = gl.convert_layout(zeros, gl.SliceLayout(2, x.type.layout), assert_trivial=True)
    return gl.convert_layout((x * factor + zeros.expand_dims(2)).reshape((4, 16, 64)), S, assert_trivial=True)


@gluon.jit
def _code_scores(q, words, meta, acc):
    """Adds products of queries with 4-bit latents but for their zeros [4, 64, 16 words] to acc, in units of 2^13."""
    t = _raw_codes(words)
    a, b = _line_of(meta, 0), _line_of(meta, 1)
    for i in gl.static_range(4):
        x = _query(q, 2 * i)
        x = _times(x, gl.broadcast(_meta_operand(a[i], gl.SliceLayout(1, S_A)).expand_dims(1), x)[0])
        acc = mma_v2(x, _score_operand(t[2 * i]), acc)
        x = _query(q, 2 * i + 1)
        x = _times(x, gl.broadcast(_meta_operand(b[i], gl.SliceLayout(1, S_A)).expand_dims(1), x)[0])
        acc = mma_v2(x, _score_operand(t[2 * i + 1]), acc)
    return acc


@gluon.jit
def _softmax(acc, smem, scale, live, share, state):
    """Sums of the four warps' scores [4, 16, 64] -> P [16, 64], and what earlier sums are to be multiplied by [16].

    scale: makes log2 of scores, [16 or 1, 4 or 1, 16 or 1]; live: which tokens there are, or None; share: a factor on
    P. state: per quarter of the tokens the largest score and each thread's sums of P; the largest score of all.
    """
    parts, p_smem, m_smem = smem
    m, total, most = state
    parts.store(acc)
    s = gl.sum(parts.load(PARTS), 0).reshape((16, 4, 16))
    s = gl.convert_layout(s, QUARTERS, assert_trivial=True) * scale
    if live is not None:
        s = gl.where(live, s, -float("inf"))
    top = gl.maximum(m, gl.max(s, 2))
    p = gl.exp2(s - (top - LIFT).expand_dims(2))
    total = total * gl.exp2(m - top).expand_dims(2) + p
    p_smem.store((p * share).to(gl.float16).permute((1, 0, 2)))
    m_smem.store(top.permute((1, 0)))
    m0, m1, m2, m3 = _four(m_smem.load(gl.SliceLayout(2, P_A)).reshape((2, 2, 16)).permute((2, 0, 1)),
                           gl.SliceLayout(1, OUT_A))
    now = gl.maximum(gl.maximum(m0, m1), gl.maximum(m2, m3))
    p0, p1, p2, p3 = _four(p_smem.load(P_A).reshape((2, 2, 16, 16)).permute((2, 3, 0, 1)), OUT_A)
    p = _lessened(p0, m0 - now), _lessened(p1, m1 - now), _lessened(p2, m2 - now), _lessened(p3, m3 - now)
    return p, gl.exp2(most - now), (top, total, now)


@gluon.jit
def _lessened(p, by):
    """P of a quarter of the tokens [16, 16], times 2^by [16]."""
    return _times(p, gl.broadcast(gl.exp2(by).to(gl.float16).expand_dims(1), p)[0])


@gluon.jit
def _four(x, layout: gl.constexpr):
    """[..., 2, 2] -> its 4 parts, of which the last but one index counts most slowly."""
    a, b = gl.split(x)
    a, c = gl.split(a)
    b, d = gl.split(b)
    return (gl.convert_layout(a, layout, assert_trivial=True), gl.convert_layout(b, layout, assert_trivial=True),
            gl.convert_layout(c, layout, assert_trivial=True), gl.convert_layout(d, layout, assert_trivial=True))


@gluon.jit
def _quarters(words):
    """[64 tokens, 64 words] -> its 4 quarters."""
    return _four(words.reshape((2, 2, 16, 64)).permute((2, 3, 0, 1)), V_WORDS)


@gluon.jit
def _times_all(acc, keep):
    return (acc[0] * keep, acc[1] * keep, acc[2] * keep, acc[3] * keep, acc[4] * keep, acc[5] * keep, acc[6] * keep,
            acc[7] * keep)


@gluon.jit
def _lines(meta, byte: gl.constexpr):
    """Steps and zeros of a byte's low and high codes."""
    s_low, s_high, z_low, z_high = meta
    return (_twice(s_low, byte, 1, 0x68006800), _twice(z_low, byte, 0, 0x08000800),
            _twice(s_high, byte, 1, 0x58005800), _twice(z_high, byte, 0, 0x08000800))


@gluon.jit
def _code_outputs(acc, p, words, meta):
    """Adds P [16, 16] times 4-bit latents [16 tokens, 64 words], over 2^13, for 4 quarters, to acc."""
    a, b, c, d = _lines(meta, 0), _lines(meta, 1), _lines(meta, 2), _lines(meta, 3)
    a0, a1, a2, a3, b0, b1, b2, b3 = acc
    for i in gl.static_range(4):
        x, y = _code_values(words[i], 0, a[0], a[1], a[2], a[3])
        a0, b0 = mma_v2(p[i], x, a0), mma_v2(p[i], y, b0)
        x, y = _code_values(words[i], 1, b[0], b[1], b[2], b[3])
        a1, b1 = mma_v2(p[i], x, a1), mma_v2(p[i], y, b1)
        x, y = _code_values(words[i], 2, c[0], c[1], c[2], c[3])
        a2, b2 = mma_v2(p[i], x, a2), mma_v2(p[i], y, b2)
        x, y = _code_values(words[i], 3, d[0], d[1], d[2], d[3])
        a3, b3 = mma_v2(p[i], x, a3), mma_v2(p[i], y, b3)
    return a0, a1, a2, a3, b0, b1, b2, b3


@gluon.jit
def _byte_outputs(acc, p, low, high):
    """Adds P times int8 latents [16 tokens, 64 words] of both halves, for 4 quarters, to acc."""
    a0, a1, a2, a3, b0, b1, b2, b3 = acc
    for i in gl.static_range(4):
        a0, b0 = mma_v2(p[i], _byte_values(low[i], 0), a0), mma_v2(p[i], _byte_values(high[i], 0), b0)
        a1, b1 = mma_v2(p[i], _byte_values(low[i], 1), a1), mma_v2(p[i], _byte_values(high[i], 1), b1)
        a2, b2 = mma_v2(p[i], _byte_values(low[i], 2), a2), mma_v2(p[i], _byte_values(high[i], 2), b2)
        a3, b3 = mma_v2(p[i], _byte_values(low[i], 3), a3), mma_v2(p[i], _byte_values(high[i], 3), b3)
    return a0, a1, a2, a3, b0, b1, b2, b3


@gluon.jit
def _by_channel(a, b, c, d):
    """Outputs [16, 64] of 4 bytes -> [16, 256] channels."""
    x = gl.join(gl.join(a, b), gl.join(c, d)).permute((0, 1, 3, 2)).reshape((16, 2, 4, 8, 4))
    return gl.convert_layout(x.permute((0, 2, 3, 1, 4)).reshape((16, 256)), ROW)


@gluon.jit
def _copy(pages, page, live, at, smem, stage):
    """Begin to copy the codes and lines of a page to shared memory; of none if not `live`. Scales are loaded."""
    async_copy.async_copy_global_to_shared(smem[0].index(stage), pages[0] + page * 4096 + at[0], mask=live)
    async_copy.async_copy_global_to_shared(smem[2].index(stage), pages[2] + page * 256 + at[2], mask=live)
    async_copy.commit_group()
    to_scale = pages[3] + 2 * page
    return gl.load(to_scale, mask=live, other=1.0), gl.load(to_scale + 1, mask=live, other=1.0)


@gluon.jit
def _copy_rotary(pages, page, live, at, smem):
    async_copy.async_copy_global_to_shared(smem[1], pages[1] + page * 1024 + at[1], mask=live)
    async_copy.commit_group()


@gluon.jit
def _meta_of(meta, line: gl.constexpr, layout: gl.constexpr):
    return meta.slice(64 * line, 64).load(layout)


@gluon.jit(do_not_specialize=["table_stride", "cap", "count", "open_blocks"])
def few_latent_kernel(
    q_ptr, qr_ptr,  # [B, N, rank] and [B, N, R], contiguous
    k_ptr, v_ptr, meta_ptr, scale_ptr,  # pages of the one head, as in `PagedHeads`
    k_open, v_open, k_scales, v_scales,  # open tokens, as in `KVStore`
    table_ptr, sealed_ptr, open_ptr,  # int64 [B, blocks], [B], [B]
    part_ptr, lse_ptr, unit_ptr,  # float16 [B, shares, N, rank] in units of [B, shares], float32 [B, shares, N]: log2
    table_stride, cap, unit, count, open_blocks,
):
    """One share of the blocks of one row, for its N <= 16 queries, which see all tokens.

    count: N. unit: scaling times log2(e). cap: a multiple of 4. The open tokens are the last blocks, each worth
    `open_blocks` others.
    """
    share, shares = gl.program_id(0), gl.num_programs(0)
    row = gl.program_id(2).to(gl.int64)
    k_ptr, v_ptr = k_ptr.to(gl.pointer_type(gl.int32)), v_ptr.to(gl.pointer_type(gl.int32))
    k_open, v_open = k_open.to(gl.pointer_type(gl.int32)), v_open.to(gl.pointer_type(gl.int32))
    pages = k_ptr, v_ptr, meta_ptr.to(gl.pointer_type(gl.int32)), scale_ptr
    held_pages = (gl.allocate_shared_memory(gl.int32, [2, 64, 64], K_SMEM),
                  gl.allocate_shared_memory(gl.int32, [64, 16], R_SMEM),
                  gl.allocate_shared_memory(gl.int32, [2, 256], LINE))
    q_smem = gl.allocate_shared_memory(gl.float16, [32, 16, 16], Q_SMEM)
    smem = (gl.allocate_shared_memory(gl.float32, [4, 16, 64], PARTS_SMEM),
            gl.allocate_shared_memory(gl.float16, [4, 16, 16], P_SMEM),
            gl.allocate_shared_memory(gl.float32, [4, 16], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])))

    sealed = gl.load(sealed_ptr + row)
    opened = gl.load(open_ptr + row)
    blocks = sealed + (opened + 63) // 64 * open_blocks
    begin = gl.minimum(share * blocks // shares, sealed).to(gl.int32)
    end = gl.minimum((share + 1) * blocks // shares, sealed).to(gl.int32)
    entries = table_ptr + row * table_stride
    page = gl.load(entries + begin, mask=begin < end, other=0)
    ahead = gl.load(entries + begin + 1, mask=begin + 1 < end, other=0)
    n = gl.arange(0, 64, layout=gl.SliceLayout(1, K_COPY))
    word = gl.arange(0, 64, layout=gl.SliceLayout(0, K_COPY))
    k_from = _stored_order(_place(n)).expand_dims(1) * 64 + word.expand_dims(0)
    c = gl.arange(0, 64, layout=gl.SliceLayout(1, R_COPY)).expand_dims(1)
    r_from = c * 16 + gl.arange(0, 16, layout=gl.SliceLayout(0, R_COPY)).expand_dims(0)
    at = k_from, r_from, gl.arange(0, 256, layout=M_COPY)
    k_scale, r_scale = _copy(pages, page, begin < end, at, held_pages, 0)
    _copy_rotary(pages, page, begin < end, at, held_pages)

    # each query over its largest number
    h = gl.arange(0, 16, layout=gl.SliceLayout(1, ROW))
    line, own = (row * count + h).expand_dims(1), (h < count).expand_dims(1)
    channel = gl.arange(0, 512, layout=gl.SliceLayout(0, ROW)).expand_dims(0)
    x = gl.load(q_ptr + line * 512 + channel, mask=own, other=0.0).to(gl.float32)
    r_channel = gl.arange(0, 64, layout=gl.SliceLayout(0, ROW)).expand_dims(0)
    y = gl.load(qr_ptr + line * 64 + r_channel, mask=own, other=0.0).to(gl.float32)
    top = gl.maximum(gl.max(gl.abs(x), 1), gl.max(gl.abs(y), 1))
    # smaller ones have no finite reciprocal, and count as 0
    top = gl.where(top > 1.0e-30, top, 1.0)
    x = (x * ((1.0 / top).expand_dims(1) * gl.where(channel < 256, gl.full_like(x, 2048.0), 128.0))).to(gl.float16)
    # [query, half, warp, k / 2 % 4, k / 8, j / 4, k % 2, j / 2 % 2] -> [j, warp, query, k]
    q_smem.store(x.reshape((16, 2, 4, 4, 2, 2, 2, 2)).permute((5, 7, 1, 2, 0, 4, 3, 6)).reshape((32, 16, 16)))
    w = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, S_A))).expand_dims(1).expand_dims(2)
    h = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, S_A)))
    k = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, S_A))).expand_dims(0).expand_dims(1)
    over = (1.0 / gl.convert_layout(top, gl.SliceLayout(0, gl.SliceLayout(2, S_A)))).expand_dims(0).expand_dims(2)
    inside = (h < count).expand_dims(0).expand_dims(2)
    h = (row * count + h).expand_dims(0).expand_dims(2)
    qr = (gl.load(qr_ptr + h * 64 + (16 * w + k), mask=inside, other=0.0) * over).to(gl.float16)
    units = gl.convert_layout(top * unit, gl.SliceLayout(1, gl.SliceLayout(2, QUARTERS))).expand_dims(1).expand_dims(2)

    zero = gl.zeros((16, 64), gl.float32, OUT)
    acc = zero, zero, zero, zero, zero, zero, zero, zero
    # below every score, and finite
    state = (gl.full((16, 4), -1.0e30, gl.float32, gl.SliceLayout(2, QUARTERS)),
             gl.zeros((16, 4, 16), gl.float32, QUARTERS), gl.full((16,), -1.0e30, gl.float32, gl.SliceLayout(1, OUT_A)))
    # largest: of the scales met, in which no output exceeds 127, whatever the last block's is
    held, largest = 1.0, 1.0e-30
    for block in range(begin, end):
        stage = (block - begin) % 2
        k_now, r_now = gl.where(k_scale > 0, k_scale, 1.0), r_scale
        async_copy.wait_group(0)
        # all have left the block before, whose place the next one takes
        gl.thread_barrier()
        live, page = block + 1 < end, ahead
        k_scale, r_scale = _copy(pages, page, live, at, held_pages, 1 - stage)
        ahead = gl.load(entries + block + 2, mask=block + 2 < end, other=0)
        codes, meta = held_pages[0].index(stage), held_pages[2].index(stage)
        zeros = _zeros(q_smem, meta)
        s = _added(_rotary(_turned_by_warp(held_pages[1].load(R_LOAD)), qr), r_now / (k_now * 8192.0), zeros)
        s = _code_scores(q_smem, _by_warp(codes.load(K_LOAD)), meta, s)
        p, keep, state = _softmax(s, smem, units * (k_now * 8192.0), None, 1.0, state)
        # all have read the block's rotary parts: they wrote scores since
        _copy_rotary(pages, page, live, at, held_pages)
        keep = gl.convert_layout(keep * (held / (k_now * 8192.0)), gl.SliceLayout(1, OUT)).expand_dims(1)
        held, largest = k_now * 8192.0, gl.maximum(largest, k_now)
        V: gl.constexpr = gl.SliceLayout(0, V_WORDS)
        lines = _meta_of(meta, 0, V), _meta_of(meta, 1, V), _meta_of(meta, 2, V), _meta_of(meta, 3, V)
        acc = _code_outputs(_times_all(acc, keep), p, _quarters(codes.load(V_LOAD)), lines)
    if share == shares - 1:
        k_word = gl.arange(0, 64, layout=gl.SliceLayout(0, K_LOAD)).expand_dims(0)
        k_token = _place(gl.arange(0, 64, layout=gl.SliceLayout(1, K_LOAD))).expand_dims(1)
        v_word = gl.arange(0, 64, layout=gl.SliceLayout(0, V_LOAD)).expand_dims(0)
        v_token = _place(gl.arange(0, 64, layout=gl.SliceLayout(1, V_LOAD))).expand_dims(1)
        r_row = gl.arange(0, 64, layout=gl.SliceLayout(1, R_LOAD)).expand_dims(1)
        r_word = gl.arange(0, 16, layout=gl.SliceLayout(0, R_LOAD)).expand_dims(0)
        quarter = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(0, QUARTERS))).expand_dims(1)
        label = quarter * 16 + gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(0, QUARTERS))).expand_dims(0)
        token = _place(label)
        s_token = _place(gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(1, S))))
        for first in range(0, opened.to(gl.int32), 64):
            to = k_open + (row * cap + first) * 128
            k_at, k_in = to + k_token * 128 + k_word, first + k_token < opened
            v_at, v_in = to + v_token * 128 + v_word, first + v_token < opened
            r_at = v_open + (row * 64 + r_row) * (cap // 4) + (first // 4 + r_word)
            turned = gl.load(r_at, mask=first + 4 * r_word < opened, other=0)
            to_scale = row * cap + first
            s_in = first + s_token < opened
            k_own = gl.load(k_scales + to_scale + s_token, mask=s_in, other=1.0)
            r_own = gl.load(v_scales + to_scale + s_token, mask=s_in, other=0.0)
            ratio = r_own / (gl.where(k_own > 0, k_own, 1.0) * (1.0 / 128))
            s = _rotary(_turned_by_warp(turned), qr) * ratio.expand_dims(0).expand_dims(1)
            s = _byte_scores(q_smem, gl.load(k_at, mask=k_in, other=0), gl.load(k_at + 64, mask=k_in, other=0), s)
            here = first + token < opened
            own_scale = gl.load(k_scales + to_scale + token, mask=here, other=0.0)
            own_scale = gl.where(here, gl.where(own_scale > 0, own_scale, 1.0), 0.0)
            most = gl.max(gl.max(own_scale, 1), 0)
            p, keep, state = _softmax(s, smem, units * (own_scale * (1.0 / 128)).expand_dims(0), here.expand_dims(0),
                                      (own_scale / most).expand_dims(0), state)
            keep = gl.convert_layout(keep * (held / most), gl.SliceLayout(1, OUT)).expand_dims(1)
            held, largest = most, gl.maximum(largest, most)
            low, high = gl.load(v_at, mask=v_in, other=0), gl.load(v_at + 64, mask=v_in, other=0)
            acc = _byte_outputs(_times_all(acc, keep), p, _quarters(low), _quarters(high))
    m, total, _ = state
    of_all = gl.max(m, 1)
    total = gl.sum(gl.sum(total, 2) * gl.exp2(m - of_all.expand_dims(1)), 1)
    some = gl.where(total > 0, total, 1.0)
    to = (row * shares + share) * count
    found = gl.where(total > 0, of_all + gl.log2(some) - LIFT, -float("inf"))
    h = gl.arange(0, 16, layout=gl.SliceLayout(1, gl.SliceLayout(2, QUARTERS)))
    gl.store(lse_ptr + to + h, found, mask=h < count)
    gl.store(unit_ptr + row * shares + share, largest)
    over = gl.convert_layout(held / largest / some, gl.SliceLayout(1, ROW)).expand_dims(1)
    h = gl.arange(0, 16, layout=gl.SliceLayout(1, ROW))
    to = part_ptr + (to + h).expand_dims(1) * 512 + gl.arange(0, 256, layout=gl.SliceLayout(0, ROW)).expand_dims(0)
    own = (h < count).expand_dims(1)
    gl.store(to, (_by_channel(acc[0], acc[1], acc[2], acc[3]) * over).to(gl.float16), mask=own)
    gl.store(to + 256, (_by_channel(acc[4], acc[5], acc[6], acc[7]) * over).to(gl.float16), mask=own)
