"""Launches of the kernels that choose key tiles. Imported only where one runs, as it needs Triton."""

import math

import torch

from turbo_hf.layout import PROMPT_TILE, KVStore, Scoring, TileRule, power_of_two
from turbo_hf.ops import gpu
from turbo_hf.ops.prefill.kernel_arguments import Listed
from turbo_hf.ops.prefill.kernel_tiles import (
    dropped_mass_kernel,
    keep_tiles_kernel,
    list_tiles_kernel,
    score_tiles_kernel,
)
from turbo_hf.ops.prefill.reference_tiles import first_of_tail, past_tiles, tile_means

SCRATCH = 1 << 28
"""Bytes of scores held at a time."""


def _last_contiguous(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _shape(q: torch.Tensor, k: torch.Tensor) -> dict[str, int]:
    heads, dim = q.shape[1], q.shape[3]
    return {"HEADS": heads, "GROUP": heads // k.shape[1], "D": dim, "DP": max(32, power_of_two(dim))}


def launch_choose_tiles(q: torch.Tensor, k: torch.Tensor, rule: TileRule, scoring: Scoring) -> torch.Tensor:
    """`ops.prefill.tiles.choose_tiles`: two launches for as many heads at a time as their scores have room."""
    batch, heads, tokens, _ = q.shape
    q, tiles, past = _last_contiguous(q), -(-tokens // PROMPT_TILE), (k.shape[2] - tokens) // PROMPT_TILE
    triangle, tail = tiles * past + tiles * (tiles - 1) // 2, first_of_tail(tokens, rule)
    scored = tail if past else tail - 1
    sink, window = (-(-n // PROMPT_TILE) for n in (rule.sink_tokens, rule.window_tokens))
    kept = torch.empty(batch, heads, triangle, dtype=torch.uint8, device=q.device)
    means = tile_means(k, q.dtype).contiguous()
    group = heads // k.shape[1]
    together = max(1, SCRATCH // (4 * max(triangle, 1) * group)) * group
    scores = torch.empty(min(together, heads), triangle, device=q.device)
    shape, (block, warps, stages) = _shape(q, k), _score_tiles(_row_bytes(q) > 256)
    with torch.cuda.device_of(q):
        for row in range(batch):
            for first in range(0, heads, together):
                some = q[row : row + 1, first : first + together]
                of_kv = means[row : row + 1, first // group :]
                count = some.shape[1]
                own = None if rule.heads is None else rule.heads[first:]
                if scored > 0:
                    score_tiles_kernel[(count * scored,)](
                        some, of_kv, scores, scoring, *some.stride()[:3], tokens, tiles, past, means.shape[2], tail,
                        rule.peak, first, own, **shape, BLOCK=block, num_warps=warps, num_stages=stages, **gpu.FMA,
                    )  # fmt: skip
                keep_tiles_kernel[(count * tiles,)](
                    scores, kept[row, first:], tiles, past, tail, sink, window, rule.mass, rule.most_density, own,
                    ALL=_all(past + tiles), num_warps=_warps(past + tiles), **gpu.FMA,
                )  # fmt: skip
    return kept


def _score_tiles(wide: bool) -> tuple[int, int, int]:
    """Mean keys per tile, warps and stages of the kernel that scores. wide: queries of more than 256 bytes."""
    return (32, 8, 1) if wide else (64, 4, 2)


def _row_bytes(q: torch.Tensor) -> int:
    """Bytes of a query, as tiles hold it."""
    return max(32, power_of_two(q.shape[3])) * q.element_size()


def _all(tiles: int) -> int:
    return power_of_two(max(tiles, 128))


def _warps(tiles: int) -> int:
    return 1 if tiles <= 1024 else 4


def launch_list_tiles(kept: torch.Tensor, tokens: int, past: KVStore | None = None) -> Listed:
    """The lists of what `kept` marks in prompts of so many tokens, or in chunks over a past: one launch."""
    pairs, tiles, before = kept.shape[0] * kept.shape[1], -(-tokens // PROMPT_TILE), past_tiles(kept, tokens)
    # the kernel for Hopper reads ahead, by up to two places
    listed = torch.empty(pairs * kept.shape[2] + 2, dtype=torch.int16, device=kept.device)
    listed[-2:] = 0
    counts = torch.empty(1 if past is None else 2, pairs, tiles, dtype=torch.int32, device=kept.device)
    # Triton compares no tuple with a None in it
    lists, sealed, block = Listed(listed, counts[0], counts[-1]), None, 1
    if past is not None:
        sealed, block = past.sealed, past.block
    with torch.cuda.device_of(kept):
        list_tiles_kernel[(pairs * tiles,)](
            kept, lists, sealed, tiles, before, HEADS=kept.shape[1], BLOCK=block, ALL=_all(before + tiles),
            num_warps=_warps(before + tiles), **gpu.FMA,
        )  # fmt: skip
    return lists


def launch_dropped_mass(
    q: torch.Tensor,
    k: torch.Tensor,
    kept: torch.Tensor,
    places: torch.Tensor,
    scoring: Scoring,
    besides: torch.Tensor | None = None,
) -> torch.Tensor:
    """`ops.prefill.tiles.dropped_mass`: one launch, in which several programs share the keys of a query."""
    batch, heads, tokens, _ = q.shape
    some, k = q[:, :, places].contiguous(), _last_contiguous(k)
    tiles, part, past = -(-tokens // PROMPT_TILE), 32, past_tiles(kept, tokens)
    parts, wide = -(-(past + tiles) // part), _row_bytes(q) > 256
    found = torch.empty(3, parts, batch * heads, len(places), device=q.device)
    rows = 16 if wide else 32
    with torch.cuda.device_of(q):
        dropped_mass_kernel[(batch * heads * -(-len(places) // rows), parts)](
            some, places, k, kept, found, scoring, *k.stride()[:3], len(places), tokens, tiles, past, part,
            BLOCK_R=rows, BLOCK=32 if wide else PROMPT_TILE, num_warps=4, num_stages=2, **_shape(q, k), **gpu.FMA,
        )  # fmt: skip
    top, total, gone = found
    # every query sees its own tile, so that some maximum is finite
    most = top.amax(0)
    weight = torch.exp2(top - most)
    whole = (total * weight).sum(0)
    if scoring.sinks is not None:
        sinks = scoring.sinks.detach().float().repeat(batch)[:, None] * math.log2(math.e)
        whole = whole + torch.exp2(sinks - most)
    if besides is not None:
        whole = whole + torch.exp2(besides.reshape(most.shape) * math.log2(math.e) - most)
    share: torch.Tensor = (gone * weight).sum(0) / whole
    return share.view(batch, heads, -1)
