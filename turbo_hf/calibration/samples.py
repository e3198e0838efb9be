"""What a run keeps of one layer, and the true attention mass of its queries by bucket."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from turbo_hf.calibration.capture import Seen
from turbo_hf.calibration.settings import Settings
from turbo_hf.sparse.undo_rotary import undo_rotary


@dataclass(slots=True)
class Samples:
    """Keys and sampled queries of one layer, a list item per window, on the CPU in the model's dtype.

    Of a model on a GPU they are in pinned memory, from which training reads without waiting.

    scaling, softcap: of the scores.
    device: where the layer computes, and its index is made.
    pre_rotary_keys, keys: [Hkv, L, D] before and after rotary embedding.
    pre_rotary_queries, queries: [Hkv, G, n, D], grouped by the KV head that they read.
    positions: int64 [n].
    far: bool [Hkv, G, n], true where the best key is long ago.
    """

    scaling: float
    softcap: float | None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    pre_rotary_keys: list[torch.Tensor] = field(default_factory=list)
    keys: list[torch.Tensor] = field(default_factory=list)
    pre_rotary_queries: list[torch.Tensor] = field(default_factory=list)
    queries: list[torch.Tensor] = field(default_factory=list)
    positions: list[torch.Tensor] = field(default_factory=list)
    far: list[torch.Tensor] = field(default_factory=list)

    def add(self, seen: Seen, settings: Settings, window: int) -> None:
        """Keep what one call saw of window number `window`. Positions depend only on the seed and the window."""
        assert seen.rotary is not None
        length, heads = seen.key.shape[2], seen.key.shape[1]
        seeded = torch.Generator().manual_seed(settings.seed * 1_000_003 + window)
        first = settings.first_query
        chosen = torch.randperm(length - first, generator=seeded)[: settings.queries].sort().values + first
        shape, dtype = (heads, seen.query.shape[1] // heads), seen.key.dtype
        query = seen.query[:, :, chosen.to(seen.query.device)]
        rotary = tuple(part[:, chosen.to(part.device)] for part in seen.rotary)
        pre_rotary_query = undo_rotary(seen.source.module, query, (rotary[0], rotary[1]))[0].unflatten(0, shape)
        pre_rotary_key = undo_rotary(seen.source.module, seen.key, seen.rotary)[0]
        query = query[0].unflatten(0, shape)
        far = self._is_far(query, seen.key[0], chosen.to(seen.key.device), settings.far)
        self.positions.append(chosen)
        self.pre_rotary_keys.append(_kept(pre_rotary_key.to(dtype)))
        self.keys.append(_kept(seen.key[0]))
        self.pre_rotary_queries.append(_kept(pre_rotary_query.to(dtype)))
        self.queries.append(_kept(query))
        self.far.append(_kept(far))
        if seen.key.is_cuda:
            torch.cuda.current_stream(seen.key.device).synchronize()

    def _is_far(self, query: torch.Tensor, key: torch.Tensor, at: torch.Tensor, far: int) -> torch.Tensor:
        """SAAP sec. 5: whether a query's best key, the sink aside, is more than `far` tokens away. bool [Hkv, G, n]."""
        token, wide = torch.arange(key.shape[1], device=key.device), key.float().mT
        best = []
        for q, position in zip(query.float().split(64, 2), at.split(64), strict=True):
            score = torch.bmm(q.flatten(1, 2), wide).unflatten(1, q.shape[1:3])
            visible = (token <= position[:, None]) & (token > 0)
            best.append(position - score.masked_fill_(~visible, -torch.inf).argmax(-1))
        return torch.cat(best, -1) > far


def _kept(x: torch.Tensor) -> torch.Tensor:
    """x on the CPU; from a GPU on its way to pinned memory."""
    return x.to("cpu", non_blocking=x.is_cuda)


def long_range(
    query: torch.Tensor,
    position: torch.Tensor,
    key: torch.Tensor,
    local: int,
    scaling: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention of long-range pairs alone (SAAP eq. 1, A); `bucket_sums` makes the mass by bucket of it, A H_k.

    Args:
        query: [N, R, D] after rotary embedding, of N KV heads; position: int64 [N, R].
        key: [N, L, D] after rotary embedding.
        local: only keys further back than this many tokens count, and not the first token (the sink).
        scaling, softcap: of the scores.

    Returns:
        float32 [N, R, L], rows that sum to 1, and which keys count, bool [N, R, L].
    """
    score = torch.bmm(query.float(), key.float().mT).mul_(scaling)
    if softcap is not None:
        score = torch.tanh(score / softcap) * softcap
    token = torch.arange(key.shape[1], device=key.device)
    counts = (token > 0) & (position[..., None] - token > local)
    return score.masked_fill_(~counts, -torch.inf).softmax(-1), counts


LARGEST = 2.0**10
"""What halves are multiplied with where they hold shares of 1: those below 6e-5 keep their digits."""


def bucket_sums(shares: Iterable[torch.Tensor], buckets: torch.Tensor, clusters: int) -> list[torch.Tensor]:
    """Each of `shares` [N, R, L], numbers from 0 to 1, summed over the tokens of each bucket: float32 [N, R, C].

    The same bits each time on one device. On a GPU shares are rounded to 11 bits.
    """
    if not buckets.is_cuda:
        return [
            x.new_zeros(*x.shape[:2], clusters, dtype=torch.float32).scatter_add_(
                2, buckets[:, None].expand_as(x), x.float()
            )
            for x in shares
        ]
    # scatter_add on CUDA adds in any order, and products in float32 take most of the time of training
    member = (buckets[..., None] == torch.arange(clusters, device=buckets.device)).half()
    return [torch.bmm((x * LARGEST).half(), member, out_dtype=torch.float32) / LARGEST for x in shares]
