"""Attention of the newest tokens over the compressed cache that holds them, in plain torch (TurboAttention alg. 2)."""

import torch

from turbo_hf.layout import AttentionOutput, KVStore
from turbo_hf.ops.decode.reference_stored import attend
from turbo_hf.ops.reference_flash import Scoring


def decode(
    q: torch.Tensor,
    store: KVStore,
    *,
    scaling: float,
    starts: torch.Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    mode: str = "turbo",
    sas_threshold: float | None = None,
) -> AttentionOutput:
    how = Scoring(scaling, True, window, softcap, sas_threshold, None if mode == "fp16" else torch.int8)
    return attend(q, store, how, starts, sinks)
