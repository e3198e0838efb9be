"""Flash attention of a prompt on Hopper's own instructions: INT8 Q K^T, FP8 or INT8 P V, in Triton's Gluon.

It computes what `ops.prefill.kernel` does, for prompts and chunks without window, cap or sinks. One
persistent program per SM: one warp loads tiles of K and V with the tensor memory accelerator (TMA) for two warpgroups,
each of which owns 64 queries. A warpgroup issues Q K^T of the next tile and P V of the last one together, and computes
its softmax meanwhile. In FP8 the row sums are those of the rounded P, by one more product.
`eval/results/prefill-log.md` has what was tried and measured.

Names: M queries and keys, Tp padded keys, n_items tiles of 128 queries in all, n_blocks in a head, heads that run side
by side because their keys fit the L2 cache together, Hq query heads, G per KV head; sqb.. strides of q, sob..
of o; it counts key tiles, s is a tile's stage in shared memory.
"""

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from turbo_hf.ops.kernel_common import LN_2, ROUND, SCORE_LIMIT
from turbo_hf.ops.latent.kernel_hopper import code_fence
from turbo_hf.ops.prefill.kernel_hopper_past import (
    GUARD,
    by_worth,
    extent,
    past_probabilities,
    past_scales,
    past_tile,
    start_of,
)

_LOG2_448 = gl.constexpr(math.log2(448))
_LOG2_127 = gl.constexpr(6.98868468677217)  # rounded to 15 digits, the same float32


@gluon.jit
def _item(round_):
    """Work item of this program in a round: in alternating order, so that the descending lengths add up evenly."""
    n = gl.num_programs(0)
    p = gl.program_id(0)
    return round_ * n + gl.where(round_ % 2 == 0, p, n - 1 - p)


