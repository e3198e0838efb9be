"""Attention of the newest tokens over the compressed cache that holds them, in plain torch (TurboAttention alg. 2)."""

import torch

from turbo_hf.layout import AttentionOutput, KVStore, Scoring
from turbo_hf.ops.decode.reference_stored import attend
from turbo_hf.ops.reference_flash import FlashOptions


def reference_decode(
    q: torch.Tensor,
    store: KVStore,
    scoring: Scoring,
    starts: torch.Tensor | None = None,
    window: int | None = None,
    mode: str = "turbo",
) -> AttentionOutput:
    return attend(q, store, FlashOptions(scoring, True, window, None if mode == "fp16" else torch.int8), starts)
