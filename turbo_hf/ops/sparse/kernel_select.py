"""Buckets of keys, logits of queries, and the buckets that queries visit (SAAP sec. 4)."""

import triton
import triton.language as tl

from turbo_hf.ops.kernel_common import pdl_wait, to_l2


@triton.jit
def _undo_rotary_halves(rows, stride, d, ok, cos, sin, ROTARY: tl.constexpr):
    """Vectors [N, DP] at `rows` [N], before rotary embedding of ROTARY channels (half layout); 0: they have none.

    cos, sin: pointers [N] to those of each vector. ok: bool [N, DP], where there are channels.
    """
    x = tl.load(rows[:, None] + d[None, :] * stride, mask=ok, other=0.0).to(tl.float32)
    if ROTARY > 0:
        turned = ok & (d < ROTARY)[None, :]
        half: tl.constexpr = ROTARY // 2
        other = tl.where(d < half, d + half, d - half)
        partner = tl.load(rows[:, None] + other[None, :] * stride, mask=turned, other=0.0).to(tl.float32)
        c = tl.load(cos[:, None] + d[None, :], mask=turned, other=1.0).to(tl.float32)
        s = tl.load(sin[:, None] + d[None, :], mask=turned, other=0.0).to(tl.float32)
        partner = tl.where((d < half)[None, :], -partner, partner)
        x = (x * c - partner * s) / (c * c + s * s)
    return x


@triton.jit
def _signed(x):
    """Numbers of float32 as int32 of the same order; equal zeros of both signs."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def assign_kernel(
    keys_ptr,  # [B, Hkv, M, D]
    centroids_ptr,  # [Hkv, C, D]
    out_ptr,  # int16 [B, Hkv, M]
    cos_ptr, sin_ptr,  # [1 or B, M, ROTARY]
    strides, rotary_stride, tokens, buckets,
    HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TOKENS: tl.constexpr, TILE: tl.constexpr,
    ROTARY: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """TOKENS keys of one row and head against all centroids, TILE at a time; the first one in a tie."""
    pair = tl.program_id(1).to(tl.int64)
    row, head = pair // HEADS, pair % HEADS
    n = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    d = tl.arange(0, DP)
    at = keys_ptr + row * strides[0] + head * strides[1] + n.to(tl.int64) * strides[2]
    turn = row * rotary_stride + n.to(tl.int64) * ROTARY
    ok = (n < tokens)[:, None] & (d < D)[None, :]
    keys = _undo_rotary_halves(at, strides[3], d, ok, cos_ptr + turn, sin_ptr + turn, ROTARY)
    keys = keys.to(centroids_ptr.dtype.element_ty)
    best = tl.full([TOKENS], -float("inf"), tl.float32)
    found = tl.zeros([TOKENS], tl.int32)
    for start in tl.range(0, buckets, TILE, num_stages=STAGES):
        c = start + tl.arange(0, TILE)
        where = (head * buckets + c)[None, :] * D + d[:, None]
        tile = tl.load(centroids_ptr + where, mask=(c < buckets)[None, :] & (d < D)[:, None], other=0.0)
        score = tl.dot(keys, tile, input_precision="ieee")
        # NaN too: beside it a place without a centroid would be the largest
        score = tl.where((c < buckets)[None, :] & (score == score), score, -float("inf"))
        top, index = tl.max(score, 1, return_indices=True)
        found = tl.where(top > best, start + index, found)
        best = tl.maximum(best, top)
    tl.store(out_ptr + pair * tokens + n, found.to(tl.int16), mask=n < tokens)


@triton.jit
def _rank_of(at, c, buckets):
    """Logits of buckets c, infinities as the largest finite numbers, NaN as the largest of all; -inf where there is no
    bucket."""
    x = tl.load(at + c, mask=c < buckets, other=0.0).to(tl.float32)
    x = tl.where(x < 3.4028234663852886e38, tl.maximum(x, -3.4028234663852886e38), 3.4028234663852886e38)
    return tl.where(c < buckets, x + 0.0, -float("inf"))


@triton.jit
def rank_kernel(
    logits_ptr,  # [N, C]
    out_ptr,  # uint8 [N, C]
    buckets, count,
    OWN: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One KV head and query: which of OWN buckets are among its `count` best, the first ones in a tie.

    A comparison is the sign of a difference, which takes two instructions with its sum; of a predicate it takes four.
    PDL: `pdl_wait`.
    """
    pdl_wait(PDL)
    n = tl.program_id(0).to(tl.int64)
    at = logits_ptr + n * buckets
    begin = tl.program_id(1) * OWN
    own = begin + tl.arange(0, OWN)
    u = _rank_of(at, own, buckets)
    # its own buckets one by one; a bucket that comes before them wins a tie
    better = tl.sum(((u[None, :] == u[:, None]) & (own[None, :] < own[:, None])).to(tl.int32), 1)
    for start in tl.range(0, buckets, TILE, num_stages=1):
        c = start + tl.arange(0, TILE)
        other = _rank_of(at, c, buckets)
        bits = other.to(tl.int32, bitcast=True)
        next_up = tl.where(bits >= 0, bits + 1, bits - 1).to(tl.float32, bitcast=True)
        other = tl.where(c < begin, next_up, other)
        worse = (u[:, None] - other[None, :]).to(tl.uint32, bitcast=True) >> 31
        better += tl.sum(worse.to(tl.int32), 1)
    tl.store(out_ptr + n * buckets + own, (better < count).to(tl.uint8), mask=own < buckets)


