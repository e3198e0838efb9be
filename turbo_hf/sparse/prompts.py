"""Sparse attention of long prompts: which are sparse, what they read, and what the audit finds."""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from turbo_hf.config.prompt_sparsity import CALIBRATED_DROP, PromptSparsity
from turbo_hf.layout import PROMPT_TILE, KVStore, Scoring
from turbo_hf.ops.prefill.reference_tiles import first_of_tail
from turbo_hf.ops.prefill.tiles import MOST_TILES, choose_tiles, density, dropped_mass, sparse_keys, why_no_choice

AUDIT_ROWS = 128
"""Queries per head whose dropped share is measured."""

LEAST_ADDED = 1024
"""Tokens that a prompt must add to a cache to be sparse: choice and audit look at all that it holds."""

MOST_OPEN = 8192
"""Unsealed tokens of a cache that audits of what continues it look at, all at once."""

REMEMBERED = 16
"""Sparse prompts whose shares are remembered: the newest ones."""


class HeadShares(NamedTuple):
    """The shares of one query head; `PromptShares` has those of its layer."""

    density: float
    dropped_mean: float | None
    dropped_p95: float | None
    dropped_max: float | None


@dataclass(frozen=True, slots=True)
class PromptShares:
    """What the newest sparse prompts of one layer have read and dropped, as shares of key tiles and of the softmax.

    Args:
        layer: the layer's number.
        prompts: sparse prompts (rows) since the patch, each chunk counted; the shares are of the newest 16 passes.
        continued: those of them that continue a cache.
        density: share of the causal key tiles that were read, over heads and rows; dense heads count with 1.
        dropped_mean, dropped_p95, dropped_max: exact dropped share of the softmax of audited queries, which are random
            and outside of the tail, over heads and rows; 0 on heads that the audit has made dense. None without audit.
        heads, dense_heads: heads times rows, and those that were computed densely because the audit found too much.
        dense: prompts that were long enough and ran densely, by the reason.
        by_head: the shares of each query head.
    """

    layer: int
    prompts: int
    density: float
    dropped_mean: float | None
    dropped_p95: float | None
    dropped_max: float | None
    heads: int
    dense_heads: int
    dense: Mapping[str, int]
    by_head: tuple[HeadShares, ...] = ()
    continued: int = 0

    def __str__(self) -> str:
        parts = []
        if self.prompts:
            over = f", {self.continued} of them over a cache" if self.continued else ""
            parts.append(f"{self.density:.1%} of the key tiles read by {self.prompts} sparse prompts{over}")
            if self.dropped_mean is not None:
                shares = (self.dropped_mean, self.dropped_p95, self.dropped_max)
                mean, p95, most = (f"{share:.2%}" for share in shares)
                parts.append(f"dropped softmax: mean {mean}, 95 % of queries below {p95}, at most {most}")
            if self.dense_heads:
                parts.append(f"{self.dense_heads} of {self.heads} heads dense")
        parts += [f"{count} long prompts dense: {reason}" for reason, count in self.dense.items()]
        return "; ".join(parts)


def _shares(read: torch.Tensor, dropped: torch.Tensor | None) -> HeadShares:
    """read: densities; dropped: of audited queries, None without audit."""
    if dropped is None:
        return HeadShares(read.mean().item(), None, None, None)
    found = dropped.flatten().sort().values
    p95 = found[int(0.95 * (len(found) - 1))].item()
    return HeadShares(read.mean().item(), found.mean().item(), p95, found[-1].item())


class _Pass(NamedTuple):
    """One pass: density [B, Hq], dropped shares [B, Hq, R] or None, and which heads became dense, bool [B, Hq]."""

    density: torch.Tensor
    dropped: torch.Tensor | None
    dense: torch.Tensor


