"""Absorbed attention: the newest tokens attend over the cached latents themselves, all or those that they name."""

import torch

from turbo_hf.config.expected import FLOATS
from turbo_hf.layout import AttentionOutput, KVStore, Scoring
from turbo_hf.ops.backend import Choice
from turbo_hf.ops.checks import check_shape
from turbo_hf.ops.latent.named import reference_named_decode
from turbo_hf.ops.latent.reference import reference_latent_decode


class LatentOps(Choice):
    """The ops that attend in decode steps of a layer that keeps latents."""

    def latent_decode(
        self,
        q_latent: torch.Tensor,
        q_rotary: torch.Tensor,
        store: KVStore,
        scaling: float,
        *,
        starts: torch.Tensor | None = None,
    ) -> AttentionOutput:
        """Attention of a row's newest tokens over the latents of all its tokens, each up to its own place.

        Scores are (q_latent . latent + q_rotary . rotary part) * scaling; the output is the weighted mean of the
        latents, which the caller multiplies by the up-projection of values.

        Args:
            q_latent: float [B, H, M, rank], queries multiplied by the up-projection of keys.
            q_rotary: float [B, H, M, R], the rotary part of the queries, in the same dtype.
            store: one layer's cache of latents (`turbo_hf.layout`), which holds these M tokens already.
            scaling: factor on the scores.
            starts: int64 [B], the first of the M columns that holds a token of the row; None: all do.

        Returns:
            out [B, H, M, rank] in q_latent's dtype, 0 at padding; lse float32 [B, H, M].

        Raises:
            ValueError: dtypes that are not floating, or shapes that do not match the store's.

        Source: DeepSeek-V2 (arXiv:2405.04434), sec. 2.1.2: the up-projections absorbed into queries and outputs.
        """
        _check_queries(q_latent, q_rotary, store)
        if not self.latent_kernels:
            return reference_latent_decode(q_latent, q_rotary, store, scaling, starts)
        from turbo_hf.ops.latent.launch import launch_latent_decode  # noqa: PLC0415 - needs Triton

        out, lse = launch_latent_decode(q_latent, q_rotary, store, scaling, starts, q_latent.device.type != "cuda")
        if starts is None:
            return AttentionOutput(out, lse)
        hidden = (torch.arange(out.shape[2], device=out.device) < starts[:, None])[:, None]
        return AttentionOutput(out.masked_fill(hidden[..., None], 0.0), lse.masked_fill(hidden, -torch.inf))

    def named_decode(
        self,
        q_latent: torch.Tensor,
        q_rotary: torch.Tensor,
        store: KVStore,
        places: torch.Tensor,
        seen: torch.Tensor,
        scoring: Scoring,
    ) -> torch.Tensor:
        """Attention of each query over the latents that it names: as `latent_decode`, over those alone.

        Args:
            q_latent, q_rotary, store: as there.
            places: int64 [B, M, K], tokens of the row that each query names, all different.
            seen: bool [B, M, K], which of them it may see: tokens that the row has. A query that sees none gets any
                finite output.
            scoring: without softcap.

        Returns:
            [B, H, M, rank] in q_latent's dtype.

        Raises:
            ValueError: as there, and for places and `seen` of other shapes or dtypes.

        Source: DeepSeek-V3.2, DeepSeek Sparse Attention (DSA): attention over the tokens that the indexer selects.
        """
        _check_queries(q_latent, q_rotary, store)
        shape, device = (len(q_latent), q_latent.shape[2], "K"), q_latent.device
        check_shape("places", places, shape, device, torch.int64)
        check_shape("seen", seen, places.shape, device, torch.bool)
        if not self.latent_kernels:
            return reference_named_decode(q_latent, q_rotary, store, places, seen, scoring)
        from turbo_hf.ops.latent.launch import launch_named_decode  # noqa: PLC0415 - needs Triton

        return launch_named_decode(q_latent, q_rotary, store, places, seen, scoring, device.type != "cuda")


def _check_queries(q_latent: torch.Tensor, q_rotary: torch.Tensor, store: KVStore) -> None:
    (batch, _, _, rank), device = store.k_open.shape, store.k_open.device
    check_shape("q_latent", q_latent, (batch, "H", "M", rank), device, *FLOATS)
    check_shape("q_rotary", q_rotary, (*q_latent.shape[:3], store.v_open.shape[2]), device, q_latent.dtype)
