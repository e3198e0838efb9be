"""The first tokens of a row are never sealed: what they stand for does not change, whatever comes behind them;
and a model with attention sinks and values of uneven size, which need that."""

from functools import cache
from typing import Any

import pytest
import torch
from choices import flat_config
from layer_support import HEADS, feed, filled, random_kv
from op_calls import quantize_tokens
from sinks_support import divergences, moved_by, prompt_of, sink_model, sink_text, tail_over
from torch import Tensor
from transformers import DynamicCache

from turbo_hf import SparseConfig, TurboConfig
from turbo_hf.cache.layer import TurboLayer
from turbo_hf.eval.published import Kivi
from turbo_hf.layout import FIRST
from turbo_hf.sparse.selectors import Centroids

ROUNDED = [
    pytest.param(TurboConfig(bits=4), id="4bit"),
    pytest.param(TurboConfig(bits=8), id="8bit"),
    pytest.param(TurboConfig(bits=8, value_bits=2), id="values"),
    pytest.param(flat_config(bits=8, low_bits=3, low_heads=0.5), id="low-heads"),
    pytest.param(flat_config(bits=2, block_size=32, recent_tokens=32), id="recent"),
]


def at_8_bit(x: Tensor) -> Tensor:
    codes, scale = quantize_tokens(x)
    return codes * scale[..., None]


def outliers(rows: int, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Keys and values whose first four tokens are unlike the others, as those of models are."""
    k, v = random_kv(rows, tokens, seed=seed)
    k[:, :, :4, 3] += 200
    v[:, :, :4] /= 100
    return k, v


@pytest.mark.parametrize("config", ROUNDED)
def test_first_tokens_stay_at_8_bit_as_a_row_grows(config: TurboConfig) -> None:
    """Of rows of other lengths, too, the last of which is shorter than that for long."""
    k, v = outliers(3, 500)
    layer, starts = TurboLayer(config), [0, 33, 340]
    valid = torch.arange(500) >= torch.tensor(starts)[:, None]
    for row, start in enumerate(starts):
        k[row], v[row] = k[row].roll(start, 1), v[row].roll(start, 1)
    at = 0
    for count in (5, 9, 120, 16, *[1] * 70, 280):
        part = slice(at, at + count)
        feed(layer, k[:, :, part], v[:, :, part], valid[:, part])
        at += count
        held = layer.dequantized(at)
        for row, start in enumerate(starts):
            first = slice(start, min(start + FIRST, at))
            for x, y in zip(held, (k, v), strict=True):
                assert torch.equal(x[row, :, first], at_8_bit(y[row : row + 1, :, first])[0])
    assert min(layer.state.sealed) >= 1
    assert all(count >= FIRST for count in layer.state.open)


def test_outliers_that_come_first_do_not_widen_a_block() -> None:
    given = outliers(1, FIRST + 128)
    plain = [torch.cat((x[:, :, 4:8], x[:, :, 4:]), 2) for x in given]
    held, want = (filled(TurboConfig(), *each).dequantized(128) for each in (given, plain))
    assert all(map(torch.equal, held, want))


def sparse_layer() -> TurboLayer:
    chosen = SparseConfig(selector="kmeans-rotated", probes=2)
    selector: Any = Centroids(chosen, 0, torch.randn(HEADS, 8, 16), pre_rotary=False)
    return TurboLayer(TurboConfig(sparse=chosen), selector=selector)


@pytest.mark.parametrize(
    "layer",
    [
        pytest.param(TurboLayer(TurboConfig(), 100), id="window"),
        pytest.param(TurboLayer(TurboConfig(bits=16)), id="16bit"),
        pytest.param(TurboLayer(TurboConfig(), latent=True), id="latent"),
        pytest.param(sparse_layer(), id="sparse"),
    ],
)
def test_where_all_tokens_are_sealed(layer: TurboLayer) -> None:
    assert layer.state.first == 0
    assert layer.state.recent == (64 if layer.window else 0)


TOKENS = 544


@cache
def sinks() -> tuple[Any, Tensor]:
    """The tiny model, and a text for it."""
    return sink_model(), sink_text(TOKENS)


def by_size(x: Tensor, bits: int, group: int) -> Tensor:
    """x [B, H, T, D] rounded by channel, each token brought to one size before, and back after."""
    size = x.pow(2).mean(-1, keepdim=True).sqrt()
    return Kivi(bits, bits, group).keys(x / size) * size


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