@triton.jit
def _nearest(
    tile, chunk, head, chunks, new, cos_ptr, sin_ptr, strides, rotary_stride, tokens, queries, heads, buckets,
    KEYS: tl.constexpr, TILE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    """KEYS new keys of one KV head, of any rows, against TILE centroids; the last tile that arrives writes the best.

    new: (keys [B, Hkv, M, D], centroids [Hkv, C, D], out int16 [B, Hkv, M], best int64 [Hkv, chunks, KEYS], the least
    integers, and arrived int32 [Hkv, chunks], zeros, both before and after). strides: of the keys. The first centroid
    wins a tie.
    """
    keys_ptr, centroids_ptr, out_ptr, best_ptr, arrived_ptr = new
    i = chunk * KEYS + tl.arange(0, KEYS)
    row, query = (i // queries).to(tl.int64), i % queries
    live = i < tokens
    d = tl.arange(0, DP)
    turn = row * rotary_stride + query * ROTARY
    at = keys_ptr + row * strides[0] + head * strides[1] + query * strides[2]
    ok = live[:, None] & (d < D)[None, :]
    keys = _undo_rotary_halves(at, strides[3], d, ok, cos_ptr + turn, sin_ptr + turn, ROTARY)
    c = tile * TILE + tl.arange(0, TILE)
    where = centroids_ptr + (head.to(tl.int64) * buckets + c)[None, :] * D + d[:, None]
    centroids = tl.load(where, mask=(c < buckets)[None, :] & (d < D)[:, None], other=0.0)
    score = tl.dot(keys.to(centroids.dtype), centroids, input_precision="ieee")
    # NaN too, as in `assign_kernel`
    score = tl.where((c < buckets)[None, :] & (score == score), score, -float("inf"))
    top, index = tl.max(score, 1, return_indices=True)
    # the score in the high half; in the low half what lets the first centroid win a tie
    found = (_signed(top).to(tl.int64) << 32) + (4294967295 - (tile * TILE + index).to(tl.int64))
    best = best_ptr + (head * chunks + chunk) * KEYS + tl.arange(0, KEYS)
    tl.atomic_max(best, found, mask=live, sem="relaxed")
    tl.debug_barrier()
    arrived = arrived_ptr + head * chunks + chunk
    if tl.atomic_add(arrived, 1, sem="acq_rel") == tl.cdiv(buckets, TILE) - 1:
        tl.store(arrived, 0)
        found = tl.load(best, mask=live, other=0, cache_modifier=".cg")
        n = (row * heads + head) * queries + query
        tl.store(out_ptr + n, (4294967295 - (found & 4294967295)).to(tl.int16), mask=live)
        tl.store(best, tl.full([KEYS], 1, tl.int64) << 63, mask=live)


@triton.jit
def _layer(
    tile, chunk, head, q_ptr, weight_ptr, bias_ptr, out_ptr, cos_ptr, sin_ptr, strides, weight_strides, rotary_stride,
    tokens, queries, heads, units, GROUP: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, TILE: tl.constexpr, ROTARY: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """A linear layer for ROWS // G tokens of one KV head, TILE units, added over the query heads of a group."""
    i = chunk * (ROWS // G) + tl.arange(0, ROWS) // G
    g = tl.arange(0, ROWS) % G
    row, query = (i // queries).to(tl.int64), i % queries
    d = tl.arange(0, DP)
    unit = tile * TILE + tl.arange(0, TILE)
    inside = unit < units
    own = weight_ptr + head.to(tl.int64) * weight_strides[0]
    where = own + d[:, None] * weight_strides[1] + unit[None, :] * weight_strides[2]
    weight = tl.load(where, mask=(d < D)[:, None] & inside[None, :], other=0.0)
    at = q_ptr + row * strides[0] + head * strides[1] + query * strides[2] + g * strides[3]
    turn = row * rotary_stride + query * ROTARY
    live = (i < tokens) & (g < GROUP)
    ok = live[:, None] & (d < D)[None, :]
    q = _undo_rotary_halves(at, strides[4], d, ok, cos_ptr + turn, sin_ptr + turn, ROTARY)
    x = tl.dot(q.to(weight.dtype), weight, input_precision="ieee")
    if RELU:
        bias = tl.load(bias_ptr + head * units + unit, mask=inside, other=0.0).to(tl.float32)
        x = tl.where(live[:, None], tl.maximum(x + bias[None, :], 0.0), 0.0)
    x = tl.sum(tl.reshape(x, (ROWS // G, G, TILE)), 1)
    i = chunk * (ROWS // G) + tl.arange(0, ROWS // G)
    n = ((i // queries).to(tl.int64) * heads + head) * queries + i % queries
    tl.store(out_ptr + n[:, None] * units + unit[None, :], x, mask=(i < tokens)[:, None] & inside[None, :])


@triton.jit
def layer_kernel(
    q_ptr,  # [B, Hkv, M, G, D]
    weight_ptr, bias_ptr,  # [Hkv, D, units] by its strides, [Hkv, units]
    out_ptr,  # float32 [B, Hkv, M, units]
    cos_ptr, sin_ptr,  # [1 or B, M, ROTARY]
    new,  # as in `_nearest`
    strides, weight_strides, key_strides, rotary_stride, tokens, queries, heads, units, buckets,
    GROUP: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr,
    ROTARY: tl.constexpr, RELU: tl.constexpr, KEYS: tl.constexpr, NEAR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A linear layer on queries; and new keys, KEYS at a time, against NEAR centroids in programs of their own.

    tokens: of all rows. G: the group, padded. RELU: with a bias and a ReLU, the first layer of a classifier; otherwise
    inner products, as with centroids. PDL: `pdl_wait`.
    """
    pdl_wait(PDL)
    tile, head, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tiles = tl.cdiv(units, TILE)
    if tile < tiles:
        if chunk * (ROWS // G) < tokens:
            _layer(
                tile, chunk, head, q_ptr, weight_ptr, bias_ptr, out_ptr, cos_ptr, sin_ptr, strides, weight_strides,
                rotary_stride, tokens, queries, heads, units, GROUP, G, ROWS, D, DP, TILE, ROTARY, RELU,
            )  # fmt: skip
    else:
        chunks = tl.cdiv(tokens, KEYS)
        if chunk < chunks:
            _nearest(
                tile - tiles, chunk, head, chunks, new, cos_ptr, sin_ptr, key_strides, rotary_stride, tokens, queries,
                heads, buckets, KEYS, NEAR, D, DP, ROTARY,
            )  # fmt: skip


@triton.jit
def logits_kernel(
    hidden_ptr,  # float32 [B, Hkv, vectors, hidden]: of each row and head, those of all its queries
    weight_ptr, bias_ptr,  # [Hkv, hidden, C], [Hkv, C]
    out_ptr,  # float32 [B, Hkv, vectors, C]
    vectors, rows, heads, hidden, buckets, times,
    ROWS: tl.constexpr, TILE: tl.constexpr, UNITS: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The second layer for ROWS vectors of one KV head, of any rows, and TILE buckets. times: biases added.

    WHOLE: UNITS divide the hidden units, and TILE the buckets. PDL: `pdl_wait`; before it weights, which the
    first layer does not write, are prefetched to L2.
    """
    head = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * TILE + tl.arange(0, TILE)
    unit = tl.arange(0, UNITS)
    weights = weight_ptr + head * hidden * buckets
    if PDL:
        line: tl.constexpr = 128 * 8 // weight_ptr.dtype.element_ty.primitive_bitwidth
        first = tl.program_id(0) * TILE + tl.arange(0, TILE // line if TILE > line else 1) * line
        lines = weights + (unit[:, None] * buckets + first[None, :])
        for start in range(0, hidden, UNITS):
            to_l2(lines, (unit < hidden - start)[:, None] & (first < buckets)[None, :])
            lines += UNITS * buckets
    i = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    live = (i < rows * vectors)[:, None]
    n = ((i // vectors).to(tl.int64) * heads + head) * vectors + i % vectors
    w_at = weights + (unit[:, None] * buckets + c[None, :])
    x_at = hidden_ptr + n[:, None] * hidden + unit[None, :]
    inside = (c < buckets)[None, :]
    acc = tl.zeros([ROWS, TILE], tl.float32)
    pdl_wait(PDL)
    for start in tl.range(0, hidden, UNITS, num_stages=STAGES):
        if WHOLE:
            x = tl.load(x_at, mask=live, other=0.0)
            weight = tl.load(w_at)
        else:
            x = tl.load(x_at, mask=live & (unit < hidden - start)[None, :], other=0.0)
            weight = tl.load(w_at, mask=(unit < hidden - start)[:, None] & inside, other=0.0)
        acc += tl.dot(x.to(weight.dtype), weight, input_precision="ieee")
        x_at += UNITS
        w_at += UNITS * buckets
    bias = tl.load(bias_ptr + head * buckets + c, mask=c < buckets, other=0.0).to(tl.float32) * times
    tl.store(out_ptr + n[:, None] * buckets + c[None, :], acc + bias[None, :], mask=live & inside)
