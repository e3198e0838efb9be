"""Head priorities: which KV heads lose least at few bits (TurboAttention eq. 11, 12), measured over many blocks."""

import torch

from turbo_hf.config.turbo_config import HEAD_METRICS
from turbo_hf.ops.store.quantize import head_scores

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
