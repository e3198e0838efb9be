"""Attention of the newest tokens over part of the compressed cache: visited buckets, first and newest tokens."""

import torch

from turbo_hf.layout import FULL, AttentionOutput, KVStore
from turbo_hf.ops.backend import uses_triton
from turbo_hf.ops.decode.contract import check_lengths, step_obstacle
from turbo_hf.ops.prefill.contract import check_queries, check_scores
from turbo_hf.ops.sparse import reference


def sparse_decode(
    q: torch.Tensor,
    store: KVStore,
    buckets: torch.Tensor | None,
    visited: torch.Tensor | None,
    *,
    scaling: float,
    sink_tokens: int,
    window_tokens: int,
    spans: torch.Tensor | None = None,
    min_collisions: int = 1,
    starts: torch.Tensor | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    mode: str = "turbo",
    sas_threshold: float | None = None,
    read: torch.Tensor | None = None,
    backend: str = "auto",
) -> AttentionOutput:
    """Causal attention of each row's M newest tokens over some of the cached keys, reading each key once.

    A query at position p of its row attends to the key at position t <= p if t < sink_tokens, or t > p - window_tokens,
    or the key's bucket is visited, either by all query heads of its KV head together or by the head itself. The M
    queries are independent: the result for one does not depend on the others. Scores and sums are computed as in
    `ops.decode`.

    Args:
        q: float [B, Hq, M, D], as in `ops.decode`.
        store: one layer's cache, including the M tokens.
        buckets: int16 [B, Hkv, L, cap], by hash table (1 except for "lsh-tables") and position in the row; -1: unknown,
            such a key is attended to. cap is at least the longest row. None: no key has a bucket, so the dense part
            alone is read.
        visited: bool [B, Hkv, M, L, C], for all query heads of a KV head together, or [B, Hq, M, L, C], for each head;
            the latter has no kernel if Hq is above Hkv.
        scaling, starts, softcap, sinks, mode, sas_threshold: as in `ops.decode`.
        spans: int16 [B, Hkv, n, 2], the smallest and the largest bucket in each of the first n blocks of a row, -1:
            unknown. It tells the kernel which blocks it can skip, and does not change the result. None: none is known.
        sink_tokens, window_tokens: how many of the first and newest tokens are always attended to.
        min_collisions: in how many tables a key's bucket must be visited.
        read: int64 [1], to which the number of keys read is added, over rows, KV heads and queries, counting a key once
            if several query heads of a KV head read it; None: not counted.
        backend: "auto", "triton" or "reference".

    Returns:
        out [B, Hq, M, D] in q's dtype, 0 where a row has no token; lse float32 [B, Hq, M], natural log, over the
        attended keys, including sinks, -inf where a row has no token.

    Raises:
        ValueError: shapes, lengths, dtypes or devices that do not agree, an unknown mode, a softcap or sas_threshold of
            the wrong sign, a dense part without any token.

    Source: SAAP sec. 4, appendix F.
    """
    batch, kv_heads, _, dim = store.k_open.shape
    check_queries(q, kv_heads, dim, mode, starts, sinks)
    check_scores(None, softcap, sas_threshold)
    if q.shape[0] != batch or q.device != store.k_open.device:
        raise ValueError(f"q has {q.shape[0]} rows on {q.device}; the cache holds {batch} on {store.k_open.device}.")
    longest = max(check_lengths(store) or (0,)) * store.block
    if sink_tokens < 0 or window_tokens < 1:
        raise ValueError(
            f"sink_tokens must be at least 0 and window_tokens at least 1; got {sink_tokens} and {window_tokens}."
        )
    if (buckets is None) != (visited is None):
        raise ValueError("buckets and visited belong together: give both, or neither for the dense part alone.")
    if buckets is not None and visited is not None:
        _check_buckets(q, kv_heads, longest, buckets, visited, min_collisions)
    _check_spans(spans, batch, kv_heads)
    run = reference.sparse_decode
    if uses_triton(backend, q.device, _obstacle(q, store, buckets, visited, mode)):
        from turbo_hf.ops.sparse import launch as launch_sparse  # noqa: PLC0415 - needs Triton

        run = launch_sparse.sparse_decode
    return run(
        q,
        store,
        buckets,
        visited,
        scaling=scaling,
        sink_tokens=sink_tokens,
        window_tokens=window_tokens,
        spans=spans,
        min_collisions=min_collisions,
        starts=starts,
        softcap=softcap,
        sinks=sinks,
        mode=mode,
        sas_threshold=sas_threshold,
        read=read,
    )


def _check_buckets(
    q: torch.Tensor, kv_heads: int, longest: int, buckets: torch.Tensor, visited: torch.Tensor, min_collisions: int
) -> None:
    """longest: tokens sealed in the longest row, as far as known."""
    batch = q.shape[0]
    tables = buckets.shape[2]
    asked = [(batch, heads, q.shape[2], tables) for heads in (kv_heads, q.shape[1])]
    if buckets.shape[:2] != (batch, kv_heads) or visited.shape[:-1] not in asked or not 1 <= min_collisions <= tables:
        raise ValueError(
            f"buckets must be [{batch}, {kv_heads}, L, cap], visited [{batch}, {kv_heads} or {q.shape[1]}, "
            f"{q.shape[2]}, L, C], and min_collisions from 1 to L; got {tuple(buckets.shape)}, {tuple(visited.shape)} "
            f"and {min_collisions}."
        )
    if buckets.dtype != torch.int16 or visited.dtype != torch.bool or buckets.shape[3] < longest:
        raise ValueError(
            f"buckets must be torch.int16 with cap >= {longest}, the tokens sealed in the longest row, and visited "
            f"torch.bool; got {buckets.dtype} with cap {buckets.shape[3]}, and {visited.dtype}."
        )


def _check_spans(spans: torch.Tensor | None, batch: int, kv_heads: int) -> None:
    if spans is None:
        return
    if spans.shape[:2] != (batch, kv_heads) or spans.shape[3:] != (2,) or spans.dtype != torch.int16:
        raise ValueError(
            f"spans must be torch.int16 [{batch}, {kv_heads}, n, 2]; got {spans.dtype} {list(spans.shape)}."
        )


def _obstacle(
    q: torch.Tensor, store: KVStore, buckets: torch.Tensor | None, visited: torch.Tensor | None, mode: str
) -> str | None:
    """Why the kernel cannot serve this call."""
    if visited is not None and visited.shape[1] != store.k_open.shape[1]:
        return "visits of each query head have no kernel"
    if buckets is not None and buckets.shape[2] > 1:
        return "several hash tables have no kernel"
    exact = mode == "fp16" or any(pages.bits == FULL for pages in store.paged)
    return step_obstacle(q, store.block, "fp16" if exact else mode)
