"""Keys and values of a chunk as the flash loop reads them: INT8 or FP8 codes and their scales, in plain torch."""

import torch

from turbo_hf.layout import INT8_MAX, MODES, Operands, Rounding, value_order
from turbo_hf.ops.maths import align, counted, key_mean, occupied, ratio, scaled


def reference_quantize_operands(
    k: torch.Tensor, v: torch.Tensor, rounding: Rounding, starts: torch.Tensor | None
) -> Operands:
    name, block, v_scale, smooth_k = rounding
    mode = MODES[name]
    k, v = (align(x, starts) for x in (k, v))
    mean = key_mean(k, starts) if smooth_k else None
    if mean is not None:
        k = k.float() - mean[:, :, None]
        k = k.masked_fill(~occupied(k, starts)[:, None, :, None], 0.0)
    k, v = (_blocks(x.float(), block) for x in (k, v))
    k_range = counted(k.abs().amax(-1 if mode.k_scale == "token" else (-1, -2)))
    k_codes = torch.round(scaled(k, k_range, INT8_MAX)).to(torch.int8).flatten(2, 3)
    k_scale = ratio(k_range, INT8_MAX).flatten(2)
    if mode.v_type is None:
        return Operands(k_codes, k_scale, k_mean=mean)

    by_block = v_scale == "block"
    v_range = counted(v.abs().amax((-1, -2)) if by_block else channel_range(v.flatten(2, 3), v_scale))
    v = scaled(v, v_range if by_block else v_range[:, :, None, None], mode.v_top)
    codes = torch.round(v).to(torch.int8) if mode.v_type == torch.int8 else v.float().to(mode.v_type)
    # FP8 tensors cannot be indexed: reorder their bytes
    stored = codes.view(torch.int8).flatten(2, 3)[:, :, value_order(k_codes.shape[2], v.device)].mT.contiguous()
    scale = ratio(v_range, mode.v_top)
    return Operands(
        k_codes,
        k_scale,
        stored.view(codes.dtype),
        scale if by_block else None,
        None if by_block else torch.where(scale > 0, scale, 1.0),
        mean,
    )


def channel_range(v: torch.Tensor, v_scale: str) -> torch.Tensor:
    """float32 [B, Hkv, D]: max|v| of each channel, or the same for all channels of a head ("tensor")."""
    by_channel = v.abs().amax(2).float()
    return by_channel if v_scale == "channel" else by_channel.amax(-1, keepdim=True).expand_as(by_channel)


def _blocks(x: torch.Tensor, block: int) -> torch.Tensor:
    """x [B, H, M, D] -> [B, H, blocks, block, D], zeros past the end."""
    whole = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % block))
    return whole.reshape(*x.shape[:2], -1, block, x.shape[3])
