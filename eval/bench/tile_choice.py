"""Random key tiles of long prompts: what a density is worth, whatever would be chosen."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from turbo_hf.sparse import prompts

MOST_SHAPES = 64
"""Of prompts or chunks whose random tiles are kept."""


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
