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


def reference_visit(logits: torch.Tensor, probes: int) -> torch.Tensor:
    bucket = logits.float().argsort(dim=-1, descending=True, stable=True)
    return torch.zeros_like(bucket, dtype=torch.bool).scatter(-1, bucket[..., :probes], True)


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
    return hidden.sum(2) @ weight_2 + group * bias_2[:, None]


def reference_score(queries: torch.Tensor, centroids: torch.Tensor, *, rotary: Rotary | None = None) -> torch.Tensor:
    # inner products are linear: those of the sum
    return torch.matmul(_pre_rotary(queries, rotary).sum(2), centroids.float().mT)


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
