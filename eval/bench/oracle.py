"""The oracle of attention, of benches and tests alike: softmax in float64, written out.

It imports torch and `layout` alone: nothing of what it judges.
"""

from typing import NamedTuple

import torch

from turbo_hf.layout import AttentionOutput

TILE_SCORES = 1 << 24
"""Scores held at a time, 128 MiB of float64: bounds the memory at any length."""


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
) -> AttentionOutput:
    """Dense softmax attention of one row of a batch, tile by tile, in float64.

    Args:
        q: [Hq, R, D], some of the queries. k, v: [Hkv, N, D], all tokens; Hq a multiple of Hkv.
        scaling, causal, window, softcap, sinks: as in `turbo_hf.ops.prefill.prefill`.
        places: int64 [R], where in the row the queries stand; None: at 0, 1, ...

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
        outs.append(by_kv_head(found.p, values) / found.total)
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
