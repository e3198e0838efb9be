"""What the tests share: an oracle of attention, budgets computed from it, and a builder of compressed caches.

The oracle is dense softmax in float64, one row of the batch at a time, and shares no code with the package. No test
types a tolerance: what an op may miss is computed from what plain low-precision attention misses on the same numbers
(`float_budget`), and, where an op rounds to INT8, from the size of its rounding steps (`turbo_budget`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from turbo_hf.layout import FULL, VALUE_ORDER, AttentionOutput, KVStore, PagedHeads, empty_pages, full_type
from turbo_hf.ops.quantize import quantize_tokens, seal_blocks

SLACK = 3
"""How many times the error of plain low-precision attention an op may have."""

CODE_MAX = 119
"""Largest INT8 code (TurboAttention sec. 3), said again so that a change of it in the package shows."""

INT8_MAX = 127
"""Largest INT8 code of P and of a query."""

KeyValue = tuple[Tensor, Tensor]
"""Keys and values of one row, [Hkv, T, D] each."""


# --- oracle --------------------------------------------------------------------------------------------------------


class Exact(NamedTuple):
    """out: [B, Hq, M, D], 0 at padding; lse: [B, Hq, M], -inf at padding; probs: a row's [Hq, m, T], sinks included."""

    out: Tensor
    lse: Tensor
    probs: list[Tensor]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scaling: float,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    """One row: q [Hq, M, D] are the last M of the T tokens whose k, v [Hkv, T, D] are given. Returns out, lse, probs.

    In a half-precision `dtype` it is eager attention as models write it: products in that type, softmax in float32.
    """
    heads, m, _ = q.shape
    group, t = heads // k.shape[0], k.shape[1]
    q, k, v = (x.detach().to("cpu", dtype) for x in (q, k, v))
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    score = (q @ k.mT) * scaling
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    query, key = torch.arange(t - m, t)[:, None], torch.arange(t)[None]
    hidden = torch.zeros(m, t, dtype=torch.bool)
    if causal:
        hidden |= key > query
    if window is not None:
        hidden |= key <= query - window
    logits = score.to(torch.promote_types(dtype, torch.float32)).masked_fill(hidden, -torch.inf)
    if sinks is not None:
        logits = torch.cat((logits, sinks.detach().to(logits)[:, None, None].expand(heads, m, 1)), -1)
    probs = torch.softmax(logits, -1)[..., :t]
    return probs.to(dtype) @ v, torch.logsumexp(logits, -1), probs


