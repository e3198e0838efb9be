"""What a cache takes, and `str()` of it and of what a patch did: they fit a screen, however many layers."""

from typing import Any

import torch
from models import left_padded, prompts
from plan_support import costs
from torch import Tensor

from turbo_hf import SparseConfig, TurboCache, TurboConfig
from turbo_hf.cache.memory import SHOWN, Memory, group_layers, measure
from turbo_hf.config.turbo_config import PRESETS
from turbo_hf.layout import FIRST, page_bytes
from turbo_hf.models.versions import CACHE
from turbo_hf.patching.handle import LayerReport, Report
from turbo_hf.sparse.selectors import Selectivity


def passed(model: Any, ids: Tensor, cache: TurboCache) -> Memory:
    """What the cache takes after a pass."""
    with torch.no_grad():
        model(ids, **{CACHE: cache})
    return measure(cache.layers)


def test_uncompressed_layers_are_counted_as_dense(llama: Any) -> None:
    cache = TurboCache(llama.config, uncompressed_layers=(1,))
    assert measure(cache.layers).compression == 1.0
    assert measure(cache.layers).total == 0
    memory = passed(llama, prompts(2, FIRST + 128), cache)
    dense = 2 * 2 * 2 * (FIRST + 128) * 16 * 8
    assert memory.by_kind["dense"] == dense
    assert memory.layers[0]["codes"] + memory.layers[0]["scales"] >= 2 * 2 * page_bytes(16, 4)
    assert memory.full_precision == dense


def test_the_index_is_counted_where_there_is_one(llama: Any) -> None:
    chosen = SparseConfig(selector="kmeans", probes=2, read_all_layers=(0,))
    plain = costs(llama.config, TurboConfig())
    sparse = costs(llama.config, TurboConfig(sparse=chosen))
    assert sparse[0] == plain[0]
    # int16 for each of 2 heads
    assert sparse[1].per_token == plain[1].per_token + 2 * 2


def test_padding_takes_no_memory(llama: Any) -> None:
    batch = left_padded([prompts(1, n, seed=n)[0] for n in (512, 1)])
    caches = [TurboCache(llama.config, attention_mask=told) for told in (batch["attention_mask"], None)]
    sizes = [passed(llama, batch["input_ids"], cache) for cache in caches]
    assert sizes[0].tokens == 513
    assert sizes[1].tokens == 1024
    assert sizes[0].by_kind["codes"] == sizes[1].by_kind["codes"] / 2


def test_layers_in_words() -> None:
    for indices, words in (([3], "layer 3"), ([0, 1], "layers 0, 1"), ([0, 2, 3, 4, 7, 8], "layers 0, 2 to 4, 7, 8")):
        assert group_layers((index, "same") for index in indices) == [(words, "same")]


def test_memory_of_many_layers_fits_a_screen() -> None:
    layer, dense = {"codes": 100_000, "scales": 500, "open": 24}, {"dense": 300_000}
    memory = Memory((layer,) * 30 + (dense, layer) * 5, 2048, 14 * 10**6)
    lines = str(memory).splitlines()
    assert lines[0] == "2,048 tokens in 5,018,340 bytes; compressed layers: 3.98 x smaller"
    assert lines[2:] == [
        "  each of layers 0 to 29, 31, 33, 35, 37, 39: codes 100,000, scales 500, open 24",
        "  each of layers 30, 32, 34, 36, 38: dense 300,000",
    ]
    uneven = str(Memory(tuple({"codes": n} for n in range(80)), 5, 10)).splitlines()
    assert len(uneven) == 2 + SHOWN + 1
    assert uneven[-1] == f"  and {80 - SHOWN} lines more: see `layers`"
    assert str(Memory((), 0, 0)) == "no cache yet"


def test_a_report_of_many_layers_fits_a_screen() -> None:
    layers = [LayerReport(index, ((4, 8),), 4096 if index % 6 < 5 else None, "") for index in range(47)]
    layers.append(LayerReport(47, ((8, 8),), None, "key bias", kept_int8=True))
    read = tuple(Selectivity(index, 1000, 10, 20 + index) for index in range(5, 47, 2))
    report = Report("Model", "family", "", PRESETS["turbo4"], tuple(layers), "", "", (), selectivity=read)
    lines = str(report).splitlines()
    assert len(lines) == 1 + 3 + 3
    assert lines[1].endswith("42 to 46: 8 x 4 bit, window 4096")
    assert lines[4] == "  least, layer 5: 2.50% of the keys read, 1.52% of those not always read"
    assert lines[5].startswith("  most, layer 45: 6.50%")
