"""Steps over 4- and 8-bit latents on Hopper's own instructions, in Triton's Gluon.

It computes what `ops.latent.kernel` does, with tokens, then channels, as the rows of the products: 64 of them fill an
instruction, which reads both operands from shared memory, and of which 16 queries would fill a quarter.

    S^T = (K Q^T) k_size + (Kr Qr^T) r_size       [64 tokens, queries]
    P^T = exp(S^T - m)                            m: the largest score so far
    O^T = O^T exp(m' - m) + K^T (P^T k_size)      [rank, queries], in units of the block's largest k_size

Everything is float16, two to a register: integers up to 2048, times a power of two, are exact there. 15 times what a
4-bit code stands for is one, of 1905 at most, as zeros and ends of spans are up to 127; and a code masked out of its
byte is a subnormal number, so that one FMA makes two such values of two codes. Queries are divided by their largest
number, P is multiplied by 2^LIFT, which uses the type's whole range.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

LIFT = gl.constexpr(15.0)


@gluon.jit
def _half_values(x):
    """4 int8 in each int32, exact: 2 int32 of 2 float16. 0x64uu is 1024 + u."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 a, k, m; xor.b32 a, $2, 0x80808080; mov.b32 k, 0x64646464; mov.b32 m, 0xE480E480;"
        "prmt.b32 $0, a, k, 0x4140; prmt.b32 $1, a, k, 0x4342;"
        "add.rn.f16x2 $0, $0, m; add.rn.f16x2 $1, $1, m; }",
        "=&r,=&r,r", [x], dtype=(gl.int32, gl.int32), is_pure=True, pack=1)


@gluon.jit
def _half_bytes(x):
    """As `_half_values`, of unsigned bytes."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 k, m; mov.b32 k, 0x64646464; mov.b32 m, 0xE400E400;"
        "prmt.b32 $0, $2, k, 0x4140; prmt.b32 $1, $2, k, 0x4342;"
        "add.rn.f16x2 $0, $0, m; add.rn.f16x2 $1, $1, m; }",
        "=&r,=&r,r", [x], dtype=(gl.int32, gl.int32), is_pure=True, pack=1)


@gluon.jit
def _half_codes(codes, s_low, z_low, s_high, z_high):
    """(code * span + 15 zero) / 2^16 of the low codes of 4 bytes in each int32, then of the high ones, exact.

    Spans are times 2^8 and 2^4, zeros times 15 / 2^16: a masked code is code * 2^-24 or code * 2^-20.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .b32 a, b, c; prmt.b32 a, $4, 0, 0x4140; prmt.b32 b, $4, 0, 0x4342;"
        "and.b32 c, a, 0x000F000F; fma.rn.f16x2 $0, c, $5, $7;"
        "and.b32 c, b, 0x000F000F; fma.rn.f16x2 $1, c, $6, $8;"
        "and.b32 c, a, 0x00F000F0; fma.rn.f16x2 $2, c, $9, $11;"
        "and.b32 c, b, 0x00F000F0; fma.rn.f16x2 $3, c, $10, $12; }",
        "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r",
        [codes, s_low[0], s_low[1], z_low[0], z_low[1], s_high[0], s_high[1], z_high[0], z_high[1]],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1)


@gluon.jit
def _line(halves, factor: gl.constexpr, like):
    """Spans or zeros of channels, times a factor (the bits of two float16), for all rows of `like`."""
    a, b = halves
    a, b = _times(a, factor), _times(b, factor)
    a, _ = gl.broadcast(a[None, :], like)
    b, _ = gl.broadcast(b[None, :], like)
    return a, b


