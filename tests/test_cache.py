"""`TurboCache` as a `transformers.Cache`: on a model without a patch, cropped, reset, copied, in any mode of torch."""

import contextlib
import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from choices import EVERY_PRESET, flat_config
from families_support import FAMILY_CASES, build
from histories_support import subject
from layer_support import tensors_of
from models import left_padded, prompts, tiny_llama, tiny_mistral
from saved_support import MIXED, Made, Make, by_bucket, family, windows
from saved_support import llama as patched_llama
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer

import turbo_hf
import turbo_hf.cache.passes
import turbo_hf.cache.rows
from turbo_hf import TurboCache, TurboConfig
from turbo_hf.attention.full_precision import _without_padding
from turbo_hf.cache.layer import TurboLayer
from turbo_hf.models.versions import CACHE


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


@pytest.mark.parametrize("name", ["int8_layers", "dense_layers", "uncompressed_layers"])
def test_a_layer_that_does_not_exist_is_refused(name: str, llama: Any) -> None:
    chosen: dict[str, Any] = {name: (5, 0, 2)}
    with pytest.raises(ValueError, match=rf"{name} names layers \[2, 5\]; the model has layers 0 to 1"):
        TurboCache(llama.config, **({"config": flat_config(**chosen)} if name == "dense_layers" else chosen))
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


def test_padding_that_only_the_cache_was_told_of_is_refused(llama: Any) -> None:
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


def test_a_mask_that_was_written_over_is_read_again(llama: Any) -> None:
    with turbo_hf.patch(llama) as handle, torch.no_grad():
        cache = handle.new_cache()
        mask = torch.ones(2, 30, dtype=torch.bool)
        llama(prompts(2, 30), attention_mask=mask, **{CACHE: cache})
        cache.crop(-30)
        mask[1, :8] = False
        llama(prompts(2, 30), attention_mask=mask, **{CACHE: cache})
        assert cache.turbo_layers()[0].lengths() == [30, 22]


@torch.no_grad()
def feed(model: Any, tokens: int, cache: TurboCache) -> None:
    """A pass over new tokens."""
    model(prompts(2, tokens), **{CACHE: cache})


def lengths(cache: TurboCache) -> list[int]:
    """Tokens that each layer has seen."""
    return [cache.get_seq_length(index) for index in range(len(cache.layers))]


def test_all_layers_are_cropped_or_none() -> None:
    model = tiny_mistral(32)
    with turbo_hf.patch(model):
        cache = TurboCache(model.config, uncompressed_layers=(1,))
        cache.crop(0)
        feed(model, 20, cache)
        cache.crop(-2)
        assert lengths(cache) == [18, 18]
        feed(model, 40, cache)
        # the compressed layer holds them still, the other one does not
        with pytest.raises(ValueError, match=r"layer 1: a DynamicSlidingWindowLayer .* activate_past_recording\(\)"):
            cache.crop(-2)
        assert lengths(cache) == [58, 58]
        feed(model, 1, cache)
        cache.activate_past_recording()
        feed(model, 5, cache)
        cache.crop(-4)
        assert lengths(cache) == [60, 60]
        cache.activate_past_recording()
        feed(model, 5, cache)
        # more than was recorded
        with pytest.raises(ValueError, match=r"layer 1: .* can be cropped only by what it has recorded"):
            cache.crop(-30)
        assert lengths(cache) == [65, 65]
        cache.stop_recording()
        dense: Any = cache.layers[1]
        assert dense.keys.shape[2] == 31


@pytest.mark.parametrize("tokens", [2, 40], ids=["shorter-than-the-convolution", "longer"])
def test_recording_ends_in_linear_layers_too(tokens: int) -> None:
    case = next(case for case in FAMILY_CASES if case.model_type == "qwen3_next")
    model = build(case.model_type, **case.options)
    with turbo_hf.patch(model) as handle, torch.no_grad():
        plain, cache = handle.new_cache(), handle.new_cache()
        cache.activate_past_recording()
        for each in (plain, cache):
            feed(model, tokens, each)
        cache.stop_recording()
        for _ in range(3):
            want, got = (model(prompts(2, 1), **{CACHE: each}).logits for each in (plain, cache))
            assert torch.equal(got, want)
        first: list[Any] = [each.layers[0] for each in (plain, cache)]
        assert first[0].conv_states[0].shape == first[1].conv_states[0].shape
        cache.activate_past_recording()
        feed(model, 9, cache)
        cache.reset()
        want, got = (model(prompts(2, tokens), **{CACHE: each}).logits for each in (handle.new_cache(), cache))
        assert torch.equal(got, want)
        assert [first[1].record_past, cache.turbo_layers()[0].record_past] == [False, False]


def test_a_sparse_cache_needs_what_selects_its_keys() -> None:
    with pytest.raises(ValueError, match=r"a sparse TurboCache needs .* handle.new_cache\(\)"):
        TurboCache(tiny_llama().config, "saap")
    TurboCache(tiny_llama().config, "saap", selectors={})


def test_a_check_of_a_model_that_gives_nan_blames_the_model() -> None:
    model = tiny_llama()
    with torch.no_grad():
        model.lm_head.weight[0, 0] = torch.nan
    with pytest.raises(turbo_hf.Unsupported, match="the unpatched model's own logits hold NaN or Inf"):
        turbo_hf.patch(model, check=True)
    turbo_hf.patch(model).remove()


def test_a_wrapped_model_is_told_which_one_to_patch() -> None:
    class Wrapper(torch.nn.Module):
        """As PEFT wraps one."""

    wrapper: Any = Wrapper()
    with pytest.raises(TypeError, match=r"got Wrapper. .* pass the one inside \(PEFT: model.get_base_model\(\),"):
        turbo_hf.patch(wrapper)


