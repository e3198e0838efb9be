"""`str()` of what a cache takes and of what a patch did: they fit a screen, however many layers there are."""

from all_pairs import in_one_test
from models import prompts, tiny_llama

import turbo_hf
from turbo_hf import TurboConfig
from turbo_hf.cache.memory import SHOWN, Memory, group_layers
from turbo_hf.config.turbo_config import PRESETS
from turbo_hf.patching.handle import LayerReport, Report
from turbo_hf.sparse.selectors import Selectivity


@in_one_test(
    ("indices", "words"),
    [
        ([3], "layer 3"),
        ([0, 1], "layers 0, 1"),
        ([*range(32)], "layers 0 to 31"),
        ([0, 2, 3, 4, 7, 8], "layers 0, 2 to 4, 7, 8"),
    ],
)
def test_layers_in_words(indices: list[int], words: str) -> None:
    assert group_layers((index, "same") for index in indices) == [(words, "same")]


def test_memory_of_many_layers_fits_a_screen() -> None:
    layer, dense = {"codes": 100_000, "scales": 500, "open": 24}, {"dense": 300_000}
    memory = Memory((layer,) * 30 + (dense, layer) * 5, 2048, 14 * 10**6)
    assert str(memory).splitlines() == [
        "2,048 tokens in 5,018,340 bytes; compressed layers: 3.98 x smaller",
        "  all layers: codes 3,500,000, dense 1,500,000, open 840, scales 17,500",
        "  each of layers 0 to 29, 31, 33, 35, 37, 39: codes 100,000, scales 500, open 24",
        "  each of layers 30, 32, 34, 36, 38: dense 300,000",
    ]
    assert all(len(line) <= 120 for line in str(memory).splitlines())
    uneven = str(Memory(tuple({"codes": n} for n in range(80)), 5, 10)).splitlines()
    assert len(uneven) == 2 + SHOWN + 1
    assert uneven[-1] == f"  and {80 - SHOWN} lines more: see `layers`"
    assert str(Memory((), 0, 0)) == "no cache yet"


def test_memory_says_what_it_measured() -> None:
    model = tiny_llama(num_hidden_layers=3)
    with turbo_hf.patch(model, TurboConfig(dense_layers=(1,))) as handle:
        model.generate(prompts(2, 70), max_new_tokens=2, do_sample=False)
        memory = handle.memory()
    first, kinds, rounded, exact = str(memory).splitlines()
    assert first.startswith(f"{memory.tokens} tokens in {memory.total:,} bytes; ")
    assert first.endswith(f"{memory.compression:.2f} x smaller than in float32")
    assert f"codes {memory.by_kind['codes']:,}" in kinds
    assert rounded.startswith("  each of layers 0, 2: codes ")
    assert exact.startswith(f"  layer 1: codes {memory.layers[1]['codes']:,}")


def test_a_report_of_many_layers_fits_a_screen() -> None:
    layers = [LayerReport(index, ((4, 8),), 4096 if index % 6 < 5 else None, "") for index in range(47)]
    layers.append(LayerReport(47, ((8, 8),), None, "key bias", kept_int8=True))
    read = tuple(Selectivity(index, 1000, 10, 20 + index) for index in range(5, 47, 2))
    report = Report("Model", "family", "", PRESETS["turbo4"], tuple(layers), "", "", (), selectivity=read)
    lines = str(report).splitlines()
    assert len(lines) == 1 + 3 + 3
    assert lines[1].startswith("  layers 0 to 4, 6 to 10, 12 to 16, ")
    assert lines[1].endswith("42 to 46: 8 x 4 bit, window 4096")
    assert lines[2] == "  layers 5, 11, 17, 23, 29, 35, 41: 8 x 4 bit"
    assert lines[3] == "  layer 47: 8 bit; key bias"
    assert lines[4] == "  least, layer 5: 2.50% of the keys read, 1.52% of those not always read"
    assert lines[5] == "  most, layer 45: 6.50% of the keys read, 5.56% of those not always read"
    assert lines[6] == f"  all {len(read)} sparse layers: see `selectivity`"
