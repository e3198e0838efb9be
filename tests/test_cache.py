"""`TurboCache` as a `transformers.Cache`, driven by a model that is not patched, and what it says of its memory."""

import contextlib
import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from choices import EVERY_PRESET
from models import lab_model, left_padded, prompts, tiny_llama, tiny_mistral
from plan_support import costs
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

import turbo_hf
import turbo_hf.cache.new_columns
import turbo_hf.cache.passes
from turbo_hf import SparseConfig, TurboCache, TurboConfig
from turbo_hf.cache.layer import TurboLayer
from turbo_hf.cache.memory import cache_bytes, measure
from turbo_hf.layout import page_bytes
from turbo_hf.models.versions import CACHE

TEXT = "Q: I have a cat, a dog, and a snake. How many animals do I have?\nA: Let's think step by step.\n"


def forward(model: Any, ids: Tensor, cache: Cache, mask: Tensor | None = None) -> Tensor:
    """Logits of one pass, positions counted from each row's first token."""
    position = None
    if mask is not None:
        position = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    with torch.no_grad():
        logits: Tensor = model(ids, attention_mask=mask, position_ids=position, **{CACHE: cache}).logits
    return logits


# --- what it is made of --------------------------------------------------------------------------------------------


def test_each_layer_gets_what_was_chosen_for_it() -> None:
    config = tiny_llama(num_hidden_layers=4).config
    cache = TurboCache(config, TurboConfig(bits=3, int8_layers=(1,), dense_layers=(3,)), int8_layers=(2,))
    assert isinstance(cache, Cache)
    assert [layer.config.bits for layer in cache.turbo_layers()] == [3, 8, 8, 16]
    cache = TurboCache(config, "turbo4", uncompressed_layers=(2,))
    assert [type(layer) for layer in cache.layers] == [TurboLayer, TurboLayer, DynamicLayer, TurboLayer]
    assert [layer.index for layer in cache.turbo_layers()] == [0, 1, 3]
    assert cache.is_croppable
    assert not cache.is_compileable


def test_a_window_comes_from_the_model() -> None:
    cache = TurboCache(tiny_mistral(24).config, uncompressed_layers=(1,))
    assert cache.is_sliding == [True, True]
    assert cache.turbo_layers()[0].window == 24
    assert isinstance(cache.layers[1], DynamicSlidingWindowLayer)
    assert TurboCache(tiny_mistral(None).config).turbo_layers()[0].window is None


@pytest.mark.parametrize("name", ["int8_layers", "dense_layers", "uncompressed_layers"])
def test_a_layer_that_does_not_exist_is_refused(name: str, llama: Any) -> None:
    chosen: dict[str, Any] = {name: (5, 0, 2)}
    with pytest.raises(ValueError, match=rf"{name} names layers \[2, 5\]; the model has layers 0 to 1"):
        TurboCache(llama.config, **({"config": TurboConfig(**chosen)} if name == "dense_layers" else chosen))
    if name != "dense_layers":
        below: dict[str, Any] = {name: (-1,)}
        with pytest.raises(ValueError, match=rf"{name} names layers \[-1\]"):
            TurboCache(llama.config, **below)
    with pytest.raises(ValueError, match=r"config must be a TurboConfig, .* or one of the presets int8, turbo4"):
        TurboCache(llama.config, "turbo5")


# --- on a model that is not patched --------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", list(EVERY_PRESET))
def test_a_prompt_is_read_in_full_precision(llama: Any, preset: str) -> None:
    ids = prompts(3, 130)
    got = forward(llama, ids, TurboCache(llama.config, preset, selectors={}))
    assert torch.equal(got, forward(llama, ids, DynamicCache(config=llama.config)))


def test_fewer_bits_lose_more_of_the_logits() -> None:
    model, tokenizer = lab_model()
    ids = tokenizer(TEXT * 6, return_tensors="pt").input_ids
    want = forward(model, ids, DynamicCache(config=model.config))[:, 192:]
    errors = []
    for bits in (8, 4, 3, 2):
        cache = TurboCache(model.config, TurboConfig(bits=bits))
        forward(model, ids[:, :192], cache)
        assert cache.turbo_layers()[0].state.sealed == [3]
        got = forward(model, ids[:, 192:], cache)
        errors.append(float((got - want).square().mean() / want.var()))
    assert errors == sorted(errors)
    # relative: what is left of the logits at 4 bit, and that 8 bit is near the model's own
    assert errors[0] < errors[1] / 4
    assert errors[1] < 1 / 8