@gluon.jit
def _times(x, factor: gl.constexpr):
    return gl.inline_asm_elementwise("mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [x, gl.full_like(x, factor)],
                                     dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _side_by_side(a, b):
    """Two int32 of each 4 channels, [T, n] each -> [T, 2 n] in the order of channels. Nothing changes its thread."""
    return gl.join(a, b).reshape((a.shape[0], a.shape[1] * 2))


@gluon.jit
def _values(x):
    """[T, n] int32 of 4 int8 -> [T, 2 n] int32 of 2 float16."""
    a, b = _half_values(x)
    return _side_by_side(a, b)


@gluon.jit
def _latents(codes, BITS: gl.constexpr):
    """A block's latents in two halves of channels, pairs of float16: codes at 8 bit, at 4 bit 15 / 2^16 of numbers."""
    if BITS == 4:
        packed, z_low, z_high, s_low, s_high = codes
        a, b, c, d = _half_codes(
            packed, _line(_half_bytes(s_low), 0x5C005C00, packed), _line(_half_values(z_low), 0x0B800B80, packed),
            _line(_half_bytes(s_high), 0x4C004C00, packed), _line(_half_values(z_high), 0x0B800B80, packed))
        return _side_by_side(a, b), _side_by_side(c, d)
    else:
        return _values(codes[0]), _values(codes[1])


@gluon.jit
def _stored_order(n):
    """The token in place n of the stored values of a block (`layout.VALUE_ORDER`)."""
    return n // 16 * 16 + n // 4 % 4 * 2 + n // 2 % 2 * 8 + n % 2


@gluon.jit
def _fetch(pages, page, live, RANK: gl.constexpr, ROTARY: gl.constexpr, BITS: gl.constexpr, K_IO: gl.constexpr,
           R_IO: gl.constexpr, S: gl.constexpr, WARPS: gl.constexpr):
    """Loads of a page, four bytes to an int32; of none if not `live`. Tokens are in the order of stored values.

    Sizes of latents are loaded twice: by those who hold the tokens' scores, and by each warp.
    """
    k_ptr, v_ptr, meta_ptr, size_ptr = pages
    WORDS: gl.constexpr = RANK // 8
    n = gl.arange(0, 64, layout=gl.SliceLayout(1, K_IO))
    t = _stored_order(n)
    c = gl.arange(0, WORDS, layout=gl.SliceLayout(0, K_IO))
    r = gl.arange(0, ROTARY, layout=gl.SliceLayout(1, R_IO))
    i = gl.arange(0, 16, layout=gl.SliceLayout(0, R_IO))
    rotary = gl.load(v_ptr + page * (ROTARY * 16) + (r[:, None] * 16 + i[None, :]), mask=live)
    own = size_ptr + page * 128 + _stored_order(gl.arange(0, 64, layout=gl.SliceLayout(1, S)))
    every = gl.arange(0, 64, layout=gl.BlockedLayout([2], [32], [WARPS], [0]))
    sizes = (gl.load(own, mask=live), gl.load(own + 64, mask=live), gl.load(size_ptr + page * 128 + every, mask=live))
    if BITS == 4:
        packed = gl.load(k_ptr + page * (64 * WORDS) + (t[:, None] * WORDS + c[None, :]), mask=live)
        meta = meta_ptr + page * (4 * WORDS) + c
        codes = (packed, gl.load(meta, mask=live), gl.load(meta + WORDS, mask=live),
                 gl.load(meta + 2 * WORDS, mask=live), gl.load(meta + 3 * WORDS, mask=live))
    else:
        at = k_ptr + page * (128 * WORDS) + (t[:, None] * (2 * WORDS) + c[None, :])
        codes = gl.load(at, mask=live), gl.load(at + WORDS, mask=live)
    return codes, rotary, sizes


@gluon.jit
def _views(words, queries, p_words, z, RANK: gl.constexpr, ROTARY: gl.constexpr):
    """Shared memory at index z, which is 0 where the compiler does not know it.

    Else it would keep the address of each operand of each product in a register of its own.
    """
    HALF: gl.constexpr = RANK // 2
    TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, HALF], gl.float16)
    R_TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROTARY, 64], gl.float16)
    low, high, turned = words[0].index(z), words[1].index(z), words[2].index(z)
    tile = (low._reinterpret(gl.float16, [64, HALF], TILE), high._reinterpret(gl.float16, [64, HALF], TILE),
            turned._reinterpret(gl.float16, [ROTARY, 64], R_TILE))
    return (low, high, turned), tile, (queries[0].index(z), queries[1].index(z), queries[2].index(z)), p_words.index(z)


