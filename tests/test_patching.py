"""`patch` and `remove`: what they touch and what they leave alone; the handle; copies and other libraries."""

import copy
import gc
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model  # type: ignore[import-untyped] # it has no types
from choices import flat_config
from families_support import SHARED as LAST_SHARE
from models import prompts, tiny_llama
from patching_support import LENGTHS, MIXED, NEW, SMALL, WINDOW, changes, generate, logits, padded, snapshot, tiny
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

import turbo_hf
from turbo_hf import TurboConfig
from turbo_hf.attention.turbo_attention import NAME, sas_threshold
from turbo_hf.cache.memory import Memory
from turbo_hf.errors import Unsupported
from turbo_hf.models.versions import CACHE

SHARED = {**LAST_SHARE, "global_head_dim": 16}


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
    stock, tokens = logits(model, **batch), generate(model)
    before, keys = snapshot(model), list(model.state_dict())
    with turbo_hf.patch(model, SMALL):
        changed = changes(before, snapshot(model))
        assert "config._attn_implementation_internal" in changed
        assert "._prepare_cache_for_generation" in changed
        assert any("_forward_pre_hooks[" in name for name in changed)
        others = [name for name in changed if "_forward_pre_hooks" not in name and "_forward_hooks" not in name]
        # of the model itself alone, for the steps of a beam search
        assert {name for name in others if "forward" in name and "norm class" not in name} <= {".forward"}
        assert list(model.state_dict()) == keys
        generate(model)
    assert not changes(before, snapshot(model))
    assert list(model.state_dict()) == keys
    assert torch.equal(logits(model, **batch), stock)
    assert torch.equal(generate(model), tokens)


def test_remove_twice_and_leaving_by_an_error() -> None:
    model = tiny_llama()
    before = snapshot(model)
    handle = turbo_hf.patch(model, SMALL)
    assert repr(handle) == "<turbo_hf.Handle of LlamaForCausalLM, on>"
    assert "has been removed" not in str(handle.report())
    handle.remove()
    assert "note: the patch has been removed, and the model is what it was" in str(handle.report())
    handle.remove()
    assert not changes(before, snapshot(model))
    with pytest.raises(KeyError), turbo_hf.patch(model, SMALL):
        raise KeyError
    assert not changes(before, snapshot(model))
    # an old handle must not take off a new patch, nor stand for one
    with turbo_hf.patch(model, SMALL):
        handle.remove()
        assert model.config._attn_implementation == NAME
    assert repr(handle) == "<turbo_hf.Handle of LlamaForCausalLM, off>"
    with pytest.raises(ValueError, match=r"has been removed\. Call turbo_hf.patch"), handle:
        raise AssertionError("not reached")
    with pytest.raises(ValueError, match="has been removed"):
        handle.new_cache()


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
    model, other = tiny_llama(), tiny_llama()
    stock, before = generate(other), snapshot(other)
    with turbo_hf.patch(other, "turbo2"):
        two = generate(other)
    with turbo_hf.patch(model, "turbo4"):
        four = generate(model)
        assert not changes(before, snapshot(other))
        assert torch.equal(generate(other), stock)
        with turbo_hf.patch(other, "turbo2"):
            assert torch.equal(generate(other), two)
            assert torch.equal(generate(model), four)
        assert torch.equal(generate(model), four)
    assert not torch.equal(two, four)


# --- the handle ----------------------------------------------------------------------------------------------------


def test_report() -> None:
    model = tiny("gemma2", **MIXED)
    config = flat_config(low_bits=3, low_heads=0.5, int8_layers=(1,))
    with turbo_hf.patch(model, config) as handle:
        report = handle.report()
        assert str(report).splitlines() == [
            "Gemma2ForCausalLM (Gemma 2)",
            f"  {report.notes}",
            f"  layer 0: 1 x 4 bit + 1 x 3 bit, window {WINDOW}",
            "  layer 1: 8 bit; asked for by int8_layers",
            "  3-bit heads: the last of each layer, for want of a calibration (there is none beside the checkpoint)",
            "  prompts: native (auto, without a GPU)",
            "  decode steps: CUDA graphs, once the model is on a GPU",
            f"  {report.serving}",
            "  last generate: none since the patch",
            f"  note: {report.warnings[0]}",
        ]
        assert report.serving.startswith("continuous batching: ")
    assert "Scores are capped" in report.notes
    assert report.config is config
    with turbo_hf.patch(tiny("stablelm"), flat_config(value_bits=2, low_bits=3, low_heads=0.5)) as handle:
        assert handle.report().family == "stablelm: generic path, no test of its own"
        assert "1 x 4/2 bit + 1 x 3/2 bit" in str(handle.report())


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
        logits(model, **batch, **dict[str, Any]({CACHE: cache}))
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


def test_sas_threshold_falls_with_the_context() -> None:
    assert sas_threshold(TurboConfig(), 5000) is None
    assert sas_threshold(flat_config(sas=True, sas_threshold=-4.0), 5000) == -4.0
    assert sas_threshold(flat_config(sas=True), 100) == sas_threshold(flat_config(sas=True), 1024) == -6.0
    long: Any = sas_threshold(flat_config(sas=True), 2048)
    assert long == pytest.approx(-6 - torch.tensor(2.0).log().item())