@pytest.mark.parametrize("preset", ["int8", "turbo4"])
def test_the_trained_model_reasons_on_it(preset: str) -> None:
    model, tokenizer = lab_model()
    batch = tokenizer([TEXT, TEXT[:64]], return_tensors="pt", padding=True)
    want = model.generate(**batch, max_new_tokens=50)
    cache = TurboCache(model.config, preset, attention_mask=batch["attention_mask"])
    assert torch.equal(model.generate(**batch, max_new_tokens=50, **{CACHE: cache})[0], want[0])
    assert cache.turbo_layers()[0].state.sealed[0] >= 1


def test_padding_is_not_stored_if_told(llama: Any) -> None:
    lengths = [70, 9, 128]
    batch = left_padded([prompts(1, n, seed=n)[0] for n in lengths])
    told = TurboCache(llama.config, attention_mask=batch["attention_mask"])
    got = llama.generate(**batch, **{CACHE: told}, max_new_tokens=20)[:, 128:]
    assert [layer.lengths() for layer in told.turbo_layers()] == [[n + 19 for n in lengths]] * 2
    for row, n in enumerate(lengths):
        alone = TurboCache(llama.config)
        ids = prompts(1, n, seed=n)
        assert torch.equal(llama.generate(ids, **{CACHE: alone}, max_new_tokens=20)[0, n:], got[row])
    untold = TurboCache(llama.config)
    llama.generate(**batch, **{CACHE: untold}, max_new_tokens=20)
    assert untold.turbo_layers()[0].lengths() == [128 + 19] * 3


def test_padding_that_only_the_cache_was_told_of_is_refused_by_a_patched_model(llama: Any) -> None:
    batch = left_padded([prompts(1, n, seed=n)[0] for n in (70, 9)])
    with turbo_hf.patch(llama):
        cache = TurboCache(llama.config, attention_mask=batch["attention_mask"])
        with pytest.raises(ValueError, match="given an attention_mask with padding, this patched model none"):
            llama(batch["input_ids"], **{CACHE: cache})
        assert [layer.seen for layer in cache.turbo_layers()] == [0, 0]
        llama(**batch, **{CACHE: cache})
        assert [layer.lengths() for layer in cache.turbo_layers()] == [[70, 9]] * 2
        without = TurboCache(llama.config, attention_mask=torch.ones(2, 70))
        forward(llama, batch["input_ids"], without)
        assert [layer.lengths() for layer in without.turbo_layers()] == [[70, 70]] * 2
        # padding in a later pass is noticed in that pass
        mask = torch.ones(2, 90)
        mask[0, 75] = 0
        later = TurboCache(llama.config, attention_mask=mask)
        forward(llama, prompts(2, 70), later)
        with pytest.raises(ValueError, match="given an attention_mask with padding, this patched model none"):
            forward(llama, prompts(2, 20), later)
        assert [layer.seen for layer in later.turbo_layers()] == [70, 70]


def test_padding_that_was_cropped_is_forgotten(llama: Any) -> None:
    mask = torch.ones(2, 20, dtype=torch.int64)
    mask[:, -3:] = 0
    for patched in (False, True):
        with turbo_hf.patch(llama) if patched else contextlib.nullcontext():
            cache = TurboCache(llama.config, attention_mask=mask)
            forward(llama, prompts(2, 20), cache, mask)
            cache.crop(-5)
            forward(llama, prompts(2, 3), cache)
        assert [layer.lengths() for layer in cache.turbo_layers()] == [[18, 18]] * 2


def test_a_mask_of_another_batch_is_refused(llama: Any) -> None:
    cache = TurboCache(llama.config, attention_mask=torch.ones(1, 9))
    with pytest.raises(ValueError, match="attention_mask given to TurboCache has 1 rows; this pass brings 3"):
        forward(llama, prompts(3, 9), cache)


def test_uncompressed_layers_hold_what_a_dynamic_cache_holds(llama: Any) -> None:
    ids = prompts(2, 90)
    stock, mixed = DynamicCache(config=llama.config), TurboCache(llama.config, "turbo2", uncompressed_layers=(0,))
    caches: list[Any] = [stock, mixed]
    for cache in caches:
        forward(llama, ids[:, :80], cache)
        forward(llama, ids[:, 80:], cache)
    want, got = (cache.layers[0] for cache in caches)
    assert torch.equal(got.keys, want.keys)
    assert torch.equal(got.values, want.values)
    assert mixed.get_seq_length() == mixed.turbo_layers()[0].get_seq_length() == 90


