"""Steps of up to 16 queries over latents of 4 and 8 bit, with all operands of the products in registers, in Gluon.

It computes what `ops.latent.kernel` does, for a latent of 512 channels and a rotary part of 64, in blocks of 64 tokens.
Four warps share a block: each multiplies its own quarter of the channels into the scores of all tokens; their sums are
added up through shared memory, where each warp turns its own quarter of the tokens into probabilities; then each
multiplies all of these with its own quarter of the channels.

Codes are read twice, in the two orders in which the products want them (the second time from the L1 cache), and
become float16 two at a time. A 4-bit code masked out of its byte is a subnormal number, which products take as it is:
steps are multiplied into the queries, zeros have a product of their own. Which element of a tensor holds which channel
or token is what the instructions find at hand, not what its index says; whoever meets it (queries, outputs, addresses)
follows the same order.

    label    of                        holds
    k        a product's 16 channels   word k / 2 % 4 * 4 + k / 8 * 2 (+ 1 for j >= 4) of the warp's 16, byte
                                       k % 2 * 2 + j / 2 % 2 of it; j % 2: the second half of the channels
    n        64 tokens                 place n % 16 * 4 + n / 16 of the stored rotary parts
    word     4 bytes of a token        channels 4 * word to 4 * word + 3; at 4 bit also those 256 further
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

LIFT = gl.constexpr(15.0)

S = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8]))
S_A = gl.constexpr(gl.DotOperandLayout(0, S, 2))
S_B = gl.constexpr(gl.DotOperandLayout(1, S, 2))
OUT = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 4], [16, 8]))
OUT_A = gl.constexpr(gl.DotOperandLayout(0, OUT, 2))
OUT_B = gl.constexpr(gl.DotOperandLayout(1, OUT, 2))
# [warp, token, word], [warp, word], [warp, word, channel]: loads of a block for the scores
K_WORDS = gl.constexpr(gl.DistributedLinearLayout(
    [[0, 0, 1], [0, 0, 2], [0, 8, 0], [0, 16, 0], [0, 32, 0]], [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
    [[1, 0, 0], [2, 0, 0]], [], [4, 64, 16]))
K_META = gl.constexpr(gl.DistributedLinearLayout(
    [[0, 1], [0, 2]], [[0, 4], [0, 8], [0, 0], [0, 0], [0, 0]], [[1, 0], [2, 0]], [], [4, 16]))
R_WORDS = gl.constexpr(gl.DistributedLinearLayout(
    [[0, 0, 1], [0, 0, 8], [0, 8, 0]], [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
    [[1, 0, 0], [2, 0, 0]], [], [4, 16, 16]))
# [token, word]: the same block for the outputs
V_WORDS = gl.constexpr(gl.DistributedLinearLayout(
    [[0, 1], [1, 0], [8, 0], [16, 0], [32, 0]], [[2, 0], [4, 0], [0, 2], [0, 4], [0, 8]], [[0, 16], [0, 32]], [],
    [64, 64]))
# [part, query, token] and [query, quarter of the tokens, token]: sums of scores
PARTS = gl.constexpr(gl.DistributedLinearLayout(
    [[0, 0, 1], [0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0]],
    [[0, 1, 0], [0, 2, 0], [0, 4, 0], [0, 8, 0], [0, 0, 8]], [[0, 0, 16], [0, 0, 32]], [], [4, 16, 64]))
QUARTERS = gl.constexpr(gl.DistributedLinearLayout(
    [[0, 0, 1], [0, 0, 2], [0, 0, 4]], [[1, 0, 0], [2, 0, 0], [4, 0, 0], [8, 0, 0], [0, 0, 8]],
    [[0, 1, 0], [0, 2, 0]], [], [16, 4, 16]))
# [query, quarter, token]: probabilities as an operand
P_A = gl.constexpr(gl.DistributedLinearLayout(
    [[0, 0, 1], [8, 0, 0], [0, 0, 8], [0, 1, 0], [0, 2, 0]], [[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
    [[0, 0, 0], [0, 0, 0]], [], [16, 4, 16]))
PARTS_SMEM = gl.constexpr(gl.SharedLinearLayout(
    [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [0, 0, 16], [0, 0, 32], [0, 1, 8], [0, 2, 16], [0, 4, 4], [0, 8, 0],
     [1, 0, 0], [2, 0, 0]]))
P_SMEM = gl.constexpr(gl.SharedLinearLayout(
    [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [1, 0, 8], [2, 1, 0], [4, 2, 0], [8, 0, 0]]))
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
    """[64 tokens, 64 words] with pairs of tokens where its words 2 w and 2 w + 1 should be -> [64, 64]."""
    x = x.reshape((32, 2, 32, 2)).permute((0, 3, 2, 1)).reshape((64, 4, 8, 2)).permute((0, 3, 1, 2)).reshape((64, 64))
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
def _times_meta(q, words):
    """Queries times int8 of words [4, 16] each, for the j of one half of the channels."""
    a, b, c, d = _int8_pairs(words)
    META: gl.constexpr = gl.SliceLayout(1, S_A)
    return (_times(q[0], gl.broadcast(_meta_operand(a, META).expand_dims(1), q[0])[0]),
            _times(q[1], gl.broadcast(_meta_operand(b, META).expand_dims(1), q[1])[0]),
            _times(q[2], gl.broadcast(_meta_operand(c, META).expand_dims(1), q[2])[0]),
            _times(q[3], gl.broadcast(_meta_operand(d, META).expand_dims(1), q[3])[0]))


@gluon.jit
def _zero_sum(q, words, acc):
    """Products of queries with zeros of words [4, 16]: [4, 16, 8], 8 times the same."""
    a, b, c, d = _int8_pairs(words)
    META: gl.constexpr = gl.SliceLayout(2, S_B)
    like = gl.zeros((4, 16, 8), gl.float16, S_B)
    acc = mma_v2(q[0], gl.broadcast(_meta_operand(a, META).expand_dims(2), like)[0], acc)
    acc = mma_v2(q[1], gl.broadcast(_meta_operand(b, META).expand_dims(2), like)[0], acc)
    acc = mma_v2(q[2], gl.broadcast(_meta_operand(c, META).expand_dims(2), like)[0], acc)
    return mma_v2(q[3], gl.broadcast(_meta_operand(d, META).expand_dims(2), like)[0], acc)


@gluon.jit
def _byte_scores(q, low, high, acc):
    """Adds products of queries with int8 words [4, 64, 16] of both halves to acc, in units of 2^-7."""
    a, b, c, d = _int8_pairs(low)
    acc = mma_v2(q[0], _score_operand(a), acc * 16.0)
    acc = mma_v2(q[2], _score_operand(b), acc)
    acc = mma_v2(q[4], _score_operand(c), acc)
    acc = mma_v2(q[6], _score_operand(d), acc) * 0.0625
    a, b, c, d = _int8_pairs(high)
    acc = mma_v2(q[1], _score_operand(a), acc)
    acc = mma_v2(q[3], _score_operand(b), acc)
    acc = mma_v2(q[5], _score_operand(c), acc)
    return mma_v2(q[7], _score_operand(d), acc)


@gluon.jit
def _code_scores(q, words, meta, acc):
    """Adds products of queries with 4-bit latents [4, 64, 16 words] to acc, in units of 2^13."""
    s_low, s_high, z_low, z_high = meta
    low, high = (q[0], q[2], q[4], q[6]), (q[1], q[3], q[5], q[7])
    none = gl.zeros((4, 16, 8), gl.float32, S)
    zeros = _zero_sum(low, z_low, none) * 2.0**-24 + _zero_sum(high, z_high, none) * 2.0**-20
    x = acc.reshape((4, 16, 8, 8))
    zeros = gl.convert_layout(zeros, gl.SliceLayout(2, x.type.layout), assert_trivial=True)
    acc = gl.convert_layout((x + zeros.expand_dims(2)).reshape((4, 16, 64)), S, assert_trivial=True)
    t = _raw_codes(words)
    a = _times_meta(low, s_low)
    b = _times_meta(high, s_high)
    acc = mma_v2(a[0], _score_operand(t[0]), acc)
    acc = mma_v2(b[0], _score_operand(t[1]), acc)
    acc = mma_v2(a[1], _score_operand(t[2]), acc)
    acc = mma_v2(b[1], _score_operand(t[3]), acc)
    acc = mma_v2(a[2], _score_operand(t[4]), acc)
    acc = mma_v2(b[2], _score_operand(t[5]), acc)
    acc = mma_v2(a[3], _score_operand(t[6]), acc)
    return mma_v2(b[3], _score_operand(t[7]), acc)


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
    p_smem.store((p * share).to(gl.float16))
    m_smem.store(top)
    p = p_smem.load(P_A)
    each = m_smem.load(gl.SliceLayout(2, P_A))
    now = gl.max(each, 1)
    less = gl.exp2(each - now.expand_dims(1)).to(gl.float16)
    p = _times(p, gl.broadcast(less.expand_dims(2), p)[0])
    p = gl.convert_layout(p.reshape((16, 64)), OUT_A, assert_trivial=True)
    return p, gl.exp2(most - now), (top, total, now)


@gluon.jit
def _code_outputs(acc, p, words, meta, keep):
    """Adds P [16, 64] times 4-bit latents [64 tokens, 64 words], over 2^13, to acc times keep."""
    s_low, s_high, z_low, z_high = meta
    x, y = _code_values(words, 0, _twice(s_low, 0, 1, 0x68006800), _twice(z_low, 0, 0, 0x08000800),
                        _twice(s_high, 0, 1, 0x58005800), _twice(z_high, 0, 0, 0x08000800))
    a0, b0 = mma_v2(p, x, acc[0] * keep), mma_v2(p, y, acc[4] * keep)
    x, y = _code_values(words, 1, _twice(s_low, 1, 1, 0x68006800), _twice(z_low, 1, 0, 0x08000800),
                        _twice(s_high, 1, 1, 0x58005800), _twice(z_high, 1, 0, 0x08000800))
    a1, b1 = mma_v2(p, x, acc[1] * keep), mma_v2(p, y, acc[5] * keep)
    x, y = _code_values(words, 2, _twice(s_low, 2, 1, 0x68006800), _twice(z_low, 2, 0, 0x08000800),
                        _twice(s_high, 2, 1, 0x58005800), _twice(z_high, 2, 0, 0x08000800))
    a2, b2 = mma_v2(p, x, acc[2] * keep), mma_v2(p, y, acc[6] * keep)
    x, y = _code_values(words, 3, _twice(s_low, 3, 1, 0x68006800), _twice(z_low, 3, 0, 0x08000800),
                        _twice(s_high, 3, 1, 0x58005800), _twice(z_high, 3, 0, 0x08000800))
    a3, b3 = mma_v2(p, x, acc[3] * keep), mma_v2(p, y, acc[7] * keep)
    return a0, a1, a2, a3, b0, b1, b2, b3


@gluon.jit
def _byte_outputs(acc, p, low, high, keep):
    """Adds P times int8 latents [64 tokens, 64 words] of both halves to acc times keep."""
    return (mma_v2(p, _byte_values(low, 0), acc[0] * keep), mma_v2(p, _byte_values(low, 1), acc[1] * keep),
            mma_v2(p, _byte_values(low, 2), acc[2] * keep), mma_v2(p, _byte_values(low, 3), acc[3] * keep),
            mma_v2(p, _byte_values(high, 0), acc[4] * keep), mma_v2(p, _byte_values(high, 1), acc[5] * keep),
            mma_v2(p, _byte_values(high, 2), acc[6] * keep), mma_v2(p, _byte_values(high, 3), acc[7] * keep))


@gluon.jit
def _by_channel(a, b, c, d):
    """Outputs [16, 64] of 4 bytes -> [16, 256] channels."""
    x = gl.join(gl.join(a, b), gl.join(c, d)).permute((0, 1, 3, 2)).reshape((16, 2, 4, 8, 4))
    return gl.convert_layout(x.permute((0, 2, 3, 1, 4)).reshape((16, 256)), ROW)


@gluon.jit
def _words_of(token, WORDS: gl.constexpr):
    """Offsets of a block's words for the scores, [4, 64, 16]. token: of each label n."""
    w = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, K_WORDS)))
    c = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, K_WORDS)))
    at = w.expand_dims(1).expand_dims(2) * 16 + c.expand_dims(0).expand_dims(1)
    return token.expand_dims(0).expand_dims(2) * WORDS + at


