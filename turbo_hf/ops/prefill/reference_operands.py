"""Keys and values of a chunk as the flash loop reads them: INT8 or FP8 codes and their scales, in plain torch."""

import torch

from turbo_hf.layout import INT8_MAX, MODES, Operands, Rounding, value_order
from turbo_hf.ops.maths import align, counted, ratio, scaled


def reference_quantize_operands(
    k: torch.Tensor, v: torch.Tensor, rounding: Rounding, starts: torch.Tensor | None
) -> Operands:
    mode, block = MODES[rounding.mode], rounding.block
    k, v = (align(x, starts) for x in (k, v))
    k, v = (_blocks(x.float(), block) for x in (k, v))
    k_range = counted(k.abs().amax(-1 if mode.k_scale == "token" else (-1, -2)))
    k_codes = torch.round(scaled(k, k_range, INT8_MAX)).to(torch.int8).flatten(2, 3)
    k_scale = ratio(k_range, INT8_MAX).flatten(2)
    if mode.v_type is None:
        return Operands(k_codes, k_scale)

    v_range = counted(v.abs().amax((-1, -2)))
    v = scaled(v, v_range, mode.v_top)
    codes = torch.round(v).to(torch.int8) if mode.v_type == torch.int8 else v.float().to(mode.v_type)
    # FP8 tensors cannot be indexed: reorder their bytes
    stored = codes.view(torch.int8).flatten(2, 3)[:, :, value_order(k_codes.shape[2], v.device)].mT.contiguous()
    return Operands(k_codes, k_scale, stored.view(codes.dtype), ratio(v_range, mode.v_top))


def _blocks(x: torch.Tensor, block: int) -> torch.Tensor:
    """x [B, H, M, D] -> [B, H, blocks, block, D], zeros past the end."""
    whole = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % block))
    return whole.reshape(*x.shape[:2], -1, block, x.shape[3])