@pytest.mark.parametrize("window", [None, 24], ids=["full", "window"])
def test_mask_sizes_are_those_of_a_dynamic_cache(window: int | None) -> None:
    model = tiny_mistral(window)
    stock, turbo = DynamicCache(config=model.config), TurboCache(model.config)
    for tokens in (10, 1, 30, 1, 7):
        for cache in (stock, turbo):
            forward(model, prompts(1, tokens), cache)
        for queries in (1, 5, 40):
            assert turbo.get_mask_sizes(queries, 0) == stock.get_mask_sizes(queries, 0)
        assert turbo.get_seq_length() == stock.get_seq_length()


# --- what Transformers does to a cache -----------------------------------------------------------------------------

ROWS = [40, 128, 3]


def start(model: Any, rows: list[int]) -> TurboCache:
    """A cache of prompts ROWS[row] tokens long, left-padded; on a model that is not patched."""
    batch = left_padded([prompts(1, ROWS[row], seed=row)[0] for row in rows])
    cache = TurboCache(model.config, attention_mask=batch["attention_mask"])
    forward(model, batch["input_ids"], cache, batch["attention_mask"])
    return cache


def go_on(model: Any, cache: TurboCache, rows: list[int]) -> Tensor:
    """The most likely token after one more pass of each row."""
    width = cache.get_seq_length()
    valid = cache.turbo_layers()[0].valid
    past = torch.ones(len(rows), width, dtype=torch.int64) if valid is None else valid.long()
    ids = prompts(1, 5, seed=20).expand(len(rows), -1)
    return forward(model, ids, cache, torch.cat((past, torch.ones_like(ids)), 1)).argmax(-1)


CHANGES: list[Any] = [
    pytest.param(lambda cache: cache.reorder_cache(torch.tensor([2, 0, 2])), [2, 0, 2], id="reorder"),
    pytest.param(lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2], id="repeat"),
    pytest.param(lambda cache: cache.batch_select_indices(torch.tensor([1, 2])), [1, 2], id="select"),
    pytest.param(lambda cache: cache.batch_select_indices(torch.tensor([True, False, True])), [0, 2], id="mask"),
]


@pytest.mark.parametrize(("change", "rows"), CHANGES)
@pytest.mark.parametrize("hooked", [False, True], ids=["plain", "patched"])
def test_rows_go_on_as_if_they_had_begun_so(
    llama: Any, change: Callable[[TurboCache], None], rows: list[int], hooked: bool
) -> None:
    cache, alone = start(llama, [0, 1, 2]), [start(llama, [row]) for row in rows]
    change(cache)
    assert cache.turbo_layers()[1].lengths() == [ROWS[row] for row in rows]
    handle = turbo_hf.patch(llama, TurboConfig(attention="fp16")) if hooked else None
    try:
        for _ in range(2):
            got = go_on(llama, cache, rows)
            for row, one in enumerate(alone):
                assert torch.equal(got[row], go_on(llama, one, rows[row : row + 1])[0])
    finally:
        if handle is not None:
            handle.remove()


def test_crop_takes_a_pass_back(llama: Any) -> None:
    cache = start(llama, [0, 1, 2])
    first = go_on(llama, cache, [0, 1, 2])
    cache.crop(-5)
    assert cache.get_seq_length() == 128
    assert torch.equal(go_on(llama, cache, [0, 1, 2]), first)


def test_recording_reaches_every_layer(llama: Any) -> None:
    cache = TurboCache(llama.config)
    cache.activate_past_recording()
    forward(llama, prompts(1, 130), cache)
    assert [layer.state.sealed for layer in cache.turbo_layers()] == [[0], [0]]
    cache.crop(0)
    assert [layer.state.sealed for layer in cache.turbo_layers()] == [[2], [2]]
    forward(llama, prompts(1, 130), cache)
    cache.stop_recording()
    assert [layer.state.sealed for layer in cache.turbo_layers()] == [[4], [4]]
    assert not any(layer.record_past for layer in cache.turbo_layers())


def test_a_reset_cache_takes_another_batch(llama: Any) -> None:
    cache = start(llama, [0, 1, 2])
    cache.reset()
    assert cache.get_seq_length() == 0
    ids = prompts(2, 70, seed=4)
    assert torch.equal(forward(llama, ids, cache), forward(llama, ids, TurboCache(llama.config)))
    assert cache.turbo_layers()[0].lengths() == [70, 70]


def test_a_cache_filled_with_gradients_on_can_be_copied(llama: Any) -> None:
    cache = TurboCache(llama.config)
    logits = llama(prompts(2, 70), **{CACHE: cache}).logits
    assert logits.requires_grad
    twin = copy.deepcopy(cache)
    assert torch.equal(go_on(llama, twin, [0, 1]), go_on(llama, cache, [0, 1]))


# --- the plan of a pass --------------------------------------------------------------------------------------------


