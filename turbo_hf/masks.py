"""The mask function that Transformers calls once per pass for each kind of layer, and masks for dense attention."""

from collections.abc import Callable
from typing import Any

import torch
from transformers.masking_utils import causal_mask_function, sdpa_mask

SLIDING_OVERLAY = "sliding_window_overlay.<locals>.inner_mask"


def turbo_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """The model's 2D mask, unchanged, for causal and sliding-window attention; a dense bool mask for any other.

    Returns None (no padding), bool [B, columns], or bool [B, 1, q_length, kv_length]. A 2D mask of a long prompt is
    thousands of times smaller than the dense one, and tells the cache where padding is.
    """
    at_end = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    if at_end and _is_plain(mask_function):
        return attention_mask
    kwargs["allow_is_causal_skip"] = False
    # sdpa_mask is annotated for an int offset and takes the tensor of a static cache too
    offset: Any = q_offset
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **kwargs,
    )


def _is_plain(mask_function: Callable[..., Any]) -> bool:
    """Causal, or causal and sliding window. A chunked mask has the same outer shape, so its parts are looked at."""
    if mask_function is causal_mask_function:
        return True
    cells = getattr(mask_function, "__closure__", None) or ()
    parts = [cell.cell_contents for cell in cells]
    if len(parts) != 1 or not isinstance(parts[0], tuple) or len(parts[0]) != 2:
        return False
    overlay, causal = parts[0]
    is_and = mask_function.__qualname__ == "and_masks.<locals>.and_mask"
    return is_and and causal is causal_mask_function and getattr(overlay, "__qualname__", "") == SLIDING_OVERLAY


def dense_mask(
    mask: torch.Tensor | None,
    queries: int,
    keys: int,
    *,
    causal: bool,
    window: int | None,
    device: torch.device,
) -> torch.Tensor | None:
    """bool [B or 1, 1, queries, keys] for queries that stand at the end of the keys; None where all are visible."""
    if mask is None and window is None and (not causal or queries == 1):
        return None
    q = torch.arange(keys - queries, keys, device=device)[:, None]
    k = torch.arange(keys, device=device)[None]
    allowed = torch.ones(queries, keys, dtype=torch.bool, device=device)
    if causal:
        allowed &= k <= q
    if window is not None:
        allowed &= k > q - window
    allowed = allowed[None, None]
    return allowed if mask is None else allowed & mask[:, None, None, -keys:].bool().to(device)
