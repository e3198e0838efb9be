"""`patch` and `remove`: what they touch and what they leave alone; the handle."""

import gc
from typing import Any

import pytest
import torch
from models import VOCABULARY, prompts, tiny_llama, tiny_mistral
from patching_support import (
    LENGTHS,
    MIXED,
    NEW,
    SMALL,
    WINDOW,
    changes,
    generate,
    logits,
    padded,
    renamed,
    snapshot,
    tiny,
)

import turbo_hf
from turbo_hf import TurboCache, TurboConfig
from turbo_hf.attention.turbo_attention import NAME, sas_threshold
from turbo_hf.cache.memory import Memory
from turbo_hf.models.versions import CACHE

SHARED = {
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": WINDOW,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCABULARY,
    "global_head_dim": 16,
}


# --- on and off ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        pytest.param("llama", {"attn_implementation": "eager"}, id="eager"),
        pytest.param("llama", {"attn_implementation": "sdpa"}, id="sdpa"),
        pytest.param("gemma2", MIXED, id="gemma2"),
        pytest.param("gemma4_text", SHARED, id="gemma4"),
    ],
)
def test_remove_leaves_no_trace(model_type: str, options: dict[str, Any]) -> None:
    model = tiny(model_type, **options)
    batch = padded()
    stock, tokens = logits(model, **renamed(batch)), generate(model)
    before, keys = snapshot(model), list(model.state_dict())
    with turbo_hf.patch(model, SMALL):
        changed = changes(before, snapshot(model))
        assert "config._attn_implementation_internal" in changed
        assert "._prepare_cache_for_generation" in changed
        assert any("_forward_pre_hooks[" in name for name in changed)
        others = [name for name in changed if "_forward_pre_hooks" not in name and "_forward_hooks" not in name]
        # of the model itself alone, for the steps of a beam search
        assert {name for name in others if "forward" in name} <= {".forward"}
        assert list(model.state_dict()) == keys
        generate(model)
    assert not changes(before, snapshot(model))
    assert list(model.state_dict()) == keys
    assert torch.equal(logits(model, **renamed(batch)), stock)
    assert torch.equal(generate(model), tokens)


def test_remove_twice_and_leaving_by_an_error() -> None:
    model = tiny_llama()
    before = snapshot(model)
    handle = turbo_hf.patch(model, SMALL)
    handle.remove()
    handle.remove()
    assert not changes(before, snapshot(model))
    with pytest.raises(KeyError), turbo_hf.patch(model, SMALL):
        raise KeyError
    assert not changes(before, snapshot(model))
    # an old handle must not take off a new patch, nor stand for one
    with turbo_hf.patch(model, SMALL):
        handle.remove()
        assert model.config._attn_implementation == NAME
    with pytest.raises(ValueError, match=r"has been removed\. Call turbo_hf.patch"), handle:
        raise AssertionError("not reached")


def test_a_method_of_ones_own_comes_back() -> None:
    model: Any = tiny_llama()
    calls = []

    def prepare(*args: Any) -> None:
        calls.append(args)
        type(model)._prepare_cache_for_generation(model, *args)

    model._prepare_cache_for_generation = prepare
    with turbo_hf.patch(model, SMALL):
        generate(model)
        assert not calls
        generate(model, use_cache=False)
        assert len(calls) == 1
    assert model._prepare_cache_for_generation is prepare


def test_patch_twice_is_refused_and_another_preset_is_not() -> None:
    model = tiny_llama()
    handle = turbo_hf.patch(model, "turbo4")
    four = generate(model)
    twin = type(model)(model.config)
    with pytest.raises(ValueError, match=r"This model is patched already\. Call remove"):
        turbo_hf.patch(model, "int8")
    with pytest.raises(ValueError, match=r"shares its config object with one that is patched already"):
        turbo_hf.patch(twin, "int8")
    assert torch.equal(generate(model), four)
    handle.remove()
    with turbo_hf.patch(model, "int8") as second:
        generate(model)
        assert {storage.storage for storage in second.report().layers} == {"2 x 8 bit"}
    with turbo_hf.patch(model, "turbo4"):
        assert torch.equal(generate(model), four)


def test_models_do_not_touch_each_other() -> None:
    model, other, third = tiny_llama(), tiny_llama(), tiny_llama()
    stock, before = generate(other), snapshot(other)
    with turbo_hf.patch(third, "turbo2"):
        two = generate(third)
    with turbo_hf.patch(model, "turbo4"):
        four = generate(model)
        assert not changes(before, snapshot(other))
        assert torch.equal(generate(other), stock)
        with turbo_hf.patch(third, "turbo2") as handle:
            assert torch.equal(generate(third), two)
            assert torch.equal(generate(model), four)
            assert torch.equal(generate(other), stock)
            assert handle.report().config.bits == 2
        assert torch.equal(generate(model), four)
    assert not torch.equal(two, four)


