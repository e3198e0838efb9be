"""What is read back of quantized tokens in full precision, and which heads need their bits."""

import torch

from turbo_hf.layout import KVStore, narrowed
from turbo_hf.ops.store.reference_pages import expand


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


def head_scores(k: torch.Tensor, v: torch.Tensor, metric: str) -> torch.Tensor:
    """How much each KV head needs its bits: the heads with the lowest scores get the low width.

    Args:
        k, v: float [B, Hkv, N, D], the tokens to decide by.
        metric: "priority" (range times the deviation of the channel gaps), "entropy" (of the channel gaps; flat gaps
            score low), "min_max" (range) or "variation" (deviation of the channel gaps).

    Returns:
        float32 [B, Hkv]: the product of the key's and the value's score, independent of their units.

    Raises: nothing.

    Source: TurboAttention eq. 11, 12 and the ablation of sec. 5.
    """
    return _head_score(k.float(), metric) * _head_score(v.float(), metric)


def _head_score(x: torch.Tensor, metric: str) -> torch.Tensor:
    gaps = x.amax(-2) - x.amin(-2)
    span = x.amax((-1, -2)) - x.amin((-1, -2))
    if metric == "priority":
        return span * gaps.std(-1, correction=0)
    if metric == "min_max":
        return span
    if metric == "variation":
        return gaps.std(-1, correction=0)
    total = gaps.sum(-1, keepdim=True)
    # gaps that are all 0 count as flat
    share = torch.where(total > 0, gaps / total, 1 / gaps.shape[-1])
    # flat gaps have the highest entropy and quantize best, so the score falls with it
    entropy: torch.Tensor = torch.special.entr(share).sum(-1)
    return 1 / (1 + entropy)
