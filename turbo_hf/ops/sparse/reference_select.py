"""Buckets of keys, and which of them a query visits (SAAP sec. 4), in plain torch."""

from collections.abc import Mapping

import torch

from turbo_hf.layout import CLASSIFIER, Rotary
from turbo_hf.ops.maths import undo_rotary_halves

PART = 4096
"""Keys assigned at a time: bounds the float32 scores, one per key and centroid."""


def reference_assign(keys: torch.Tensor, centroids: torch.Tensor, *, rotary: Rotary | None = None) -> torch.Tensor:
    keys = undo_rotary_halves(keys, rotary)
    wide = centroids.float().mT
    parts = [(part @ wide).argmax(-1) for part in keys.split(PART, 2)]
    return torch.cat(parts, 2).to(torch.int16)


def reference_visit(
    logits: torch.Tensor,
    *,
    probes: int | None = None,
    mass: float | None = None,
    most: int | None = None,
    sizes: torch.Tensor | None = None,
) -> torch.Tensor:
    # the second layer of the classifier is linear: one summation over the group serves all its queries
    score = logits.float().sum(3)
    rank = torch.arange(score.shape[-1], device=score.device)
    if mass is None:
        bucket = score.argsort(dim=-1, descending=True, stable=True)
        taken = (rank < (probes or 0)).expand_as(bucket)
    else:
        keys = (torch.ones_like(score[:, :, :1]) if sizes is None else sizes[:, :, None]).float().expand_as(score)
        share = (score / logits.shape[3] + keys.log()).softmax(-1)
        # the fewest keys that hold a mass are those of the largest mass each
        bucket = score.masked_fill(keys == 0, -torch.inf).argsort(dim=-1, descending=True, stable=True)
        ranked = share.gather(-1, bucket)
        left = 1 - (ranked.cumsum(-1) - ranked)
        taken = (left >= mass) & (rank < (most or len(rank))) & (keys > 0).gather(-1, bucket)
    return torch.zeros_like(score, dtype=torch.bool).scatter(-1, bucket, taken)


def reference_classify(
    queries: torch.Tensor,
    classifier: Mapping[str, torch.Tensor],
    *,
    rotary: Rotary | None = None,
) -> torch.Tensor:
    group = queries.shape[3]
    x = _pre_rotary(queries, rotary)
    weight_1, bias_1, weight_2, bias_2 = (classifier[name].float() for name in CLASSIFIER)
    hidden = (x @ weight_1[:, None] + bias_1[:, None, None]).relu()
    # the second layer is linear: it runs on the sum
    logits = hidden.sum(2, keepdim=True) @ weight_2[:, None] + group * bias_2[:, None, None]
    return logits.transpose(2, 3)


def reference_score(queries: torch.Tensor, centroids: torch.Tensor, *, rotary: Rotary | None = None) -> torch.Tensor:
    # inner products are linear: those of the sum
    x = _pre_rotary(queries, rotary).sum(2, keepdim=True)
    return torch.matmul(x, centroids.float().mT[:, None]).transpose(2, 3)


def reference_assign_and_score(
    keys: torch.Tensor,
    queries: torch.Tensor,
    centroids: torch.Tensor,
    classifier: Mapping[str, torch.Tensor] | None = None,
    *,
    rotary: Rotary | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    if classifier is None:
        return reference_assign(keys, centroids, rotary=rotary), reference_score(queries, centroids, rotary=rotary)
    return reference_assign(keys, centroids, rotary=rotary), reference_classify(queries, classifier, rotary=rotary)


def _pre_rotary(queries: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
    """Queries [B, Hkv, M, G, D] before rotary embedding: float32 [B, Hkv, G, M, D]."""
    batch, heads, tokens, group, dim = queries.shape
    return undo_rotary_halves(queries.transpose(2, 3).flatten(1, 2), rotary).view(batch, heads, group, tokens, dim)