# --- the handle ----------------------------------------------------------------------------------------------------


def test_report() -> None:
    model = tiny("gemma2", **MIXED)
    config = TurboConfig(low_bits=3, low_heads=0.5, int8_layers=(1,))
    with turbo_hf.patch(model, config) as handle:
        report = handle.report()
        assert str(report).splitlines() == [
            "Gemma2ForCausalLM (Gemma 2)",
            f"  {report.notes}",
            f"  layer 0: 1 x 4 bit + 1 x 3 bit, window {WINDOW}",
            "  layer 1: 8 bit; asked for by int8_layers",
            "  3-bit heads: chosen by each row's first 64 tokens (no calibration beside the checkpoint)",
            "  prompts: fp16 (auto, without a GPU)",
            "  decode steps: CUDA graphs, once the model is on a GPU",
            f"  {report.serving}",
            "  last generate: none since the patch",
        ]
        assert report.serving.startswith("continuous batching: ")
    assert "Scores are capped" in report.notes
    assert report.config is config
    with turbo_hf.patch(tiny("stablelm")) as handle:
        assert handle.report().family == "stablelm: generic path, no test of its own"


def test_memory_of_a_cache_that_lives_and_of_one_that_is_gone() -> None:
    model, batch = tiny_llama(), padded()
    with turbo_hf.patch(model, SMALL) as handle:
        assert handle.memory() == Memory((), 0, 0)
        generate(model)
        gc.collect()
        gone = handle.memory()
        # the last token of a generation is never fed
        assert gone.tokens == sum(LENGTHS) + len(LENGTHS) * (NEW - 1)
        cache = handle.new_cache()
        assert handle.memory().tokens == 0
        assert handle.memory().compression == 1.0
        logits(model, **renamed(batch), **dict[str, Any]({CACHE: cache}))
        living = handle.memory()
        assert living.tokens == sum(LENGTHS)
        # keys and values of 2 layers, 2 heads of 16 float32 channels
        assert living.full_precision == sum(LENGTHS) * 2 * 2 * 2 * 16 * 4
        assert living.total == sum(living.by_kind.values()) > 0
        longer = torch.nn.functional.pad(batch["attention_mask"], (0, 1), value=1)
        logits(model, prompts(3, 1), attention_mask=longer, **{CACHE: cache})
        assert handle.memory().tokens == living.tokens + 3
        last = handle.memory()
        del cache
        gc.collect()
        assert handle.memory() == last
    assert handle.memory() == last


def test_a_handle_is_told_in_one_line_and_makes_no_cache_once_removed() -> None:
    handle = turbo_hf.patch(tiny_llama(), SMALL)
    assert repr(handle) == "<turbo_hf.Handle of LlamaForCausalLM, on>"
    assert handle in {handle}
    handle.remove()
    assert repr(handle) == "<turbo_hf.Handle of LlamaForCausalLM, off>"
    with pytest.raises(ValueError, match=r"has been removed\. Call turbo_hf.patch"):
        handle.new_cache()


def test_new_cache_is_that_of_generate() -> None:
    model = tiny_mistral(WINDOW)
    ids = prompts(1, 70)
    with turbo_hf.patch(model, TurboConfig(block_size=32, dense_layers=(1,))) as handle:
        tokens, cache = generate(model, input_ids=ids), handle.new_cache()
        assert isinstance(cache, TurboCache)
        assert [layer.config.bits for layer in cache.turbo_layers()] == [4, 16]
        given = ids
        for _ in range(NEW):
            best = logits(model, given, **{CACHE: cache})[:, -1:].argmax(-1)
            ids, given = torch.cat((ids, best), 1), best
        assert torch.equal(ids, tokens)


def test_sas_threshold_falls_with_the_context() -> None:
    assert sas_threshold(TurboConfig(), 5000) is None
    assert sas_threshold(TurboConfig(sas=True, sas_threshold=-4.0), 5000) == -4.0
    assert sas_threshold(TurboConfig(sas=True), 100) == sas_threshold(TurboConfig(sas=True), 1024) == -6.0
    long = sas_threshold(TurboConfig(sas=True), 2048)
    assert long is not None
    assert long == pytest.approx(-6 - torch.tensor(2.0).log().item())
