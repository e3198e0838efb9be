"""Tokens in the order of their buckets: what a layer seals is what it was given, sorted, and nothing else changes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from choices import flat_config
from graphs_support import an_index
from models import prompts, tiny_llama
from op_calls import ops_like
from sparse_cache_support import bucketed
from torch import Tensor

import turbo_hf
from turbo_hf import SparseConfig, TurboConfig
from turbo_hf.cache.layer import TurboLayer
from turbo_hf.cache.rows import NewColumns
from turbo_hf.models.versions import CACHE
from turbo_hf.sparse.bucket_index import SPARE
from turbo_hf.sparse.selectors import Centroids

BLOCK, WINDOW, SINK = 32, 40, 3


def layer_of(sorts: bool = True, **options: Any) -> TurboLayer:
    """16 bit, so that keys are what they were."""
    chosen: dict[str, Any] = {"selector": "kmeans-rotated", "probes": 2, "window_tokens": WINDOW}
    sparse = SparseConfig(**chosen, sink_tokens=SINK)
    config = flat_config(bits=16, block_size=BLOCK, sparse=sparse, **options)
    layer = TurboLayer(config, selector=bucketed(sparse, 8))
    if not sorts:
        layer.activate_past_recording()  # nothing is sealed, so nothing moves
    return layer


def feed(layers: list[TurboLayer], tokens: int, rows: int = 2, starts: list[int] | None = None) -> None:
    k, v = torch.randn(rows, 2, tokens, 16).half(), torch.randn(rows, 2, tokens, 16).half()
    for layer in layers:
        assert isinstance(layer.selector, Centroids)
        layer.append(k, v, NewColumns(tokens, None, starts), layer.selector.buckets(ops_like(k.float()), k.float()))
        layer.commit()


def held(layer: TurboLayer, row: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and buckets of a row, as they lie: [Hkv, T, D] twice, [Hkv, T]."""
    count = layer.lengths()[row]
    k, v = (x[row, :, :count] for x in layer.dequantized(layer.seen))
    return k, v, layer.bucket_index.buckets[row, :, :count].clone()


def check(layer: TurboLayer, plain: TurboLayer, ordered: list[list[range]]) -> None:
    """`layer` holds what `plain` holds, the blocks `ordered` sorted by bucket, of equals the older first."""
    assert layer.bucket_index.sorted_blocks == ordered
    assert layer.lengths() == plain.lengths()
    for row, runs in enumerate(ordered):
        k, v, buckets = held(plain, row)
        for run in runs:
            at = slice(run.start * BLOCK, run.stop * BLOCK)
            for head in range(2):
                own = buckets[head, at].clone()
                by = sorted(range(len(own)), key=lambda i: int(own[i]))
                for x in (k, v, buckets):
                    x[head, at] = x[head, at][by]
        for got, want in zip(held(layer, row), (k, v, buckets), strict=True):
            assert torch.equal(got, want)
        spans = layer.bucket_index.spans[row]
        known = [n for run in runs for n in run]
        for n in range(spans.shape[1]):
            own = buckets[:, n * BLOCK : (n + 1) * BLOCK]
            want = torch.stack((own.amin(-1), own.amax(-1)), -1) if n in known else torch.full((2, 2), -1)
            assert torch.equal(spans[:, n], want.to(spans.dtype))


def test_a_prompt_is_sorted_but_for_what_is_always_read() -> None:
    layer, plain = layer_of(), layer_of(sorts=False)
    feed([layer, plain], 500)
    # 500 - 40 tokens before the window, 64 to spare: 12 blocks, of which the first holds the sink
    assert SPARE == 64
    check(layer, plain, [[range(1, 12)]] * 2)
    # the newest tokens wait for more of the prompt, and are sealed when an answer begins
    assert layer.state.sealed == [12, 12]
    feed([layer, plain], 1)
    assert layer.state.sealed == [15, 15]
    for _ in range(70):
        feed([layer, plain], 1)
    check(layer, plain, [[range(1, 12)]] * 2)
    assert layer.state.sealed == [17, 17]


