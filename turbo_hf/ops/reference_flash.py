"""The flash loop over runs of quantized keys and values (TurboAttention alg. 1, 2, INT-FlashAttention alg. 1).

P of a key tile is relative to that tile's own maximum, so that it does not depend on how tiles are split over programs,
nor on their order. It has one scale per query and tile.
"""

from typing import NamedTuple

import torch

from turbo_hf.layout import E4M3_MAX, INT8_MAX, LEAST, AttentionOutput, Scoring

TILE_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 24}
"""Scores held at a time: bounds the memory of the loop over query tiles. A GPU needs larger tiles to be busy."""


class Operand(NamedTuple):
    """Codes and scales of a run of tokens.

    x: [B, H, T, D].
    scale: [B, H, T]; 1 for unquantized numbers.
    place: int64 [B, T], the token's place in its row; -1 where there is none.
    """

    x: torch.Tensor
    scale: torch.Tensor
    place: torch.Tensor


class Run(NamedTuple):
    """Keys and values that the queries see, and the queries as these keys see them.

    tile: tokens that share one scale of P.
    own: whether the keys are the queries' own, in the same order.
    chosen: bool [B, Hkv, M, T], keys that each query may see; None: all.
    """

    q: Operand
    k: Operand
    v: Operand
    tile: int
    own: bool = False
    chosen: torch.Tensor | None = None


class State(NamedTuple):
    """Per query: running maximum, sum of P and accumulated P V, both relative to exp(maximum)."""

    top: torch.Tensor
    total: torch.Tensor
    acc: torch.Tensor


class FlashOptions(NamedTuple):
    """What the loop does with scores.

    scoring, window: as in `ops.prefill.contract`.
    p_type: the type that P is rounded to: INT8, FP8 or 16 bit; None: it is not rounded.
    """

    scoring: Scoring
    window: int | None
    p_type: torch.dtype | None


