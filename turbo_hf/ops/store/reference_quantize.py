"""FlashQ in plain torch: INT8 codes, and sealed blocks of 4, 3 or 2 bit (TurboAttention sec. 3).

Unlike the paper's, a block has no scale: each of its tokens keeps a size of its own."""

from collections.abc import Callable

import torch

from turbo_hf.layout import (
    CODE_MAX,
    EDGE,
    INSET,
    UNQUANTIZED,
    PagedHeads,
    Width,
    half_split,
    value_order,
    widths_of,
)
from turbo_hf.ops.maths import counted, ratio


def reference_quantize_tokens(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """INT8 codes of x [B, H, M, D] in [-127, 127], and one scale for each token and head, float32 [B, H, M]: the format
    of open tokens (INT-FlashAttention alg. 1): its max|x| / 127, rounded up to bfloat16.
    """
    scale = rounded_up(ratio(counted(x.abs().amax(-1).float()), CODE_MAX))
    codes = torch.round(x.float() / torch.where(scale > 0, scale, 1.0)[..., None])
    return codes.clamp(-CODE_MAX, CODE_MAX).to(torch.int8), scale


def rounded_up(x: torch.Tensor) -> torch.Tensor:
    """float32 x >= 0 as float32 that bfloat16 can hold, not below x; NaN where x is not finite."""
    # the bits of a NaN may overflow
    return ((x.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32) + x * 0


def _nearest(x: torch.Tensor) -> torch.Tensor:
    """float32 x >= 0 to the nearest number that bfloat16 can hold, up from the middle; NaN where x is not finite."""
    return ((x.view(torch.int32) + 0x8000) & -0x10000).view(torch.float32) + x * 0


def reference_seal_blocks(
    k: torch.Tensor,
    k_scale: torch.Tensor,
    v: torch.Tensor,
    v_scale: torch.Tensor,
    width: Width,
) -> PagedHeads:
    """Whole blocks of open tokens as pages of one width (`turbo_hf.layout`; TurboAttention eq. 5, 6, alg. 1).

    k, v: int8 [P, S, b, D], one block for each page and head, tokens in time order; in 16 bit at width 16, a copy.
    k_scale, v_scale: float32 [P, S, b].
    """
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
    code, zero, span = _by_channel(codes.float() * share[..., None], bits)
    size = _fitted(codes.int(), share, size, zero * (2**bits - 1) + code * span, bits)
    lines = [zero.squeeze(-2).to(torch.int8), span.squeeze(-2).to(torch.uint8).view(torch.int8)]
    return half_split(placed(code.to(torch.uint8)), bits), lines, size


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
    """int32 codes of numbers x [..., b, D] from -127 to 127, and each channel's zero and span, which leave out `INSET`
    at both ends (TurboAttention eq. 5, 6)."""
    levels = 2**bits - 1
    low, high = x.amin(-2, keepdim=True), x.amax(-2, keepdim=True)
    inset = (high - low) * INSET[bits]
    zero, top = (low + inset).floor(), (high - inset).ceil()
    span = top - zero
    code = torch.round((x - zero) * levels / span.clamp(min=1)).clamp(0, levels)
    return code.int(), zero.int(), span.int()


def _fitted(
    codes: torch.Tensor, share: torch.Tensor, size: torch.Tensor, stored: torch.Tensor, bits: int
) -> torch.Tensor:
    """The sizes by which sealed tokens are as long in their own direction as before, at most twice as large as `size`.

    codes, stored: int32 [..., b, D], what tokens were and are, in units of their scales and of 1 / levels of `size`.
    """
    # integers, so that the order of sums does not matter
    own = (codes * codes).sum(-1).float() * (2**bits - 1) * share
    factor = own / torch.maximum((codes * stored).sum(-1).float(), own / 2).clamp(min=torch.finfo(torch.float32).tiny)
    return _nearest(size * factor)
