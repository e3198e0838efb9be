"""Which key tiles each tile of queries of a long prompt reads, and the softmax that this drops."""

from typing import Any, NamedTuple

import torch

from turbo_hf.layout import PROMPT_TILE, KVStore, Scoring, TileRule, power_of_two
from turbo_hf.ops.backend import uses_triton, why_no_kernel
from turbo_hf.ops.prefill.reference_tiles import (
    as_square,
    past_tiles,
    reference_choose_tiles,
    reference_dropped_mass,
    scores,
)
from turbo_hf.ops.store.reference_pages import sealed_tokens

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

    q: float [B, Hq, M, D]; k: float [B, Hkv, 128 P + M, D], P whole tiles of a past before the queries' own keys
    (`sparse_keys`); Hq a multiple of Hkv. Every row has M tokens. scoring: without SAS; mean keys' scores are capped as
    others are, and sinks take their share.

    Returns uint8 [B, Hq, T P + T (T - 1) / 2], T = ceil(M / 128): 1 where a tile is read; the P + t tiles before tile t
    of queries begin at t P + t (t - 1) / 2, those of the past first. Nothing waits for the device.

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
        tiles, past = -(-q.shape[2] // PROMPT_TILE), (k.shape[2] - q.shape[2]) // PROMPT_TILE
        below = torch.ones(tiles, past + tiles, dtype=torch.bool, device=q.device).tril(past - 1)
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
    rest: torch.Tensor | None = None,
    *,
    backend: str = "auto",
) -> torch.Tensor:
    """float32 [B, Hq, R]: the share of the softmax of the queries at `places` on tiles that are not read.

    q, k, kept, scoring: as of `choose_tiles`. places: int64 [R], ascending. rest: float [B, Hkv, n, D], keys of a past
    that are in no tile, and that all queries read. All keys are read for it; only the rounding of a product in float32,
    and of a past's keys to q's dtype, is between this and the exact share. An output differs from the dense one by at
    most twice this share times the largest |v|.
    """
    besides = None
    if rest is not None and rest.shape[2]:
        wide = torch.promote_types(q.dtype, torch.float32)
        found = [scores(x.to(wide), y.to(wide).mT, scoring) for x, y in zip(q[:, :, places], rest, strict=True)]
        besides = torch.stack(found).logsumexp(-1).float()
    if not uses_triton(backend, q.device, why_no_choice(q)):
        square = as_square(kept, q.shape[2])
        rows = [
            reference_dropped_mass(*row, places, scoring, None if besides is None else besides[i])
            for i, row in enumerate(zip(q, k, square, strict=True))
        ]
        return torch.stack(rows)
    from turbo_hf.ops.prefill.launch_tiles import launch_dropped_mass  # noqa: PLC0415 - needs Triton

    return launch_dropped_mass(q, k, kept, places, scoring, besides)


class SparseKeys(NamedTuple):
    """The keys that a sparse chunk meets, in its own dtype.

    keys: [B, Hkv, 128 P + M, D], the P whole tiles of the past's sealed blocks, and the chunk's own.
    rest: [B, Hkv, n, D], what of the past is in no whole tile, and is always read.
    """

    keys: torch.Tensor
    rest: torch.Tensor


def sparse_keys(past: KVStore, k: torch.Tensor, sealed: int, opened: int, *, backend: str = "auto") -> SparseKeys:
    """Keys of a past, dequantized, and those that follow.

    past: of rows that have `sealed` blocks and `opened` open tokens each. k: float [B, Hkv, M, D], rotated like the
    past's.
    """
    size = past.block
    whole = sealed * size // PROMPT_TILE * PROMPT_TILE
    keys = k.new_empty(*k.shape[:2], whole + k.shape[2], k.shape[3])
    rest = k.new_empty(*k.shape[:2], sealed * size - whole + opened, k.shape[3])
    keys[:, :, whole:] = k
    parts = ((0, keys[:, :, :whole]), (whole // size, rest[:, :, : rest.shape[2] - opened]))
    if uses_triton(backend, k.device, why_no_kernel(k)):
        from turbo_hf.ops.prefill.launch import dequantize_keys  # noqa: PLC0415 - needs Triton

        for first, to in parts:
            dequantize_keys(past, first, to)
    else:
        numbers, size_of = sealed_tokens(past)[:2]
        for first, to in parts:
            own = slice(first * size, first * size + to.shape[2])
            torch.mul(numbers[:, :, own], size_of[:, :, own, None], out=to)
    last = rest[:, :, rest.shape[2] - opened :]
    torch.mul(past.k_open[:, :, :opened], past.k_scale[:, :, :opened, None], out=last)
    return SparseKeys(keys, rest)


def density(kept: torch.Tensor, tokens: int) -> torch.Tensor:
    """float32 [B, Hq]: the share of the causal tiles that is read."""
    tiles = -(-tokens // PROMPT_TILE)
    return (kept.sum(-1, dtype=torch.float32) + tiles) / (kept.shape[-1] + tiles)


def check_kept(kept: torch.Tensor, q: torch.Tensor, past: KVStore | None = None) -> None:
    """ValueError unless `kept` is of prompts, or of chunks over a past, like q [B, Hq, M, D]."""
    tiles, before = -(-q.shape[2] // PROMPT_TILE), 0
    if past is not None:
        # as many as `kept` is about, if the table has room for them
        before = min(past_tiles(kept, q.shape[2]), past.table.shape[1] * past.block // PROMPT_TILE)
    want = (*q.shape[:2], tiles * before + tiles * (tiles - 1) // 2)
    if kept.shape != want or kept.dtype != torch.uint8 or kept.device != q.device or not kept.is_contiguous():
        raise ValueError(
            f"kept must be contiguous uint8 {list(want)} on {q.device}, the tiles before each of the {tiles} tiles of "
            f"128 queries; got {kept.dtype} {list(kept.shape)} on {kept.device}."
        )
    if before + tiles > MOST_TILES:
        most, got = MOST_TILES * PROMPT_TILE, before * PROMPT_TILE + q.shape[2]
        raise ValueError(f"kept numbers tiles in 16 bits: at most {most} tokens; got {got}.")