def test_a_mask_is_read_once_a_pass(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []
    plan = turbo_hf.cache.new_columns.columns_from_mask

    def counted(*args: Any) -> Any:
        plans.append(args)
        return plan(*args)

    monkeypatch.setattr(turbo_hf.cache.passes, "columns_from_mask", counted)
    batch = left_padded([prompts(1, n, seed=n)[0] for n in (20, 70)])
    with turbo_hf.patch(llama):
        llama.generate(**batch, max_new_tokens=5)
        assert len(plans) == 5
        llama.generate(prompts(2, 20), max_new_tokens=5)
    # without padding there is at most one look at an all-ones mask a pass
    assert len(plans) <= 10


def test_a_mask_that_was_written_over_is_read_again(llama: Any) -> None:
    with turbo_hf.patch(llama) as handle, torch.no_grad():
        cache = handle.new_cache()
        mask = torch.ones(2, 30, dtype=torch.bool)
        llama(prompts(2, 30), attention_mask=mask, **{CACHE: cache})
        cache.crop(-30)
        mask[1, :8] = False
        llama(prompts(2, 30), attention_mask=mask, **{CACHE: cache})
        assert cache.turbo_layers()[0].lengths() == [30, 22]


# --- memory --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", [name for name, config in EVERY_PRESET.items() if config.sparse is None])
@pytest.mark.parametrize("window", [None, 256], ids=["full", "window"])
def test_memory_is_what_the_plan_says(preset: str, window: int | None) -> None:
    model = tiny_mistral(window, head_dim=64).to(torch.bfloat16)
    # planned as open, which test_plan compares
    config = replace(EVERY_PRESET[preset], recent_tokens=0)
    cache = TurboCache(model.config, config)
    forward(model, prompts(2, 512), cache)
    forward(model, prompts(2, 1), cache)
    memory = measure(cache.layers)
    planned = 2 * cache_bytes(costs(model.config, config), 512)
    sealed = memory.by_kind["codes"] + memory.by_kind["scales"]
    assert planned <= sealed <= 1.05 * planned
    assert memory.total == sum(memory.by_kind.values())
    assert memory.tokens == 2 * 513
    dense = 2 * cache_bytes(costs(model.config), 512)
    assert memory.full_precision <= dense * 513 / 512 if window is None else memory.full_precision < 2 * dense
    assert memory.compression == memory.full_precision / memory.total


def test_uncompressed_layers_are_counted_as_dense(llama: Any) -> None:
    cache = TurboCache(llama.config, uncompressed_layers=(1,))
    assert measure(cache.layers).compression == 1.0
    assert measure(cache.layers).total == 0
    forward(llama, prompts(2, 64), cache)
    memory = measure(cache.layers)
    assert memory.by_kind["dense"] == 2 * 2 * 2 * 64 * 16 * 8
    assert memory.layers[0]["codes"] + memory.layers[0]["scales"] >= 2 * 2 * page_bytes(16, 4)
    assert memory.full_precision == 2 * 2 * 2 * 64 * 16 * 8


def test_heads_of_16_bit_are_counted_as_what_they_take(llama: Any) -> None:
    dense = cache_bytes(costs(llama.config), 640)
    full = cache_bytes(costs(llama.config, TurboConfig(bits=16)), 640)
    assert full == dense
    one = cache_bytes(costs(llama.config, TurboConfig(bits=2, recent_tokens=64, dense_layers=(0, 1))), 640)
    assert one == full
    mixed = cache_bytes(costs(llama.config, TurboConfig(bits=16, low_bits=4, low_heads=0.5)), 640)
    assert mixed == full / 2 + 2 * 10 * page_bytes(16, 4)


def test_the_index_is_counted_where_there_is_one(llama: Any) -> None:
    chosen = SparseConfig(selector="kmeans", probes=2, read_all_layers=(0,))
    plain = costs(llama.config, TurboConfig())
    sparse = costs(llama.config, TurboConfig(sparse=chosen))
    assert sparse[0] == plain[0]
    # int16 for each of 2 heads
    assert sparse[1].per_token == plain[1].per_token + 2 * 2


def test_padding_takes_no_memory(llama: Any) -> None:
    batch = left_padded([prompts(1, n, seed=n)[0] for n in (512, 1)])
    sizes = []
    for told in (batch["attention_mask"], None):
        cache = TurboCache(llama.config, attention_mask=told)
        forward(llama, batch["input_ids"], cache, batch["attention_mask"])
        sizes.append(measure(cache.layers))
    assert sizes[0].tokens == 513
    assert sizes[1].tokens == 1024
    assert sizes[0].by_kind["codes"] == sizes[1].by_kind["codes"] / 2
