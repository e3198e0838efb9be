"""Head priorities: which KV heads lose least at few bits (TurboAttention eq. 11, 12), measured over many blocks."""

import torch

from turbo_hf.config.turbo_config import HEAD_METRICS

BLOCK = 64
"""Tokens over which a channel's gap is taken: those that share a scale in the cache."""


class HeadPriorities:
    """Mean scores of a layer's KV heads over every block of every window, one for each metric.

    The mean over many blocks lacks the randomness of a single one, and the weight of a text's first tokens.
    """

    def __init__(self) -> None:
        self.blocks = 0
        self.sums: dict[str, torch.Tensor] = {}

    def add(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """k, v: [1, Hkv, L, D], finite, after rotary embedding, not rotated further; L is a block at least. Tokens over
        a whole block are left.
        """
        blocks = k.shape[2] // BLOCK
        keys, values = (x[0, :, : blocks * BLOCK].unflatten(1, (blocks, BLOCK)).transpose(0, 1) for x in (k, v))
        for metric in HEAD_METRICS:
            score = head_scores(keys, values, metric).double().sum(0).cpu()
            self.sums[metric] = self.sums.get(metric, torch.zeros_like(score)) + score
        self.blocks += blocks

    def scores(self) -> dict[str, torch.Tensor]:
        """float32 [Hkv] for each metric; higher needs more bits."""
        return {metric: (total / self.blocks).float() for metric, total in self.sums.items()}


def head_order(scores: torch.Tensor) -> tuple[int, ...]:
    """KV heads from the highest score to the lowest: the last ones get the low bits. Equal scores keep their order."""
    return tuple(scores.argsort(descending=True, stable=True).tolist())


def head_scores(k: torch.Tensor, v: torch.Tensor, metric: str) -> torch.Tensor:
    """How much each KV head of tokens [B, Hkv, N, D] needs its bits, float32 [B, Hkv]: the product of the key's and the
    value's score, independent of their units (TurboAttention eq. 11, 12 and the ablation of sec. 5).

    metric: "priority" (range times the deviation of the channel gaps), "entropy" (of the channel gaps; flat gaps score
        low), "min_max" (range) or "variation" (deviation of the channel gaps).
    """
    return _head_score(k.float(), metric) * _head_score(v.float(), metric)


def _head_score(x: torch.Tensor, metric: str) -> torch.Tensor:
    gaps = x.amax(-2) - x.amin(-2)
    span = x.amax((-1, -2)) - x.amin((-1, -2))
    if metric == "priority":
        return span * gaps.std(-1, correction=0)
    if metric == "min_max":
        return span
    if metric == "variation":
        return gaps.std(-1, correction=0)
    total = gaps.sum(-1, keepdim=True)
    # gaps that are all 0 count as flat
    share = torch.where(total > 0, gaps / total, 1 / gaps.shape[-1])
    # flat gaps have the highest entropy and quantize best, so the score falls with it
    entropy: torch.Tensor = torch.special.entr(share).sum(-1)
    return 1 / (1 + entropy)
