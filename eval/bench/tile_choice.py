"""Which key tiles each tile of queries of a long prompt would read, and what that drops, in plain torch.

Nothing in the attention of a patched model reads this yet: `turbo-hf bench density` measures it on a model's own heads.
"""

from typing import NamedTuple

import torch

from turbo_hf.eval.bench.oracle import by_kv_head, weights

TILE = 128
"""Queries and keys of a tile, as in the prompt kernels."""


class TileRule(NamedTuple):
    """What a tile of queries reads: forced tiles, wanted tiles, and the fewest tiles that cover the mass.

    mass: share in (0, 1] of the estimated softmax, averaged over the rows of a tile.
    peak: a key tile that one row alone gives this share, in (0, 1], is read.
    sink_tokens, window_tokens: the first tokens, and the newest before a tile of queries: read by all, in whole tiles.
    tail_tokens: the last queries, which read every key.
    """

    mass: float = 0.95
    peak: float = 0.02
    sink_tokens: int = 128
    window_tokens: int = 512
    tail_tokens: int = 256

    def check(self) -> None:
        """ValueError for a share outside (0, 1] or a negative number of tokens."""
        for name in ("mass", "peak"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be above 0 and at most 1; got {getattr(self, name)}.")
        for name in ("sink_tokens", "window_tokens", "tail_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0; got {getattr(self, name)}.")


def choose_tiles(
    q: torch.Tensor,
    k: torch.Tensor,
    rule: TileRule,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """bool [Hq, T, T]: the key tiles that each tile of queries reads; only tiles at or before its own.

    q: float [Hq, N, D]; k: float [Hkv, N, D], Hq a multiple of Hkv; T = ceil(N / 128). Causal, without a window.

    A row's score of a key tile is ln 128 + scaling q . mean(k): by Jensen at most the logarithm of the tile's true sum
    of exponentials. Its softmax runs over the tiles wholly before the row's own. Ties at the cut are all read.

    Raises:
        ValueError: a rule out of its range.
    """
    rule.check()
    heads, tokens, _ = q.shape
    tiles = -(-tokens // TILE)
    at = torch.arange(tiles, device=q.device)
    query, key = at[:, None], at[None, :]
    first_of_window = query - -(-rule.window_tokens // TILE)
    forced = (key < -(-rule.sink_tokens // TILE)) | (key >= first_of_window)
    forced = (forced | (query * TILE + TILE > tokens - rule.tail_tokens)) & (key <= query)
    kept = forced.repeat(heads, 1, 1)
    whole = tokens // TILE
    means = k[:, : whole * TILE].float().unflatten(1, (whole, TILE)).mean(2).mT
    for tile in range(1, tiles):
        rows = q[:, tile * TILE : (tile + 1) * TILE].float()
        score = by_kv_head(rows, means[:, :, :tile]) * scaling
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        score = score + torch.tensor(TILE, device=q.device).log()
        total = score.logsumexp(-1, keepdim=True)
        if sinks is not None:
            total = torch.logaddexp(total, sinks.detach().to(score)[:, None, None])
        share = torch.exp(score - total)
        wanted, mean = share.amax(1) >= rule.peak, share.mean(1)
        ordered = mean.sort(-1, descending=True).values
        # tiles before the cut cover less than the mass of what all tiles hold
        short = ordered.cumsum(-1) < rule.mass * ordered.sum(-1, keepdim=True)
        cut = ordered.gather(-1, short.sum(-1, keepdim=True).clamp(max=tile - 1))
        kept[:, tile, :tile] |= wanted | (mean >= cut)
    return kept


def density(kept: torch.Tensor) -> torch.Tensor:
    """float [Hq]: share of the causal tiles that are read."""
    tiles = kept.shape[-1]
    return kept.sum((1, 2)) / (tiles * (tiles + 1) / 2)


def dropped_mass(
    q: torch.Tensor,
    k: torch.Tensor,
    kept: torch.Tensor,
    places: torch.Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """float [Hq, R]: the exact share of the softmax of the rows at `places` (int64 [R]) that falls on unread tiles.

    q, k, kept: as of `choose_tiles`. An output differs from the dense one by at most twice this share times max |v|.
    """
    parts = []
    # 64 rows at a time bound the memory
    for here in places.split(64):
        found = weights(
            q[:, here].double(), k.double(), here, scaling=scaling, causal=True, softcap=softcap, sinks=sinks
        )
        unread = ~kept[:, here // TILE].repeat_interleave(TILE, -1)[..., : k.shape[1]]
        parts.append((found.p * unread).sum(-1) / found.total[..., 0])
    return torch.cat(parts, -1)
