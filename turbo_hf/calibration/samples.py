"""What a run keeps of one layer, and the true attention mass of its queries by bucket."""

from dataclasses import dataclass, field

import torch

from turbo_hf.calibration.capture import Seen
from turbo_hf.calibration.settings import Settings
from turbo_hf.rotary import unrotate


@dataclass(slots=True)
class Samples:
    """Keys and sampled queries of one layer, a list item a window, on the CPU in the model's dtype.

    plain_keys, keys: [Hkv, L, D] before and after rotary embedding. plain_queries, queries: [Hkv, G, n, D], grouped by
    the KV head that they read. positions: int64 [n]. far: bool [Hkv, G, n], true where the best key is long ago.
    scaling, softcap: of the scores. device: where the layer computes, and its index is made.
    """

    scaling: float
    softcap: float | None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    plain_keys: list[torch.Tensor] = field(default_factory=list)
    keys: list[torch.Tensor] = field(default_factory=list)
    plain_queries: list[torch.Tensor] = field(default_factory=list)
    queries: list[torch.Tensor] = field(default_factory=list)
    positions: list[torch.Tensor] = field(default_factory=list)
    far: list[torch.Tensor] = field(default_factory=list)

    def add(self, seen: Seen, settings: Settings, window: int) -> None:
        """Keep what one call saw of window number `window`. Positions depend on the seed and the window only."""
        assert seen.rotary is not None
        length, heads = seen.key.shape[2], seen.key.shape[1]
        seeded = torch.Generator().manual_seed(settings.seed * 1_000_003 + window)
        first = settings.first_query
        chosen = torch.randperm(length - first, generator=seeded)[: settings.queries].sort().values + first
        at = chosen.to(seen.key.device)
        groups = seen.query.shape[1] // heads
        plain_query = unrotate(seen.source.module, seen.query, seen.rotary)[0, :, at]
        plain_key = unrotate(seen.source.module, seen.key, seen.rotary)[0]
        query = seen.query[0, :, at]
        kept, dtype = "cpu", seen.key.dtype
        self.positions.append(chosen)
        self.plain_keys.append(plain_key.to(kept, dtype))
        self.keys.append(seen.key[0].to(kept))
        self.plain_queries.append(plain_query.unflatten(0, (heads, groups)).to(kept, dtype))
        self.queries.append(query.unflatten(0, (heads, groups)).to(kept))
        self.far.append(self._is_far(query.unflatten(0, (heads, groups)), seen.key[0], at, settings.far).to(kept))

    def _is_far(self, query: torch.Tensor, key: torch.Tensor, at: torch.Tensor, far: int) -> torch.Tensor:
        """SAAP sec. 5: whether a query's best key, the sink aside, is more than `far` tokens away. bool [Hkv, G, n]."""
        token = torch.arange(key.shape[1], device=key.device)
        best = []
        for q, position in zip(query.split(64, 2), at.split(64), strict=True):
            score = q.float() @ key.float().mT[:, None]
            visible = (token <= position[:, None]) & (token > 0)
            best.append(position - score.masked_fill(~visible, -torch.inf).argmax(-1))
        return torch.cat(best, -1) > far


def true_mass(
    query: torch.Tensor,
    position: torch.Tensor,
    key: torch.Tensor,
    buckets: torch.Tensor,
    clusters: int,
    local: int,
    scaling: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the attention of long-range pairs lies (SAAP eq. 1, A H_k).

    Args:
        buckets: int64 [N, L]. clusters: C. The others as in `long_range`.

    Returns:
        float32 [N, R, C], rows that sum to 1, and the number of keys that count by bucket, float32 [N, R, C].
    """
    weight, counts = long_range(query, position, key, local, scaling, softcap)
    return bucket_sums(weight, buckets, clusters), bucket_sums(counts, buckets, clusters)


def long_range(
    query: torch.Tensor,
    position: torch.Tensor,
    key: torch.Tensor,
    local: int,
    scaling: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention of long-range pairs alone.

    Args:
        query: [N, R, D] after rotary embedding, of N KV heads; position: int64 [N, R].
        key: [N, L, D] after rotary embedding.
        local: only keys further back than this many tokens count, and not the first token (the sink).
        scaling, softcap: of the scores.

    Returns:
        float32 [N, R, L], rows that sum to 1, and which keys count, as float32 [N, R, L].
    """
    score = torch.bmm(query.float(), key.float().mT) * scaling
    if softcap is not None:
        score = torch.tanh(score / softcap) * softcap
    token = torch.arange(key.shape[1], device=key.device)
    counts = (token > 0) & (position[..., None] - token > local)
    return score.masked_fill(~counts, -torch.inf).softmax(-1), counts.float()


def bucket_sums(x: torch.Tensor, buckets: torch.Tensor, clusters: int) -> torch.Tensor:
    """x [N, R, L] summed over the tokens of each bucket: [N, R, C]. The same bits each time, on every device."""
    if x.is_cuda:
        # scatter_add on CUDA adds in any order
        return torch.bmm(x, torch.nn.functional.one_hot(buckets, clusters).to(x.dtype))
    return x.new_zeros(*x.shape[:2], clusters).scatter_add_(2, buckets[:, None].expand_as(x), x)
