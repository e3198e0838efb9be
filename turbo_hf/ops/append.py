"""New tokens into the open buffer of a cache."""

from functools import lru_cache

import torch

from turbo_hf.layout import KVStore
from turbo_hf.ops.backend import kernel_obstacle, uses_triton
from turbo_hf.reference import append as reference


def append_tokens(
    k: torch.Tensor,
    v: torch.Tensor,
    store: KVStore,
    *,
    starts: torch.Tensor | None = None,
    given: torch.Tensor | None = None,
    broken: torch.Tensor,
    backend: str = "auto",
) -> None:
    """Quantize new tokens to INT8 behind the open ones of `store`, in place; on a GPU one launch, and no wait.

    Args:
        k, v: float [B, Hkv, M, D].
        store: one layer's cache, with room for M more open tokens a row; k_open, v_open, their scales, open_len change.
        starts: int64 [B], the first column that holds a token of the row; None: all do.
        given: float32 [B, Hkv, 2], scales of K and of V to use where they are above 0; codes are clamped to +-119.
        broken: int32 [1], set to 1 if a token holds NaN or Inf, else left alone.
        backend: "auto", "triton" or "reference".

    Returns:
        None.

    Raises:
        ValueError: shapes that do not agree with the store's.

    Source: TurboAttention sec. 3.3 (decode buffer); INT-FlashAttention alg. 1 (token-level scales).
    """
    batch, heads, _, dim = store.k_open.shape
    for name, x in (("k", k), ("v", v)):
        if x.dim() != 4 or x.shape != k.shape or (x.shape[0], x.shape[1], x.shape[3]) != (batch, heads, dim):
            raise ValueError(f"{name} must be [{batch}, {heads}, M, {dim}] like the store; got {tuple(x.shape)}.")
    if uses_triton(backend, k.device, kernel_obstacle(k)):
        from turbo_hf.ops import launch_store  # noqa: PLC0415 - needs Triton

        launch_store.append_tokens(k, v, store, starts, given, broken, _counters(batch, k.device))
    else:
        reference.append_tokens(k, v, store, starts=starts, given=given, broken=broken)


@lru_cache(maxsize=32)
def _counters(rows: int, device: torch.device) -> torch.Tensor:
    """int32 [B], zeros before and after each launch. Launches on one device follow one another."""
    return torch.zeros(rows, dtype=torch.int32, device=device)
