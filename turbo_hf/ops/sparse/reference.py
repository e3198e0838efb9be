"""Attention of the newest tokens over the buckets that they visit and the always-read tokens, in plain torch."""

import torch

from turbo_hf.layout import AlwaysRead, AttentionOutput, KVStore, Scoring, Visits
from turbo_hf.ops.decode.reference import reference_decode


def reference_sparse_decode(
    q: torch.Tensor,
    store: KVStore,
    scoring: Scoring,
    visits: Visits | None,
    always: AlwaysRead,
    starts: torch.Tensor | None = None,
    mode: str = "turbo",
    read: torch.Tensor | None = None,
) -> AttentionOutput:
    batch, _, tokens, _ = q.shape
    heads, cap = store.k_open.shape[1:3]
    length = store.sealed * store.block + store.open_len
    places = (store.table.shape[1] + -(-cap // store.block)) * store.block
    key = torch.arange(places, device=q.device)
    column = torch.arange(tokens, device=q.device).expand(batch, tokens)
    place = column + length[:, None] - tokens
    padding = (place < 0) if starts is None else (place < 0) | (column < starts[:, None])
    place = place.masked_fill(padding, -1)[..., None]

    causal = key <= place
    first, newest = key < always.sink_tokens, key > place - always.window_tokens
    kept = (causal & (first | newest))[:, None].expand(-1, heads, -1, -1)
    if visits is not None:
        kept = kept | (causal[:, None] & _met(visits, places))
    if read is not None:
        read += kept.sum()
    return reference_decode(q, store, scoring, starts, None, mode, kept)


def _met(visits: Visits, tokens: int) -> torch.Tensor:
    """bool [B, Hkv, M, tokens]: whether a token's bucket is visited, or not known."""
    buckets, visited, _ = visits
    bucket = torch.nn.functional.pad(buckets[..., :tokens], (0, max(0, tokens - buckets.shape[-1])), value=-1).long()
    # [B, Hkv, T] into visited [B, Hkv, M, C]
    at = bucket.clamp(0, visited.shape[-1] - 1)[:, :, None].expand(-1, -1, visited.shape[2], -1)
    return visited.gather(-1, at) | (bucket < 0)[:, :, None]