@gluon.jit
def _fetch(k_ptr, v_ptr, meta_ptr, scale_ptr, page, live, k_at, r_at, m_at, BITS: gl.constexpr):
    """Loads of a page for the scores; of nothing if not `live`."""
    rotary = gl.load(v_ptr + page * 1024 + r_at, mask=live, other=0)
    k_scale = gl.load(scale_ptr + 2 * page, mask=live, other=1.0)
    r_scale = gl.load(scale_ptr + 2 * page + 1, mask=live, other=1.0)
    if BITS == 4:
        meta = meta_ptr + page * 256 + m_at
        return (gl.load(k_ptr + page * 4096 + k_at, mask=live, other=0), gl.load(meta, mask=live, other=0),
                gl.load(meta + 64, mask=live, other=0), gl.load(meta + 128, mask=live, other=0),
                gl.load(meta + 192, mask=live, other=0)), rotary, k_scale, r_scale
    else:
        at = k_ptr + page * 8192 + k_at
        return (gl.load(at, mask=live, other=0), gl.load(at + 64, mask=live, other=0)), rotary, k_scale, r_scale


@gluon.jit(do_not_specialize=["table_stride", "cap", "count"])
def few_latent_kernel(
    q_ptr, qr_ptr,  # [B, N, rank] and [B, N, R], contiguous
    k_ptr, v_ptr, meta_ptr, scale_ptr,  # pages of the one head, as in `PagedHeads`
    k_open, v_open, k_scales, v_scales,  # open tokens, as in `KVStore`
    table_ptr, sealed_ptr, open_ptr,  # int64 [B, blocks], [B], [B]
    part_ptr, lse_ptr, unit_ptr,  # float16 [B, shares, N, rank] in units of [B, shares], float32 [B, shares, N]: log2
    table_stride, cap, unit, count,
    BITS: gl.constexpr,
):
    """One share of the blocks of one row, for its N <= 16 queries, which see all tokens.

    count: N. unit: scaling times log2(e). cap: a multiple of 4. The open tokens are the last blocks.
    """
    WORDS: gl.constexpr = 16 * BITS
    share, shares = gl.program_id(0), gl.num_programs(0)
    row = gl.program_id(2).to(gl.int64)
    k_ptr, v_ptr = k_ptr.to(gl.pointer_type(gl.int32)), v_ptr.to(gl.pointer_type(gl.int32))
    k_open, v_open = k_open.to(gl.pointer_type(gl.int32)), v_open.to(gl.pointer_type(gl.int32))
    meta_ptr = meta_ptr.to(gl.pointer_type(gl.int32))
    smem = (gl.allocate_shared_memory(gl.float32, [4, 16, 64], PARTS_SMEM),
            gl.allocate_shared_memory(gl.float16, [16, 4, 16], P_SMEM),
            gl.allocate_shared_memory(gl.float32, [16, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])))

    sealed = gl.load(sealed_ptr + row)
    opened = gl.load(open_ptr + row)
    blocks = sealed + (opened + 63) // 64
    begin = gl.minimum(share * blocks // shares, sealed).to(gl.int32)
    end = gl.minimum((share + 1) * blocks // shares, sealed).to(gl.int32)
    entries = table_ptr + row * table_stride
    page = gl.load(entries + begin, mask=begin < end, other=0)
    ahead = gl.load(entries + begin + 1, mask=begin + 1 < end, other=0)

    n = gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(2, K_WORDS)))
    k_at = _words_of(_stored_order(_place(n)), WORDS)
    w = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, R_WORDS))).expand_dims(1).expand_dims(2)
    i = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, R_WORDS))).expand_dims(0).expand_dims(2)
    c = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, R_WORDS))).expand_dims(0).expand_dims(1)
    r_channel = w * 16 + c
    w = gl.arange(0, 4, layout=gl.SliceLayout(1, K_META)).expand_dims(1)
    m_at = w * 16 + gl.arange(0, 16, layout=gl.SliceLayout(0, K_META)).expand_dims(0)
    n = gl.arange(0, 64, layout=gl.SliceLayout(1, V_WORDS))
    word = gl.arange(0, 64, layout=gl.SliceLayout(0, V_WORDS))
    v_at = _stored_order(_place(n)).expand_dims(1) * WORDS + word.expand_dims(0)
    codes, rotary, k_scale, r_scale = _fetch(
        k_ptr, v_ptr, meta_ptr, scale_ptr, page, begin < end, k_at, r_channel * 16 + i, m_at, BITS)

    # each query over its largest number
    h = gl.arange(0, 16, layout=gl.SliceLayout(1, ROW))
    line, own = (row * count + h).expand_dims(1), (h < count).expand_dims(1)
    at = gl.arange(0, 512, layout=gl.SliceLayout(0, ROW)).expand_dims(0)
    x = gl.load(q_ptr + line * 512 + at, mask=own, other=0.0)
    top = gl.max(gl.abs(x.to(gl.float32)), 1)
    at = gl.arange(0, 64, layout=gl.SliceLayout(0, ROW)).expand_dims(0)
    x = gl.load(qr_ptr + line * 64 + at, mask=own, other=0.0)
    top = gl.maximum(top, gl.max(gl.abs(x.to(gl.float32)), 1))
    top = gl.where(top > 0, top, 1.0)
    w = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, S_A))).expand_dims(1).expand_dims(2)
    h = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, S_A)))
    k = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, S_A))).expand_dims(0).expand_dims(1)
    over = (1.0 / gl.convert_layout(top, gl.SliceLayout(0, gl.SliceLayout(2, S_A)))).expand_dims(0).expand_dims(2)
    inside = (h < count).expand_dims(0).expand_dims(2)
    h = (row * count + h).expand_dims(0).expand_dims(2)
    at = q_ptr + h * 512 + (4 * (16 * w + 4 * (k // 2 % 4) + 2 * (k // 8)) + 2 * (k % 2))
    low, high = over * 2048.0, over * 128.0
    q = ((gl.load(at, mask=inside, other=0.0) * low).to(gl.float16),
         (gl.load(at + 256, mask=inside, other=0.0) * high).to(gl.float16),
         (gl.load(at + 1, mask=inside, other=0.0) * low).to(gl.float16),
         (gl.load(at + 257, mask=inside, other=0.0) * high).to(gl.float16),
         (gl.load(at + 4, mask=inside, other=0.0) * low).to(gl.float16),
         (gl.load(at + 260, mask=inside, other=0.0) * high).to(gl.float16),
         (gl.load(at + 5, mask=inside, other=0.0) * low).to(gl.float16),
         (gl.load(at + 261, mask=inside, other=0.0) * high).to(gl.float16))
    qr = (gl.load(qr_ptr + h * 64 + (16 * w + k), mask=inside, other=0.0) * over).to(gl.float16)
    units = gl.convert_layout(top * unit, gl.SliceLayout(1, gl.SliceLayout(2, QUARTERS))).expand_dims(1).expand_dims(2)

    zero = gl.zeros((16, 64), gl.float32, OUT)
    acc = zero, zero, zero, zero, zero, zero, zero, zero
    # below every score, and finite
    state = (gl.full((16, 4), -1.0e30, gl.float32, gl.SliceLayout(2, QUARTERS)),
             gl.zeros((16, 4, 16), gl.float32, QUARTERS),
             gl.full((16,), -1.0e30, gl.float32, gl.SliceLayout(1, gl.SliceLayout(2, P_A))))
    held, zoom = 1.0, 1.0
    ZOOM: gl.constexpr = 8192.0 if BITS == 4 else 1.0 / 128
    V_UNIT: gl.constexpr = 8192.0 if BITS == 4 else 1.0
    for block in range(begin, end):
        k_now = gl.where(k_scale > 0, k_scale, 1.0)
        s = _rotary(rotary, qr) * (r_scale / (k_now * ZOOM))
        if BITS == 4:
            s = _code_scores(q, codes[0], (codes[1], codes[2], codes[3], codes[4]), s)
        else:
            s = _byte_scores(q, codes[0], codes[1], s)
        v_from = k_ptr + page * (64 * WORDS) + v_at
        meta = meta_ptr + page * 256 + word
        live = block + 1 < end
        page = ahead
        ahead = gl.load(entries + block + 2, mask=block + 2 < end, other=0)
        codes, rotary, k_scale, r_scale = _fetch(
            k_ptr, v_ptr, meta_ptr, scale_ptr, page, live, k_at, r_channel * 16 + i, m_at, BITS)
        p, keep, state = _softmax(s, smem, units * (k_now * ZOOM), None, 1.0, state)
        keep = gl.convert_layout(keep * (held / (k_now * V_UNIT)), gl.SliceLayout(1, OUT)).expand_dims(1)
        held, zoom = k_now * V_UNIT, V_UNIT
        if BITS == 4:
            acc = _code_outputs(acc, p, gl.load(v_from), (gl.load(meta), gl.load(meta + 64), gl.load(meta + 128),
                                                        gl.load(meta + 192)), keep)
        else:
            acc = _byte_outputs(acc, p, gl.load(v_from), gl.load(v_from + 64), keep)
    if share == shares - 1:
        quarter = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(0, QUARTERS))).expand_dims(1)
        label = quarter * 16 + gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(0, QUARTERS))).expand_dims(0)
        token = _place(label)
        score_label = _place(gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(1, S))))
        k_label = _place(gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(2, K_WORDS))))
        v_label = _place(gl.arange(0, 64, layout=gl.SliceLayout(1, V_WORDS)))
        for first in range(0, opened.to(gl.int32), 64):
            to = k_open + (row * cap + first) * 128
            k_in = (first + k_label < opened).expand_dims(0).expand_dims(2)
            k_low = gl.load(to + _words_of(k_label, 128), mask=k_in, other=0)
            k_high = gl.load(to + _words_of(k_label, 128) + 64, mask=k_in, other=0)
            r_from = v_open + (row * 64 + r_channel) * (cap // 4) + (first // 4 + i)
            turned = gl.load(r_from, mask=first + 4 * i < opened, other=0)
            to_scale = row * cap + first
            s_in = first + score_label < opened
            k_own = gl.load(k_scales + to_scale + score_label, mask=s_in, other=1.0)
            r_own = gl.load(v_scales + to_scale + score_label, mask=s_in, other=0.0)
            ratio = r_own / (gl.where(k_own > 0, k_own, 1.0) * (1.0 / 128))
            s = _byte_scores(q, k_low, k_high, _rotary(turned, qr) * ratio.expand_dims(0).expand_dims(1))
            here = first + token < opened
            own_scale = gl.load(k_scales + to_scale + token, mask=here, other=0.0)
            own_scale = gl.where(here, gl.where(own_scale > 0, own_scale, 1.0), 0.0)
            largest = gl.max(gl.max(own_scale, 1), 0)
            p, keep, state = _softmax(s, smem, units * (own_scale * (1.0 / 128)).expand_dims(0), here.expand_dims(0),
                                      (own_scale / largest).expand_dims(0), state)
            keep = gl.convert_layout(keep * (held / largest), gl.SliceLayout(1, OUT)).expand_dims(1)
            held, zoom = largest, 1.0
            v_in = (first + v_label < opened).expand_dims(1)
            v_from = to + v_label.expand_dims(1) * 128 + word.expand_dims(0)
            v_low, v_high = gl.load(v_from, mask=v_in, other=0), gl.load(v_from + 64, mask=v_in, other=0)
            acc = _byte_outputs(acc, p, v_low, v_high, keep)
    m, total, _ = state
    of_all = gl.max(m, 1)
    total = gl.sum(gl.sum(total, 2) * gl.exp2(m - of_all.expand_dims(1)), 1)
    some = gl.where(total > 0, total, 1.0)
    to = (row * shares + share) * count
    found = gl.where(total > 0, of_all + gl.log2(some) - LIFT, -float("inf"))
    h = gl.arange(0, 16, layout=gl.SliceLayout(1, gl.SliceLayout(2, QUARTERS)))
    gl.store(lse_ptr + to + h, found, mask=h < count)
    # in units of a scale no number exceeds 127
    gl.store(unit_ptr + row * shares + share, held / zoom)
    over = gl.convert_layout(zoom / some, gl.SliceLayout(1, ROW)).expand_dims(1)
    h = gl.arange(0, 16, layout=gl.SliceLayout(1, ROW))
    at = part_ptr + (to + h).expand_dims(1) * 512 + gl.arange(0, 256, layout=gl.SliceLayout(0, ROW)).expand_dims(0)
    inside = (h < count).expand_dims(1)
    gl.store(at, (_by_channel(acc[0], acc[1], acc[2], acc[3]) * over).to(gl.float16), mask=inside)
    gl.store(at + 256, (_by_channel(acc[4], acc[5], acc[6], acc[7]) * over).to(gl.float16), mask=inside)
