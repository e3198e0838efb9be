"""Attention of the newest tokens over the compressed cache that holds them."""

import torch

from turbo_hf.layout import AttentionOutput, KVStore, Scoring
from turbo_hf.ops.backend import Choice
from turbo_hf.ops.checks import check_queries, check_shape
from turbo_hf.ops.decode.reference import reference_decode


class DecodeOps(Choice):
    """A layer's op that attends in decode steps."""

    def decode(
        self,
        q: torch.Tensor,
        store: KVStore,
        scoring: Scoring,
        *,
        starts: torch.Tensor | None = None,
        window: int | None = None,
    ) -> AttentionOutput:
        """Causal attention of each row's M newest tokens, whose keys and values the cache already holds.

        Args:
            q: float [B, Hq, M, D], the row's last M tokens (1 in plain decoding, more when drafts are verified);
                balanced (`ops.maths.balanced_queries`) if the stored keys are.
            store: one layer's cache, including the M tokens; Hq is a multiple of its Hkv.
            scoring: scaling, softcap, sinks and SAS (`turbo_hf.layout.Scoring`).
            starts: int64 [B], the first column of q that holds a token of the row; None: as many as the row has.
            window: how many tokens a query sees, including itself; None: all.

        Returns:
            out [B, Hq, M, D] in q's dtype, 0 where a row has no token; lse float32 [B, Hq, M], natural log, including
            sinks, -inf where a row has no token.

        Raises:
            ValueError: shapes, lengths or devices that do not agree, a softcap of the wrong sign.

        Source: TurboAttention alg. 2 (P with one scale per query row and key block; exact exponential for the
        rescaling).
        """
        _, kv_heads, _, dim = store.k_open.shape
        check_queries(q, kv_heads, dim, scoring)
        check_lengths(store, q)
        if self.step_kernels:
            from turbo_hf.ops.decode.launch import launch_decode  # noqa: PLC0415 - needs Triton

            return launch_decode(q, store, scoring, starts, window, self.mode)
        return reference_decode(q, store, scoring, starts, window, self.mode)


def check_lengths(store: KVStore, q: torch.Tensor) -> tuple[int, ...] | None:
    """Sealed blocks of each row, as far as the host knows them without waiting. ValueError if rows do not match q's."""
    batch, device, known = store.k_open.shape[0], store.k_open.device, store.sealed_host
    check_shape("q", q, (batch, "Hq", "M", "D"), device)
    check_shape("store.sealed", store.sealed, (batch,), device)
    check_shape("store.open_len", store.open_len, (batch,), device)
    check_shape("store.table", store.table, (batch, "blocks"), device)
    if store.sealed.device.type == "cpu":
        there = tuple(store.sealed.tolist())
        if known not in (None, there):
            raise ValueError(f"store.sealed_host must hold the numbers in store.sealed, {there}; got {known}.")
        known = there
    if known is not None and (len(known) != batch or not 0 <= min(known) <= max(known) <= store.table.shape[1]):
        blocks = store.table.shape[1]
        raise ValueError(f"store.sealed must give {batch} rows of 0 to {blocks} blocks, as the table has; got {known}.")
    return known