@gluon.jit
def _place(item, n_blocks, heads, parts):
    """Work item -> (first query row, batch * head, part of the past): longest first inside a section of heads that
    share L2."""
    part = 0
    if parts is not None:
        part, item = item % parts, item // parts
    section = item // (n_blocks * heads)
    rest = item % (n_blocks * heads)
    return (n_blocks - 1 - rest // heads) * 128, section * heads + rest % heads, part


@gluon.jit
def _producer(k_desc, v_desc, past_k, past_v, k_smem, v_smem, full, empty, M, Tp, n_items, n_blocks, heads, Hq, G,
              past, parts, starts, D: gl.constexpr, STAGES: gl.constexpr):
    it = 0
    for round_ in range(gl.cdiv(n_items, gl.num_programs(0))):
        item = _item(round_)
        if item < n_items:
            row, bh, part = _place(item, n_blocks, heads, parts)
            kv = (bh // Hq) * (Hq // G) + (bh % Hq) // G
            # tiles of their own keys that the 128 rows from row on need; both halves need the same ones
            n = row // 128 + 1
            if starts is not None:
                n = gl.where(row < M - start_of(starts, bh // Hq), n, 1)
            if parts is not None:
                n = gl.where(part == 0, n, 1)
            for i in range(n):
                j = n - 1 - i
                s = it % STAGES
                mbarrier.wait(empty.index(s), ((it // STAGES) & 1) ^ 1)
                mbarrier.expect(full.index(s), 256 * D)
                tma.async_copy_global_to_shared(k_desc, [kv * Tp + j * 128, 0], full.index(s), k_smem.index(s))
                tma.async_copy_global_to_shared(v_desc, [kv * D, j * 128], full.index(s), v_smem.index(s))
                it += 1
            if past is not None:
                _, newest, begin, end = extent(past, bh, row, Hq, starts, M, part, parts)
                ahead = past_tile(begin, newest, past.room)
                for i in range(begin, end):
                    j = ahead
                    ahead = past_tile(i + 1, newest, past.room)
                    s = it % STAGES
                    mbarrier.wait(empty.index(s), ((it // STAGES) & 1) ^ 1)
                    mbarrier.expect(full.index(s), 256 * D)
                    k_row = kv * past.room + j * 128
                    tma.async_copy_global_to_shared(past_k, [k_row, 0], full.index(s), k_smem.index(s))
                    tma.async_copy_global_to_shared(past_v, [kv * D, j * 128], full.index(s), v_smem.index(s))
                    it += 1


@gluon.jit
def _load_q(q, round_, wg: gl.constexpr, sqb, sqh, sqm, M, n_items, n_blocks, heads, Hq, starts, parts,
            D: gl.constexpr, layout: gl.constexpr):
    """This warpgroup's 64 query rows in a round (past the end: any item's)."""
    row, bh, _ = _place(gl.minimum(_item(round_), n_items - 1), n_blocks, heads, parts)
    rows = start_of(starts, bh // Hq) + row + 64 * wg + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    base = q + (bh // Hq).to(gl.int64) * sqb + (bh % Hq).to(gl.int64) * sqh
    cols = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    return gl.load(base + (rows.to(gl.int64) * sqm)[:, None] + cols[None, :], mask=(rows < M)[:, None], other=0.0)


@gluon.jit
def _quantize_q(x, q_smem, broken):
    """Queries to INT8 in shared memory; returns each row's maximum, which is 127 codes."""
    xf = x.to(gl.float32)
    # codes cannot represent NaN or Inf: the head is reported, and computed again in 16 bit
    unfit = gl.sum(xf * 0.0, 1) != 0.0
    gl.store(broken + gl.where(unfit, 0, 0), gl.where(unfit, 1, 0), mask=unfit)
    top = gl.maximum(gl.max(gl.abs(xf), 1), 1e-20)
    q_smem.store((xf * gl.div_rn(127.0, top)[:, None] + ROUND).to(gl.int32, bitcast=True).to(gl.int8))
    fence_async_shared()
    gl.thread_barrier()
    return top


@gluon.jit
def _store_out(o, out, row, som, M, D: gl.constexpr, layout: gl.constexpr):
    """64 rows of the output, those past the end left out."""
    rows = row + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    cols = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    gl.store(o + (rows.to(gl.int64) * som)[:, None] + cols[None, :], out, mask=(rows < M)[:, None])


@gluon.jit
def _store_lse(lse, found, rows, broken, M, seen):
    """The natural log of the sums; a head whose scores are too large for INT8 is reported. seen: rows that have seen a
    key; None: all."""
    large = gl.abs(found) > SCORE_LIMIT
    if seen is not None:
        large, found = large & seen, gl.where(seen, found, float("-inf"))
    gl.store(lse + rows, found, mask=rows < M)
    gl.store(broken + rows * 0, rows * 0 + 1, mask=(rows < M) & large)


@gluon.jit
def _next_scales(k_scales, v_logs, j):
    """Scales of the tile that comes after tile j (past the end: any)."""
    at = gl.maximum(j - 1, 0)
    return gl.load(k_scales + at), gl.load(v_logs + at)


@gluon.jit
def _p_v(W, v_smem, zero, FP8: gl.constexpr, layout: gl.constexpr):
    """A fresh product of P and a tile of V."""
    return warpgroup_mma(_operand(W, FP8, layout), v_smem.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _row_sums(W, ones, zero, layout: gl.constexpr):
    """Sums of the rows of the rounded P, by the tensor cores."""
    P = _operand(W, True, layout)
    return warpgroup_mma(P, ones.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _first_tile(q_smem, k_smem, zero, c, last, first_key, OFFSET: gl.constexpr, layout: gl.constexpr):
    """P, maximum and reference of the tile that comes first, the only one with masked keys."""
    S = warpgroup_mma(q_smem, k_smem.permute((1, 0)), zero, use_acc=False, is_async=True)
    S = warpgroup_mma_wait(0, deps=[S])
    m = gl.full((64,), -1.0e30, gl.float32, gl.SliceLayout(1, layout))
    return _probabilities(S, c, m, last, first_key, OFFSET, True, layout)


@gluon.jit
def _probabilities(S, c, m, last, first_key, OFFSET: gl.constexpr, MASK: gl.constexpr, layout: gl.constexpr):
    """INT32 scores, times c in log2 -> (P as fp32, scaled by row and tile; running maximum; reference exponent)."""
    if MASK:
        keep = (first_key + gl.arange(0, 128, layout=gl.SliceLayout(0, layout)))[None, :] <= last[:, None]
        S = gl.where(keep, S, -1073741824)
    top = gl.max(S, 1).to(gl.float32) * c  # on integers: one VIMNMX3 for two scores
    m = gl.maximum(m, top)
    ref = gl.maximum(top, m - GUARD)
    P = gl.exp2(S.to(gl.float32) * c[:, None] - (ref - OFFSET)[:, None])
    if MASK:
        P = gl.where(keep, P, 0.0)
    return P, m, ref


@gluon.jit
def _pack(P, FP8: gl.constexpr):
    """fp32 P -> registers of four 8-bit values, [64, 32]. In V's token order no value changes its thread."""
    P = P.reshape((64, 4, 2, 2, 4, 2)).permute((0, 1, 2, 4, 3, 5)).reshape((64, 32, 2, 2))
    even, odd = gl.split(P)
    a, c = gl.split(even)
    b, d = gl.split(odd)
    if FP8:
        packed = gl.inline_asm_elementwise(
            "{.reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, $2, $1; cvt.rn.satfinite.e4m3x2.f32 h, $4, $3;"
            " mov.b32 $0, {l, h};}", "=r,f,f,f,f", [a, b, c, d], dtype=gl.int32, is_pure=True, pack=1)
    else:
        packed = gl.inline_asm_elementwise(
            "{.reg .b32 l, h; prmt.b32 l, $1, $2, 0x0040; prmt.b32 h, $3, $4, 0x0040; prmt.b32 $0, l, h, 0x5410;}",
            "=r,f,f,f,f", [a + ROUND, b + ROUND, c + ROUND, d + ROUND], dtype=gl.int32, is_pure=True, pack=1)
    return packed


@gluon.jit
def _operand(W, FP8: gl.constexpr, parent: gl.constexpr):
    """Packed registers as the tensor-core operand. Free, while an 8-bit tensor carried around a loop is taken apart."""
    W = gl.join(W, W)
    W = gl.convert_layout(gl.join(W, W).reshape((64, 128)), gl.DotOperandLayout(0, parent, 4), assert_trivial=True)
    if FP8:
        out = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r,r,r", [W], dtype=gl.float8e4nv, is_pure=True, pack=4)
    else:
        out = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r,r,r", [W], dtype=gl.int8, is_pure=True, pack=4)
    return out


@gluon.jit
def _lane_sum(P):
    """Row sums over the columns that a thread holds, [64, 4 lanes]."""
    return gl.sum(gl.sum(P.reshape((64, 16, 4, 2)), 3), 1)


@gluon.jit
def _rows(x, layout: gl.constexpr):
    """A row vector as a column of another tensor-core layout; both hold the same rows in a thread."""
    return gl.convert_layout(x, gl.SliceLayout(1, layout), assert_trivial=True)[:, None]


@gluon.jit
def _products(W, q_smem, k_smem, v_smem, ones, full, it, s, s_zero, o_zero, l_zero, STAGES: gl.constexpr,
              FP8: gl.constexpr):
    """Issue Q K^T of the next tile, and P V of the last one, in FP8 with its row sums. The scores are waited for."""
    o_layout: gl.constexpr = o_zero.type.layout
    nxt = (it + 1) % STAGES
    mbarrier.wait(full.index(nxt), ((it + 1) // STAGES) & 1)
    S = warpgroup_mma(q_smem, k_smem.index(nxt).permute((1, 0)), s_zero, use_acc=False, is_async=True)
    F = _p_v(W, v_smem.index(s), o_zero, FP8, o_layout)
    R = F
    if FP8:
        l_layout: gl.constexpr = l_zero.type.layout
        R = _row_sums(W, ones, l_zero, l_layout)
    S = warpgroup_mma_wait(2 if FP8 else 1, deps=[S])
    return S, F, R


@gluon.jit
def _absorb(P, worth, W, F, R, acc, total, old, ref, unit, v_exp, alpha, beta, M, empty, FP8: gl.constexpr,
            LATE_PACK: gl.constexpr):
    """What the last tile added, F and R, to the sums. P: of this tile; worth: the same by which its values count."""
    lanes: gl.constexpr = total.type.layout
    o_layout: gl.constexpr = acc.type.layout
    Wn = worth
    if not LATE_PACK:
        Wn = _pack(Wn, FP8)
    if FP8:
        code_fence(M)
        F, R, W, Wn = warpgroup_mma_wait(0, deps=[F, R, W, Wn])
        total = total * _rows(beta, lanes) + R
        beta = gl.exp2(old - ref)
    else:
        total = total * _rows(gl.exp2(old - ref), lanes) + _lane_sum(P)
        code_fence(M)
        F, W, Wn, total = warpgroup_mma_wait(0, deps=[F, W, Wn, total])
    mbarrier.arrive(empty)
    acc = acc * _rows(alpha, o_layout) + F.to(gl.float32)
    W = Wn
    if LATE_PACK:
        # after the wait it saves a copy of W, takes registers, and pays at D = 64 only
        W = _pack(Wn, FP8)
    alpha = gl.exp2(unit - (ref + v_exp))
    return W, acc, total, ref + v_exp, alpha, beta


@gluon.jit
def _consumer(wg: gl.constexpr, q, o, lse, k_scale, v_log2, broken, q_smem, ones, k_smem, v_smem, full, empty,
              sqb, sqh, sqm, sob, som, soh, M, Tp, n_items, n_blocks, heads, Hq, G, past, parts,
              starts, scale_log2, D: gl.constexpr, STAGES: gl.constexpr, FP8: gl.constexpr,
              LATE_PACK: gl.constexpr):
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 32])
    l_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 32])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    io_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    OFFSET: gl.constexpr = _LOG2_448 if FP8 else _LOG2_127

    q_wg = q_smem.index(wg)
    s_zero = gl.zeros((64, 128), gl.int32, s_layout)
    if FP8:
        o_zero = gl.zeros((64, D), gl.float32, o_layout)
        l_zero = gl.zeros((64, 8), gl.float32, l_layout)
    else:
        o_zero = gl.zeros((64, D), gl.int32, o_layout)
        l_zero = None
    halves: gl.constexpr = s_zero.reshape((64, 2, 64)).type.layout

    it = 0
    rounds = gl.cdiv(n_items, gl.num_programs(0))
    rounds = gl.where(_item(rounds - 1) < n_items, rounds, rounds - 1)
    x = _load_q(q, 0, wg, sqb, sqh, sqm, M, n_items, n_blocks, heads, Hq, starts, parts, D, io_layout)
    for round_ in range(rounds):
        row, bh, part = _place(_item(round_), n_blocks, heads, parts)
        kv = bh // Hq * (Hq // G) + bh % Hq // G
        n = row // 128 + 1
        j = n - 1
        if past is not None:
            tokens, newest, begin, end = extent(past, bh, row, Hq, starts, M, part, parts)
        if starts is not None:
            n = gl.where(row < M - start_of(starts, bh // Hq), n, 1)
        if parts is not None:
            n = gl.where(part == 0, n, 1)
        row += 64 * wg
        k_scales, v_logs = k_scale + kv * (Tp // 128), v_log2 + kv * (Tp // 128)

        q_scale = gl.convert_layout(_quantize_q(x, q_wg, broken + bh) * (scale_log2 / 127.0), row_layout)

        s = it % STAGES
        # the last key that each row sees
        last = gl.minimum(gl.full((64,), 0, gl.int32, row_layout) + (M - 1), row + gl.arange(0, 64, layout=row_layout))
        if parts is not None:
            # other parts see none of the first tile, from which the loops go on
            last = gl.where(part == 0, last, -1)
        c = q_scale * gl.load(k_scales + j)
        v_exp = gl.load(v_logs + j)
        mbarrier.wait(full.index(s), (it // STAGES) & 1)
        P, m, ref = _first_tile(q_wg, k_smem.index(s), s_zero, c, last, j * 128, OFFSET, s_layout)
        if parts is not None:
            m, ref = gl.where(part == 0, m, -1.0e30), gl.where(part == 0, ref, -1.0e30)
        W = _pack(P, FP8)
        acc = gl.zeros((64, D), gl.float32, o_layout)  # in units of 2**unit
        unit = ref + v_exp
        alpha = gl.full((64,), 0.0, gl.float32, row_layout)
        beta = alpha
        if FP8:
            total = gl.zeros((64, 8), gl.float32, l_layout)
        else:
            total = _lane_sum(P)
        k_next, v_next = _next_scales(k_scales, v_logs, j)

        for _ in range(n - 1):
            c = q_scale * k_next
            v_exp = v_next
            j -= 1
            k_next, v_next = _next_scales(k_scales, v_logs, j)
            S, F, R = _products(W, q_wg, k_smem, v_smem, ones, full, it, s, s_zero, o_zero, l_zero, STAGES, FP8)
            old = ref
            P, m, ref = _probabilities(S, c, m, last, 0, OFFSET, False, s_layout)
            W, acc, total, unit, alpha, beta = _absorb(
                P, P, W, F, R, acc, total, old, ref, unit, v_exp, alpha, beta, M, empty.index(s), FP8, LATE_PACK)
            it += 1
            s = it % STAGES

        if past is not None:
            scales = past.scale + kv * (past.room // 32)
            # the newest tile alone may have keys that are not the row's
            full_from = gl.where((begin == 0) & (end > 0) & (tokens % 128 > 0), 1, begin)
            k_two, v_two = past_scales(scales, past_tile(begin, newest, past.room), halves)
            ahead = past_tile(begin + 1, newest, past.room)
            for turn in gl.static_range(2):
                for i in range(begin if turn == 0 else full_from, full_from if turn == 0 else end):
                    k_here, v_here = k_two, v_two
                    k_two, v_two = past_scales(scales, ahead, halves)
                    ahead = past_tile(i + 2, newest, past.room)
                    S, F, R = _products(W, q_wg, k_smem, v_smem, ones, full, it, s, s_zero, o_zero, l_zero, STAGES, FP8)
                    old = ref
                    P, m, ref = past_probabilities(
                        S, q_scale, k_here, m, tokens, (newest - 1) * 128, OFFSET, turn == 0, s_layout, halves)
                    v_exp = gl.max(v_here, 0)
                    worth = P
                    if not FP8:
                        worth = by_worth(P, v_here, v_exp, s_layout)
                    W, acc, total, unit, alpha, beta = _absorb(
                        P, worth, W, F, R, acc, total, old, ref, unit, v_exp, alpha, beta, M, empty.index(s), FP8,
                        LATE_PACK)
                    it += 1
                    s = it % STAGES

        F = _p_v(W, v_smem.index(s), o_zero, FP8, o_layout)
        x = _load_q(q, round_ + 1, wg, sqb, sqh, sqm, M, n_items, n_blocks, heads, Hq, starts, parts, D, io_layout)
        if FP8:
            R = warpgroup_mma_wait(0, deps=[_row_sums(W, ones, l_zero, l_layout)])
            total = gl.convert_layout(gl.max(total * _rows(beta, l_layout) + R, 1), row_layout, assert_trivial=True)
        else:
            total = gl.convert_layout(gl.sum(total, 1), row_layout)
        F = warpgroup_mma_wait(0, deps=[F])
        mbarrier.arrive(empty.index(s))
        it += 1

        seen = None
        if parts is not None:
            # a part may see nothing
            seen = total > 0
            total = gl.where(seen, total, 1.0)
        out = (acc * _rows(alpha, o_layout) + F.to(gl.float32)) * _rows(gl.exp2(v_exp) / total, o_layout)
        out = gl.convert_layout(out.to(o.dtype.element_ty), io_layout)
        row += start_of(starts, bh // Hq)
        to = o + (bh // Hq).to(gl.int64) * sob + (bh % Hq).to(gl.int64) * soh
        lse_at = bh.to(gl.int64) * M
        if parts is not None:
            lse_at += part.to(gl.int64) * (n_items // parts // n_blocks) * M
            to = o + lse_at * D
        _store_out(to, out, row, som, M, D, io_layout)
        rows = row + gl.arange(0, 64, layout=row_layout)
        _store_lse(lse + lse_at, (ref - OFFSET + gl.log2(total)) * LN_2, rows, broken + bh, M, seen)


@gluon.jit(do_not_specialize=["M", "Tp", "n_items", "n_blocks", "heads", "Hq", "G", "parts"])
def hopper_prefill_kernel(q, k_desc, v_desc, k_scale, v_log2, past_k, past_v, broken, o, lse, sqb, sqh, sqm, sob, som,
                          soh, M, Tp, n_items, n_blocks, heads, Hq, G, past, parts, starts,
                          scale_log2, D: gl.constexpr, STAGES: gl.constexpr, FP8: gl.constexpr,
                          LATE_PACK: gl.constexpr):
    """q [B, Hq, M, D] with last stride 1; k_desc [B*Hkv*Tp, D], v_desc [B*Hkv*D, Tp]; broken int32 [B*Hq + ...].

    past: `TiledPast`, whose codes are past_k and past_v, or None; parts: how many items share the
    past of a tile of queries, with o and lse as of `merge_parts_kernel`; None: each reads all. starts: int64 [B], the
    first token of each row; None: 0.
    """
    q_smem = gl.allocate_shared_memory(gl.int8, [2, 64, D], gl.NVMMASharedLayout.get_default_for([64, D], gl.int8))
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 128, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES, D, 128], v_desc.layout)
    ones = gl.allocate_shared_memory(v_desc.dtype, [8, 128], gl.NVMMASharedLayout(128, 8))
    if FP8:
        one = gl.full((8, 128), 0x38, gl.int8, gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))  # 1.0 in e4m3
        ones.store(one.to(v_desc.dtype, bitcast=True))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), 1)
        mbarrier.init(empty.index(i), 2)
    fence_async_shared()
    gl.warp_specialize([
        (_consumer, (0, q, o, lse, k_scale, v_log2, broken, q_smem, ones, k_smem, v_smem, full, empty, sqb, sqh, sqm,
                     sob, som, soh, M, Tp, n_items, n_blocks, heads, Hq, G, past, parts, starts,
                     scale_log2, D, STAGES, FP8, LATE_PACK)),
        (_consumer, (1, q, o, lse, k_scale, v_log2, broken, q_smem, ones, k_smem, v_smem, full, empty, sqb, sqh, sqm,
                     sob, som, soh, M, Tp, n_items, n_blocks, heads, Hq, G, past, parts, starts,
                     scale_log2, D, STAGES, FP8, LATE_PACK)),
        (_producer, (k_desc, v_desc, past_k, past_v, k_smem, v_smem, full, empty, M, Tp, n_items, n_blocks, heads, Hq,
                     G, past, parts, starts, D, STAGES)),
    ], [4, 1], [240, 24])