@pytest.mark.parametrize("size", [20, 100, 170])
def test_a_prompt_in_parts_is_sorted_part_by_part(size: int) -> None:
    layer, plain = layer_of(), layer_of(sorts=False)
    runs: list[range] = []
    done, total = 0, 0
    for _ in range(600 // size):
        feed([layer, plain], size)
        total += size
        end = max(0, total - WINDOW - SPARE) // BLOCK
        if end - max(done, 1) > 1:
            runs.append(range(max(done, 1), end))
        done = max(done, end)
    assert (not runs) == (size < BLOCK)
    check(layer, plain, [runs] * 2)
    assert layer.state.sealed == [done] * 2


def test_a_new_turn_sorts_its_own_tokens_and_can_be_taken_back() -> None:
    layer, plain = layer_of(), layer_of(sorts=False)
    for tokens in (300, 1, 1, 1):
        feed([layer, plain], tokens)
    check(layer, plain, [[range(1, 6)]] * 2)
    feed([layer, plain], 300)
    # 303 tokens stood before: the first whole block behind them is the tenth
    check(layer, plain, [[range(1, 6), range(10, 15)]] * 2)
    for x in (layer, plain):
        x.crop(-300)
    check(layer, plain, [[range(1, 6)]] * 2)
    feed([layer, plain], 1)
    layer.crop(-4)
    plain.crop(-4)
    check(layer, plain, [[range(1, 6)]] * 2)


def test_what_stands_in_order_cannot_be_cut() -> None:
    layer = layer_of()
    feed([layer], 300)
    message = (
        r"layer 0: crop\(-100\) leaves 200 tokens of row 0\. Its tokens 32 to 192 stand in the order of their buckets: "
        r"leave at most 32 tokens or at least 231, or use a new cache\."
    )
    with pytest.raises(ValueError, match=message):
        layer.crop(-100)
    assert layer.lengths() == [300, 300]
    with pytest.raises(ValueError, match=r"crop\(-70\) leaves 230 tokens"):
        layer.crop(-70)
    layer.crop(-69)
    assert layer.lengths() == [231, 231]
    layer.crop(-199)
    assert layer.lengths() == [32, 32]
    assert layer.bucket_index.sorted_blocks == [[], []]
    assert bool((layer.bucket_index.spans == -1).all())


@pytest.mark.parametrize("tokens", [290, 291, 303, 323])
def test_the_end_of_a_prompt_can_be_cropped(tokens: int) -> None:
    layer, plain = layer_of(), layer_of(sorts=False)
    feed([layer, plain], tokens)
    order = [list(runs) for runs in layer.bucket_index.sorted_blocks]
    for x in (layer, plain):
        x.crop(-SPARE - 1)
    check(layer, plain, order)


def test_tokens_of_no_known_bucket_end_the_order() -> None:
    layer, plain = layer_of(), layer_of(sorts=False)
    k, v = torch.randn(2, 2, 300, 16).half(), torch.randn(2, 2, 300, 16).half()
    for x in (layer, plain):
        x.append(k, v, NewColumns(300))
        x.commit()
    feed([layer, plain], 300)
    check(layer, plain, [[], []])
    layer.crop(-200)
    assert layer.lengths() == [400, 400]


def test_a_crop_changes_all_layers_or_none() -> None:
    model, ids = tiny_llama(num_hidden_layers=3), prompts(1, 400)
    sparse, index = SparseConfig(selector="kmeans-rotated", probes=2, window_tokens=WINDOW), an_index(model, 8)
    with turbo_hf.patch(model, TurboConfig(bits=8, sparse=sparse), calibration=index) as handle, torch.no_grad():
        cache = handle.new_cache()
        model(ids, **{CACHE: cache})
        with pytest.raises(ValueError, match=r"layer 1: crop\(-200\) leaves 200 tokens of row 0"):
            cache.crop(-200)
        assert [layer.seen for layer in cache.turbo_layers()] == [400] * 3
        cache.crop(-60)
        assert [layer.seen for layer in cache.turbo_layers()] == [340] * 3


@pytest.mark.parametrize(
    ("change", "rows"),
    [
        pytest.param(lambda layer: layer.reorder_cache(torch.tensor([1, 0])), [1, 0], id="reorder"),
        pytest.param(lambda layer: layer.batch_select_indices(torch.tensor([1])), [1], id="select"),
        pytest.param(lambda layer: layer.batch_repeat_interleave(2), [0, 0, 1, 1], id="repeat"),
    ],
)
def test_rows_that_change_places_keep_where_their_turn_began(
    change: Callable[[TurboLayer], None], rows: list[int]
) -> None:
    layer, plain = layer_of(), layer_of(sorts=False)
    feed([layer, plain], 400, starts=[0, 150])
    feed([layer, plain], 1)
    # the turn begins behind 401 and 251 tokens, and is too short as yet to be put in order
    feed([layer, plain], 100)
    first = [[range(1, 9)], [range(1, 4)]]
    check(layer, plain, first)
    for x in (layer, plain):
        change(x)
    feed([layer, plain], 300, len(rows))
    runs = [[*first[0], range(13, 21)], [*first[1], range(8, 17)]]
    check(layer, plain, [runs[row] for row in rows])


def test_what_follows_a_crop_is_sorted_as_in_a_new_cache() -> None:
    layer, plain, new = layer_of(), layer_of(sorts=False), layer_of()
    for tokens in (300, 1, 300):
        feed([layer, plain], tokens)
    for x in (layer, plain):
        x.crop(32 - 601)
    feed([new], 32)
    feed([layer, plain, new], 300)
    check(layer, plain, [[range(1, 7)]] * 2)
    assert new.bucket_index.sorted_blocks == layer.bucket_index.sorted_blocks


@pytest.mark.parametrize("chunk", [None, 150])
def test_tokens_are_the_same_with_a_cache_in_bucket_order(chunk: int | None) -> None:
    """A cache in order is read by prompts, dense decode and sparse decode alike."""
    model, ids = tiny_llama(num_hidden_layers=3), prompts(2, 400)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "prefill_chunk_size": chunk}

    def run(sparse: SparseConfig | None) -> Any:
        config = flat_config(bits=16, block_size=BLOCK, attention="native", sparse=sparse)
        with turbo_hf.patch(model, config, calibration=an_index(model, 8)) as handle:
            cache = handle.new_cache()
            out = model.generate(ids, **{CACHE: cache}, **options)
        return out, cache

    every = SparseConfig(selector="kmeans-rotated", probes=8, window_tokens=WINDOW, read_all_layers=())
    found, cache = run(every)
    assert any(cache.layers[0].bucket_index.sorted_blocks)
    assert torch.equal(found, run(None)[0])


def test_a_mask_that_tells_columns_apart_is_refused() -> None:
    model, ids = tiny_llama(num_hidden_layers=2), prompts(1, 300)
    config = TurboConfig(bits=8, sparse=SparseConfig(selector="kmeans-rotated", probes=8, window_tokens=WINDOW))
    patched = turbo_hf.patch(model, config, calibration=an_index(model, 8), strict="fallback")
    with patched as handle, torch.no_grad():
        cache = handle.new_cache()
        model(ids, **{CACHE: cache})
        mask = torch.zeros(1, 1, 2, 302)
        mask[..., 5] = torch.finfo(torch.float32).min
        with pytest.raises(ValueError, match="stand in the order of their buckets, so that no 4D mask can tell them"):
            model(ids[:, :2], **{CACHE: cache}, attention_mask=mask)
        assert [layer.seen for layer in cache.turbo_layers()] == [300, 300]
