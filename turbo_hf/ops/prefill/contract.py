"""Attention of a prompt, or of a chunk of one over a compressed past."""

import torch

from turbo_hf.layout import BLOCK_SIZES, AttentionOutput, KVStore, Rounding, Scoring
from turbo_hf.ops.backend import Choice
from turbo_hf.ops.checks import check_float, check_queries, check_shape
from turbo_hf.ops.prefill.reference import reference_prefill


class PrefillOps(Choice):
    """A layer's op that attends in prompts."""

    def prefill(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scoring: Scoring,
        rounding: Rounding,
        *,
        past: KVStore | None = None,
        starts: torch.Tensor | None = None,
        window: int | None = None,
    ) -> AttentionOutput:
        """Causal attention of M new tokens over themselves and, optionally, over a compressed past before them.

        Args:
            q: float [B, Hq, M, D]. k, v: float [B, Hkv, M, D], not yet in the cache; Hq is a multiple of Hkv.
            scoring: scaling, softcap, sinks and SAS (`turbo_hf.layout.Scoring`).
            rounding: mode, blocks, scales of V, and what prepares keys for rounding (`turbo_hf.layout.Rounding`).
            past: the cache of the preceding tokens; with heads of 16 bit it is read in mode "native".
            starts: int64 [B], the first real column of each row (left padding before it); None: no padding.
            window: how many tokens a query sees, including itself; None: all.

        Returns:
            out [B, Hq, M, D] in q's dtype, 0 at padding; lse float32 [B, Hq, M], natural log, including sinks, -inf at
            padding.

        Raises:
            ValueError: shapes, dtypes or devices that do not agree, an unknown block, a softcap of the wrong sign.

        Source: TurboAttention alg. 1 ("turbo"; exact exponential for the rescaling), INT-FlashAttention alg. 1 ("int8",
        "half"; P scaled by tile instead of by 127 of the running maximum), SageAttention2 (FP8 products accumulated in
        float32).
        """
        check_float("k", k)
        check_queries(q, k.shape[1], k.shape[3], scoring)
        if rounding.block not in BLOCK_SIZES:
            raise ValueError(f"block must be one of {', '.join(map(str, BLOCK_SIZES))} tokens; got {rounding.block}.")
        for name, x in (("k", k), ("v", v)):
            check_shape(name, x, (q.shape[0], k.shape[1], *q.shape[2:]), q.device, q.dtype)
        if past is not None:
            check_shape("past.k_open", past.k_open, (*k.shape[:2], "cap", k.shape[3]), k.device)
        if not self.prompt_kernels(rounding.mode):
            return reference_prefill(q, k, v, scoring, rounding, past, starts, window)
        from turbo_hf.ops.prefill.launch import launch_prefill  # noqa: PLC0415 - needs Triton

        return launch_prefill(q, k, v, scoring, rounding, past, starts, window)