@dataclass(slots=True)
class PromptTally:
    """What the sparse prompts of one layer have read. It stays on the device until a report reads it.

    heads: float32 [Hq, 2], calibrated mass and peak of each query head; None: those of the config.
    """

    heads: torch.Tensor | None = None
    prompts: int = 0
    continued: int = 0
    passes: deque[_Pass] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    dense: Counter[str] = field(default_factory=Counter)
    generators: dict[torch.device, torch.Generator] = field(default_factory=dict)

    def __reduce__(self) -> Any:
        # a cache that was unpickled belongs to no patch, so nothing is counted
        return PromptTally, ()

    def __deepcopy__(self, memo: Any) -> "PromptTally":
        # a copied cache belongs to the same patch
        return self

    def shares(self, layer: int) -> PromptShares:
        """Read from the device."""
        if not self.passes:
            return PromptShares(layer, self.prompts, 0.0, None, None, None, 0, 0, dict(self.dense))
        read = torch.cat([one.density.float().cpu() for one in self.passes])
        dropped = [one.dropped.double().cpu().mT.flatten(0, 1) for one in self.passes if one.dropped is not None]
        found = torch.cat(dropped) if dropped else None
        heads = [_shares(read[:, i], None if found is None else found[:, i]) for i in range(read.shape[1])]
        dense = sum(int(one.dense.sum()) for one in self.passes)
        return PromptShares(
            layer, self.prompts, *_shares(read, found), read.numel(), dense, dict(self.dense), (*heads,), self.continued
        )

    def places(self, queries: int, device: torch.device) -> torch.Tensor:
        """int64 [R], ascending: one random query of each of R equal parts of the first `queries`.

        The same ones for the same number: which heads become dense depends on the prompt alone.
        """
        # of its own: what a user samples stays the same
        generator = self.generators.setdefault(device, torch.Generator(device)).manual_seed(queries)
        rows = min(AUDIT_ROWS, queries)
        part = torch.arange(rows, device=device, dtype=torch.float64)
        drawn = torch.rand(rows, generator=generator, device=device, dtype=torch.float64)
        return ((part + drawn) * (queries / rows)).long().clamp(max=queries - 1)

    def tiles_to_read(
        self,
        rule: PromptSparsity,
        q: torch.Tensor,
        k: torch.Tensor,
        past: KVStore | None,
        window: int | None,
        scoring: Scoring,
        *,
        starts: Sequence[int] | None = None,
        held: Sequence[int] | None = None,
        sorted_past: bool = False,
        mode: str,
        backend: str,
    ) -> torch.Tensor | None:
        """`kept` for `prefill`; None if this prompt reads every key.

        q [B, Hq, M, D], k [B, Hkv, M, D] and what follows: as of `prefill`. starts: of each row, the first real column.
        held: tokens of each row that the past holds; None: none. sorted_past: it is not in the order of time. A row
        reads what it would alone.
        """
        tokens, rows = q.shape[2], range(len(q))
        first = [0] * len(q) if starts is None else starts
        held = [0] * len(q) if held is None else held
        added = [tokens - start for start in first]
        long = [row for row in rows if added[row] and held[row] + added[row] >= rule.from_tokens]
        if not long or (window is not None and window < max(held) + tokens):
            return None
        reason = _why_dense(q, past, sorted_past, mode, backend)
        if reason is not None:
            self.dense[reason] += len(long)
            return None
        short = [row for row in long if held[row] and added[row] < LEAST_ADDED]
        if short:
            self.dense[f"they add fewer than {LEAST_ADDED:,} tokens to a cache"] += len(short)
        sealed, block = [0] * len(q), 0
        if past is not None:
            sealed, block = list(past.sealed.tolist() if past.sealed_host is None else past.sealed_host), past.block
        whole = [count * block // PROMPT_TILE for count in sealed]
        opened = [row for row in long if row not in short and held[row] - sealed[row] * block > MOST_OPEN]
        if opened:
            self.dense[f"more than {MOST_OPEN:,} tokens before them are not sealed yet"] += len(opened)
        # the first tile of a first prompt has nothing to choose from
        sparse = [
            row
            for row in long
            if row not in {*short, *opened} and first_of_tail(added[row], rule.rule) > (0 if whole[row] else 1)
        ]
        if not sparse:
            return None
        alike = len(sparse) == len(q) and not any(first) and len({*zip(sealed, held, strict=True)}) == 1
        if alike:
            return self._chosen(rule, q, k, past, sealed[0], held[0], scoring, backend)
        tiles, most = -(-tokens // PROMPT_TILE), max(whole)
        kept = q.new_ones(*q.shape[:2], tiles * most + tiles * (tiles - 1) // 2, dtype=torch.uint8)
        for row in sparse:
            one, own = slice(row, row + 1), (slice(row, row + 1), slice(None), slice(first[row], None))
            of_row = None if past is None else past.of_rows(one)
            found = self._chosen(rule, q[own], k[own], of_row, sealed[row], held[row], scoring, backend)
            kept[row, :, _places(added[row], whole[row], most).to(q.device)] = found[0]
        return kept

    def _chosen(
        self,
        rule: PromptSparsity,
        q: torch.Tensor,
        k: torch.Tensor,
        past: KVStore | None,
        sealed: int,
        held: int,
        scoring: Scoring,
        backend: str,
    ) -> torch.Tensor:
        """`kept` of rows without padding, which are long enough; noted. Each has `held` tokens and `sealed` blocks."""
        tokens, rest = q.shape[2], None
        if past is not None:
            k, rest = sparse_keys(past, k, sealed, held - sealed * past.block, backend=backend)
        if self.heads is not None and self.heads.device != q.device:
            with torch.inference_mode(False):
                self.heads = self.heads.to(q.device)
        kept = choose_tiles(q, k, rule.rule._replace(heads=self.heads), scoring, backend=backend)
        read, dropped = density(kept, tokens), None
        dense = torch.zeros_like(read, dtype=torch.bool)
        if rule.audit:
            places = self.places(first_of_tail(tokens, rule.rule) * PROMPT_TILE, q.device)
            dropped = dropped_mass(q, k, kept, places, scoring, rest, backend=backend)
            bound = rule.bound if self.heads is None else max(rule.bound, 2 * CALIBRATED_DROP)
            # a mean that is not a number is over the bound
            dense = ~(dropped.mean(-1) <= bound)
            kept.masked_fill_(dense[..., None], 1)
            read, dropped = read.masked_fill(dense, 1.0), dropped.masked_fill(dense[..., None], 0.0)
        self.prompts += len(q)
        self.continued += len(q) if held else 0
        self.passes.append(_Pass(read, dropped, dense))
        return kept


def _places(tokens: int, whole: int, most: int) -> torch.Tensor:
    """int64: where the entries of `kept` lie among those of a batch, of a row whose past has `whole` tiles and not
    `most`."""
    tiles = -(-tokens // PROMPT_TILE)
    tile, entry = torch.ones(tiles, whole + tiles).tril(whole - 1).nonzero().unbind(1)
    return tile * most + tile * (tile - 1) // 2 + entry + (entry >= whole) * (most - whole)


def _why_dense(q: torch.Tensor, past: KVStore | None, sorted_past: bool, mode: str, backend: str) -> str | None:
    """Why a long prompt reads every key; None: it may be sparse."""
    if past is not None and sorted_past:
        return "they continue a cache that is in the order of buckets"
    room = 0 if past is None else past.table.shape[1] * past.block
    if room + q.shape[2] > MOST_TILES * PROMPT_TILE:
        return f"they have more than {MOST_TILES * PROMPT_TILE} tokens"
    # plain torch would save nothing on a GPU, and hold all scores; in float32, lists of tiles failed a test there
    if q.is_cuda and (backend == "reference" or q.dtype == torch.float32 or why_no_choice(q, mode) is not None):
        return "no kernel serves them"
    return None


def describe_sparse_prompts(rule: PromptSparsity | None, calibrated: int = 0) -> str:
    """How long prompts are sparse, for reports; "" if they are not. calibrated: layers whose heads have rules."""
    if rule is None:
        return ""
    audit = "audited" if rule.audit else "not audited"
    own = f"; of {calibrated} layers by calibration" if calibrated else ""
    return f"; from {rule.from_tokens} tokens up sparse (mass {rule.mass:g}, peak {rule.peak:g}{own}, {audit})"
