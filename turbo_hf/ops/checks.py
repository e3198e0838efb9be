"""Checks of what several ops are given."""

from collections.abc import Sequence

import torch

from turbo_hf.config.expected import FLOATS
from turbo_hf.layout import HEAD_DIM_MULTIPLE, Scoring


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


def check_shape(
    name: str, x: torch.Tensor, wanted: Sequence[int | str], device: torch.device, *types: torch.dtype
) -> None:
    """ValueError unless x has this shape (a letter: any size), on this device, and one of these types (none: any)."""
    fits = len(x.shape) == len(wanted) and all(n == size or type(n) is str for n, size in zip(wanted, x.shape))  # noqa: B905
    if not fits or x.device != device or (types and x.dtype not in types):
        sizes, named = ", ".join(map(str, wanted)), "".join(f"{each} " for each in types[:1])
        raise ValueError(f"{name} must be {named}[{sizes}] on {device}; got {x.dtype} {list(x.shape)} on {x.device}.")


def check_queries(q: torch.Tensor, kv_heads: int, dim: int, scoring: Scoring) -> None:
    """ValueError unless q and what a model brings of `scoring` fit `kv_heads` heads of `dim` channels."""
    check_float("q", q)
    if q.shape[1] % kv_heads or q.shape[3] != dim:
        raise ValueError(f"q must be [B, Hq, M, {dim}] with Hq a multiple of {kv_heads}; got {tuple(q.shape)}.")
    if scoring.sinks is not None and scoring.sinks.shape != q.shape[1:2]:
        raise ValueError(f"sinks must be [Hq] = [{q.shape[1]}]; got {tuple(scoring.sinks.shape)}.")
    if scoring.softcap is not None and not scoring.softcap > 0:
        raise ValueError(f"softcap must be above 0; got {scoring.softcap}.")
