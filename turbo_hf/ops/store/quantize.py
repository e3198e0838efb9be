"""What is read back of quantized tokens in full precision."""

import torch

from turbo_hf.layout import KVStore, narrowed
from turbo_hf.ops.store.reference import expand


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

    Raises: nothing.

    Source: TurboAttention sec. 3 (stage 2, then stage 1).
    """
    codes_k, k_scale, codes_v, v_scale, place = expand(store)
    by_place = torch.where(place < 0, place.shape[1], place).argsort(1)[:, None, :, None]
    k, v = (x.take_along_dim(by_place, 2) for x in (codes_k * k_scale[..., None], codes_v * v_scale[..., None]))
    k = k if balance is None else k * balance[:, None]
    # rounded codes may take a value near the end of float16's range beyond it
    return narrowed(k, dtype), narrowed(v, dtype)
