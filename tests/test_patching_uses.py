"""What people do with patched models, by themselves and by way of other libraries."""

import copy
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model  # type: ignore[import-untyped] # it has no types
from models import prompts, tiny_llama, tiny_mistral
from patching_support import EXACT, NEW, SMALL, WINDOW, changes, generate, logits, padded, renamed, snapshot
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaModel

import turbo_hf
from turbo_hf import TurboConfig
from turbo_hf.attention.turbo_attention import NAME
from turbo_hf.cache.memory import Memory
from turbo_hf.errors import Unsupported
from turbo_hf.models.versions import CACHE

SEALED = 0.05
"""Several times what sealing a block at 8 bit does to a logit of a tiny model."""


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
    assert not changes(snapshot(model), snapshot(model))
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
    stock = logits(model, **renamed(padded()))
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
    assert torch.equal(logits(loaded, **renamed(padded())), stock)


def test_threads_share_a_patched_model() -> None:
    model = tiny_llama()
    inputs = [prompts(1, length, length) for length in (80, 65, 40)]
    found: dict[int, list[Tensor]] = {}

    def work(index: int) -> None:
        found[index] = [generate(model, input_ids=inputs[index]) for _ in range(3)]

    with turbo_hf.patch(model, SMALL):
        alone = [generate(model, input_ids=ids) for ids in inputs]
        threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 3
    assert all(torch.equal(tokens, alone[index]) for index in found for tokens in found[index])


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
        loss = model(ids, labels=ids, **{CACHE: handle.new_cache()}).loss
        with pytest.raises(RuntimeError, match=r"has no gradient.*use_cache=False"):
            loss.backward()
        model.train()
        with pytest.raises(Unsupported, match=r"training mode.*Call model.eval"):
            model(ids, **{CACHE: handle.new_cache()})
        model(ids, labels=ids, use_cache=False).loss.backward()


@pytest.mark.parametrize("options", [{}, {"attn_implementation": "sdpa"}], ids=["eager", "sdpa"])
def test_generate_without_a_cache_is_that_of_the_model(options: dict[str, Any]) -> None:
    model = tiny_llama(**options)
    stock = generate(model, use_cache=False)
    with turbo_hf.patch(model, "turbo2") as handle:
        assert torch.equal(generate(model, use_cache=False), stock)
        assert handle.memory() == Memory((), 0, 0)
        assert not torch.equal(generate(model), stock)


def test_a_cache_with_use_cache_false_is_refused() -> None:
    """`generate` would pass all tokens at each step, over the ones that are cached already."""
    model = tiny_llama()
    with turbo_hf.patch(model) as handle:
        cache = handle.new_cache()
        with pytest.raises(ValueError, match=r"use_cache=False with a TurboCache.*or set use_cache=True"):
            generate(model, use_cache=False, **{CACHE: cache})
        assert cache.get_seq_length() == 0


@pytest.mark.parametrize("window", [None, WINDOW])
def test_assistant_and_prompt_lookup_give_the_greedy_tokens(window: int | None) -> None:
    """Drafts that are refused are taken back, also past the seal of a block and the edge of a window."""
    model, assistant = tiny_mistral(window), tiny_mistral(window, num_hidden_layers=1)
    config = TurboConfig(block_size=32, attention="fp16", bits=8)
    with turbo_hf.patch(model, config), turbo_hf.patch(assistant, config):
        for seed in range(300):
            ids = prompts(1, 70, seed)
            greedy: Any = model.generate(
                ids, max_new_tokens=30, do_sample=False, output_logits=True, return_dict_in_generate=True
            )
            best = torch.stack(greedy.logits).topk(2, -1).values
            # a draft's tokens are sealed together, after all of them: its logits differ by the rounding of a seal
            if float((best[..., 0] - best[..., 1]).min()) > SEALED:
                break
        else:
            raise AssertionError("all prompts have ties")
        for options in ({"assistant_model": assistant}, {"prompt_lookup_num_tokens": 3}):
            assert torch.equal(generate(model, input_ids=ids, max_new_tokens=30, **options), greedy.sequences)


def test_a_model_without_a_head() -> None:
    model: Any = LlamaModel(tiny_llama().config)
    model.eval()
    ids = prompts(2, 70)
    before, stock = snapshot(model), model(ids).last_hidden_state
    with pytest.warns(UserWarning, match=r"LlamaModel has no generate: pass handle.new_cache\(\)"):
        handle = turbo_hf.patch(model, EXACT)
    with handle:
        torch.testing.assert_close(model(ids, **{CACHE: handle.new_cache()}).last_hidden_state, stock)
    assert not changes(before, snapshot(model))


def test_inference_mode() -> None:
    model = tiny_llama()
    with turbo_hf.patch(model, SMALL):
        ours = generate(model)
        with torch.inference_mode():
            assert torch.equal(generate(model), ours)


def test_another_implementation_set_meanwhile() -> None:
    model = tiny_llama(attn_implementation="sdpa")
    before, stock = snapshot(model), generate(model)
    handle = turbo_hf.patch(model, "turbo2")
    ours = generate(model)
    assert not torch.equal(ours, stock)
    cache = handle.new_cache()
    model.set_attn_implementation("sdpa")
    assert torch.equal(generate(model), stock)
    ids = prompts(2, 70)
    torch.testing.assert_close(logits(model, ids, **{CACHE: cache}), logits(model, ids))
    model.set_attn_implementation(NAME)
    assert torch.equal(generate(model), ours)
    handle.remove()
    assert not changes(before, snapshot(model))


def test_a_report_says_the_bits_of_keys_and_of_values() -> None:
    with turbo_hf.patch(tiny_llama(), TurboConfig(value_bits=2, low_bits=3, low_heads=0.5)) as handle:
        assert "1 x 4/2 bit + 1 x 3/2 bit" in str(handle.report())


@pytest.mark.parametrize("preset", ["int8", "turbo4", "turbo2"])
def test_keys_and_values_next_to_nothing_are_no_nan(preset: str) -> None:
    model = tiny_llama()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight.mul_(1e-42)
            layer.self_attn.v_proj.weight.mul_(1e-42)
    stock = logits(model, prompts(1, 200))
    with turbo_hf.patch(model, preset) as handle, torch.no_grad():
        cache = handle.new_cache()
        parts = [model(ids, **{CACHE: cache}).logits for ids in prompts(1, 200).split([190, 10], 1)]
    assert torch.allclose(torch.cat(parts, 1), stock, atol=1e-5)
