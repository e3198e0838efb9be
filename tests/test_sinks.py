"""Attention sinks and values of uneven size: what pages would lose on models that have them, and what mends it."""

from functools import cache
from typing import Any

import pytest
import torch
from sinks_support import divergences, moved_by, prompt_of, sink_model, sink_text, tail_over
from torch import Tensor
from transformers import DynamicCache

from turbo_hf.eval.published import by_channel

TOKENS = 544


@cache
def sinks() -> tuple[Any, Tensor]:
    """The tiny model, and a text for it."""
    return sink_model(), sink_text(TOKENS)


def by_size(x: Tensor, bits: int, group: int) -> Tensor:
    """x [B, H, T, D] rounded by channel, each token brought to one size before, and back after."""
    size = x.pow(2).mean(-1, keepdim=True).sqrt()
    return by_channel(x / size, bits, group) * size


def simulated(model: Any, ids: Tensor, value_bits: int) -> float:
    """KL where the cache of the prompt is rounded but for 4 tokens: keys at 4 bit, values at `value_bits`, by size."""
    exact = tail_over(model, ids, prompt_of(model, ids, DynamicCache(config=model.config)))
    cache = prompt_of(model, ids, DynamicCache(config=model.config))
    for layer in cache.layers:
        keys, values = by_size(layer.keys, 4, 64), by_size(layer.values, value_bits, 64)
        layer.keys = torch.cat([layer.keys[:, :, :4], keys[:, :, 4:]], dim=2)
        layer.values = torch.cat([layer.values[:, :, :4], values[:, :, 4:]], dim=2)
    return float(divergences(exact, tail_over(model, ids, cache)).mean())


@pytest.mark.parametrize(("preset", "value_bits"), [("turbo4", 4), ("turbo-k4v2", 2)])
def test_pages_are_as_good_as_both_remedies(preset: str, value_bits: int) -> None:
    """Up to the integers that pages compute in."""
    assert moved_by(*sinks(), preset).mean() < 3 * simulated(*sinks(), value_bits)
