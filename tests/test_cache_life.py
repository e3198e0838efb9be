"""The life of a whole cache: a pass that breaks off, what is cropped, what is forgotten, what it takes."""

import copy
import warnings
from typing import Any

import pytest
import torch
from families_support import GENERIC_CASES, build
from models import prompts, tiny_llama, tiny_mistral

import turbo_hf
from turbo_hf import TurboCache, TurboConfig
from turbo_hf.attention.full_precision import _without_padding
from turbo_hf.models.versions import CACHE


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


@pytest.mark.parametrize("dense", [(0,), (1,)])
def test_drafts_from_the_prompt_beside_uncompressed_layers_with_a_window(dense: tuple[int, ...]) -> None:
    model, ids = tiny_mistral(24), prompts(1, 60)
    ways: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "prompt_lookup_num_tokens": 2}
    want = model.generate(ids, **ways)
    exact = TurboConfig(bits=16, block_size=32, attention="fp16")
    with turbo_hf.patch(model, exact):
        cache = TurboCache(model.config, exact, uncompressed_layers=dense)
        assert torch.equal(model.generate(ids, **ways, **{CACHE: cache}), want)


def test_a_reset_ends_the_recording() -> None:
    model = tiny_llama()
    with turbo_hf.patch(model) as handle:
        cache = handle.new_cache()
        cache.activate_past_recording()
        feed(model, 200, cache)
        assert cache.turbo_layers()[0].state.sealed == [0, 0]
        cache.reset()
        feed(model, 200, cache)
        assert cache.turbo_layers()[0].state.sealed == [3, 3]
        own = copy.deepcopy(model)
        own.set_attn_implementation("sdpa")
    # a copy has no handle that could be named
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own.generate(prompts(1, 9), max_new_tokens=2)


@pytest.mark.parametrize("tokens", [2, 40], ids=["shorter-than-the-convolution", "longer"])
def test_recording_ends_in_linear_layers_too(tokens: int) -> None:
    case = next(case for case in GENERIC_CASES if case.model_type == "qwen3_next")
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


def test_memory_is_that_of_the_whole_model_and_of_any_cache() -> None:
    model = tiny_llama(num_hidden_layers=4)
    with turbo_hf.patch(model) as handle:
        assert handle.memory().layers == ()
        model.generate(prompts(1, 50), max_new_tokens=12, do_sample=False, assistant_early_exit=2)
        assert len(handle.memory().layers) == 4
        own = TurboCache(model.config)
        feed(model, 70, own)
    assert own.memory().tokens == 140
    assert own.memory().total == sum(sum(layer.nbytes().values()) for layer in own.turbo_layers())


def test_a_sparse_cache_needs_what_selects_its_keys() -> None:
    with pytest.raises(ValueError, match=r"a sparse TurboCache needs .* handle.new_cache\(\)"):
        TurboCache(tiny_llama().config, "saap")
    TurboCache(tiny_llama().config, "saap", selectors={})


def test_fallback_is_silent_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="turbo_hf.errors")
    config = TurboConfig(bits=4, low_bits=3, low_heads=0.1, backend="reference", cuda_graphs=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with turbo_hf.patch(tiny_llama(), config, strict="fallback") as handle:
            said = handle.report().warnings
    assert [line.partition(":")[0] for line in said] == [
        "low_heads=0.1 is less than one KV head of each layer",
        "cuda_graphs=True",
    ]
    assert [record.message for record in caplog.records] == list(said)


def test_a_patch_warns_where_it_is_called() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        turbo_hf.patch(tiny_llama(), TurboConfig(bits=4, low_bits=3, low_heads=0.1)).remove()
    assert [warning.filename for warning in caught] == [__file__]


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


def test_another_attention_chosen_since_the_patch_is_told_and_kept() -> None:
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
