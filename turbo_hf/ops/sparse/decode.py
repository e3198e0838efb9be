"""Attention of the newest tokens over part of the compressed cache: visited buckets, first and newest tokens."""

import torch

from turbo_hf.layout import UNQUANTIZED, AlwaysRead, AttentionOutput, KVStore, Scoring, Visits
from turbo_hf.ops.backend import uses_triton
from turbo_hf.ops.decode.contract import DECODE_MODES, check_lengths, why_no_step_kernel
from turbo_hf.ops.prefill.contract import check_queries, check_scoring
from turbo_hf.ops.sparse.reference import reference_sparse_decode


def sparse_decode(
    q: torch.Tensor,
    store: KVStore,
    scoring: Scoring,
    visits: Visits | None,
    always: AlwaysRead,
    *,
    starts: torch.Tensor | None = None,
    mode: str = "turbo",
    read: torch.Tensor | None = None,
    backend: str = "auto",
) -> AttentionOutput:
    """Causal attention of each row's M newest tokens over some of the cached keys, reading each key once.

    A query at position p of its row attends to the key at position t <= p if t < sink_tokens, or t > p - window_tokens,
    or the query heads of its KV head visit the key's bucket. The M queries are independent: the result for one does not
    depend on the others. Scores and sums are computed as in `ops.decode.contract`.

    Args:
        q: float [B, Hq, M, D], as in `ops.decode.contract`.
        store: one layer's cache, including the M tokens.
        scoring, starts, mode: as in `ops.decode.contract`.
        visits: buckets of keys, and which of them queries visit (`turbo_hf.layout.Visits`); None: no key has a bucket,
            so that only those of `always` are read.
        always: the first and newest tokens, which each query reads.
        read: int64 [1], to which the number of keys read is added, over rows, KV heads and queries, counting a key once
            if several query heads of a KV head read it; None: not counted.
        backend: "auto", "triton" or "reference".

    Returns:
        out [B, Hq, M, D] in q's dtype, 0 where a row has no token; lse float32 [B, Hq, M], natural log, over the
        attended keys, including sinks, -inf where a row has no token.

    Raises:
        ValueError: shapes, lengths, dtypes or devices that do not agree, an unknown mode, a softcap or sas_threshold of
            the wrong sign, an `always` without any token.

    Source: SAAP sec. 4, appendix F.
    """
    batch, kv_heads, _, dim = store.k_open.shape
    check_queries(q, kv_heads, dim, mode, starts, DECODE_MODES)
    check_scoring(scoring, q.shape[1], None)
    if q.shape[0] != batch or q.device != store.k_open.device:
        raise ValueError(f"q has {q.shape[0]} rows on {q.device}; the cache holds {batch} on {store.k_open.device}.")
    longest = max(check_lengths(store) or (0,)) * store.block
    if always.sink_tokens < 0 or always.window_tokens < 1:
        raise ValueError(
            f"sink_tokens must be at least 0 and window_tokens at least 1; got {always.sink_tokens} and "
            f"{always.window_tokens}."
        )
    if visits is not None:
        _check_visits(visits, q, kv_heads, longest)
    run = reference_sparse_decode
    if uses_triton(backend, q.device, _why_no_kernel(q, store, mode)):
        from turbo_hf.ops.sparse.launch import launch_sparse_decode  # noqa: PLC0415 - needs Triton

        run = launch_sparse_decode
    return run(q, store, scoring, visits, always, starts, mode, read)


def _check_visits(visits: Visits, q: torch.Tensor, kv_heads: int, longest: int) -> None:
    """longest: tokens sealed in the longest row, as far as known."""
    buckets, visited, spans = visits
    batch = q.shape[0]
    if buckets.shape[:-1] != (batch, kv_heads) or visited.shape[:-1] != (batch, kv_heads, q.shape[2]):
        raise ValueError(
            f"buckets must be [{batch}, {kv_heads}, cap] and visited [{batch}, {kv_heads}, {q.shape[2]}, C]; got "
            f"{tuple(buckets.shape)} and {tuple(visited.shape)}."
        )
    if buckets.dtype != torch.int16 or visited.dtype != torch.bool or buckets.shape[2] < longest:
        raise ValueError(
            f"buckets must be torch.int16 with cap >= {longest}, the tokens sealed in the longest row, and visited "
            f"torch.bool; got {buckets.dtype} with cap {buckets.shape[2]}, and {visited.dtype}."
        )
    if spans is None:
        return
    if spans.shape[:2] != (batch, kv_heads) or spans.shape[3:] != (2,) or spans.dtype != torch.int16:
        raise ValueError(
            f"spans must be torch.int16 [{batch}, {kv_heads}, n, 2]; got {spans.dtype} {list(spans.shape)}."
        )


def _why_no_kernel(q: torch.Tensor, store: KVStore, mode: str) -> str | None:
    """Why the kernel cannot serve this call."""
    exact = mode == "fp16" or any(pages.bits == UNQUANTIZED for pages in store.paged)
    return why_no_step_kernel(q, store.block, "fp16" if exact else mode)