@gluon.jit
def _scores(to, low, high, turned, tile, q, ROWS: gl.constexpr, S: gl.constexpr):
    """Store a block's latents and rotary parts, and begin its products with the queries."""
    to[0].store(low)
    to[1].store(high)
    to[2].store(turned)
    fence_async_shared()
    gl.thread_barrier()
    zero = gl.zeros((64, ROWS), gl.float32, S)
    s = warpgroup_mma(tile[0], q[0].permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma(tile[1], q[1].permute((1, 0)), s, is_async=True)
    r = warpgroup_mma(tile[2].permute((1, 0)), q[2].permute((1, 0)), zero, use_acc=False, is_async=True)
    return s, r


@gluon.jit
def _outputs(state, s, share, k_unit, tile, p_smem, SUMS: gl.constexpr):
    """Softmax of scores s [64, queries] in log2, and the beginning of P's product with the latents in units of k_unit.

    share: the tokens' sizes over k_unit. state: sums, the largest score, each thread's sums of P, the sums' unit.
    """
    low, high, m, total, unit = state
    top = gl.maximum(m, gl.max(s, 0))
    p = gl.exp2(s - (top - LIFT)[None, :])
    keep = gl.exp2(m - top)
    total = total * keep[None, :] + p
    p_smem.store((p * share).to(gl.float16))
    fence_async_shared()
    gl.thread_barrier()
    keep = gl.convert_layout(keep * (unit / k_unit), gl.SliceLayout(0, SUMS))[None, :]
    low = warpgroup_mma(tile[0].permute((1, 0)), p_smem, low * keep, is_async=True)
    high = warpgroup_mma(tile[1].permute((1, 0)), p_smem, high * keep, is_async=True)
    return low, high, top, total, k_unit


@gluon.jit
def code_fence(x):
    """A branch never taken (x >= 0): keeps ptxas from moving a wait for products over what is to run beside them."""
    gl.inline_asm_elementwise(
        "{.reg .pred p; setp.eq.s32 p, $1, -1; spin: @!p bra done; nanosleep.u32 8; bra spin; done: mov.u32 $0, 0;}",
        "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _store_queries(q_ptr, qr_ptr, queries, row, first, count, RANK: gl.constexpr, ROTARY: gl.constexpr,
                   ROWS: gl.constexpr, Q_IO: gl.constexpr, QR_IO: gl.constexpr):
    """ROWS queries to shared memory, each over its largest number, which is returned."""
    HALF: gl.constexpr = RANK // 2
    n = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, Q_IO))
    at = q_ptr + (row * count + n)[:, None] * RANK + gl.arange(0, HALF, layout=gl.SliceLayout(0, Q_IO))[None, :]
    inside = (n < count)[:, None]
    low = gl.load(at, mask=inside, other=0.0).to(gl.float32)
    high = gl.load(at + HALF, mask=inside, other=0.0).to(gl.float32)
    n = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, QR_IO))
    at = qr_ptr + (row * count + n)[:, None] * ROTARY + gl.arange(0, ROTARY, layout=gl.SliceLayout(0, QR_IO))[None, :]
    rotary = gl.load(at, mask=(n < count)[:, None], other=0.0).to(gl.float32)
    top = gl.maximum(gl.max(gl.abs(low), 1), gl.max(gl.abs(high), 1))
    top = gl.maximum(top, gl.convert_layout(gl.max(gl.abs(rotary), 1), gl.SliceLayout(1, Q_IO)))
    top = gl.where(top > 0, top, 1.0)
    queries[0].index(0).store((low / top[:, None]).to(gl.float16))
    queries[1].index(0).store((high / top[:, None]).to(gl.float16))
    queries[2].index(0).store((rotary / gl.convert_layout(top, gl.SliceLayout(1, QR_IO))[:, None]).to(gl.float16))
    return top


