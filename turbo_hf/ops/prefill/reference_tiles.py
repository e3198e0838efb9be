"""Which key tiles each tile of queries of a long prompt reads, and what that drops, in plain torch."""

import torch

from turbo_hf.layout import PROMPT_TILE, Scoring, TileRule


def reference_choose_tiles(
    q: torch.Tensor,
    k: torch.Tensor,
    rule: TileRule,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """bool [Hq, T, P + T]: the key tiles that each tile of queries reads; only tiles at or before its own.

    q: float [Hq, N, D]; k: float [Hkv, 128 P + N, D], P whole tiles before the queries' own keys; Hq a multiple of Hkv;
    T = ceil(N / 128). Causal, without a window.

    A row's score of a key tile is ln 128 + scaling q . mean(k): by Jensen at most the logarithm of the tile's true sum
    of exponentials. Its softmax runs over the tiles wholly before the row's own. Ties at the cut are all read.
    A tile of queries that would read more than `most_density` of the tiles before its own reads them all.
    """
    heads, tokens, _ = q.shape
    scoring = Scoring(scaling, softcap, sinks)
    tiles, wide = -(-tokens // PROMPT_TILE), torch.promote_types(q.dtype, torch.float32)
    past = (k.shape[1] - tokens) // PROMPT_TILE
    kept = forced_tiles(tokens, rule, q.device, past).repeat(heads, 1, 1)
    means = tile_means(k, q.dtype).to(wide).mT
    mass, peak = (rule.mass, rule.peak) if rule.heads is None else rule.heads[..., None].to(wide).unbind(1)
    for tile in range(0 if past else 1, tiles):
        rows, own = q[:, tile * PROMPT_TILE : (tile + 1) * PROMPT_TILE].to(wide), past + tile
        score = scores(rows, means[:, :, :own], scoring)
        score = score + torch.tensor(PROMPT_TILE, device=q.device).log()
        total = score.logsumexp(-1, keepdim=True)
        if sinks is not None:
            total = torch.logaddexp(total, sinks.detach().to(score)[:, None, None])
        share = torch.exp(score - total)
        wanted, mean = share.amax(1) >= peak, share.mean(1)
        ordered = mean.sort(-1, descending=True).values
        # tiles before the cut cover less than the mass of what all tiles hold
        short = ordered.cumsum(-1) < mass * ordered.sum(-1, keepdim=True)
        cut = ordered.gather(-1, short.sum(-1, keepdim=True).clamp(max=own - 1))
        # what is not a number is read
        kept[:, tile, :own] |= wanted | ~(mean < cut)
        read = kept[:, tile, :own].sum(-1, keepdim=True, dtype=torch.float32)
        kept[:, tile, :own] |= read > read.new_tensor(rule.most_density) * own
    return kept


def forced_tiles(tokens: int, rule: TileRule, device: torch.device, past: int = 0) -> torch.Tensor:
    """bool [T, past + T]: what is read whatever it holds: the own tile, the first, the newest, and all in the tail."""
    at = torch.arange(past + -(-tokens // PROMPT_TILE), device=device)
    query, key = at[past:, None], at[None, :]
    forced = (key < -(-rule.sink_tokens // PROMPT_TILE)) | (key >= query - -(-rule.window_tokens // PROMPT_TILE))
    return (forced | (query >= past + first_of_tail(tokens, rule))) & (key <= query)


def first_of_tail(tokens: int, rule: TileRule) -> int:
    """The first tile of queries that reads every key."""
    return max(0, (tokens - rule.tail_tokens) // PROMPT_TILE)


def tile_means(k: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[..., Hkv, whole tiles, D] in `dtype`: the mean key of each whole tile of k [..., Hkv, N, D]."""
    whole = k.shape[-2] // PROMPT_TILE
    keys = k[..., : whole * PROMPT_TILE, :].unflatten(-2, (whole, PROMPT_TILE))
    means: torch.Tensor = keys.mean(-2, dtype=torch.promote_types(k.dtype, torch.float32)).to(dtype)
    return means


def reference_dropped_mass(
    q: torch.Tensor,
    k: torch.Tensor,
    kept: torch.Tensor,
    places: torch.Tensor,
    scoring: Scoring,
    besides: torch.Tensor | None = None,
) -> torch.Tensor:
    """float32 [Hq, R]: share of the softmax of the queries at `places` that falls on tiles which are not read.

    q: [Hq, N, D], k: [Hkv, 128 P + N, D]; kept: bool [Hq, T, P + T], as of `reference_choose_tiles`; places: int64 [R];
    besides: float32 [Hq, R], as of `ops.prefill.tiles.dropped_mass`.
    """
    past = k.shape[1] - q.shape[1]
    key = torch.arange(k.shape[1], device=k.device) - past
    parts: list[torch.Tensor] = []
    wide = torch.promote_types(q.dtype, torch.float32)
    # 64 rows at a time bound the memory
    for first in range(0, len(places), 64):
        here = places[first : first + 64]
        score = scores(q[:, here].to(wide), k.to(wide).mT, scoring).masked_fill(key > here[:, None], -torch.inf)
        total = score.logsumexp(-1, keepdim=True)
        if scoring.sinks is not None:
            total = torch.logaddexp(total, scoring.sinks.detach().to(score)[:, None, None])
        if besides is not None:
            total = torch.logaddexp(total, besides[:, first : first + 64, None].to(score))
        share = torch.exp(score - total)
        unread = ~kept[:, here // PROMPT_TILE].repeat_interleave(PROMPT_TILE, -1)[..., : k.shape[1]]
        parts.append((share * unread).sum(-1))
    return torch.cat(parts, -1).float()


def as_square(kept: torch.Tensor, tokens: int) -> torch.Tensor:
    """bool [B, Hq, T, P + T] of `choose_tiles`' result for `tokens` queries, with each tile of queries' own."""
    tiles, past = -(-tokens // PROMPT_TILE), past_tiles(kept, tokens)
    square = kept.new_zeros(*kept.shape[:2], tiles, past + tiles, dtype=torch.bool)
    square[..., past:] = torch.eye(tiles, dtype=torch.bool, device=kept.device)
    square[:, :, torch.ones_like(square[0, 0]).tril(past - 1)] = kept.bool()
    return square


def past_tiles(kept: torch.Tensor, tokens: int) -> int:
    """P, the key tiles before the first of `tokens` queries, of `choose_tiles`' result; 0 for no queries."""
    tiles = -(-tokens // PROMPT_TILE)
    return (kept.shape[-1] - tiles * (tiles - 1) // 2) // max(tiles, 1)


def scores(q: torch.Tensor, keys: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """[Hq, R, M] of q [Hq, R, D] and keys [Hkv, D, M], scaled and capped."""
    score = _by_kv_head(q, keys) * scoring.scaling
    return score if scoring.softcap is None else scoring.softcap * torch.tanh(score / scoring.softcap)


def _by_kv_head(x: torch.Tensor, of_kv: torch.Tensor) -> torch.Tensor:
    """x [Hq, R, N] times of_kv [Hkv, N, M], each query head with the one of its KV head: [Hq, R, M]."""
    by_head: torch.Tensor = x.unflatten(0, (len(of_kv), -1)).flatten(1, 2) @ of_kv
    return by_head.reshape(x.shape[0], x.shape[1], of_kv.shape[2])