def test_another_attention_chosen_since_is_told_and_kept() -> None:
    model = tiny_llama()
    before = set(model.__dict__)
    handle = turbo_hf.patch(model)
    model.set_attn_implementation("sdpa")
    with pytest.warns(UserWarning, match=r"has chosen 'sdpa' since the patch, so this call is not compressed"):
        model.generate(prompts(1, 9), max_new_tokens=2)
    with pytest.raises(ValueError, match="This model is patched already"):
        turbo_hf.patch(model)
    model.set_attn_implementation("turbo_hf")
    model.generate(prompts(1, 9), max_new_tokens=2)
    assert handle.memory().tokens == 10
    model.set_attn_implementation("sdpa")
    handle.remove()
    assert model.config._attn_implementation == "sdpa"
    assert set(model.__dict__) == before


def test_the_config_of_a_patched_model_is_told() -> None:
    model = tiny_llama()
    with turbo_hf.patch(model):
        copied = copy.deepcopy(model.config)
    other = type(model)(copied).eval()
    copied._attn_implementation = "turbo_hf"
    with pytest.raises(ValueError, match=r'still says "turbo_hf", call model.set_attn_implementation\("sdpa"\)'):
        turbo_hf.patch(other)
    other.set_attn_implementation("sdpa")
    turbo_hf.patch(other).remove()


def test_prompts_that_end_in_padding_are_told() -> None:
    model, mask = tiny_llama(), torch.ones(3, 20, dtype=torch.int64)
    mask[1, 12:] = 0
    with turbo_hf.patch(model), pytest.warns(UserWarning, match=r"rows \[1\] of attention_mask end in padding"):
        model.generate(prompts(3, 20), attention_mask=mask, max_new_tokens=2)


def test_prefix_tuning_is_told() -> None:
    with pytest.raises(AttributeError, match=r"has no max_cache_len\. Prefix tuning \(PEFT\)"):
        _ = TurboCache(tiny_llama().config).max_cache_len


def test_uncompressed_layers_take_no_mask_without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = tiny_llama(attn_implementation="sdpa", num_hidden_layers=3), []
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def noted(q: Any, k: Any, v: Any, attn_mask: Any = None, **options: Any) -> Any:
        given.append(attn_mask is not None)
        return sdpa(q, k, v, attn_mask=attn_mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    found = []
    with turbo_hf.patch(model), torch.no_grad():
        for padded in (0, 3):
            cache = TurboCache(model.config, uncompressed_layers=(0, 1))
            mask = torch.ones(1, 41, dtype=torch.long)
            mask[:, :padded] = 0
            model(prompts(1, 40), **{CACHE: cache}, attention_mask=mask[:, :40])
            given.clear()
            found.append(model(prompts(1, 1), **{CACHE: cache}, attention_mask=mask).logits)
            assert given == [padded > 0] * 2
    assert not torch.equal(*found)
    mask = torch.ones(1, 4)
    assert [_without_padding(mask), _without_padding(mask)] == [True, True]
    # changed in place since it was read
    mask[0, 1] = 0
    assert not _without_padding(mask)


MODES = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": torch.enable_grad}
modes = pytest.mark.parametrize("mode", list(MODES))


def through_a_file(cache: Any) -> Any:
    """As `torch.save` and `torch.load` give it back."""
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: list[Any] = [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache)), through_a_file]


MAKES: list[Any] = [
    pytest.param(patched_llama(), id="llama"),
    pytest.param(patched_llama(**MIXED), id="mixed"),
    pytest.param(patched_llama(bits=16, attention="native"), id="16-bit"),
    pytest.param(patched_llama(dense_layers=(0,)), id="beside-dense"),
    pytest.param(windows, id="windows"),
    pytest.param(by_bucket, id="sparse"),
    pytest.param(family("lfm2"), id="convolution"),
    pytest.param(family("qwen3_next"), id="recurrent"),
]
makes = pytest.mark.parametrize("make", MAKES)


def step(model: Any, cache: Any, tokens: int, seed: int, mode: str = "no_grad") -> torch.Tensor:
    """Logits of a pass over new tokens of two rows."""
    ids = prompts(2, tokens, seed) % 63 + 1
    with MODES[mode]():
        logits: torch.Tensor = model(ids, **{CACHE: cache}).logits
        return logits.clone()


def begin(make: Make, mode: str) -> Made:
    """A model and a cache that holds pages which two rows share, and some tokens of each."""
    model, cache = make()
    step(model, cache, 70, 0, mode)
    with MODES[mode]():
        cache.reorder_cache(torch.tensor([1, 1]))
    step(model, cache, 1, 1, mode)
    step(model, cache, 20, 2, mode)
    return model, cache


@makes
@pytest.mark.parametrize(("mode", "way"), [*zip(MODES, WAYS, strict=True)], ids=MODES)
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
def test_a_cache_that_was_initialized_early_goes_on_in_any_mode(mode: str) -> None:
    model, ids = tiny_llama(), prompts(2, 20)
    with turbo_hf.patch(model, flat_config(block_size=32)) as handle, torch.no_grad():
        cache: Any = handle.new_cache()
        want = handle.new_cache()
        with MODES[mode]():
            cache.early_initialization(2, 2, 16, torch.float32, torch.device("cpu"))
            assert cache.is_initialized
            assert cache.layers[0].keys.shape == (2, 2, 0, 16)
        for part in (ids, ids[:, :1], ids):
            assert torch.equal(*(model(part, **{CACHE: each}).logits for each in (cache, want)))


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
