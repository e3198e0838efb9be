"""Checks of what several ops are given."""

from collections.abc import Sequence

import torch

from turbo_hf.config.expected import FLOATS
from turbo_hf.config.turbo_config import ATTENTION_MODES
from turbo_hf.layout import BLOCK_SIZES, HEAD_DIM_MULTIPLE, Scoring


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


def check_block(block: int) -> None:
    """ValueError unless the layout supports blocks of this many tokens."""
    if block not in BLOCK_SIZES:
        raise ValueError(f"block must be one of {', '.join(map(str, BLOCK_SIZES))} tokens; got {block}.")


def check_queries(
    q: torch.Tensor,
    kv_heads: int,
    dim: int,
    mode: str,
    starts: torch.Tensor | None,
    modes: Sequence[str] = ATTENTION_MODES,
) -> None:
    """ValueError unless q and starts fit `kv_heads` heads of `dim` channels, and the mode is one of `modes`."""
    check_float("q", q)
    if q.shape[1] % kv_heads or q.shape[3] != dim:
        raise ValueError(f"q must be [B, Hq, M, {dim}] with Hq a multiple of {kv_heads}; got {tuple(q.shape)}.")
    if mode not in modes:
        raise ValueError(f"mode must be one of {', '.join(modes)}; got {mode!r}.")
    if starts is not None:
        check_shape("starts", starts, q.shape[:1], q.device)


def check_scoring(scoring: Scoring, query_heads: int, window: int | None) -> None:
    """ValueError unless sinks are of `query_heads` heads, and each given option leaves something to attend to."""
    _, softcap, sinks, sas_threshold = scoring
    if sinks is not None and sinks.shape != (query_heads,):
        raise ValueError(f"sinks must be [Hq] = [{query_heads}]; got {tuple(sinks.shape)}.")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 token, the query itself; got {window}.")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be above 0; got {softcap}.")
    if sas_threshold is not None and not sas_threshold < 0:
        raise ValueError(f"sas_threshold must be below 0 (natural log units under the maximum); got {sas_threshold}.")
