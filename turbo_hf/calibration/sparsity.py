"""The cheapest rules of sparse prompts, and of steps by means, that keep what each head drops within a bound."""

from dataclasses import dataclass, field
from typing import Any

import torch

from turbo_hf.calibration.capture import Seen
from turbo_hf.config.prompt_sparsity import CALIBRATED_DROP, PromptSparsity
from turbo_hf.config.turbo_config import SparseConfig
from turbo_hf.layout import PROMPT_TILE, AlwaysRead, ByMeans, KVStore, Scoring
from turbo_hf.ops.prefill.tiles import choose_tiles, density, dropped_mass
from turbo_hf.ops.sparse.reference_means import reference_read_blocks
from turbo_hf.ops.store.reference_quantize import reference_means

RULES = tuple((mass, peak) for mass in (0.9, 0.95, 0.98) for peak in (1.0, 0.1, 0.05, 0.02, 0.01))
"""(mass, peak) of sparse prompts that are tried."""

LEFTS = (0.2, 0.1, 0.05, 0.02, 0.01)
"""Shares left by steps by means that are tried."""

EVERYTHING = (1.0, 1.0)
"""The rule of a head that none of `RULES` serves."""

QUERIES = 128
"""Random queries of a window whose dropped shares are measured."""

BLOCK = 64
"""Tokens of a block; steps know its mean key."""

COVERED = 0.95
"""Share of the queries that must drop no more than `CALIBRATED_DROP`."""


@dataclass(slots=True)
class HeadRules:
    """What each rule reads and drops of one layer's heads, a list item per window.

    densities, read: float32 [rules, Hq], the share of key tiles; and of keys, [shares left, Hkv], for each of `LEFTS`.
    dropped, left: float32 [rules, Hq, R] and [shares left, Hkv, R], the exact share of a query's softmax that is not
        read; of a KV head the largest of its query heads'.
    """

    densities: list[torch.Tensor] = field(default_factory=list)
    dropped: list[torch.Tensor] = field(default_factory=list)
    read: list[torch.Tensor] = field(default_factory=list)
    left: list[torch.Tensor] = field(default_factory=list)

    def add(self, seen: Seen, window: int, seed: int) -> None:
        """Try all rules on one window; on none of a layer that has a window, capped scores or sinks."""
        q, k, always = seen.query, seen.key, PromptSparsity()
        tokens, plain = q.shape[2], seen.softcap is None and seen.sinks is None and seen.source.window is None
        if not plain or tokens < 2 * PROMPT_TILE + always.sink_tokens + always.window_tokens:
            return
        seeded = torch.Generator().manual_seed(seed * 1_000_003 + window)
        places = torch.randperm(tokens, generator=seeded)[:QUERIES].sort().values.to(q.device)
        reads, drops = [], []
        for mass, peak in RULES:
            rule = always.rule._replace(mass=mass, peak=peak, tail_tokens=0)
            kept = choose_tiles(q, k, rule, Scoring(seen.scaling))
            reads.append(density(kept, tokens)[0].cpu())
            drops.append(dropped_mass(q, k, kept, places, Scoring(seen.scaling))[0].cpu())
        self.densities.append(torch.stack(reads))
        self.dropped.append(torch.stack(drops))
        beyond = places[places >= sum(_always())]
        if len(beyond):
            parts = [_by_means(q[0], k[0], beyond, left, seen.scaling) for left in LEFTS]
            self.read.append(torch.stack([part[0] for part in parts]))
            self.left.append(torch.stack([part[1] for part in parts]))

    def found(self, kv_heads: int) -> dict[str, Any]:
        """`LayerCalibration.prompt` and `left_by_head`: of each head what reads least within the bound; {}: none."""
        made: dict[str, Any] = {}
        if self.densities:
            best = _cheapest(self.densities, self.dropped)
            rules = torch.tensor([*RULES, EVERYTHING])[best]
            made["prompt"] = rules.unflatten(0, (kv_heads, -1))
        if self.read:
            made["left_by_head"] = torch.tensor([*LEFTS, 0.0])[_cheapest(self.read, self.left)]
        return made


def _cheapest(read: list[torch.Tensor], dropped: list[torch.Tensor]) -> torch.Tensor:
    """int64 [H], for each head the rule within the bound that reads least; the number of rules: none is."""
    share, drops = torch.stack(read).mean(0), torch.cat(dropped, -1)
    within = drops.quantile(COVERED, -1) <= CALIBRATED_DROP
    cost = torch.cat((share.masked_fill(~within, 2.0), torch.ones_like(share[:1])))
    return cost.argmin(0)


def _always() -> AlwaysRead:
    usual = SparseConfig(selector="means")
    return AlwaysRead(usual.sink_tokens, usual.window_tokens)


def _by_means(
    q: torch.Tensor, k: torch.Tensor, places: torch.Tensor, left: float, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys that queries at `places` would read as steps do, over all: float32 [Hkv]; and what each drops [Hkv, R]."""
    heads, tokens = k.shape[:2]
    blocks, device = tokens // BLOCK, k.device
    keys = k[:, : blocks * BLOCK].unflatten(1, (blocks, BLOCK)).movedim(0, 1).float()
    counts = torch.tensor([blocks], device=device)
    empty = torch.empty(1, heads, 0, k.shape[2], device=device)
    store = KVStore(
        (),
        torch.arange(heads, device=device)[None],
        torch.arange(blocks, device=device)[None],
        counts,
        empty,
        empty,
        empty[..., 0],
        empty[..., 0],
        counts * 0,
        BLOCK,
        means=reference_means(keys, torch.ones(keys.shape[:3], device=device)),
    )
    share, parts = torch.zeros(heads, device=device), []
    for at in places.split(32):
        asking = q[:, at]
        kept = reference_read_blocks(asking[None], store, Scoring(scaling), ByMeans(left), _always(), at[None])[0]
        # tokens behind the last whole block are open
        read = torch.nn.functional.pad(kept.repeat_interleave(BLOCK, -1), (0, tokens - blocks * BLOCK), value=True)
        score = asking.float().unflatten(0, (heads, -1)) @ k.float()[:, None].mT * scaling
        seen = torch.arange(tokens, device=device) <= at[:, None]
        p = score.masked_fill(~seen, -torch.inf).softmax(-1)
        # an unfinished block of a query's own time would still be open
        read = read | (torch.arange(tokens, device=device) >= (at[:, None] + 1) // BLOCK * BLOCK)
        parts.append((p * ~read[:, None]).sum(-1).amax(1))
        share += (read & seen).sum((1, 2)) / seen.sum()
    return (share / len(places.split(32))).cpu(), torch.cat(parts, -1).cpu()