def oracle(
    q: Tensor,
    rows: Sequence[KeyValue],
    *,
    starts: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> Exact:
    """`attend` of each row: q [B, Hq, M, D], whose columns before `starts[row]` are padding; rows: all keys, values."""
    batch, heads, m, dim = q.shape
    wide = torch.promote_types(dtype, torch.float32)
    out = torch.zeros(batch, heads, m, dim, dtype=dtype)
    lse = torch.full((batch, heads, m), -torch.inf, dtype=wide)
    probs = []
    for row, (k, v) in enumerate(rows):
        start = 0 if starts is None else starts[row]
        if start == m:
            probs.append(torch.zeros(heads, 0, k.shape[1], dtype=wide))
            continue
        out[row, :, start:], lse[row, :, start:], p = attend(q[row, :, start:], k, v, dtype=dtype, **options)
        probs.append(p)
    return Exact(out, lse, probs)


def tokens(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
    """Random tokens as models have them: channels of different size, some off centre."""
    size = torch.rand(shape[-1]) * 2 + 0.1
    return (torch.randn(shape) * size + torch.randn(shape[-1]) / 2).to(device, dtype)


# --- budgets -------------------------------------------------------------------------------------------------------


def largest(x: Tensor) -> float:
    """max|x|, infinities left out; 0 of nothing."""
    x = x.detach().double().abs()
    return float(x[x.isfinite()].max()) if bool(x.isfinite().any()) else 0.0


def float_budget(want: Tensor, eager: Tensor, magnitude: float, dtype: torch.dtype) -> float:
    """SLACK times: what eager attention in `dtype` misses, and one rounding of a number of this magnitude."""
    assert bool((eager.isfinite() == want.isfinite()).all()), "eager overflows here: no budget"
    error = largest(torch.where(want.isfinite(), eager.double() - want, 0.0))
    return SLACK * (error + torch.finfo(dtype).eps * magnitude)


def check(name: str, got: Tensor, want: Tensor, budget: float | Tensor) -> None:
    """Assert |got - want| <= budget, element by element, and the same infinities in the same places."""
    got = got.detach().to("cpu", torch.float64)
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    infinite = want.isinf()
    assert bool((got[infinite] == want[infinite]).all()), f"{name}: an infinity is missing"
    error = torch.where(infinite, 0.0, got - want).abs()
    worst = (error - budget).max() if error.numel() else torch.tensor(0.0)
    # not (<=): a NaN must fail
    assert bool((error <= budget).all()), f"{name}: error {float(error.max()):.3e} exceeds its budget by {worst:.3e}"


def check_same(got: AttentionOutput, want: AttentionOutput, values: float) -> None:
    """Assert that two results are equal but for the order in which float32 sums are taken. values: the largest one."""
    eps = torch.finfo(torch.float32).eps
    check("out", got.out, want.out.double().cpu(), SLACK * eps * values)
    check("lse", got.lse, want.lse.double().cpu(), SLACK * eps * (1 + largest(want.lse)))


def score_size(q: Tensor, rows: Sequence[KeyValue], scaling: float) -> float:
    """Size of the numbers that are summed to a score: a bound of |q| . |k| * scaling."""
    k_norm = max((largest(k.double().norm(dim=-1)) for k, _ in rows), default=0.0)
    return largest(q.detach().double().norm(dim=-1)) * k_norm * scaling


def score_noise(want: "Exact", rows: Sequence[KeyValue], size: float) -> Tensor:
    """What float32's rounding of scores of this size may do to out [B, Hq, M, D].

    Scores that are off by d at most move each P by a factor of e^2d at most, and out within the hull of the values
    (and of 0, which is a sink's).
    """
    share = float(torch.expm1(torch.tensor(2 * SLACK * torch.finfo(torch.float32).eps * size, dtype=torch.float64)))
    noise = torch.zeros_like(want.out, dtype=torch.float64)
    for i, (probs, (_, v)) in enumerate(zip(want.probs, rows, strict=True)):
        m = probs.shape[1]
        if m and v.shape[1]:
            values = v.double().cpu().repeat_interleave(probs.shape[0] // v.shape[0], 0)
            out = want.out[i, :, -m:].double()
            # the mean distance from the mean is at most the deviation
            square = probs.double() @ values**2 - out**2
            hull = torch.maximum(values.amax(1, keepdim=True) - out, out - values.amin(1, keepdim=True)).clamp(min=0)
            noise[i, :, -m:] = torch.minimum(share * square.clamp(min=0).sqrt(), hull + out.abs())
    return noise


def check_padding(got: AttentionOutput, want: Exact) -> None:
    """Assert that out is 0, not merely small, where a row has no token."""
    assert not got.out.cpu()[want.lse.isneginf()].any(), "out: not 0 where a row has no token"


def check_exact(
    got: AttentionOutput,
    q: Tensor,
    rows: Sequence[KeyValue],
    *,
    starts: Sequence[int] | None = None,
    units: float = 0.0,
    **options: Any,
) -> None:
    """Assert that an op in mode "fp16" is attention of q over these keys and values, to eager's own precision.

    units: largest |log2| of a scale of the values, which an op may carry as its log2 in float32.
    """
    assert got.out.dtype == q.dtype
    assert got.lse.dtype == torch.float32
    want = oracle(q, rows, starts=starts, **options)
    eager = oracle(q, rows, starts=starts, dtype=q.dtype, **options)
    if q.dtype == torch.float64:
        # the oracle's own precision: channels summed in another order show its error
        eager = oracle(q.flip(-1), [(k.flip(-1), v) for k, v in rows], starts=starts, **options)
    values = max((largest(v) for _, v in rows), default=0.0)
    scores = score_size(q, rows, options["scaling"]) + largest(want.lse)
    noise = score_noise(want, rows, scores) if q.dtype == torch.float32 else torch.zeros(())
    carried = SLACK * torch.finfo(torch.float32).eps * units * want.out.double().abs()
    check("out", got.out, want.out, float_budget(want.out, eager.out, values, q.dtype) + noise + carried)
    check_padding(got, want)
    # lse is float32 even where the rest is float64
    narrow = torch.float32 if q.dtype == torch.float64 else q.dtype
    check("lse", got.lse, want.lse, float_budget(want.lse, eager.lse, scores, narrow))


class Codes(NamedTuple):
    """INT8 tokens of one row, float64: k, v [Hkv, T, D] integer-valued; k_scale, v_scale [Hkv, T].

    tile: int64 [T], which tokens share one scale of P.
    """

    k: Tensor
    k_scale: Tensor
    v: Tensor
    v_scale: Tensor
    tile: Tensor

    def values(self) -> KeyValue:
        """What the codes stand for."""
        return self.k * self.k_scale[..., None], self.v * self.v_scale[..., None]


def p_error(weight: Tensor, least: Tensor, p_type: str) -> tuple[Tensor, Tensor]:
    """How far rounding moves each weight of a tile: at most, and in the mean square."""
    peak = torch.maximum(weight.amax(-1, keepdim=True), least)
    seen = (weight > 0).double()
    if p_type == "int8":
        step = peak / INT8_MAX * seen
        return step / 2, step**2 / 12
    # half the distance of two neighbours, and of the smallest numbers there are (a share of the tile's largest)
    share, smallest = {"fp8": (2.0**-4, 2.0**-18), "float16": (2.0**-11, 2.0**-25), "bfloat16": (2.0**-8, 0.0)}[p_type]
    bound = (weight * share + peak * smallest) * seen
    return bound, bound**2 / 3


def p_budget(probs: Tensor, row: Codes, p_type: str = "int8", depth: float = 0.0) -> tuple[Tensor, Tensor]:
    """What rounding P may do to out [Hq, m, D]: the largest error, and the expected mean square.

    A tile's P (times the scale of V) is rounded to steps of its maximum / 127, so each of its values is off by half a
    step at most, and by step**2 / 12 in the mean square. depth: a tile's P is scaled by no less than this share of the
    largest P of its row.
    """
    group = probs.shape[0] // row.v.shape[0]
    v, v_scale = row.v.repeat_interleave(group, 0), row.v_scale.repeat_interleave(group, 0)
    bound = torch.zeros(*probs.shape[:2], v.shape[-1], dtype=torch.float64)
    square = bound.clone()
    top = probs.amax(-1, keepdim=True)
    for tile in row.tile.unique():
        inside = row.tile == tile
        scale = v_scale[:, None, inside]
        most, mean_square = p_error(probs[..., inside] * scale, depth * top * scale.amax(-1, keepdim=True), p_type)
        bound += most @ v[:, inside].abs()
        square += mean_square @ v[:, inside] ** 2
    return bound, square


def check_rounded(
    got: AttentionOutput,
    q: Tensor,
    dtype: torch.dtype,
    rows: Sequence[Codes],
    p_type: str = "int8",
    *,
    starts: Sequence[int] | None = None,
    depth: float = 0.0,
    **options: Any,
) -> None:
    """Assert that an op is attention of q (float64, fake-quantized) over `rows`, with P rounded to `p_type`.

    The only errors left are P's rounding, float32 arithmetic, and the rounding of the output to `dtype`. Where there
    are enough outputs for a mean, their mean square must be that of P's rounding too, which is far below its bound.
    """
    assert got.out.dtype == dtype
    assert got.lse.dtype == torch.float32
    values = [row.values() for row in rows]
    want = oracle(q, values, starts=starts, **options)
    eager = oracle(q, values, starts=starts, dtype=torch.float32, **options)
    size = max((largest(v) for _, v in values), default=0.0)
    scores = score_size(q, values, options["scaling"]) + largest(want.lse)
    noise = float_budget(want.out, eager.out, size, torch.float32) + score_noise(want, values, scores)
    bound, square = torch.zeros_like(want.out), torch.zeros_like(want.out)
    for i, (probs, row) in enumerate(zip(want.probs, rows, strict=True)):
        if probs.shape[1]:
            m = probs.shape[1]
            bound[i, :, -m:], square[i, :, -m:] = p_budget(probs, row, p_type, depth)
    # in FP8 the sum of P may be that of the rounded P, which is off by their largest relative error at most
    of_sum = 2.0**-4 if p_type == "fp8" else 0.0
    bound = bound + of_sum * want.out.abs()
    rounding = torch.finfo(dtype).eps * (want.out.abs() + bound)
    lse_budget = float_budget(want.lse, eager.lse, scores, torch.float32)
    # where P has a least scale, scores that are off by float32's rounding move it by as much as the lse, and may move
    # it over one more step
    moved = lse_budget if depth else 0.0
    check("out", got.out, want.out, bound * (1 + moved) + noise + rounding)
    check_padding(got, want)
    if want.out.numel() >= 512:
        error = (got.out.detach().to("cpu", torch.float64) - want.out).square().mean().sqrt()
        # all values of a tile at half a step, the worst case, are sqrt(3) times the mean square of a uniform error
        expected = 2 * square.mean().sqrt() + noise.max() + rounding.max()
        expected += of_sum / 2 * want.out.square().mean().sqrt()
        assert bool(error <= expected), f"out: rms error {error:.3e} exceeds {expected:.3e}"
    check("lse", got.lse, want.lse, lse_budget + of_sum)


def check_turbo(got: AttentionOutput, q: Tensor, dtype: torch.dtype, rows: Sequence[Codes], **options: Any) -> None:
    """`check_rounded` of mode "turbo" over a cache: P in INT8, each tile's in steps of its own largest."""
    check_rounded(got, q, dtype, rows, **options)


# --- compressed caches ---------------------------------------------------------------------------------------------


def make_store(
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int],
    *,
    groups: tuple[tuple[int, int], ...] | None = None,
    order: Tensor | None = None,
    block: int = 64,
    sealed: Sequence[int] | None = None,
) -> KVStore:
    """A cache whose row r holds the first `lengths[r]` tokens of k, v [B, Hkv, N, D].

    groups: (bits, heads) of each width, default 4 bit for all. order: int64 [B, Hkv], the head in each slot; default
    the model's order. sealed: sealed blocks of each row, default all whole ones. With heads of 16 bit the open tokens
    are in 16 bit. Pages lie in the pool in reverse,
    between pages that no row owns, and open slots without a token stay uninitialised.
    """
    batch, heads, _, dim = k.shape
    device = k.device
    groups = groups or ((4, heads),)
    order = torch.arange(heads, device=device).expand(batch, heads) if order is None else order.to(device)
    sealed = [n // block for n in lengths] if sealed is None else list(sealed)
    open_len = [n - s * block for n, s in zip(lengths, sealed, strict=True)]
    cap = -(-max(open_len) // 16) * 16

    full = full_type(k.dtype)
    opened = full if FULL in dict(groups) else torch.int8
    pool = [empty_pages(bits, sum(sealed) + 2, n, dim, block, device, full) for bits, n in groups]
    table = torch.zeros(batch, max(sealed), dtype=torch.int64)
    k_open = torch.empty(batch, heads, cap, dim, dtype=opened, device=device)
    v_open = torch.empty(batch, heads, dim, cap, dtype=opened, device=device)
    k_scale, v_scale = (torch.empty(batch, heads, cap, dtype=torch.float32, device=device) for _ in range(2))
    page = sum(sealed)
    for row in range(batch):
        own_k, own_v = k[row : row + 1], v[row : row + 1]
        codes_k, scale_k, codes_v, scale_v = (x[0] for x in (*quantize_tokens(own_k), *quantize_tokens(own_v)))
        for n in range(sealed[row]):
            at, slot = slice(n * block, (n + 1) * block), 0
            for pages, (bits, count) in zip(pool, groups, strict=True):
                own = order[row, slot : slot + count]
                key, key_scale, value, value_scale = (x[own, at][None] for x in (codes_k, scale_k, codes_v, scale_v))
                if bits == FULL:
                    key, value = (x[0, own, at][None].to(full) for x in (own_k, own_v))
                page_of = seal_blocks(key, key_scale, value, value_scale, bits)
                for target, source in zip(pages[1:], page_of[1:], strict=True):
                    target[page] = source[0]
                slot += count
            table[row, n] = page
            page -= 1
        rest, count = slice(sealed[row] * block, lengths[row]), open_len[row]
        if opened != torch.int8:
            codes_k, codes_v = own_k[0].to(full), own_v[0].to(full)
            scale_k, scale_v = torch.ones_like(scale_k), torch.ones_like(scale_v)
        k_open[row, :, :count], k_scale[row, :, :count] = codes_k[:, rest], scale_k[:, rest]
        v_open[row, :, :, :count], v_scale[row, :, :count] = codes_v[:, rest].mT, scale_v[:, rest]
    counts = (torch.tensor(x, dtype=torch.int64, device=device) for x in (sealed, open_len))
    sealed_count, open_count = counts
    return KVStore(
        tuple(pool), order, table.to(device), sealed_count, k_open, v_open, k_scale, v_scale, open_count, block
    )


def random_store(
    lengths: Sequence[int],
    heads: int,
    dim: int,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    **how: Any,
) -> KVStore:
    """A cache of random tokens, of rows of these lengths."""
    shape = (len(lengths), heads, max(1, *lengths), dim)
    k, v = (tokens(*shape, dtype=dtype, device=device) for _ in range(2))
    return make_store(k, v, lengths, **how)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Codes of the last dimension, one after the other as `turbo_hf.layout` draws them; int64."""
    packed = packed.cpu().long()
    if bits == 8:
        return packed
    n = packed.shape[-1] * 8 // bits
    codes = []
    for c in range(n):
        if bits == 3:
            low = packed[..., c % (n // 4)] >> 2 * (c // (n // 4)) & 3
            high = packed[..., n // 4 + c % (n // 8)] >> c // (n // 8) & 1
            codes.append(low + 4 * high)
        else:
            lane = n * bits // 8
            codes.append(packed[..., c % lane] >> bits * (c // lane) & (2**bits - 1))
    return torch.stack(codes, -1)


def page_codes(pages: PagedHeads, page: int, slot: int) -> tuple[Tensor, Tensor]:
    """INT8 keys and values of one page and slot, [b, D] each, tokens in time order; at 16 bit what they hold."""
    if pages.bits == FULL:
        return pages.k[page, slot].cpu(), pages.v[page, slot].cpu().T
    k, v = unpack(pages.k[page, slot], pages.bits), unpack(pages.v[page, slot], pages.bits).T
    if pages.bits != 8:
        k_step, k_zero, v_step, v_zero = pages.meta[page, slot].cpu().long()
        k, v = (k * k_step + k_zero).clamp(-127, 127), (v * v_step + v_zero).clamp(-127, 127)
    tokens = torch.empty_like(v)
    for position in range(v.shape[0]):
        tokens[position // 16 * 16 + VALUE_ORDER[position % 16]] = v[position]
    return k, tokens


def store_codes(store: KVStore) -> list[Codes]:
    """What each row of a cache holds, read token by token; P's tiles are its blocks, counted from the row's start."""
    rows = []
    for row, (sealed, count) in enumerate(zip(store.sealed.tolist(), store.open_len.tolist(), strict=True)):
        heads, dim, split = store.k_open.shape[1], store.k_open.shape[3], sealed * store.block
        k, v = (torch.zeros(heads, split + count, dim, dtype=torch.float64) for _ in range(2))
        k_scale, v_scale = (torch.zeros(heads, split + count, dtype=torch.float64) for _ in range(2))
        slots = [(pages, slot) for pages in store.heads for slot in range(pages.k.shape[1])]
        for (pages, slot), head in zip(slots, store.order[row].tolist(), strict=True):
            for n, page in enumerate(store.table[row, :sealed].tolist()):
                at = slice(n * store.block, (n + 1) * store.block)
                key, value = page_codes(pages, page, slot)
                k[head, at], v[head, at] = key.double(), value.double()
                k_scale[head, at], v_scale[head, at] = pages.scale[page, slot].double().cpu()
        k[:, split:], k_scale[:, split:] = store.k_open[row, :, :count].cpu(), store.k_scale[row, :, :count].cpu()
        v[:, split:], v_scale[:, split:] = store.v_open[row, :, :, :count].mT.cpu(), store.v_scale[row, :, :count].cpu()
        rows.append(Codes(k, k_scale, v, v_scale, torch.arange(split + count) // store.block))
    return rows


def no_past(heads: int, dim: int) -> Codes:
    """The past of a prompt."""
    empty, scale = torch.zeros(heads, 0, dim, dtype=torch.float64), torch.zeros(heads, 0, dtype=torch.float64)
    return Codes(empty, scale, empty, scale, torch.zeros(0, dtype=torch.int64))
