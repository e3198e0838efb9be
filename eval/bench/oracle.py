"""The oracle of attention, of benches and tests alike: softmax in float64, written out, and distances from it.

It imports torch and `layout` alone: nothing of what it judges.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from turbo_hf.layout import E4M3_MAX, AttentionOutput

TILE_SCORES = 1 << 24
"""Scores held at a time, 128 MiB of float64: bounds the memory at any length."""


class Errors(NamedTuple):
    """How far a result o is from the reference r, as shares.

    norm: |o - r| / |r|, Euclidean.
    mre: mean |o - r| / mean |r|. INT-FlashAttention sec. 4.2 names its figure "Mean Relative Error (MRE)" and prints no
        formula; on normal data its figures are of the size of `norm` and `mre`.
    elementwise: mean of |o - r| / |r|, which elements near 0 dominate.
    """

    norm: float
    mre: float
    elementwise: float


def errors(out: torch.Tensor, want: torch.Tensor) -> Errors:
    """The errors of `out` against float64 `want` of the same shape; exact zeros of `want` stay out of `elementwise`."""
    off, size = (out.double() - want).abs(), want.abs()
    norm, mre = off.norm() / size.norm(), off.mean() / size.mean()
    return Errors(norm.item(), mre.item(), (off / size)[size > 0].mean().item())


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scaling: float,
    causal: bool,
    places: torch.Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    round_p: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> AttentionOutput:
    """Dense softmax attention of one row of a batch, tile by tile, in float64.

    Args:
        q: [Hq, R, D], some of the queries. k, v: [Hkv, N, D], all tokens; Hq a multiple of Hkv.
        scaling, causal, window, softcap, sinks: as in `turbo_hf.ops.prefill.prefill`.
        places: int64 [R], where in the row the queries stand; None: at 0, 1, ...
        round_p: what becomes of exp(score - row maximum) before it meets V; the denominator stays exact.

    Returns:
        out float64 [Hq, R, D]; lse float64 [Hq, R], natural log.
    """
    heads, rows, _ = q.shape
    place = torch.arange(rows, device=q.device) if places is None else places.to(q.device)
    keys, values = k.double(), v.double()
    outs, lses = [], []
    step = max(1, TILE_SCORES // (heads * k.shape[1]))
    for start in range(0, rows, step):
        here = slice(start, start + step)
        found = weights(
            q[:, here].double(), keys, place[here], scaling=scaling, causal=causal, window=window, softcap=softcap,
            sinks=sinks,
        )  # fmt: skip
        p = found.p if round_p is None else round_p(found.p)
        outs.append(by_kv_head(p, values) / found.total)
        lses.append(found.lse)
    return AttentionOutput(torch.cat(outs, 1), torch.cat(lses, 1))


class SoftmaxWeights(NamedTuple):
    """A softmax before the division.

    p: exp(score - row maximum) [Hq, R, N].
    total: their sum with the sinks [Hq, R, 1].
    lse: [Hq, R], natural log.
    """

    p: torch.Tensor
    total: torch.Tensor
    lse: torch.Tensor


def weights(
    q: torch.Tensor,
    k: torch.Tensor,
    places: torch.Tensor,
    *,
    scaling: float,
    causal: bool,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> SoftmaxWeights:
    """The softmax of queries [Hq, R, D] at `places` over keys [Hkv, N, D], before it is divided by its sum.

    Scores are products in the dtype of `q`; the softmax is in float32 at least, as eager models have it.
    """
    score = by_kv_head(q, k.mT) * scaling
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    score = score.to(torch.promote_types(q.dtype, torch.float32))
    score = score.masked_fill(_hidden(places, k.shape[1], causal, window), -torch.inf)
    top = score.amax(-1, keepdim=True)
    p = torch.exp(score - top)
    total = p.sum(-1, keepdim=True)
    lse = top + torch.log(total)
    if sinks is not None:
        sink = sinks.detach().to(score)[:, None, None]
        # a sink far above all scores makes the sum infinite in float32, not its logarithm
        total, lse = total + torch.exp(sink - top), torch.logaddexp(lse, sink)
    return SoftmaxWeights(p, total, lse[..., 0])


def by_kv_head(x: torch.Tensor, of_kv: torch.Tensor) -> torch.Tensor:
    """x [Hq, R, N] times of_kv [Hkv, N, M], each query head with the one of its KV head: [Hq, R, M]."""
    by_head: torch.Tensor = x.unflatten(0, (len(of_kv), -1)).flatten(1, 2) @ of_kv
    return by_head.reshape(x.shape[0], x.shape[1], of_kv.shape[2])


def _hidden(place: torch.Tensor, tokens: int, causal: bool, window: int | None) -> torch.Tensor:
    """bool [R, N]: which keys a query does not see."""
    key = torch.arange(tokens, device=place.device)
    hidden = torch.zeros(len(place), tokens, dtype=torch.bool, device=place.device)
    if causal:
        hidden |= key > place[:, None]
    if window is not None:
        hidden |= key <= place[:, None] - window
    return hidden


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """x rounded to FP8 e4m3 under one scale per tensor, max|x| / 448, and back, in x's dtype."""
    scale = x.abs().amax().float() / E4M3_MAX
    codes = (x.float() / torch.where(scale > 0, scale, 1.0)).to(torch.float8_e4m3fn)
    return (codes.float() * scale).to(x.dtype)


def fp8_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> torch.Tensor:
    """FlashAttention in FP8 with tensor-level scales, simulated: e4m3 Q, K, V and P, products and sums exact.

    P's largest value in a row becomes 448, e4m3's largest. Shapes and options as in `attend`.
    Source: the baseline of INT-FlashAttention sec. 4.2 (the paper does not say how its P is scaled).
    """
    q, k, v = (to_e4m3(x.double()) for x in (q, k, v))

    def round_p(p: torch.Tensor) -> torch.Tensor:
        return (p * E4M3_MAX).to(torch.float8_e4m3fn).double() / E4M3_MAX

    return attend(q, k, v, round_p=round_p, **options).out  # type: ignore[arg-type]
