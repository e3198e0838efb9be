"""Caches whose steps are taken by the host, and as they are replayed."""

import pytest
import torch
from choices import flat_config
from models import SHAPE
from op_calls import ops_like
from stores import tokens
from torch import Tensor
from transformers import LlamaConfig

from turbo_hf import SparseConfig, TurboCache, TurboConfig
from turbo_hf.cache.layer import TurboLayer
from turbo_hf.cache.rows import NewColumns, columns_of
from turbo_hf.graphs.replayable_steps import ReplayableSteps
from turbo_hf.sparse.selectors import Centroids

HEADS, DIM, LAYERS = 2, 16, 2
LENGTHS = [70, 33, 5]
KMEANS = SparseConfig(selector="kmeans-rotated", probes=2)
CONFIGS = [
    pytest.param(flat_config(block_size=32), id="4bit"),
    pytest.param(flat_config(bits=8, block_size=32), id="8bit"),
    pytest.param(flat_config(block_size=32, int8_layers=(1,)), id="4bit-8bit"),
    pytest.param(flat_config(bits=2, block_size=32), id="2bit"),
    pytest.param(flat_config(value_bits=2, block_size=32, recent_tokens=64), id="recent"),
    pytest.param(flat_config(block_size=32, sparse=KMEANS), id="sparse"),
]


def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps by the references: what is counted and kept in place is the same, and takes no interpreter."""
    monkeypatch.setattr(TurboLayer, "in_place", True)


def filled(config: TurboConfig, window: int | None = None, lengths: list[int] | None = None) -> TurboCache:
    """A left-padded batch in a cache of two layers."""
    lengths = LENGTHS if lengths is None else lengths
    shape = {**SHAPE, "num_hidden_layers": LAYERS}
    generator = torch.Generator().manual_seed(3)
    centroids = torch.randn(HEADS, 8, DIM, generator=generator)
    selectors = {
        n: Centroids(KMEANS, n, centroids, pre_rotary=False) for n in range(LAYERS) if config.sparse is not None
    }
    orders = {n: [1, 0] for n in range(LAYERS)}
    cache = TurboCache(LlamaConfig(**shape), config, head_orders=orders, selectors=selectors)
    chunk = columns_of(torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None])
    for layer in cache.turbo_layers():
        layer.window = window
        layer.state = layer.state._replace(first=0 if window else layer.state.first)
        k, v = (torch.randn(len(lengths), HEADS, max(lengths), DIM, generator=generator) for _ in range(2))
        layer.append(k, v, chunk, buckets_of(layer, k))
        layer.commit()
    return cache


def buckets_of(layer: TurboLayer, k: Tensor) -> Tensor | None:
    return layer.selector.buckets(ops_like(k), k) if isinstance(layer.selector, Centroids) else None


def new_tokens(rows: int = len(LENGTHS), count: int = 1) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of more tokens for each layer."""
    return [(tokens(rows, HEADS, count, DIM), tokens(rows, HEADS, count, DIM)) for _ in range(LAYERS)]


def by_host(cache: TurboCache, new: list[tuple[Tensor, Tensor]]) -> None:
    for layer, (k, v) in zip(cache.turbo_layers(), new, strict=True):
        layer.append(k, v, NewColumns(k.shape[2]), buckets_of(layer, k))
        layer.commit()


def by_steps(run: ReplayableSteps, new: list[tuple[Tensor, Tensor]], surplus: int = 0) -> None:
    """The tokens, and `surplus` more that are taken back at once."""
    size = new[0][0].shape[2] + surplus
    run.mark_unfinished()
    run.begin(size)
    with run.running(size):
        for layer, pair in zip(run.layers, new, strict=True):
            k, v = (torch.cat((x, x[:, :, -1:].expand(-1, -1, surplus, -1)), 2) for x in pair)
            layer.append(k, v, NewColumns(size), buckets_of(layer, k))
            layer.commit()
    run.finish(size, surplus)


def by_both(
    run: ReplayableSteps, plain: TurboCache, rows: int = len(LENGTHS), count: int = 1, surplus: int = 0
) -> None:
    """The same new tokens by a step, and by the host."""
    new = new_tokens(rows, count)
    by_host(plain, new)
    by_steps(run, new, surplus)


def assert_shows_same(a: TurboCache, b: TurboCache, columns: int) -> None:
    """The same newest tokens, bit by bit."""
    for x, y in zip(a.turbo_layers(), b.turbo_layers(), strict=True):
        assert x.seen == y.seen
        for p, q in zip(x.dequantized(columns), y.dequantized(columns), strict=True):
            assert torch.equal(p, q)


def assert_same(a: TurboCache, b: TurboCache) -> None:
    """The same tokens, bit by bit, in as many columns; and the device knows the lengths that the host does."""
    for x, y in zip(a.turbo_layers(), b.turbo_layers(), strict=True):
        assert x.seen == y.seen
        assert x.lengths() == y.lengths()
        assert (x.valid is None) == (y.valid is None)
        if x.valid is not None and y.valid is not None:
            assert torch.equal(x.valid, y.valid)
        for layer in (x, y):
            store = layer.kv_store()
            assert store.open_len.tolist() == layer.state.open
            assert store.sealed.tolist() == list(layer.state.sealed)
        for p, q in zip(x.dequantized(x.seen), y.dequantized(y.seen), strict=True):
            assert torch.equal(p, q)
        for row, length in enumerate(x.lengths() if x.bucket_index.bucketed else []):
            p, q = (layer.bucket_index.buckets[row, ..., :length] for layer in (x, y))
            assert torch.equal(p, q)
