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


def reference_assign_and_score(
    keys: torch.Tensor,
    queries: torch.Tensor,
    centroids: torch.Tensor,
    classifier: Mapping[str, torch.Tensor] | None = None,
    *,
    rotary: Rotary | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    found, x = reference_assign(keys, centroids, rotary=rotary), _pre_rotary(queries, rotary)
    if classifier is None:
        # inner products are linear: those of the sum
        return found, torch.matmul(x.sum(2), centroids.float().mT)
    weight_1, bias_1, weight_2, bias_2 = (classifier[name].float() for name in CLASSIFIER)
    hidden = (x @ weight_1[:, None] + bias_1[:, None, None]).relu()
    # the second layer is linear: it runs on the sum
    return found, hidden.sum(2) @ weight_2 + queries.shape[3] * bias_2[:, None]


def _pre_rotary(queries: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
    """Queries [B, Hkv, M, G, D] before rotary embedding: float32 [B, Hkv, G, M, D]."""
    batch, heads, tokens, group, dim = queries.shape
    return undo_rotary_halves(queries.transpose(2, 3).flatten(1, 2), rotary).view(batch, heads, group, tokens, dim)
