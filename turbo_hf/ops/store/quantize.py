"""FlashQ: full precision to INT8 codes, INT8 codes to sealed blocks, and back."""

from itertools import product

import torch

from turbo_hf.config.turbo_config import HEAD_METRICS
from turbo_hf.layout import BITS, BLOCK_SIZES, HEAD_DIM_MULTIPLE, UNQUANTIZED, WIDTHS, KVStore, PagedHeads, Width
from turbo_hf.ops.backend import Choice
from turbo_hf.ops.store.reference_pages import reference_unpack_blocks
from turbo_hf.ops.store.reference_quantize import (
    reference_dequantize,
    reference_head_scores,
    reference_quantize_tokens,
    reference_seal_blocks,
)

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_float(name: str, x: torch.Tensor) -> None:
    """ValueError unless x is a floating-point tensor [B, H, M, D] whose D the layout supports."""
    if x.dtype not in FLOATS:
        raise ValueError(f"{name} must be float16, bfloat16, float32 or float64; got {x.dtype}.")
    if x.dim() != 4:
        raise ValueError(f"{name} must be [B, H, M, D]; got shape {tuple(x.shape)}.")
    if x.shape[-1] % HEAD_DIM_MULTIPLE or not x.shape[-1]:
        raise ValueError(
            f"{name} has head dim {x.shape[-1]}; packed blocks need a multiple of {HEAD_DIM_MULTIPLE}. "
            "Leave such layers to Transformers (TurboCache(uncompressed_layers=...))."
        )


def check_block(block: int) -> None:
    """ValueError unless the layout supports blocks of this many tokens."""
    if block not in BLOCK_SIZES:
        raise ValueError(f"block must be one of {', '.join(map(str, BLOCK_SIZES))} tokens; got {block}.")


