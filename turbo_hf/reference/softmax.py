"""The flash loop of decode, and the exponential that prefill shares (TurboAttention alg. 2, sec. 4)."""

from typing import NamedTuple

import torch

from turbo_hf.layout import INT8_MAX, AttentionOutput

TILE_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 24}
"""Scores held at a time: bounds the memory of the loop over query tiles. A GPU needs larger tiles to be busy."""


class Operand(NamedTuple):
    """Codes and scales of a run of tokens. x: [B, H, T, D]; scale: [B, H, T]; a plain tensor has scale 1.

    place: int64 [B, T], the token's place in its row; -1 where there is none.
    """

    x: torch.Tensor
    scale: torch.Tensor
    place: torch.Tensor


def sas_exp(x: torch.Tensor, threshold: float) -> torch.Tensor:
    """exp(x) for x <= 0 by a table and a cubic; 0 below `threshold`. TurboAttention sec. 4, eq. 13-15, alg. 3."""
    whole = torch.floor(-x.clamp(min=threshold))
    fraction = -x.clamp(min=threshold) - whole
    cubic = ((-0.1025 * fraction + 0.4626) * fraction - 0.9922) * fraction + 0.9996
    return torch.where(x < threshold, 0.0, torch.exp(-whole) * cubic)


def flash(
    q: Operand,
    k: Operand,
    v: Operand,
    *,
    scaling: float,
    causal: bool,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    mode: str,
    sas_threshold: float | None,
    block: int,
) -> AttentionOutput:
    """Attention of q over k and v, the query tiles in a loop, the key blocks of each side by side.

    Each block's P is relative to that block's own maximum, whoever computes it and in whatever order: a split over CTAs
    gives the same P. It has one scale a query row and key block. Output float32 (float64 for float64).
    """
    batch, heads, rows, _ = q.x.shape
    per_row = batch * heads * k.x.shape[2]
    tile = max(1, min(rows, TILE_ELEMENTS.get(q.x.device.type, 1 << 22) // max(per_row, 1)))
    outs, lses = [], []
    for start in range(0, rows, tile):
        end = min(start + tile, rows)
        part = Operand(q.x[:, :, start:end], q.scale[:, :, start:end], q.place[:, start:end])
        out, lse = _tile(part, k, v, scaling, causal, window, softcap, sinks, mode, sas_threshold, block)
        outs.append(out)
        lses.append(lse)
    return AttentionOutput(torch.cat(outs, 2), torch.cat(lses, 2))


def _tile(
    q: Operand,
    k: Operand,
    v: Operand,
    scaling: float,
    causal: bool,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    mode: str,
    sas_threshold: float | None,
    block: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, rows, dim = q.x.shape
    kv_heads, tokens = k.x.shape[1:3]
    group = heads // kv_heads
    # the query heads of a KV head stand below each other, so that K and V are never repeated
    grouped = q.x.reshape(batch, kv_heads, group * rows, dim)
    score = (grouped @ k.x.mT).unflatten(2, (group, rows))
    score = score * (q.scale.reshape(batch, kv_heads, group, rows)[..., None] * scaling)
    score = score * k.scale[:, :, None, None, :]
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    allowed = _allowed(q.place, k.place, causal, window)
    score = score.masked_fill(~allowed[:, None, None], -torch.inf).unflatten(-1, (tokens // block, block))

    own = score.amax(-1)
    # a row that sees no key of a block has a maximum of -inf there: use 0, its probabilities are 0 anyway
    base = own.masked_fill(own == -torch.inf, 0.0)
    shifted = score - base[..., None]
    p = torch.exp(shifted) if sas_threshold is None else sas_exp(shifted, sas_threshold)

    last = own.amax(-1)
    if sinks is not None:
        sink = sinks.to(last.dtype).reshape(1, kv_heads, group, 1)
        last = torch.maximum(last, sink)
    top = last.masked_fill(last == -torch.inf, 0.0)
    rescale = torch.exp(own - top[..., None])
    total = (p.sum(-1) * rescale).sum(-1)
    if sinks is not None:
        total = total + torch.exp(sink - top)

    weight = p * v.scale[:, :, None, None].unflatten(-1, (-1, block))
    if mode == "turbo":
        p_scale = weight.amax(-1, keepdim=True) / INT8_MAX
        weight = torch.round(weight / torch.where(p_scale > 0, p_scale, 1.0)) * p_scale
    weight = (weight * rescale[..., None]).flatten(-2).flatten(2, 3)
    out = (weight @ v.x).unflatten(2, (group, rows))
    out = out / torch.where(total > 0, total, 1.0)[..., None]
    return out.flatten(1, 2), (top + torch.log(total)).flatten(1, 2)


def _allowed(query: torch.Tensor, key: torch.Tensor, causal: bool, window: int | None) -> torch.Tensor:
    """bool [B, M, T]: which keys each query sees."""
    q, k = query[:, :, None], key[:, None, :]
    allowed = (k >= 0) & (q >= 0)
    if causal:
        allowed = allowed & (k <= q)
    if window is not None:
        allowed = allowed & (k > q - window)
    return allowed
