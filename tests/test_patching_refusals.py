"""What `patch` refuses, what it guards against, and its own check."""

import copy
import warnings
from typing import Any

import pytest
import torch
from accelerate import cpu_offload  # type: ignore[import-untyped] # it has no types
from models import tiny_llama, tiny_mistral
from patching_support import SMALL, WINDOW, Doubling, changes, generate, logits, padded, snapshot, tiny
from transformers import DynamicCache

import turbo_hf
from turbo_hf import TurboCache, TurboConfig
from turbo_hf.attention.turbo_attention import NAME
from turbo_hf.cache.memory import Memory
from turbo_hf.errors import Unsupported
from turbo_hf.models.versions import CACHE
from turbo_hf.patching import selfcheck


@pytest.mark.parametrize("check", [False, True])
def test_a_model_without_weights_is_refused(check: bool) -> None:
    with torch.device("meta"):
        model = tiny_llama()
    with pytest.raises(Unsupported, match=r"LlamaForCausalLM has no weights \(device meta\).*from_pretrained"):
        turbo_hf.patch(model, check=check)
    # accelerate brings those of an offloaded model
    offloaded = cpu_offload(tiny_llama())
    assert offloaded.lm_head.weight.is_meta
    with turbo_hf.patch(offloaded, SMALL):
        assert generate(offloaded).shape[0]


# --- refusals ------------------------------------------------------------------------------------------------------


def test_bad_arguments() -> None:
    model: Any = tiny_llama()
    with pytest.raises(ValueError, match="strict must be one of raise, warn, fallback; got 'loud'"):
        turbo_hf.patch(model, strict="loud")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"presets int8, turbo4, turbo-k4v3, saap.*; got 'turbo5'"):
        turbo_hf.patch(model, "turbo5")
    with pytest.raises(TypeError, match=r"model must be a .*PreTrainedModel; got Linear"):
        turbo_hf.patch(model.lm_head)
    with pytest.raises(ValueError, match="names layer 2; the model has layers 0 to 1"):
        turbo_hf.patch(model, TurboConfig(dense_layers=(0, 2)))
    with pytest.raises(ValueError, match="names layer 7; the model has layers 0 to 1"):
        turbo_hf.patch(model, TurboConfig(int8_layers=(7,)))
    assert model.config._attn_implementation == "eager"


def test_remote_code_that_keeps_its_attention_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    monkeypatch.setattr(type(model), "_can_set_attn_implementation", classmethod(lambda cls: False))
    before = snapshot(model)
    with pytest.raises(Unsupported, match="does not let its attention implementation be set"):
        turbo_hf.patch(model, strict="fallback")
    assert not changes(before, snapshot(model))


def test_a_language_model_deep_inside_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    inner = copy.deepcopy(model.config)
    monkeypatch.setattr(type(model.config), "get_text_config", lambda self, **_: inner)
    with pytest.raises(Unsupported, match=r"lies inside another of its parts.*model\.thinker"):
        turbo_hf.patch(model)


def test_a_model_without_layers_is_refused() -> None:
    model = tiny_llama(num_hidden_layers=0)
    with pytest.raises(Unsupported, match="can be compressed: it has no attention layer"):
        turbo_hf.patch(model)


def test_continuous_batching_of_older_versions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turbo_hf.patching.continuous_batching.transformers.__version__", "5.18.1")
    model: Any = tiny_llama()
    with turbo_hf.patch(model) as handle:
        message = r"needs transformers 5.19 or newer, and 5.18.1 is installed.*use generate, or remove the patch"
        with pytest.raises(Unsupported, match=message):
            model.generate_batch([[1, 2, 3]])
        with pytest.raises(Unsupported, match=message):
            model.init_continuous_batching()
        assert "5.19 or newer" in handle.report().serving


def test_masks_and_caches_of_another_batch_or_model_are_refused() -> None:
    model, ids = tiny_mistral(WINDOW), padded()["input_ids"]
    mask = torch.ones(1, ids.shape[1])
    with turbo_hf.patch(model, SMALL) as handle:
        with pytest.raises(ValueError, match="attention_mask has 1 rows, this pass 3"):
            logits(model, ids, attention_mask=mask, **{CACHE: handle.new_cache()})
        for other, message in (
            (tiny_mistral(None), f"layer 0 of this TurboCache has the window None, the model's {WINDOW}"),
            (tiny_mistral(WINDOW, num_hidden_layers=3), "this TurboCache has 3 layers, the model 2"),
        ):
            with pytest.raises(Unsupported, match=message + r".*use handle.new_cache\(\)"):
                logits(model, ids, **{CACHE: TurboCache(other.config, SMALL)})


def test_rows_without_a_prompt_are_refused() -> None:
    model, batch = tiny_llama(), padded()
    batch["attention_mask"][1] = 0
    with turbo_hf.patch(model), pytest.raises(ValueError, match=r"rows \[1\] of attention_mask are all padding"):
        generate(model, **batch)


def test_caches_that_are_not_compressed_are_told() -> None:
    model = tiny_llama()
    stock = generate(model)
    with turbo_hf.patch(model, "turbo2") as handle:
        with pytest.warns(UserWarning, match=rf"a DynamicCache was passed as {CACHE}.*{CACHE}=handle.new_cache\(\)"):
            assert torch.equal(generate(model, **{CACHE: DynamicCache(config=model.config)}), stock)
        with pytest.warns(UserWarning, match=r"'static' asks for .* leave out the argument cache_implementation"):
            assert torch.equal(generate(model, cache_implementation="static"), stock)
        model.generation_config.cache_implementation = "static"
        with pytest.warns(UserWarning, match=r"set model\.generation_config\.cache_implementation = None"):
            assert torch.equal(generate(model), stock)
        model.generation_config.cache_implementation = None
        assert handle.memory() == Memory((), 0, 0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ours = generate(model)
            assert torch.equal(generate(model, **{CACHE: handle.new_cache()}), ours)
    assert not torch.equal(ours, stock)


# --- the self-check ------------------------------------------------------------------------------------------------


def test_check_passes_and_leaves_the_patch_on() -> None:
    model = tiny_llama()
    with turbo_hf.patch(model, "int8", check=True):
        assert model.config._attn_implementation == NAME


def test_check_of_a_model_with_few_positions() -> None:
    # learned positions: one more would be none
    model = tiny("gpt2", n_embd=64, n_layer=2, n_head=4, max_position_embeddings=100)
    assert model.config.n_positions == 100 < selfcheck.PROMPT
    with turbo_hf.patch(model, "int8", check=True):
        assert model.config._attn_implementation == NAME


def test_check_that_fails_takes_the_patch_off(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    before = snapshot(model)
    monkeypatch.setattr(selfcheck, "MOST", 0.0)
    with pytest.raises(Unsupported, match=r"self-check failed: .* the logits differ by [\d.]+% .*off again"):
        turbo_hf.patch(model, "int8", check=True)
    assert not changes(before, snapshot(model))


def test_check_that_meets_an_error_takes_the_patch_off() -> None:
    model = tiny_llama()
    model.model.layers[0].self_attn.__class__ = Doubling
    before = snapshot(model)
    with pytest.raises(Unsupported, match="changes keys or values"):
        turbo_hf.patch(model, check=True)
    assert not changes(before, snapshot(model))