def quantize_tokens(
    x: torch.Tensor, scale: torch.Tensor | None = None, backend: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """INT8 codes with one scale per token and head; the format of the decode buffer.

    Args:
        x: float [B, H, M, D].
        scale: float32 [B, H, M] to use instead of the token's own max|x| / 127, rounded up to bfloat16; codes are then
            clamped to +-127.
        backend: "auto", "triton" or "reference".

    Returns:
        codes int8 [B, H, M, D] in [-127, 127] and scale float32 [B, H, M], with x ~ codes * scale.

    Raises:
        ValueError: wrong dtype, rank, head dim or scale shape.

    Source: INT-FlashAttention alg. 1 (token-level scales); TurboAttention sec. 3.3 (given, universal scale).
    """
    check_float("x", x)
    if scale is not None and scale.shape != x.shape[:3]:
        raise ValueError(f"scale must be [B, H, M] = {tuple(x.shape[:3])}; got {tuple(scale.shape)}.")
    if x.numel() and Choice(backend, x.device, x.dtype, x.shape[3]).store_kernels:
        from turbo_hf.ops.store.launch import launch_quantize_tokens  # noqa: PLC0415 - needs Triton

        return launch_quantize_tokens(x, scale)
    return reference_quantize_tokens(x, scale)


def seal_blocks(
    k: torch.Tensor,
    k_scale: torch.Tensor,
    v: torch.Tensor,
    v_scale: torch.Tensor,
    width: Width,
    backend: str = "auto",
) -> PagedHeads:
    """Seal whole blocks of INT8 tokens into pages of one width, packed as described in `turbo_hf.layout`.

    Args:
        k, v: int8 [P, S, b, D], one block per page and head, tokens in time order; float16 or bfloat16 at 16 bit.
        k_scale, v_scale: float32 [P, S, b], one per token and head; ones at 16 bit.
        width: bits per code: 16 (a copy), 8, 4, 3 or 2; or a pair of the last four, of keys and of values.
        backend: "auto", "triton" or "reference".

    Returns:
        PagedHeads of P pages.

    Raises:
        ValueError: wrong width, dtype, block or shapes that do not agree.

    Source: TurboAttention eq. 5, 6, alg. 1, over tokens that are divided by their root mean square first; a channel's
    range is stored in whole units, its step is not rounded.
    """
    if width not in (*WIDTHS, *product(BITS, BITS)):
        single, paired = (", ".join(map(str, each)) for each in (WIDTHS, BITS))
        raise ValueError(f"width must be one of {single}, or a pair (keys, values) of {paired}; got {width}.")
    types = (torch.float16, torch.bfloat16) if width == UNQUANTIZED else (torch.int8,)
    for name, x in (("k", k), ("v", v)):
        if x.dtype not in types or x.dtype != k.dtype or x.dim() != 4 or x.shape != k.shape:
            wanted = "float16 or bfloat16" if width == UNQUANTIZED else "int8"
            raise ValueError(f"{name} must be {wanted} [P, S, b, D] like k; got {x.dtype} {tuple(x.shape)}.")
    check_block(k.shape[2])
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale.shape != k.shape[:3]:
            raise ValueError(f"{name} must be [P, S, b] = {tuple(k.shape[:3])}; got {tuple(scale.shape)}.")
    if width != UNQUANTIZED and k.numel() and Choice(backend, k.device, k.dtype, k.shape[3]).store_kernels:
        from turbo_hf.ops.store.launch import launch_seal_blocks  # noqa: PLC0415 - needs Triton

        return launch_seal_blocks(k, k_scale, v, v_scale, width)
    return reference_seal_blocks(k, k_scale, v, v_scale, width)


def unpack_blocks(pages: PagedHeads) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of sealed blocks in units of their sizes (`pages.size`), which still have to be applied.

    Args:
        pages: P pages of S heads.

    Returns:
        k and v, float32 [P, S, b, D] in [-127, 127], tokens in time order; at 16 bit, the stored numbers themselves.

    Raises:
        ValueError: bits that no layout supports.

    Source: TurboAttention alg. 2 (K_q1 = K_q2 * s + z).
    """
    if pages.bits not in WIDTHS:
        raise ValueError(f"pages.bits must be one of {', '.join(map(str, WIDTHS))}; got {pages.bits}.")
    return reference_unpack_blocks(pages)


def dequantize(
    store: KVStore, dtype: torch.dtype, balance: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every cached token in full precision, rows starting at place 0.

    Args:
        store: one layer's cache.
        dtype: dtype of the result.
        balance: float32 [Hkv, D], what the stored keys have been divided by; None: by nothing.

    Returns:
        k and v, dtype [B, Hkv, T, D]; T is at least the longest row; zeros past a row's end.

    Raises:
        ValueError: dtype is not a floating-point type.

    Source: TurboAttention sec. 3 (stage 2, then stage 1).
    """
    if dtype not in FLOATS:
        raise ValueError(f"dtype must be float16, bfloat16, float32 or float64; got {dtype}.")
    return reference_dequantize(store, dtype, balance)


def head_scores(k: torch.Tensor, v: torch.Tensor, metric: str) -> torch.Tensor:
    """How much each KV head needs its bits: the heads with the lowest scores get the low width.

    Args:
        k, v: float [B, Hkv, N, D], the tokens to decide by.
        metric: "priority" (range times the deviation of the channel gaps), "entropy" (of the channel gaps; flat gaps
            score low), "min_max" (range) or "variation" (deviation of the channel gaps).

    Returns:
        float32 [B, Hkv]: the product of the key's and the value's score, independent of their units.

    Raises:
        ValueError: unknown metric, wrong dtype or rank.

    Source: TurboAttention eq. 11, 12 and the ablation of sec. 5.
    """
    check_float("k", k)
    check_float("v", v)
    if metric not in HEAD_METRICS:
        raise ValueError(f"metric must be one of {', '.join(HEAD_METRICS)}; got {metric!r}.")
    return reference_head_scores(k, v, metric)
