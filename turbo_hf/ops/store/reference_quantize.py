"""FlashQ in plain torch: INT8 codes, sealed blocks of 4, 3 or 2 bit, and back (TurboAttention sec. 3).

Unlike the paper's, a block has no scale: each of its tokens keeps a size of its own."""

from collections.abc import Callable

import torch

from turbo_hf.layout import (
    CODE_MAX,
    EDGE,
    UNQUANTIZED,
    KVStore,
    PagedHeads,
    Width,
    half_split,
    narrowed,
    value_order,
    widths_of,
)
from turbo_hf.ops.maths import counted, ratio
from turbo_hf.ops.store.reference_pages import expand


def reference_quantize_tokens(x: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    own = rounded_up(ratio(counted(x.abs().amax(-1).float()), CODE_MAX)) if scale is None else scale
    return _codes(x, own[..., None]), own


def _codes(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    divisor = torch.where(scale > 0, scale, 1.0)
    return torch.round(x.float() / divisor).clamp(-CODE_MAX, CODE_MAX).to(torch.int8)


def rounded_up(x: torch.Tensor) -> torch.Tensor:
    """float32 x >= 0 as float32 that bfloat16 can hold, not below x; NaN where x is not finite."""
    # the bits of a NaN may overflow
    return ((x.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32) + x * 0


def reference_seal_blocks(
    k: torch.Tensor,
    k_scale: torch.Tensor,
    v: torch.Tensor,
    v_scale: torch.Tensor,
    width: Width,
) -> PagedHeads:
    if width == UNQUANTIZED:
        none = torch.empty(*k.shape[:2], 0, k.shape[-1], dtype=torch.int8, device=k.device)
        no_size = torch.empty(*k.shape[:2], 0, k.shape[-2], dtype=torch.bfloat16, device=k.device)
        return PagedHeads(UNQUANTIZED, k.contiguous(), v.mT.contiguous(), none, no_size)
    order = value_order(v.shape[-2], v.device)
    bits, value_bits = widths_of(width)
    packed_k, k_lines, k_size = _packed(k, k_scale, bits, lambda codes: codes)
    packed_v, v_lines, v_size = _packed(v, v_scale, value_bits, lambda codes: codes[..., order, :].mT.contiguous())
    lines = [*k_lines, *v_lines]
    meta = torch.stack(lines, -2) if lines else k.new_empty(*k.shape[:-2], 0, k.shape[-1])
    return PagedHeads(bits, packed_k, packed_v, meta, torch.stack((k_size, v_size), -2).bfloat16())


def _packed(
    codes: torch.Tensor, scale: torch.Tensor, bits: int, placed: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """INT8 tokens [..., b, D] as a page holds them, its lines of `meta`, and the sizes of tokens [..., b]."""
    if bits == 8:
        return placed(codes), [], scale
    size, share = _sizes(codes, scale)
    code, *lines = _by_channel(codes.float() * share[..., None], bits)
    return half_split(placed(code), bits), lines, size


def _sizes(codes: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sizes of INT8 tokens [..., b, D] with scales [..., b]: their root mean squares, in the unit of the block; and
    what one of a token's codes is in that size."""
    wide = codes.float()
    # sums of squares of codes are exact; on a CPU, torch's root of float32 is not always the nearest
    root = ((wide * wide).sum(-1) * (1 / codes.shape[-1])).double().sqrt().float()
    divisor = torch.where(root > 0, root, 1.0)
    unit = ratio((wide.abs().amax(-1) / divisor).amax(-1, keepdim=True), EDGE)
    size = rounded_up(scale * (root * unit))
    return size, scale / torch.where(size > 0, size, 1.0)


def _by_channel(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes of numbers x [..., b, D] from -127 to 127, and each channel's zero and span (TurboAttention eq. 5, 6)."""
    levels = 2**bits - 1
    zero, top = x.amin(-2, keepdim=True).floor(), x.amax(-2, keepdim=True).ceil()
    span = top - zero
    code = torch.round((x - zero) * levels / span.clamp(min=1)).clamp(0, levels)
    return code.to(torch.uint8), zero.squeeze(-2).to(torch.int8), span.squeeze(-2).to(torch.uint8).view(torch.int8)


def reference_dequantize(
    store: KVStore, dtype: torch.dtype, balance: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    codes_k, k_scale, codes_v, v_scale, _ = expand(store)
    k, v = codes_k * k_scale[..., None], codes_v * v_scale[..., None]
    k = k if balance is None else k * balance[:, None]
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
