"""Copies of a cache, and tensors made in inference mode: usable inside of it and outside, beside the original."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from all_pairs import all_pairs
from graphs_support import an_index
from histories_support import subject
from layer_support import tensors_of
from models import left_padded, prompts, tiny_llama, tiny_mistral
from sparse_cache_support import sparse

import turbo_hf
from turbo_hf import TurboCache, TurboConfig
from turbo_hf.models.versions import CACHE

MODES = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": torch.enable_grad}
modes = pytest.mark.parametrize("mode", list(MODES))


def through_a_file(cache: Any) -> Any:
    """As `torch.save` and `torch.load` give it back."""
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: list[Any] = [
    pytest.param(copy.deepcopy, id="deepcopy"),
    pytest.param(lambda cache: pickle.loads(pickle.dumps(cache)), id="pickle"),
    pytest.param(through_a_file, id="torch-save"),
]


def llama(**options: Any) -> Callable[[], tuple[Any, TurboCache]]:
    """What makes a patched Llama and a cache of it."""

    def make() -> tuple[Any, TurboCache]:
        model = tiny_llama().requires_grad_(False)
        return model, turbo_hf.patch(model, TurboConfig(**{"bits": 4, "block_size": 32, **options})).new_cache()

    return make


def windows() -> tuple[Any, TurboCache]:
    """A window in every layer, of which one is not compressed."""
    model, config = tiny_mistral(24).requires_grad_(False), TurboConfig(block_size=32)
    turbo_hf.patch(model, config)
    return model, TurboCache(model.config, config, uncompressed_layers=(1,))


def by_bucket() -> tuple[Any, TurboCache]:
    """Buckets of all keys."""
    model = tiny_llama().requires_grad_(False)
    config = sparse("kmeans-rotated", probes=2, window_tokens=8, read_all_layers=())
    return model, turbo_hf.patch(model, config, calibration=an_index(model, 8)).new_cache()


def hybrid(family: str) -> Callable[[], tuple[Any, TurboCache]]:
    """What makes a model with linear layers, and a cache of it."""

    def make() -> tuple[Any, TurboCache]:
        made = subject(family, "turbo4")
        return made.patched, made.new_cache()

    return make


MAKES: list[Any] = [
    pytest.param(llama(), id="llama"),
    pytest.param(llama(low_bits=2, low_heads=0.5, buffer_scale="universal"), id="mixed-universal"),
    pytest.param(llama(bits=16, attention="fp16"), id="16-bit"),
    pytest.param(llama(dense_layers=(0,)), id="beside-dense"),
    pytest.param(windows, id="windows"),
    pytest.param(by_bucket, id="sparse"),
    pytest.param(hybrid("lfm2"), id="convolution"),
    pytest.param(hybrid("qwen3_next"), id="recurrent"),
]
makes = pytest.mark.parametrize("make", MAKES)


def step(model: Any, cache: Any, tokens: int, seed: int, mode: str = "no_grad") -> torch.Tensor:
    """Logits of a pass over new tokens of two rows."""
    ids = prompts(2, tokens, seed) % 63 + 1
    with MODES[mode]():
        logits: torch.Tensor = model(ids, **{CACHE: cache}).logits
        return logits.clone()


def begin(make: Callable[[], tuple[Any, TurboCache]], mode: str) -> tuple[Any, TurboCache]:
    """A model and a cache that holds pages which two rows share, and some tokens of each."""
    model, cache = make()
    step(model, cache, 70, 0, mode)
    with MODES[mode]():
        cache.reorder_cache(torch.tensor([1, 1]))
    step(model, cache, 1, 1, mode)
    step(model, cache, 20, 2, mode)
    return model, cache


@all_pairs(make=MAKES, mode=MODES, way=WAYS)
def test_a_copy_goes_on_in_any_mode_beside_the_original(make: Any, mode: str, way: Callable[[Any], Any]) -> None:
    model, cache = begin(make, mode)
    _, same = begin(make, "no_grad")
    with MODES[mode]():
        twin = way(cache)
    for seed, (later, tokens) in enumerate((("inference", 1), ("grad", 20), ("no_grad", 12), ("inference", 1))):
        want = step(model, same, tokens, seed)
        # other tokens to the original
        step(model, cache, tokens, seed + 500, later)
        assert torch.equal(step(model, twin, tokens, seed, later), want)


@makes
@modes
def test_a_cache_goes_on_in_any_mode(make: Any, mode: str) -> None:
    model, cache = begin(make, mode)
    _, same = begin(make, "no_grad")
    for number, later in enumerate(("inference", "no_grad", "grad", "inference")):
        for each, how in ((cache, later), (same, "no_grad")):
            with MODES[how]():
                each.batch_select_indices([1, 0])
                each.stop_recording()
        for tokens in (1, 20):
            assert torch.equal(step(model, cache, tokens, number, later), step(model, same, tokens, number))
    with MODES["no_grad" if mode == "inference" else "inference"]():
        cache.reset()
    assert torch.equal(step(model, cache, 40, 3), step(model, make()[1], 40, 3))


@makes
def test_no_tensor_of_a_copy_is_shared_or_of_inference_mode(make: Any) -> None:
    _, cache = begin(make, "inference")
    with torch.inference_mode():
        twin = copy.deepcopy(cache)
    own = {x.untyped_storage().data_ptr() for x in tensors_of(cache.layers) if x.numel()}
    copied = [x for layer in twin.layers for x in tensors_of({**vars(layer), "selector": None}) if x.numel()]
    selectors = {x.untyped_storage().data_ptr() for layer in cache.turbo_layers() for x in tensors_of(layer.selector)}
    assert copied
    assert not any(x.is_inference() for x in copied)
    assert not {x.untyped_storage().data_ptr() for x in copied} & (own - selectors)


@modes
def test_a_cache_that_was_told_of_padding_is_copied_with_it(mode: str) -> None:
    model, batch = tiny_llama(), left_padded([prompts(1, n, seed=n)[0] for n in (40, 9)])
    told = TurboCache(model.config, attention_mask=batch["attention_mask"])
    with MODES[mode]():
        twin = copy.deepcopy(told)
    for cache in (told, twin):
        model.generate(**batch, **{CACHE: cache}, max_new_tokens=3)
        assert [layer.lengths() for layer in cache.turbo_layers()] == [[42, 11]] * 2


@modes
def test_a_copied_layer_shares_nothing_that_is_written(mode: str) -> None:
    model, cache = begin(llama(), mode)
    layer: Any = cache.layers[0]
    for way in (copy.copy, copy.deepcopy):
        before = [x.clone() for x in (layer.keys, layer.values)]
        with MODES[mode]():
            kept = way(layer)
        step(model, cache, 3, 5)
        cache.crop(-3)
        step(model, cache, 40, 6)
        cache.crop(-40)
        assert all(torch.equal(x, y) for x, y in zip((kept.keys, kept.values), before, strict=True))


@modes
def test_a_prompt_that_is_reused(mode: str) -> None:
    model, ids = tiny_llama(), prompts(1, 45)
    with turbo_hf.patch(model, TurboConfig(block_size=32)) as handle:
        fresh, prefix = handle.new_cache(), handle.new_cache()
        step_of = {"max_new_tokens": 9, "do_sample": False}
        with torch.no_grad():
            model(ids[:, :44], **{CACHE: fresh})
        want = model.generate(ids, **{CACHE: fresh}, **step_of)
        with MODES[mode]():
            model(ids[:, :44], **{CACHE: prefix})
            inside = model.generate(ids, **{CACHE: copy.deepcopy(prefix)}, **step_of)
        outside = model.generate(ids, **{CACHE: copy.deepcopy(prefix)}, **step_of)
    assert torch.equal(inside, want)
    assert torch.equal(outside, want)


@modes
def test_a_cache_that_was_initialized_early_goes_on_in_any_mode(mode: str) -> None:
    model, ids = tiny_llama(), prompts(2, 20)
    with turbo_hf.patch(model, TurboConfig(block_size=32)) as handle, torch.no_grad():
        cache: Any = handle.new_cache()
        want = handle.new_cache()
        with MODES[mode]():
            cache.early_initialization(2, 2, 16, torch.float32, torch.device("cpu"))
            assert cache.is_initialized
            assert cache.layers[0].keys.shape == (2, 2, 0, 16)
        for part in (ids, ids[:, :1], ids):
            assert torch.equal(*(model(part, **{CACHE: each}).logits for each in (cache, want)))


@pytest.mark.parametrize("family", ["lfm2", "qwen3_next"])
def test_a_reset_hybrid_takes_another_batch(family: str) -> None:
    made = subject(family, "turbo4")
    cache = made.new_cache()
    step(made.patched, cache, 40, 0)
    cache.reset()
    ids = prompts(3, 20) % 63 + 1
    with torch.no_grad():
        got, want = (made.patched(ids, **{CACHE: each}).logits for each in (cache, made.new_cache()))
    assert torch.equal(got, want)


def test_a_recurrent_state_cannot_be_cropped() -> None:
    made = subject("qwen3_next", "turbo4")
    cache = made.new_cache()
    # holds nothing
    cache.crop(-3)
    cache.activate_past_recording()
    step(made.patched, cache, 40, 0)
    with pytest.raises(ValueError, match=r"layer 0: a LinearAttentionLayer has mixed .* Keep a copy.deepcopy"):
        cache.crop(-3)
    assert cache.get_seq_length() == 40


def test_a_convolution_is_cropped_by_what_it_has_recorded() -> None:
    made = subject("lfm2", "exact")
    cache, ids = made.new_cache(), prompts(1, 40) % 63 + 1
    with torch.no_grad():
        made.patched(ids[:, :20], **{CACHE: cache})
        cache.activate_past_recording()
        with pytest.raises(ValueError, match=r"layer 0: .* can be cropped only by what it has recorded"):
            cache.crop(-2)
        made.patched(ids[:, 20:], **{CACHE: cache})
        cache.crop(-5)
        with pytest.raises(ValueError, match=r"layer 0: .* can be cropped only by what it has recorded"):
            cache.crop(-1)
        got = made.patched(ids[:, 35:], **{CACHE: cache}).logits
        want = made.plain(ids, use_cache=False).logits[:, 35:]
    # keys and values in 16 bits
    assert float((got - want).abs().max()) < 0.01 * float(want.std())