def flash(runs: list[Run], options: FlashOptions) -> AttentionOutput:
    """Attention over `runs`, in float32 (float64 for float64), the query tiles in a loop to bound memory."""
    q = runs[-1].q.x
    batch, heads, rows, _ = q.shape
    keys = sum(run.k.place.shape[1] for run in runs)
    tile = max(1, TILE_ELEMENTS.get(q.device.type, 1 << 22) // max(batch * heads * keys, 1))
    if tile >= rows:
        return AttentionOutput(*_queries(runs, options))
    parts = [
        _queries([_cut(run, start, min(start + tile, rows)) for run in runs], options) for start in range(0, rows, tile)
    ]
    return AttentionOutput(torch.cat([out for out, _ in parts], 2), torch.cat([lse for _, lse in parts], 2))


def _cut(run: Run, start: int, end: int) -> Run:
    """Queries `start` to `end` of a run, without the keys that come after all of them."""
    q = Operand(run.q.x[:, :, start:end], run.q.scale[:, :, start:end], run.q.place[:, start:end])
    chosen = None if run.chosen is None else run.chosen[:, :, start:end]
    run = run._replace(q=q, chosen=chosen)
    if run.own:
        seen = -(-end // run.tile) * run.tile
        k, v = (Operand(x.x[:, :, :seen], x.scale[:, :, :seen], x.place[:, :seen]) for x in (run.k, run.v))
        run = run._replace(k=k, v=v)
    return run


def _queries(runs: list[Run], options: FlashOptions) -> tuple[torch.Tensor, torch.Tensor]:
    q, kv_heads = runs[0].q.x, runs[0].k.scale.shape[1]
    batch, heads, rows, dim = q.shape
    # the query heads of a KV head are stacked, so that K and V are never repeated
    shape = (batch, kv_heads, heads // kv_heads, rows)
    state = None
    for run in runs:
        if run.k.place.shape[1]:
            state = _run(state, run, options, shape)
    if state is None:
        state = State(q.new_full(shape, -torch.inf), q.new_zeros(shape), q.new_zeros(*shape, dim))
    top, total, acc = state
    if options.scoring.sinks is not None:
        sink = options.scoring.sinks.to(top.dtype).reshape(1, *shape[1:3], 1)
        top = torch.maximum(top, sink)
        kept = torch.exp(state.top - top)
        total, acc = total * kept + torch.exp(sink - top), acc * kept[..., None]
    out = acc / torch.where(total > 0, total, 1.0)[..., None]
    lse = torch.where(total > 0, top + torch.log(total), -torch.inf)
    return out.flatten(1, 2), lse.flatten(1, 2)


def _run(state: State | None, run: Run, options: FlashOptions, shape: tuple[int, int, int, int]) -> State:
    """All key tiles of a run side by side, after what `state` holds. shape: [B, Hkv, query heads of each, M]."""
    scoring, (batch, kv_heads, group, rows) = options.scoring, shape
    stacked = (batch, kv_heads, group * rows)
    grouped, q_scale = run.q.x.reshape(*stacked, -1), (run.q.scale * scoring.scaling).reshape(*stacked, 1)
    score = (grouped * q_scale) @ run.k.x.mT * run.k.scale[:, :, None]
    score = score.unflatten(2, (group, rows))
    if scoring.softcap is not None:
        score = scoring.softcap * torch.tanh(score / scoring.softcap)
    q_place, k_place = run.q.place[:, None, None, :, None], run.k.place[:, None, None, None]
    # a query without a place is before every key
    allowed = (k_place >= 0) & (k_place <= q_place)
    if options.window is not None:
        allowed = allowed & (k_place > q_place - options.window)
    if run.chosen is not None:
        allowed = allowed & run.chosen.unflatten(1, (kv_heads, -1))
    score = score.masked_fill(~allowed, -torch.inf).unflatten(-1, (-1, run.tile))

    own = score.amax(-1)
    # a query that sees no key of a tile has a maximum of -inf there; its P is 0 whatever is subtracted
    shifted = score - own.masked_fill(own == -torch.inf, 0.0)[..., None]
    p = torch.exp(shifted) if scoring.sas_threshold is None else sas_exp(shifted, scoring.sas_threshold)

    top = own.amax(-1) if state is None else torch.maximum(state.top, own.amax(-1))
    finite = top.masked_fill(top == -torch.inf, 0.0)
    moves = torch.exp(own - finite[..., None])
    codes, unit = rounded(p * run.v.scale[:, :, None, None].unflatten(-1, (-1, run.tile)), options.p_type)
    part = (codes * (unit * moves[..., None])).flatten(-2).flatten(2, 3) @ run.v.x
    part = part.unflatten(2, (group, rows))
    total = (p.sum(-1) * moves).sum(-1)
    if state is None:
        return State(top, total, part)
    moved = torch.exp(state.top - finite)
    return State(top, state.total * moved + total, state.acc * moved[..., None] + part)


def sas_exp(x: torch.Tensor, threshold: float) -> torch.Tensor:
    """exp(x) for x <= 0 by a table and a cubic; 0 below `threshold`. TurboAttention sec. 4, eq. 13-15, alg. 3."""
    whole = torch.floor(-x.clamp(min=threshold))
    fraction = -x.clamp(min=threshold) - whole
    cubic = ((-0.1025 * fraction + 0.4626) * fraction - 0.9922) * fraction + 0.9996
    return torch.where(x < threshold, 0.0, torch.exp(-whole) * cubic)


def rounded(weight: torch.Tensor, p_type: torch.dtype | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [..., tile] as the second product reads them: codes, and what one of them is worth [..., 1]."""
    peak = weight.amax(-1, keepdim=True)
    # a query may give all of its weight to a token that counts as 0
    peak = torch.where(peak > LEAST, peak, 1.0)
    if p_type is None:
        return weight, torch.ones_like(peak)
    if p_type == torch.int8:
        return torch.round(weight * (INT8_MAX / peak)), peak / INT8_MAX
    if p_type == torch.float8_e4m3fn:
        return (weight * (E4M3_MAX / peak)).float().to(torch.float8_e4m3fn).to(weight.dtype), peak / E4M3_MAX
    return (weight / peak).to(p_type).to(weight.dtype), peak
