"""Keys and values of a chunk, quantized for the flash loop of `prefill`."""

import torch

from turbo_hf.config.turbo_config import V_SCALES
from turbo_hf.layout import QUANTIZED_MODES, Operands, Rounding
from turbo_hf.ops.backend import uses_triton, why_no_kernel
from turbo_hf.ops.prefill.reference_operands import reference_quantize_operands
from turbo_hf.ops.store.quantize import check_block, check_float


def quantize_operands(
    k: torch.Tensor,
    v: torch.Tensor,
    rounding: Rounding,
    *,
    starts: torch.Tensor | None = None,
    backend: str = "auto",
) -> Operands:
    """A chunk's keys in INT8 and its values in INT8 or FP8, in the layouts that the flash loop reads.

    Args:
        k, v: float [B, Hkv, M, D].
        rounding: as in `ops.prefill.contract`, of any mode but "fp16".
        starts: int64 [B], the first real column of each row.
        backend: "auto", "triton" or "reference".

    Returns:
        Operands, with T = M rounded up to whole blocks.

    Raises:
        ValueError: wrong dtype, rank, head dim, mode, block or v_scale, or a backend that cannot run.

    Source: TurboAttention eq. 4 (blocks), INT-FlashAttention alg. 1 (tokens) and its outlook (V by block).
    """
    check_float("k", k)
    check_float("v", v)
    check_rounding(rounding)
    if rounding.mode not in QUANTIZED_MODES:
        raise ValueError(f"mode must be one of {', '.join(QUANTIZED_MODES)}; got {rounding.mode!r}.")
    if uses_triton(backend, k.device, why_no_kernel(k, rounding.mode)):
        from turbo_hf.ops.prefill.launch import launch_quantize_operands  # noqa: PLC0415 - needs Triton

        return launch_quantize_operands(k, v, rounding, starts)
    return reference_quantize_operands(k, v, rounding, starts)


def check_rounding(rounding: Rounding) -> None:
    """ValueError unless the blocks and the scales of V exist."""
    check_block(rounding.block)
    if rounding.v_scale not in V_SCALES:
        raise ValueError(f"v_scale must be one of {', '.join(V_SCALES)}; got {rounding.v_scale!r}.")
