"""Buckets of keys, which of them a query visits, and attention over these (SAAP sec. 4), in plain torch."""

from collections.abc import Mapping

import torch

from turbo_hf.layout import CLASSIFIER, AlwaysRead, AttentionOutput, KVStore, Rotary, Scoring, Visits
from turbo_hf.ops.decode.reference import reference_decode
from turbo_hf.ops.maths import undo_rotary_halves

PART = 4096
"""Keys assigned at a time: bounds the float32 scores, one per key and centroid."""


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


def reference_assign(keys: torch.Tensor, centroids: torch.Tensor, *, rotary: Rotary | None = None) -> torch.Tensor:
    keys = undo_rotary_halves(keys, rotary)
    wide = centroids.float().mT
    parts = [(part @ wide).argmax(-1) for part in keys.split(PART, 2)]
    return torch.cat(parts, 2).to(torch.int16)


def reference_visit(logits: torch.Tensor, probes: int) -> torch.Tensor:
    bucket = logits.float().argsort(dim=-1, descending=True, stable=True)
    return torch.zeros_like(bucket, dtype=torch.bool).scatter(-1, bucket[..., :probes], True)


def reference_assign_and_score(
    keys: torch.Tensor,
    queries: torch.Tensor,
    centroids: torch.Tensor,
    classifier: Mapping[str, torch.Tensor] | None = None,
    *,
    rotary: Rotary | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    found, turned = reference_assign(keys, centroids, rotary=rotary), queries.transpose(2, 3)
    x = undo_rotary_halves(turned.flatten(1, 2), rotary).view(turned.shape)
    if classifier is None:
        # inner products are linear: those of the sum
        return found, torch.matmul(x.sum(2), centroids.float().mT)
    weight_1, bias_1, weight_2, bias_2 = (classifier[name].float() for name in CLASSIFIER)
    hidden = (x @ weight_1[:, None] + bias_1[:, None, None]).relu()
    # the second layer is linear: it runs on the sum
    return found, hidden.sum(2) @ weight_2 + queries.shape[3] * bias_2[:, None]
