"""Keys and values of a chunk, quantized for the flash loop of `prefill`."""

from typing import Any

import torch

from turbo_hf.config.turbo_config import V_SCALES
from turbo_hf.layout import Operands
from turbo_hf.ops.backend import kernel_obstacle, uses_triton
from turbo_hf.ops.prefill import reference_operands as reference
from turbo_hf.ops.store.quantize import check_block, check_float

QUANTIZED_MODES = ("turbo", "int8", "half", "fp8")


def quantize_operands(
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mode: str,
    block: int = 128,
    v_scale: str = "block",
    smooth_k: bool = False,
    hadamard: bool = False,
    starts: torch.Tensor | None = None,
    backend: str = "auto",
) -> Operands:
    """A chunk's keys in INT8 and its values in INT8 or FP8, in the layouts that the flash loop reads.

    Args:
        k, v: float [B, Hkv, M, D].
        mode: "turbo" (one key scale per block, INT8 values), "int8" (one key scale per token, INT8 values), "half" (one
            key scale per token, values unchanged) or "fp8" (one key scale per block, FP8 e4m3 values).
        block: tokens per block.
        v_scale: scales of V: one per "block", one per "channel" of a row, or one for the whole row and head ("tensor").
        smooth_k: subtract each row's mean key from its keys.
        hadamard: rotate keys as `ops.rotate.rotate_keys` does; queries must be rotated too.
        starts: int64 [B], the first real column of each row.
        backend: "auto", "triton" or "reference".

    Returns:
        Operands, with T = M rounded up to whole blocks.

    Raises:
        ValueError: wrong dtype, rank, head dim, mode, block or v_scale, or a backend that cannot run.

    Source: TurboAttention eq. 4 (blocks), INT-FlashAttention alg. 1 (tokens) and its outlook (V by block, Hadamard).
    """
    check_float("k", k)
    check_float("v", v)
    check_block(block)
    check_v_scale(v_scale)
    if mode not in QUANTIZED_MODES:
        raise ValueError(f"mode must be one of {', '.join(QUANTIZED_MODES)}; got {mode!r}.")
    choices: dict[str, Any] = {
        "mode": mode,
        "block": block,
        "v_scale": v_scale,
        "smooth_k": smooth_k,
        "hadamard": hadamard,
    }
    if uses_triton(backend, k.device, kernel_obstacle(k, mode)):
        from turbo_hf.ops.prefill import launch  # noqa: PLC0415 - needs Triton

        return launch.quantize_operands(k, v, starts=starts, **choices)
    return reference.quantize_operands(k, v, starts=starts, **choices)


def check_v_scale(v_scale: str) -> None:
    """ValueError unless `v_scale` exists."""
    if v_scale not in V_SCALES:
        raise ValueError(f"v_scale must be one of {', '.join(V_SCALES)}; got {v_scale!r}.")
