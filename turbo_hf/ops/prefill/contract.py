"""Attention of a prompt, or of a chunk of one over a compressed past."""

import torch

from turbo_hf.layout import BLOCK_SIZES, AttentionOutput, KVStore, Rounding, Scoring
from turbo_hf.ops.backend import Choice
from turbo_hf.ops.prefill.reference import reference_prefill
from turbo_hf.ops.store.quantize import check_float, check_shape


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
        own: bool = True,
    ) -> AttentionOutput:
        """Causal attention of M new tokens over themselves and, optionally, over a compressed past before them.

        Args:
            q: float [B, Hq, M, D]. k, v: float [B, Hkv, M, D], not yet in the cache; Hq is a multiple of Hkv.
            scoring: scaling, softcap, sinks and SAS (`turbo_hf.layout.Scoring`).
            rounding: mode, blocks, scales of V, and what prepares keys for rounding (`turbo_hf.layout.Rounding`).
            past: the cache of the preceding tokens.
            starts: int64 [B], the first real column of each row (left padding before it); None: no padding.
            window: how many tokens a query sees, including itself; None: all.
            own: whether queries attend to the new tokens; if not, to the past alone.

        Returns:
            out [B, Hq, M, D] in q's dtype, 0 at padding; lse float32 [B, Hq, M], natural log, including sinks, -inf at
            padding and for a query that sees no key.

        Raises:
            ValueError: shapes, dtypes or devices that do not agree, an unknown block, a window below 1, a softcap or
                sas_threshold of the wrong sign.

        Source: TurboAttention alg. 1 ("turbo"; exact exponential for the rescaling), INT-FlashAttention alg. 1 ("int8",
        "half"; P scaled by tile instead of by 127 of the running maximum), SageAttention2 (FP8 products accumulated in
        float32).
        """
        check_float("k", k)
        check_float("v", v)
        mode = rounding.mode
        check_queries(q, k.shape[1], k.shape[3], starts)
        check_scoring(scoring, q.shape[1], window)
        if rounding.block not in BLOCK_SIZES:
            raise ValueError(f"block must be one of {', '.join(map(str, BLOCK_SIZES))} tokens; got {rounding.block}.")
        for name, x in (("k", k), ("v", v)):
            check_shape(name, x, (q.shape[0], k.shape[1], *q.shape[2:]), q.device, q.dtype)
        if past is not None:
            check_shape("past.k_open", past.k_open, (*k.shape[:2], "cap", k.shape[3]), k.device)
            if past.k_open.dtype != torch.int8 and mode != "native":
                raise ValueError(
                    f'a past with heads of 16 bit is read in mode "native", which rounds nothing; got {mode!r}.'
                )
        elif not own:
            raise ValueError("own=False leaves the past to attend to; got none.")
        if not self.prompt_kernels(mode):
            return reference_prefill(q, k, v, scoring, rounding, past, starts, window, own)
        from turbo_hf.ops.prefill.launch import launch_prefill  # noqa: PLC0415 - needs Triton

        return launch_prefill(q, k, v, scoring, rounding, past, starts, window, own)


def check_queries(q: torch.Tensor, kv_heads: int, dim: int, starts: torch.Tensor | None) -> None:
    """ValueError unless q and starts fit `kv_heads` heads of `dim` channels."""
    check_float("q", q)
    if q.shape[1] % kv_heads or q.shape[3] != dim:
        raise ValueError(f"q must be [B, Hq, M, {dim}] with Hq a multiple of {kv_heads}; got {tuple(q.shape)}.")
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
