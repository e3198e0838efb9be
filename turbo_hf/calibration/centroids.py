"""Spherical k-means on keys before rotary embedding, all KV heads at once (SAAP sec. 4, appendix A)."""

import torch

from turbo_hf.calibration.settings import DEFAULT_CLUSTERS, MIN_KEYS, SMALLEST_CLUSTERS

COMPARED = 4096
"""Keys per head that are compared with all centroids at a time."""
KEYS_EACH = 256
"""Maximum number of keys per centroid that k-means uses; more change little."""


def sample_keys(count: int, clusters: int, generator: torch.Generator) -> torch.Tensor:
    """Which of `count` keys k-means looks at: int64, in order; all, or so many that there are `KEYS_EACH` for each."""
    most = clusters * KEYS_EACH
    return torch.arange(count) if count <= most else torch.randperm(count, generator=generator)[:most].sort().values


def choose_clusters(wanted: int | None, keys: int) -> int:
    """C for `keys` keys per head: `wanted`, or 1024 halved until each has 32 keys. ValueError: too few keys."""
    if wanted is not None:
        if wanted * 2 > keys:
            raise ValueError(
                f"{keys} keys per head are too few for {wanted} clusters (2 for each at least). Give more text, or "
                "fewer clusters."
            )
        return wanted
    clusters = DEFAULT_CLUSTERS
    while clusters * MIN_KEYS > keys and clusters > SMALLEST_CLUSTERS:
        clusters //= 2
    if clusters * 2 > keys:
        raise ValueError(f"{keys} keys per head are too few for clusters. Give more text.")
    return clusters


def k_means(keys: torch.Tensor, clusters: int, iterations: int, generator: torch.Generator) -> torch.Tensor:
    """Unit centroids [N, C, D] of keys [N, P, D], by head.

    generator: on the CPU, so that a seed means the same on every device. It picks the initial keys, and those that
    replace a centroid without keys.

    Source: SAAP appendix A: random start, 10 iterations; assignment by the largest inner product with unit centroids.
    """
    heads, count = keys.shape[:2]
    keys = keys.float()
    start = torch.stack([torch.randperm(count, generator=generator)[:clusters] for _ in range(heads)])
    found = _unit(torch.take_along_dim(keys, start.to(keys.device)[..., None], 1))
    for _ in range(iterations):
        buckets = assign(keys, found)
        total = torch.zeros_like(found)
        filled = torch.zeros(heads, clusters, device=keys.device)
        # in parts: the one-hot matrix of buckets would be larger than the keys
        for part, bucket in zip(keys.split(COMPARED, 1), buckets.split(COMPARED, 1), strict=True):
            member = (bucket[..., None] == torch.arange(clusters, device=keys.device)).to(part.dtype)
            total += torch.bmm(member.mT, part)
            filled += member.sum(1)
        spare = torch.randint(count, (heads, clusters), generator=generator).to(keys.device)
        other = torch.take_along_dim(keys, spare[..., None], 1)
        found = _unit(torch.where((filled > 0)[..., None], total, other))
    return found


def assign(keys: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """Bucket of each key: int64 [N, P] of keys [N, P, D] and unit centroids [N, C, D], by largest inner product."""
    parts = [torch.bmm(part.float(), centroids.float().mT).argmax(-1) for part in keys.split(COMPARED, 1)]
    return torch.cat(parts, 1)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(x, dim=-1)