def test_deepcopy_of_a_patched_model_is_patched_on_its_own() -> None:
    model = tiny_llama()
    stock = generate(model)
    handle = turbo_hf.patch(model, SMALL)
    ours = generate(model)
    twin = copy.deepcopy(model)
    measured = handle.memory()
    assert torch.equal(generate(twin, input_ids=prompts(1, 200)), generate(model, input_ids=prompts(1, 200)))
    generate(model)
    generate(twin, input_ids=prompts(1, 200))
    assert handle.memory() == measured, "the copy's cache is not this model's"
    handle.remove()
    assert torch.equal(generate(model), stock)
    assert torch.equal(generate(twin), ours)
    assert twin.config._attn_implementation == NAME
    assert not any(module._forward_pre_hooks for module in copy.deepcopy(model).modules())


def test_deepcopy_with_its_handle_can_be_taken_off() -> None:
    model = tiny_llama()
    stock = generate(model)
    handle = turbo_hf.patch(model, SMALL)
    ours = generate(model)
    twin, twin_handle = copy.deepcopy((model, handle))
    twin_handle.remove()
    assert torch.equal(generate(twin), stock)
    assert torch.equal(generate(model), ours)
    assert not any(module._forward_pre_hooks for module in twin.modules())


def test_a_shallow_copy_does_not_outlive_the_patch() -> None:
    model = tiny_llama()
    stock = generate(model)
    handle = turbo_hf.patch(model, "turbo2")
    twin = copy.copy(model)
    assert torch.equal(generate(twin), generate(model))
    handle.remove()
    assert torch.equal(generate(twin), stock)


def test_a_patched_model_can_be_sent_to_another_process(tmp_path: Path) -> None:
    model, ids = tiny_llama(), prompts(1, 70)
    with turbo_hf.patch(model, SMALL):
        torch.save((model, ids, generate(model, input_ids=ids)), tmp_path / "model.pt")
    code = f"""
import torch
model, ids, tokens = torch.load({str(tmp_path / "model.pt")!r}, weights_only=False)
assert torch.equal(model.generate(ids, max_new_tokens={NEW}, do_sample=False), tokens)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_save_pretrained_knows_nothing_of_the_patch(tmp_path: Path) -> None:
    model = tiny_llama()
    stock = logits(model, **padded())
    model.save_pretrained(tmp_path / "before")
    with turbo_hf.patch(model, SMALL):
        model.save_pretrained(tmp_path / "patched")
    model.save_pretrained(tmp_path / "after")
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        content = (tmp_path / "before" / name).read_bytes()
        assert (tmp_path / "patched" / name).read_bytes() == content
        assert (tmp_path / "after" / name).read_bytes() == content
    text = (tmp_path / "patched" / "config.json").read_text()
    assert "turbo" not in text
    assert '"LlamaForCausalLM"' in text
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "patched", attn_implementation="eager")
    assert torch.equal(logits(loaded, **padded()), stock)


def test_threads_share_a_patched_model() -> None:
    model = tiny_llama()
    inputs = [prompts(1, length, length) for length in (80, 65, 40)]
    with turbo_hf.patch(model, SMALL), ThreadPoolExecutor(3) as pool:
        alone = [generate(model, input_ids=ids) for ids in inputs]
        together = pool.map(lambda ids: generate(model, input_ids=ids), inputs * 3)
        assert all(map(torch.equal, together, alone * 3))


@pytest.mark.parametrize("when", ["before", "after"])
def test_accelerate_dispatch(when: str) -> None:
    model = tiny_llama()
    stock = generate(model)
    with turbo_hf.patch(model, SMALL):
        ours = generate(model)
    parts = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head")
    places: dict[str, Any] = dict.fromkeys(parts, "cpu")
    if when == "after":
        dispatch_model(model, places, force_hooks=True)
    handle = turbo_hf.patch(model, SMALL)
    if when == "before":
        dispatch_model(model, places, force_hooks=True)
    assert hasattr(model.model.layers[0], "_hf_hook")
    assert torch.equal(generate(model), ours)
    handle.remove()
    assert torch.equal(generate(model), stock)


def test_training_without_a_cache_is_untouched() -> None:
    model = tiny_llama(attn_implementation="sdpa")
    model.train()
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    ids = prompts(2, 50)

    def step() -> list[Tensor]:
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    stock = step()
    with turbo_hf.patch(model, SMALL):
        ours = step()
    assert len(ours) > 10
    assert all(torch.equal(a, b) for a, b in zip(stock, ours, strict=True))


def test_gradients_through_a_compressed_cache_are_refused() -> None:
    model: Any = tiny_llama()
    ids = prompts(2, 50)
    with turbo_hf.patch(model, SMALL) as handle:
        for how in ({CACHE: handle.new_cache()}, {"use_cache": True}):
            loss = model(ids, labels=ids, **how).loss
            with pytest.raises(RuntimeError, match=r"has no gradient.*use_cache=False"):
                loss.backward()
        model.train()
        with pytest.raises(Unsupported, match=r"training mode.*Call model.eval"):
            model(ids, **{CACHE: handle.new_cache()})
        out = model(ids, labels=ids, use_cache=True)
        assert isinstance(out[CACHE], DynamicCache)
        out.loss.backward()


def test_a_cache_with_use_cache_false_is_refused() -> None:
    """`generate` would pass all tokens at each step, over the ones that are cached already."""
    model = tiny_llama()
    with turbo_hf.patch(model) as handle:
        cache = handle.new_cache()
        with pytest.raises(ValueError, match=r"use_cache=False with a TurboCache.*or set use_cache=True"):
            generate(model, use_cache=False, **{CACHE: cache})
        assert cache.get_seq_length() == 0
