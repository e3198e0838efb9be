"""What the key tiles that a long prompt reads leave out, exactly: the judge of `ops.prefill.tiles`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from turbo_hf.eval.bench.oracle import weights
from turbo_hf.layout import PROMPT_TILE
from turbo_hf.sparse import prompts

MOST_SHAPES = 64
"""Of prompts or chunks whose random tiles are kept."""


def density(kept: torch.Tensor) -> torch.Tensor:
    """float [Hq]: share of the causal tiles that are read."""
    tiles = kept.shape[-1]
    return kept.sum((1, 2)) / (tiles * (tiles + 1) / 2)


def random_tiles(like: torch.Tensor, share: float, seed: int) -> torch.Tensor:
    """`kept` of `ops.prefill` in the shape of `like`: each earlier key tile with this probability."""
    generator = torch.Generator(like.device).manual_seed(seed)
    return (torch.rand(like.shape, generator=generator, device=like.device) < share).to(torch.uint8)


@contextmanager
def at_density(share: float) -> Iterator[None]:
    """Sparse prompts choose tiles and audit the choice, and then read a random share of the tiles instead."""
    ops: Any = prompts
    choose, audit = ops.choose_tiles, ops.dropped_mass
    # they are drawn in the first pass, which is not timed; each chunk of a prompt has a shape of its own
    drawn: dict[torch.Size, torch.Tensor] = {}

    def instead(*args: Any, **options: Any) -> torch.Tensor:
        kept = choose(*args, **options)
        if kept.shape not in drawn:
            if len(drawn) == MOST_SHAPES:
                drawn.clear()
            drawn[kept.shape] = random_tiles(kept, share, 0)
        return drawn[kept.shape]

    ops.choose_tiles = instead
    # no head becomes dense
    ops.dropped_mass = lambda *args, **options: audit(*args, **options) * 0
    try:
        yield
    finally:
        ops.choose_tiles, ops.dropped_mass = choose, audit


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
