"""What the key tiles that a long prompt reads leave out, exactly: the judge of `ops.prefill.tiles`."""

import torch

from turbo_hf.eval.bench.oracle import weights
from turbo_hf.layout import PROMPT_TILE


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

    q, k, kept: as of `reference_choose_tiles`. An output differs from the dense one by at most twice
    this share times max |v|.
    """
    parts = []
    # 64 rows at a time bound the memory
    for here in places.split(64):
        found = weights(
            q[:, here].double(), k.double(), here, scaling=scaling, causal=True, softcap=softcap, sinks=sinks
        )
        unread = ~kept[:, here // PROMPT_TILE].repeat_interleave(PROMPT_TILE, -1)[..., : k.shape[1]]
        parts.append((found.p * unread).sum(-1) / found.total[..., 0])
    return torch.cat(parts, -1)
