"""Decode steps of sparse layers: buckets of new keys, and attention over the buckets that queries visit."""

from typing import Any, NamedTuple

import torch

from turbo_hf.cache.layer import TurboLayer
from turbo_hf.cache.rows import NewColumns
from turbo_hf.layout import AlwaysRead, AttentionOutput, Rotary, Scoring, Visits
from turbo_hf.ops.maths import balanced_queries
from turbo_hf.sparse.selectors import Centroids
from turbo_hf.sparse.undo_rotary import turns_by_halves, undo_rotary

PART = 8192
"""Keys whose rotation is undone at a time: bounds the float32 temporaries of a long prompt."""


class Source(NamedTuple):
    """Where queries and keys come from.

    module: the attention module.
    rotary: this call's (cos, sin); None without rotary embedding.
    """

    module: Any
    rotary: Rotary | None

    def pre_rotary(self, x: torch.Tensor, first: int = 0, fused: bool = True) -> tuple[torch.Tensor, Rotary | None]:
        """x [B, H, M, D] before rotary embedding, and None. Its first column is column `first` of the call.

        If `fused`, and an op can undo the rotation itself: x unchanged, and the cos and sin for that.
        """
        if self.rotary is None:
            raise ValueError(
                "this call brings no position_embeddings to the attention, and buckets are made of keys before rotary "
                'embedding. Call the model as a whole, or choose selector "window".'
            )
        cos, sin = (part[:, first : first + x.shape[2]].to(x.device) for part in self.rotary)
        if fused and turns_by_halves(self.module, x.shape[3], cos.shape[2]):
            return x, (cos, sin)
        return undo_rotary(self.module, x, (cos, sin)), None


def new_buckets(layer: TurboLayer, source: Source, key: torch.Tensor, new: NewColumns) -> torch.Tensor | None:
    """Buckets of new keys [B, Hkv, M, D], as the model gives them: int16 [B, Hkv, M], aligned by `new`.

    None where the layer keeps no buckets.
    """
    selector = layer.selector
    if not isinstance(selector, Centroids):
        return None
    parts = []
    for first in range(0, key.shape[2], PART):
        part = key[:, :, first : first + PART]
        parts.append(selector.buckets(layer.ops, *(source.pre_rotary(part, first) if selector.pre_rotary else (part,))))
    buckets = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
    return buckets if new.gather is None else torch.take_along_dim(buckets, new.gather[:, None], 2)


def new_buckets_and_logits(
    layer: TurboLayer, source: Source, query: torch.Tensor, key: torch.Tensor, new: NewColumns
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """For a decode step: buckets of its keys, as in `new_buckets`, and its queries' logits float32 [B, Hkv, M, C].

    query: [B, Hq, M, D], key: [B, Hkv, M, D], as the model gives them. None and None where the layer keeps no buckets.
    """
    selector = layer.selector
    if not isinstance(selector, Centroids):
        return None, None
    rotary = None
    if selector.pre_rotary:
        # alignment moves columns, which separates them from their cos and sin: undo the rotation first
        fused = new.gather is None
        (query, rotary), (key, _) = source.pre_rotary(query, fused=fused), source.pre_rotary(key, fused=fused)
    grouped = new.align(query).unflatten(1, (layer.heads, -1)).transpose(2, 3)
    return selector.buckets_and_logits(layer.ops, new.align(key), grouped, rotary)


def attend_sparse(
    layer: TurboLayer,
    logits: torch.Tensor | None,
    query: torch.Tensor,
    new: NewColumns,
    starts: torch.Tensor | None,
    scoring: Scoring,
) -> AttentionOutput:
    """Decode of query [B, Hq, M, D], as the model gives it, over the keys that the layer's selector chooses.

    The layer holds the new tokens already. logits: as of `new_buckets_and_logits`.
    """
    selector, index = layer.selector, layer.bucket_index
    assert selector is not None
    if layer.replay is None:
        # `ReplayableSteps` counts replayed steps, since a replay runs no Python
        counts = [new.tokens - start for start in new.starts or [0] * layer.rows]
        selector.count(layer.lengths(), counts, layer.heads)
    q = balanced_queries(new.align(query), layer.balance)
    visits = None
    if isinstance(selector, Centroids) and logits is not None:
        # nothing may come between it and attention: their launches overlap
        visits = Visits(index.buckets, selector.visited(layer.ops, logits), index.spans)
    return layer.ops.sparse_decode(
        q,
        layer.kv_store(),
        scoring,
        visits,
        AlwaysRead(selector.config.sink_tokens, selector.window),
        starts=starts,
        read=selector.tally.counter(query.device),
    )
