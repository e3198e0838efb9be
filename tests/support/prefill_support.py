"""What tests of prefill share: random inputs, what each mode rounds, and what that may cost."""

from collections.abc import Sequence
from typing import Any

import torch
from budgets import INT8_MAX, QUERY_MAX, check_exact, check_rounded, largest
from op_calls import prefill, quantize_operands
from oracle import Codes, KeyValue
from stores import no_past, random_store, store_codes, tokens
from torch import Tensor

from turbo_hf.layout import LEAST, MODES, VALUE_ORDER, AttentionOutput, KVStore, Operands, half_type, in_time_order
from turbo_hf.ops.backend import uses_triton
from turbo_hf.ops.prefill.reference import past_operands

Inputs = tuple[Tensor, Tensor, Tensor]
DEPTH = 2.0**-16
"""A tile's P is scaled by no less than this share of the largest P of its row."""


def inputs(
    batch: int, m: int, device: torch.device, *, heads: int = 4, kv_heads: int = 2, dim: int = 64, **how: Any
) -> Inputs:
    """Random q, k, v of rows of m tokens."""
    q = tokens(batch, heads, m, dim, device=device, **how)
    k, v = (tokens(batch, kv_heads, m, dim, device=device, **how) for _ in range(2))
    return q, k, v


def random_past(lengths: Sequence[int], like: Tensor, **how: Any) -> KVStore:
    """A cache of rows of these lengths, of the heads and head dim of k."""
    return random_store(lengths, like.shape[1], like.shape[3], like.device, **how)


def step_queries(q: Tensor, starts: Sequence[int], *, fused: bool = True) -> Tensor:
    """As `int8_queries`, in 16 bit, as decode steps take them."""
    return int8_queries(q, starts, fused=fused, largest_code=QUERY_MAX)


def int8_queries(q: Tensor, starts: Sequence[int], *, fused: bool = True, largest_code: int = INT8_MAX) -> Tensor:
    """q [B, H, M, D] rounded to INT8 and back, one scale a token and head, in float64; 0 at padding.

    fused: the quotient's product is rounded once, to a code; the interpreter rounds it to float32 before.
    """
    x = q.detach().cpu().float()
    top = x.nan_to_num().abs().amax(-1, keepdim=True)
    top = torch.where(top < LEAST, 0.0, top)
    inverse = torch.full_like(top, largest_code) / torch.where(top > 0, top, 1.0)
    codes = torch.round(x.double() * inverse.double() if fused else x * inverse)
    out = codes.double() * (top / torch.full_like(top, largest_code)).double()
    for row, start in enumerate(starts):
        out[row, :, :start] = 0
    return out


