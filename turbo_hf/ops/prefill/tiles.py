"""Which key tiles each tile of queries of a long prompt reads, and the softmax that this drops."""

from typing import Any

import torch

from turbo_hf.layout import PROMPT_TILE, Scoring, TileRule, power_of_two
from turbo_hf.ops.backend import uses_triton, why_no_kernel
from turbo_hf.ops.prefill.reference_tiles import as_square, reference_choose_tiles, reference_dropped_mass

MOST_TILES = 1 << 15
"""Tiles are numbered in 16 bits."""


MOST_BYTES = 512
"""Bytes of a query for which the kernels have tiles."""


def why_no_choice(q: torch.Tensor, mode: str = "fp16") -> str | None:
    """Why no kernel makes prompts of queries like q [..., D] sparse in this mode; None if one does."""
    if power_of_two(q.shape[-1]) * q.element_size() > MOST_BYTES:
        return f"sparse prompts have no kernel for {q.dtype} at head dim {q.shape[-1]}"
    return why_no_kernel(q, mode)


def choose_tiles(
    q: torch.Tensor, k: torch.Tensor, rule: TileRule, scoring: Scoring, *, backend: str = "auto"
) -> torch.Tensor:
    """The key tiles that each tile of 128 queries reads beside its own, of causal attention.

    q: float [B, Hq, M, D]; k: float [B, Hkv, M, D], Hq a multiple of Hkv. Every row has M tokens. scoring: without SAS;
    mean keys' scores are capped as others are, and sinks take their share.

    Returns uint8 [B, Hq, T (T - 1) / 2], T = ceil(M / 128): 1 where a tile is read; the t tiles before tile t of
    queries begin at t (t - 1) / 2. Nothing waits for the device.

    Source: estimated shares are those of `reference_choose_tiles`. Keeping the fewest blocks that cover a mass:
    XAttention (arXiv 2503.16428) sec. 2; scores by mean keys: FlashPrefill (arXiv 2603.06199).
    """
    heads = rule.heads
    if heads is not None and (
        heads.shape != (q.shape[1], 2) or heads.dtype != torch.float32 or heads.device != q.device
    ):
        raise ValueError(
            f"rule.heads must be torch.float32 [{q.shape[1]}, 2] on {q.device}; got {heads.dtype} {list(heads.shape)} "
            f"on {heads.device}."
        )
    if not uses_triton(backend, q.device, why_no_choice(q)):
        below = torch.ones(2 * (-(-q.shape[2] // PROMPT_TILE),), dtype=torch.bool, device=q.device).tril(-1)
        how: Any = {"scaling": scoring.scaling, "softcap": scoring.softcap, "sinks": scoring.sinks}
        rows = [reference_choose_tiles(*pair, rule, **how) for pair in zip(q, k, strict=True)]
        return torch.stack(rows)[:, :, below].to(torch.uint8)
    from turbo_hf.ops.prefill.launch_tiles import launch_choose_tiles  # noqa: PLC0415 - needs Triton

    return launch_choose_tiles(q, k, rule, scoring)


def dropped_mass(
    q: torch.Tensor,
    k: torch.Tensor,
    kept: torch.Tensor,
    places: torch.Tensor,
    scoring: Scoring,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """float32 [B, Hq, R]: the share of the softmax of the queries at `places` on tiles that are not read.

    q, k, kept, scoring: as of `choose_tiles`. places: int64 [R], ascending. All keys are read for it; only the rounding
    of a product in float32 is between this and the exact share. An output differs from the dense one by at most twice
    this share times the largest |v|.
    """
    if not uses_triton(backend, q.device, why_no_choice(q)):
        square = as_square(kept, q.shape[2])
        rows = zip(q, k, square, strict=True)
        return torch.stack([reference_dropped_mass(*row, places, scoring) for row in rows])
    from turbo_hf.ops.prefill.launch_tiles import launch_dropped_mass  # noqa: PLC0415 - needs Triton

    return launch_dropped_mass(q, k, kept, places, scoring)


def density(kept: torch.Tensor, tokens: int) -> torch.Tensor:
    """float32 [B, Hq]: the share of the causal tiles that is read."""
    tiles = -(-tokens // PROMPT_TILE)
    return (kept.sum(-1, dtype=torch.float32) + tiles) / (tiles * (tiles + 1) // 2)


def check_kept(kept: torch.Tensor, q: torch.Tensor) -> None:
    """ValueError unless `kept` is of prompts like q [B, Hq, M, D]."""
    tiles = -(-q.shape[2] // PROMPT_TILE)
    want = (*q.shape[:2], tiles * (tiles - 1) // 2)
    if kept.shape != want or kept.dtype != torch.uint8 or kept.device != q.device or not kept.is_contiguous():
        raise ValueError(
            f"kept must be contiguous uint8 {list(want)} on {q.device}, the tiles before each of the {tiles} tiles of "
            f"128 queries; got {kept.dtype} {list(kept.shape)} on {kept.device}."
        )
    if tiles > MOST_TILES:
        raise ValueError(f"kept numbers tiles in 16 bits: at most {MOST_TILES * PROMPT_TILE} tokens; got {q.shape[2]}.")
