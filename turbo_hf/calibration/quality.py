"""How good an index is, on held-out windows: attention mass recalled for a given share of the keys."""

from typing import Any

import torch

from turbo_hf.calibration.centroids import assign
from turbo_hf.calibration.query_model import classify
from turbo_hf.calibration.samples import Samples, bucket_sums, long_range

SELECTIVITY = (0.01, 0.02, 0.04, 0.08)
"""Shares of the keys (without the always-read ones) that may be read."""

WAYS = ("classifier", "k-means", "k-means, rotated", "random")
"""How buckets are chosen: by the query classifier, by inner products with the centroids of keys before and after rotary
embedding (the latter have buckets of their own), by chance."""


@torch.no_grad()
def evaluate(
    samples: Samples,
    buckets: list[torch.Tensor],
    centroids: torch.Tensor,
    rotated: torch.Tensor,
    classifier: dict[str, torch.Tensor],
    windows: range,
    local: int,
    seed: int,
) -> dict[str, Any]:
    """Figures of one layer over the long-range queries of `windows`.

    Buckets are chosen as in decoding: scores summed over the query heads of a KV head, best buckets first, until the
    share of keys is read. The last bucket counts in part: the same share of its mass as of its keys.

    rotated: centroids [Hkv, C, D] of keys after rotary embedding.

    Returns, by name:
        recall: for each way of choosing (`WAYS`), the share of long-range attention mass at each of `SELECTIVITY`, the
            mean over long-range queries of all heads; null without any.
        queries: number of long-range queries for each KV head.
    """
    heads, clusters = centroids.shape[:2]
    seeded = torch.Generator().manual_seed(seed)
    total = {way: torch.zeros(len(SELECTIVITY), dtype=torch.float64) for way in WAYS}
    counted = torch.zeros(heads, dtype=torch.float64)
    device = centroids.device
    for window in windows:
        keys = samples.keys[window].to(device, non_blocking=True)
        turned = assign(keys, rotated)
        parts = (samples.pre_rotary_queries[window], samples.queries[window], samples.far[window])
        for plain, query, far, at in zip(
            *(x.split(64, 2) for x in parts), samples.positions[window].split(64), strict=True
        ):
            groups, rows = query.shape[1], query.shape[2]
            asking, places = query.flatten(1, 2).to(device), at.repeat(heads, groups).to(device)
            pairs = long_range(asking, places, keys, local, samples.scaling, samples.softcap)
            mass, sizes = bucket_sums(pairs, buckets[window], clusters)
            flat = plain.flatten(1, 2).to(device).float()
            logits = classify(classifier, flat)
            # keys that count depend on the position alone
            shape = (heads, groups, rows, clusters)
            sizes = sizes.view(shape)[:, 0]
            scores = {
                "classifier": logits.view(shape).sum(1),
                "k-means": torch.bmm(flat, centroids.float().mT).view(shape).sum(1),
                "random": torch.rand(heads, rows, clusters, generator=seeded).to(device),
            }
            weight = far.to(device).double()
            mass = mass.view(shape)
            for way, score in scores.items():
                total[way] += _recalled(score, mass, sizes, weight).cpu()
            mass, sizes = bucket_sums(pairs, turned, clusters)
            score = torch.bmm(asking.float(), rotated.float().mT).view(shape).sum(1)
            recalled = _recalled(score, mass.view(shape), sizes.view(shape)[:, 0], weight)
            total["k-means, rotated"] += recalled.cpu()
            counted += weight.sum((1, 2)).cpu()
    count = int(counted.sum())
    recall = {way: [round(x, 4) for x in (sums / count).tolist()] if count else None for way, sums in total.items()}
    return {"recall": recall, "queries": [int(x) for x in counted.tolist()]}


def _recalled(score: torch.Tensor, mass: torch.Tensor, sizes: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Sum over weighted queries of the mass in the buckets that are read, [selectivities].

    score, sizes: [Hkv, n, C]; mass: [Hkv, G, n, C]; weight: [Hkv, G, n].
    """
    order = score.argsort(-1, descending=True)
    size = sizes.gather(-1, order)
    before = size.cumsum(-1) - size
    seen = mass.gather(-1, order[:, None].expand_as(mass)).double()
    allowed = sizes.sum(-1, keepdim=True)
    parts = [((allowed * limit - before) / size.clamp(min=1)).clamp(0, 1) for limit in SELECTIVITY]
    each = [(seen * part[:, None]).sum(-1) * weight for part in parts]
    return torch.stack([x.sum() for x in each])