def chunk_codes(parts: Operands, v: Tensor, row: int, count: int, block: int) -> Codes:
    """The first `count` tokens of one row of quantized operands; values left alone are v [Hkv, m, D] in 16 bit."""
    k = parts.k[row, :, :count].double().cpu()
    padded = parts.k.shape[2]
    k_scale = parts.k_scale[row].double().cpu().repeat_interleave(padded // parts.k_scale.shape[2], -1)[:, :count]
    tile = torch.arange(count) // block
    one = torch.ones_like(k_scale)
    if parts.v is None or parts.v_scale is None:
        narrow = v if v.dtype == torch.float64 else v.to(half_type(v.dtype))
        return Codes(k, k_scale, narrow.double().cpu(), one, tile)
    stored = parts.v[row].cpu().float().double().mT
    values = torch.empty_like(stored)
    for position in range(padded):
        values[:, position // 16 * 16 + VALUE_ORDER[position % 16]] = stored[:, position]
    values = values[:, :count]
    v_scale = parts.v_scale[row].double().cpu().repeat_interleave(block, -1)[:, :count]
    return Codes(k, k_scale, values, v_scale, tile)


def past_codes(past: KVStore, mode: str, dtype: torch.dtype, backend: str) -> list[Codes]:
    """`store_codes` as products of `mode` take them: sealed blocks in codes with one scale each.

    As the op unpacks them, which has a test of its own, for the reason that `check_prefill` gives."""
    rows, block = store_codes(past), past.block
    if mode == "native":
        return rows
    if uses_triton(backend, past.table.device, None):
        from turbo_hf.ops.prefill.launch import unpack_past  # noqa: PLC0415 - needs Triton

        keys, values, scale = unpack_past(past, values=torch.int8 if MODES[mode].v_type else half_type(dtype))
        scales = scale.double().repeat_interleave(block, 2)
        found = (keys, scales[..., 0], in_time_order(values).mT, scales[..., 1].exp2())
    else:
        found = past_operands(past, MODES[mode], dtype)
    joined = []
    for row, codes in enumerate(rows):
        split = int(past.sealed[row]) * block
        k, k_scale, v, v_scale = (
            torch.cat((own[row, :, :split].double().cpu(), x[:, split:]), 1)
            for own, x in zip(found, codes[:4], strict=True)
        )
        joined.append(Codes(k, k_scale, v, v_scale, codes.tile))
    return joined


def join(past: Codes, new: Codes) -> Codes:
    """A row's past followed by its chunk."""
    first = int(past.tile.max()) + 1 if past.tile.numel() else 0
    k, k_scale, v, v_scale = (torch.cat(pair, 1) for pair in zip(past[:4], new[:4], strict=True))
    return Codes(k, k_scale, v, v_scale, torch.cat((past.tile, first + new.tile)))


def check_prefill(
    q: Tensor, k: Tensor, v: Tensor, mode: str, *, past: KVStore | None = None, starts: Sequence[int] | None = None,
    block: int = 128, backend: str = "auto", **options: Any,
) -> AttentionOutput:  # fmt: skip
    """Assert that `prefill` is right in `mode`, and return it. sinks=True stands for random ones."""
    if options.get("sinks") is True:
        options["sinks"] = torch.randn(q.shape[1], device=q.device) * 3
    options.setdefault("scaling", q.shape[-1] ** -0.5)
    batch, kv_heads, _, dim = k.shape
    held = [no_past(kv_heads, dim)] * batch if past is None else past_codes(past, mode, q.dtype, backend)
    first = [0] * batch if starts is None else list(starts)
    given = None if starts is None else torch.tensor(first, device=q.device)
    choices: dict[str, Any] = {"mode": mode, "block": block}
    got = prefill(q, k, v, past=past, starts=given, backend=backend, **choices, **options)
    if mode == "native":
        rows: list[KeyValue] = []
        for row, start in enumerate(first):
            before, new = held[row].values(), (x[row, :, start:].cpu().double() for x in (k, v))
            keys, values = (torch.cat(pair, 1) for pair in zip(before, new, strict=True))
            rows.append((keys, values))
        scales = [x.v_scale[x.v_scale > 0].log2() for x in held]
        units = max((largest(x) for x in scales), default=0.0)
        check_exact(got, q, rows, starts=first, units=units, unpacked=past is not None, **options)
        return got
    if mode == "fp8":
        held = [x._replace(v=x.v.float().to(torch.float8_e4m3fn).double()) for x in held]
    # made by the quantizer, which has tests of its own: a code that a tie rounds the other way is more than float32
    # arithmetic may miss
    parts = quantize_operands(k, v, starts=given, backend=backend, **choices)
    codes = [
        join(held[i], chunk_codes(parts, v[i, :, start:], i, k.shape[2] - start, block))
        for i, start in enumerate(first)
    ]
    wide = "int8" if mode in ("turbo", "int8") else mode
    p_type = str(half_type(q.dtype)).removeprefix("torch.") if mode == "half" else wide
    fused = backend != "triton" or q.device.type == "cuda"
    check_rounded(
        got, int8_queries(q, first, fused=fused), q.dtype, codes, p_type, starts=first, depth=DEPTH, **options
    )
    return got