@gluon.jit(do_not_specialize=["table_stride", "cap", "count"])
def hopper_latent_kernel(
    q_ptr, qr_ptr,  # [B, N, rank] and [B, N, R], contiguous
    k_ptr, v_ptr, meta_ptr, size_ptr,  # pages of the one head, as in `PagedHeads`
    k_open, v_open, k_scales, v_scales,  # open tokens, as in `KVStore`
    table_ptr, sealed_ptr, open_ptr,  # int64 [B, blocks], [B], [B]
    part_ptr, lse_ptr,  # float32 [B, shares, N, rank], [B, shares, N]: log2
    table_stride, cap, unit, count,
    RANK: gl.constexpr, ROTARY: gl.constexpr, BITS: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr,
    WARPS: gl.constexpr, OVERLAP: gl.constexpr,
):
    """One share of the blocks of one row, for ROWS of its N queries (head-major); the last share has the open tokens.

    count: N = heads * TOKENS. unit: scaling times log2(e). cap: a multiple of 4. Blocks have 64 tokens.
    OVERLAP: the next block's latents are made while the products of P run.
    """
    HALF: gl.constexpr = RANK // 2
    LANES: gl.constexpr = RANK // 16
    K_IO: gl.constexpr = gl.BlockedLayout([1, 2], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    R_IO: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [WARPS, 1], [1, 0])
    Q_IO: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    QR_IO: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [WARPS, 1], [1, 0])
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WARPS // 4], [16, ROWS * 4 // WARPS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16])
    WORDS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, HALF // 2], gl.int32)
    R_WORDS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROTARY, 32], gl.int32)
    Q: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HALF], gl.float16)
    QR: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, ROTARY], gl.float16)
    P: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, ROWS], gl.float16)
    ZOOM: gl.constexpr = 65536.0 / 15.0 if BITS == 4 else 1.0

    share, shares = gl.program_id(0), gl.num_programs(0)
    group, row = gl.program_id(1) * ROWS, gl.program_id(2).to(gl.int64)
    k_ptr, v_ptr = k_ptr.to(gl.pointer_type(gl.int32)), v_ptr.to(gl.pointer_type(gl.int32))
    k_open, v_open = k_open.to(gl.pointer_type(gl.int32)), v_open.to(gl.pointer_type(gl.int32))
    pages = k_ptr, v_ptr, meta_ptr.to(gl.pointer_type(gl.int32)), size_ptr
    words = (gl.allocate_shared_memory(gl.int32, [1, 64, HALF // 2], WORDS),
             gl.allocate_shared_memory(gl.int32, [1, 64, HALF // 2], WORDS),
             gl.allocate_shared_memory(gl.int32, [1, ROTARY, 32], R_WORDS))
    queries = (gl.allocate_shared_memory(gl.float16, [1, ROWS, HALF], Q),
               gl.allocate_shared_memory(gl.float16, [1, ROWS, HALF], Q),
               gl.allocate_shared_memory(gl.float16, [1, ROWS, ROTARY], QR))
    p_words = gl.allocate_shared_memory(gl.float16, [1, 64, ROWS], P)

    sealed = gl.load(sealed_ptr + row)
    opened = gl.load(open_ptr + row).to(gl.int32)
    # a block of open tokens takes as long as two, as nothing fetches it ahead
    blocks = sealed + (opened + 63) // 64 * 2
    begin = gl.minimum(share * blocks // shares, sealed).to(gl.int32)
    end = gl.minimum((share + 1) * blocks // shares, sealed).to(gl.int32)
    entries = table_ptr + row * table_stride
    page = gl.load(entries + begin, mask=begin < end, other=0)
    codes, rotary, sizes = _fetch(pages, page, begin < end, RANK, ROTARY, BITS, K_IO, R_IO, S, WARPS)
    page = gl.load(entries + begin + 1, mask=begin + 1 < end, other=0)
    top = _store_queries(q_ptr, qr_ptr, queries, row, group, count, RANK, ROTARY, ROWS, Q_IO, QR_IO)
    # a query sees the tokens up to its own
    query = group + gl.arange(0, ROWS, layout=gl.SliceLayout(0, S))
    last = (sealed.to(gl.int32) * 64 + opened - TOKENS + query % TOKENS)[None, :]
    n = gl.arange(0, 64, layout=gl.SliceLayout(1, S))
    units = gl.convert_layout(top * unit, gl.SliceLayout(0, S))[None, :]

    acc = gl.zeros((HALF, ROWS), gl.float32, SUMS)
    # below every score, and finite: a query may see no token of this share
    m = gl.full((ROWS,), -1.0e30, gl.float32, gl.SliceLayout(0, S))
    state = acc, acc, m, gl.zeros((64, ROWS), gl.float32, S), 1.0
    low, high = _latents(codes, BITS)
    turned = _values(rotary)
    for block in range(begin, end):
        to, tile, q, p_smem = _views(words, queries, p_words, block >> 30, RANK, ROTARY)
        if not OVERLAP:
            low, high = _latents(codes, BITS)
            turned = _values(rotary)
        s, r = _scores(to, low, high, turned, tile, q, ROWS, S)
        k_own, r_own, most = sizes[0].to(gl.float32), sizes[1].to(gl.float32), gl.max(sizes[2].to(gl.float32), 0)
        most = gl.where(most > 0, most, 1.0)
        codes, rotary, sizes = _fetch(pages, page, block + 1 < end, RANK, ROTARY, BITS, K_IO, R_IO, S, WARPS)
        page = gl.load(entries + block + 2, mask=block + 2 < end, other=0)
        s, r = warpgroup_mma_wait(0, deps=[s, r])
        s = (s * (k_own * ZOOM)[:, None] + r * r_own[:, None]) * units
        if TOKENS > 1:
            s = gl.where((block * 64 + _stored_order(n))[:, None] <= last, s, -float("inf"))
        a, b, m, total, held = _outputs(state, s, (k_own / most)[:, None], most * ZOOM, tile, p_smem, SUMS)
        if OVERLAP:
            low, high = _latents(codes, BITS)
            turned = _values(rotary)
            code_fence(count)
            a, b, low, high, turned = warpgroup_mma_wait(0, deps=[a, b, low, high, turned])
        else:
            a, b = warpgroup_mma_wait(0, deps=[a, b])
        gl.thread_barrier()
        state = a, b, m, total, held
    if share == shares - 1:
        t = gl.arange(0, 64, layout=gl.SliceLayout(1, K_IO))
        c = gl.arange(0, HALF // 4, layout=gl.SliceLayout(0, K_IO))
        r_at = gl.arange(0, ROTARY, layout=gl.SliceLayout(1, R_IO))
        i = gl.arange(0, 16, layout=gl.SliceLayout(0, R_IO))
        for first in range(0, opened, 64):
            to, tile, q, p_smem = _views(words, queries, p_words, first >> 30, RANK, ROTARY)
            at = k_open + (row * cap + first + t)[:, None] * (RANK // 4) + c[None, :]
            live = (first + t < opened)[:, None]
            low = _values(gl.load(at, mask=live, other=0))
            high = _values(gl.load(at + HALF // 4, mask=live, other=0))
            r_from = v_open + (row * ROTARY + r_at)[:, None] * (cap // 4) + (first // 4 + i)[None, :]
            turned = _values(gl.load(r_from, mask=(first + 4 * i < opened)[None, :], other=0))
            live = first + n < opened
            k_own = gl.load(k_scales + row * cap + first + n, mask=live, other=0.0)
            r_own = gl.load(v_scales + row * cap + first + n, mask=live, other=0.0)
            s, r = _scores(to, low, high, turned, tile, q, ROWS, S)
            s, r = warpgroup_mma_wait(0, deps=[s, r])
            live = live[:, None]
            if TOKENS > 1:
                live = live & ((sealed.to(gl.int32) * 64 + first + n)[:, None] <= last)
            s = gl.where(live, (s * k_own[:, None] + r * r_own[:, None]) * units, -float("inf"))
            most = gl.max(k_own, 0)
            most = gl.where(most > 0, most, 1.0)
            a, b, m, total, held = _outputs(state, s, (k_own / most)[:, None], most, tile, p_smem, SUMS)
            a, b = warpgroup_mma_wait(0, deps=[a, b])
            gl.thread_barrier()
            state = a, b, m, total, held
    a, b, m, total, held = state
    total = gl.sum(total, 0)
    some = gl.where(total > 0, total, 1.0)
    to = (row * shares + share) * count
    found = gl.where(total > 0, m + gl.log2(some) - LIFT, -float("inf"))
    gl.store(lse_ptr + to + query, found, mask=query < count)
    n = group + gl.arange(0, ROWS, layout=gl.SliceLayout(0, SUMS))
    share_of = gl.convert_layout(held / some, gl.SliceLayout(0, SUMS))[None, :]
    at = part_ptr + (to + n)[None, :] * RANK + gl.arange(0, HALF, layout=gl.SliceLayout(1, SUMS))[:, None]
    gl.store(at, a * share_of, mask=(n < count)[None, :])
    gl.store(at + HALF, b * share_of, mask=(n < count)[None, :])
