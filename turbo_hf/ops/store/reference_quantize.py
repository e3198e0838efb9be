"""FlashQ in plain torch: INT8 codes, sealed blocks of 4, 3 or 2 bit, and back (TurboAttention sec. 3)."""

from collections.abc import Callable

import torch

from turbo_hf.layout import (
    CODE_MAX,
    UNQUANTIZED,
    KVStore,
    PagedHeads,
    Width,
    half_split,
    narrowed,
    value_order,
    widths_of,
)
from turbo_hf.ops.maths import counted, query_shift, ratio
from turbo_hf.ops.store.reference_pages import expand
from turbo_hf.ops.store.reference_rotate import reference_rotate


def reference_quantize_tokens(x: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    own = ratio(counted(x.abs().amax(-1).float()), CODE_MAX) if scale is None else scale
    return _codes(x, own[..., None]), own


def _codes(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    divisor = torch.where(scale > 0, scale, 1.0)
    return torch.round(x.float() / divisor).clamp(-CODE_MAX, CODE_MAX).to(torch.int8)


def reference_seal_blocks(
    k: torch.Tensor,
    k_scale: torch.Tensor,
    v: torch.Tensor,
    v_scale: torch.Tensor,
    width: Width,
) -> PagedHeads:
    if width == UNQUANTIZED:
        one = torch.ones(*k.shape[:2], 2, device=k.device)
        none = torch.empty(*k.shape[:2], 0, k.shape[-1], dtype=torch.int8, device=k.device)
        return PagedHeads(UNQUANTIZED, k.contiguous(), v.mT.contiguous(), none, one)
    k1, ks = _stage1(k, k_scale)
    v1, vs = _stage1(v, v_scale)
    scale = torch.stack((ks, vs), -1)
    order = value_order(v.shape[-2], v.device)
    bits, value_bits = widths_of(width)
    codes_k, k_lines = _packed(k1, bits, lambda codes: codes)
    codes_v, v_lines = _packed(v1, value_bits, lambda codes: codes[..., order, :].mT.contiguous())
    lines = [*k_lines, *v_lines]
    meta = torch.stack(lines, -2) if lines else k1.new_empty(*k1.shape[:-2], 0, k1.shape[-1])
    return PagedHeads(bits, codes_k, codes_v, meta, scale)


def _packed(
    q1: torch.Tensor, bits: int, placed: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Stage 1 codes [..., b, D] as a page holds them, and its lines of `meta`: step and zero, none at 8 bit."""
    if bits == 8:
        return placed(q1), []
    code, *lines = _stage2(q1, bits)
    return half_split(placed(code), bits), lines


def _stage1(codes: torch.Tensor, token_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """INT8 with one scale per block. The largest token scale is max|x| / 119 of the block (TurboAttention eq. 4)."""
    scale = token_scale.amax(-1)
    ratio = token_scale / torch.where(scale > 0, scale, 1.0)[..., None]
    return torch.round(codes.float() * ratio[..., None]).to(torch.int8), scale


def _stage2(q1: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Integer step and zero per channel over the block's tokens (TurboAttention eq. 5, 6)."""
    levels = 2**bits - 1
    low, high = q1.amin(-2).float(), q1.amax(-2).float()
    step = torch.round((high - low) / torch.full_like(low, levels)).clamp(min=1)
    # a rounded step covers a little more or less than the range: share the difference between both ends
    zero = (low + torch.floor((high - low - levels * step) / 2)).clamp(min=-128)
    code = torch.round((q1 - zero[..., None, :]) / step[..., None, :]).clamp(0, levels)
    return code.to(torch.uint8), step.to(torch.int8), zero.to(torch.int8)


def reference_dequantize(
    store: KVStore, dtype: torch.dtype, rotated: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    codes_k, k_scale, codes_v, v_scale, _ = expand(store)
    k, v = codes_k * k_scale[..., None], codes_v * v_scale[..., None]
    k = reference_rotate(k, query_shift(k.shape[-1]), k.dtype) if rotated else k
    # rounded codes may take a value near the end of float16's range beyond it
    return narrowed(k, dtype), narrowed(v, dtype)


def reference_head_scores(k: torch.Tensor, v: torch.Tensor, metric: str) -> torch.Tensor:
    return _head_score(k.float(), metric) * _head_score(v.float(), metric)


def _head_score(x: torch.Tensor, metric: str) -> torch.Tensor:
    gaps = x.amax(-2) - x.amin(-2)
    span = x.amax((-1, -2)) - x.amin((-1, -2))
    if metric == "priority":
        return span * gaps.std(-1, correction=0)
    if metric == "min_max":
        return span
    if metric == "variation":
        return gaps.std(-1, correction=0)
    total = gaps.sum(-1, keepdim=True)
    # gaps that are all 0 count as flat
    share = torch.where(total > 0, gaps / total, 1 / gaps.shape[-1])
    # flat gaps have the highest entropy and quantize best, so the score falls with it
    entropy: torch.Tensor = torch.special.entr(share).sum(-1)
    return 1 / (1 + entropy)
