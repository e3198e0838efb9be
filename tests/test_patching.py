"""`patch` and `remove`: what they touch, what they leave alone, and what they refuse."""

import copy
import gc
import logging
import re
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from accelerate import cpu_offload, dispatch_model  # type: ignore[import-untyped] # it has no types
from models import SHAPE, VOCABULARY, left_padded, prompts, tiny_llama, tiny_mistral
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, LlamaModel, PreTrainedModel, StaticCache
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    packed_sequence_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

import turbo_hf
from turbo_hf import TurboCache, TurboConfig, selfcheck, versions
from turbo_hf.attention import NAME, Unsupported, sas_threshold
from turbo_hf.masks import dense_mask, turbo_mask
from turbo_hf.memory import Memory
from turbo_hf.ops.rotate import rotate_keys
from turbo_hf.patches.generic import PROBES

LENGTHS = (90, 70, 31)
NEW = 8
WINDOW = 24
SMALL = TurboConfig(block_size=32)
EXACT = TurboConfig(block_size=32, attention="fp16")
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2}
SHARED = {
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": WINDOW,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCABULARY,
    "global_head_dim": 16,
}
PROBE_ERROR = 3 / (2 * (PROBES - 2)) ** 0.5
"""Three standard deviations of a standard deviation that is measured on so many numbers."""
SEALED = 0.05
"""Several times what sealing a block at 8 bit does to a logit of a tiny model."""
stricts = pytest.mark.parametrize("strict", ["raise", "warn", "fallback"])


def padded() -> dict[str, Tensor]:
    """Three prompts of different length, padded at the left."""
    return left_padded([prompts(1, length, length)[0] for length in LENGTHS])


def generate(model: Any, **options: Any) -> Tensor:
    """Greedy tokens after `padded`, or after other inputs."""
    inputs = {} if "input_ids" in options else padded()
    return torch.as_tensor(model.generate(**{"max_new_tokens": NEW, **inputs, **options}, do_sample=False))


@torch.no_grad()
def logits(model: Any, ids: Tensor, **options: Any) -> Tensor:
    """Logits of one pass."""
    return torch.as_tensor(model(ids, **options).logits)


def tiny(model_type: str, **options: Any) -> PreTrainedModel:
    """A random model of another family, of the shape of `tiny_llama`."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**SHAPE, "tie_word_embeddings": False, **options})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    model.eval()
    return model


def snapshot(model: PreTrainedModel) -> dict[str, Any]:
    """Every object that Python holds of a model and its configs, by name."""
    held: dict[str, Any] = {}
    owners = {**dict(model.named_modules()), "config": model.config}
    if model.can_generate():
        owners["generation"] = model.generation_config
    for name, owner in owners.items():
        held[f"{name} class"] = type(owner)
        for key, value in vars(owner).items():
            held[f"{name}.{key}"] = value
            if isinstance(value, dict):
                held |= {f"{name}.{key}[{inner}]": x for inner, x in value.items()}
    return held


def changes(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """Names under which there is now another object, or none, or one more."""
    both = before.keys() & after.keys()
    return (before.keys() ^ after.keys()) | {name for name in both if before[name] is not after[name]}


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
        assert not any("forward" in name for name in others)
        assert list(model.state_dict()) == keys
        generate(model)
    assert not changes(before, snapshot(model))
    assert list(model.state_dict()) == keys
    assert torch.equal(logits(model, **renamed(batch)), stock)
    assert torch.equal(generate(model), tokens)


def renamed(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The arguments of `logits`."""
    return {"ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}


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
    for patched in (model, twin):
        with pytest.raises(
            ValueError, match=r"or another that shares its config object, is patched already\. Call remove"
        ):
            turbo_hf.patch(patched, "int8")
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


def test_import_changes_nothing() -> None:
    code = """
import sys
sys.modules["triton"] = None
import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING
tables = ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS, DYNAMIC_LAYER_TYPE_MAPPING
before = [dict(table) for table in tables]
import turbo_hf
assert [dict(table) for table in tables] == before
assert not torch.cuda.is_initialized()
assert "accelerate" not in sys.modules or "turbo_hf" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# --- what people do with models ------------------------------------------------------------------------------------


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
        loss = model(ids, labels=ids, past_key_values=handle.new_cache()).loss
        with pytest.raises(RuntimeError, match=r"has no gradient.*use_cache=False"):
            loss.backward()
        model.train()
        with pytest.raises(Unsupported, match=r"training mode.*Call model.eval"):
            model(ids, past_key_values=handle.new_cache())
        model(ids, labels=ids, use_cache=False).loss.backward()


@pytest.mark.parametrize("options", [{}, {"attn_implementation": "sdpa"}], ids=["eager", "sdpa"])
def test_generate_without_a_cache_is_that_of_the_model(options: dict[str, Any]) -> None:
    model = tiny_llama(**options)
    stock = generate(model, use_cache=False)
    with turbo_hf.patch(model, "turbo2") as handle:
        assert torch.equal(generate(model, use_cache=False), stock)
        assert handle.memory() == Memory((), 0, 0)
        assert not torch.equal(generate(model), stock)


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
        torch.testing.assert_close(model(ids, past_key_values=handle.new_cache()).last_hidden_state, stock)
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
    torch.testing.assert_close(logits(model, ids, past_key_values=cache), logits(model, ids))
    model.set_attn_implementation(NAME)
    assert torch.equal(generate(model), ours)
    handle.remove()
    assert not changes(before, snapshot(model))


# --- dense attention on a patched model ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        pytest.param("llama", {"attn_implementation": "sdpa"}, id="llama"),
        pytest.param("mistral", {"attn_implementation": "sdpa", "sliding_window": WINDOW}, id="window"),
        pytest.param("phimoe", {"attn_implementation": "sdpa", "sliding_window": WINDOW, **EXPERTS}, id="no-keyword"),
        pytest.param("gemma2", {**MIXED, "attn_logit_softcapping": 5.0}, id="softcap"),
        pytest.param("gpt_oss", {**MIXED, **EXPERTS}, id="sinks"),
    ],
)
@pytest.mark.parametrize("kind", ["none", "dynamic", "static"])
def test_other_caches_give_the_models_own_logits(model_type: str, options: dict[str, Any], kind: str) -> None:
    model, batch = tiny(model_type, **options), padded()
    ids, mask = batch["input_ids"], batch["attention_mask"]
    real, step = mask.bool(), prompts(len(LENGTHS), 1)
    longer = torch.nn.functional.pad(mask, (0, 1), value=1)

    def run() -> list[Tensor]:
        caches: dict[str, Any] = {
            "none": lambda: None,
            "dynamic": lambda: DynamicCache(config=model.config),
            "static": lambda: StaticCache(config=model.config, max_cache_len=128),
        }
        cache = caches[kind]()
        passes = [logits(model, ids, attention_mask=mask, past_key_values=cache)[real]]
        if cache is not None:
            passes.append(logits(model, step, attention_mask=longer, past_key_values=cache))
        cache = caches[kind]()
        passes.append(logits(model, ids, past_key_values=cache))
        if cache is not None:
            passes.append(logits(model, ids[:, :3], past_key_values=cache))
            passes.append(logits(model, step, past_key_values=cache))
        return passes

    stock = run()
    with turbo_hf.patch(model, EXACT):
        ours = run()
    for a, b in zip(ours, stock, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        pytest.param("llama", {}, id="llama"),
        pytest.param("mistral", {"sliding_window": WINDOW}, id="window"),
        pytest.param("phimoe", {"sliding_window": WINDOW, **EXPERTS}, id="no-keyword"),
        pytest.param("gpt_oss", {**MIXED, **EXPERTS}, id="sinks"),
    ],
)
def test_dense_layers_stay_dense_and_right(model_type: str, options: dict[str, Any]) -> None:
    model = tiny(model_type, **options)
    config = TurboConfig(block_size=32, attention="fp16", bits=8, dense_layers=(0,))
    cache = TurboCache(model.config, config, attention_mask=padded()["attention_mask"])
    oracle = generate(model, past_key_values=cache)
    with turbo_hf.patch(model, config) as handle:
        assert torch.equal(generate(model), oracle)
        assert [layer.storage for layer in handle.report().layers] == ["dense", "2 x 8 bit"]
        assert handle.report().layers[0].reason == "asked for by dense_layers"
        assert set(handle.memory().layers[0]) == {"dense"}


@pytest.mark.parametrize("rows", [1, 2])
def test_masks_of_one_form_are_passed_on(rows: int) -> None:
    mask = torch.ones(rows, 9, dtype=torch.bool)
    for function in (causal_mask_function, sliding_window_causal_mask_function(4)):
        given: dict[str, Any] = {"batch_size": rows, "mask_function": function}
        assert turbo_mask(q_length=9, kv_length=9, attention_mask=mask, **given) is mask
        assert turbo_mask(q_length=9, kv_length=9, attention_mask=None, **given) is None
        assert turbo_mask(q_length=2, kv_length=5, q_offset=7, kv_offset=4, attention_mask=mask, **given) is mask


def test_other_masks_are_made_dense() -> None:
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, :3] = False
    packed = packed_sequence_mask_function(torch.tensor([[0] * 5 + [1] * 4]).expand(2, -1))
    functions = [
        chunked_causal_mask_function(4, torch.tensor([0, 3])),
        bidirectional_mask_function,
        and_masks(causal_mask_function, packed),
        and_masks(sliding_window_overlay(4), bidirectional_mask_function),
        and_masks(sliding_window_causal_mask_function(4), packed),
        and_masks(causal_mask_function, causal_mask_function, causal_mask_function),
        lambda batch, head, q, kv: kv <= q,
    ]
    for function in functions:
        given: dict[str, Any] = {"batch_size": 2, "q_length": 9, "kv_length": 9, "attention_mask": mask}
        ours = turbo_mask(mask_function=function, **given)
        want: Any = sdpa_mask(mask_function=function, allow_is_causal_skip=False, **given)
        assert ours is not None
        assert torch.equal(ours, want)
        assert ours.shape == (2, 1, 9, 9)
    # a static cache has columns that no token has reached
    ours = turbo_mask(batch_size=2, q_length=1, kv_length=9, q_offset=torch.tensor(5), attention_mask=mask)
    assert ours is not None
    assert ours[:, 0, 0].tolist() == [[True] * 6 + [False] * 3, [False] * 3 + [True] * 3 + [False] * 3]


@pytest.mark.parametrize("window", [None, 4, 1])
@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (1, 9), (3, 9), (1, 1)])
def test_dense_mask_is_that_of_transformers(window: int | None, queries: int, keys: int) -> None:
    mask = torch.ones(2, keys, dtype=torch.bool)
    mask[1, : keys - 2] = False
    function = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    want: Any = sdpa_mask(
        batch_size=2,
        q_length=queries,
        kv_length=keys,
        q_offset=keys - queries,
        mask_function=function,
        attention_mask=mask,
        allow_is_causal_skip=False,
    )
    ours = dense_mask(mask, queries, keys, causal=True, window=window, device=mask.device)
    assert ours is not None
    assert torch.equal(ours, want)
    # wider masks are those of a cache that has dropped its oldest columns
    wider = torch.nn.functional.pad(mask, (5, 0), value=True)
    again = dense_mask(wider, queries, keys, causal=True, window=window, device=mask.device)
    assert again is not None
    assert torch.equal(again, want)


def test_dense_mask_is_none_where_all_is_seen() -> None:
    cpu = torch.device("cpu")
    assert dense_mask(None, 1, 9, causal=True, window=None, device=cpu) is None
    assert dense_mask(None, 9, 9, causal=False, window=None, device=cpu) is None
    assert dense_mask(None, 9, 9, causal=True, window=None, device=cpu) is not None
    assert dense_mask(None, 1, 9, causal=True, window=4, device=cpu) is not None


# --- strict --------------------------------------------------------------------------------------------------------


@stricts
def test_a_layer_that_cannot_be_compressed(
    strict: Literal["raise", "warn", "fallback"], caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_llama()
    layer: Any = model.model.layers[1].self_attn
    layer.is_cross_attention = True
    message = r"layers 1 cannot be compressed: cross-attention"
    if strict == "raise":
        with pytest.raises(Unsupported, match=message + r"\. Pass strict=\"warn\" or .*dense_layers=\(1,\)"):
            turbo_hf.patch(model, EXACT, strict=strict)
        assert model.config._attn_implementation == "eager"
        return
    handle = spoken(strict, message, caplog, lambda: turbo_hf.patch(model, EXACT, strict=strict))
    assert [layer.storage for layer in handle.report().layers] == ["2 x 4 bit", "dense"]
    assert handle.report().warnings == ("layers 1 cannot be compressed: cross-attention.",)
    ours = generate(model)
    handle.remove()
    cache = TurboCache(model.config, EXACT, attention_mask=padded()["attention_mask"], dense_layers=(1,))
    assert torch.equal(ours, generate(model, past_key_values=cache))


def spoken(strict: str, message: str, caplog: pytest.LogCaptureFixture, call: Any) -> Any:
    """What `call` returns, after the warning of "warn" or the silent log line of "fallback"."""
    if strict == "warn":
        with pytest.warns(UserWarning, match=message):
            return call()
    with warnings.catch_warnings(), caplog.at_level(logging.INFO, "turbo_hf"):
        warnings.simplefilter("error")
        result = call()
    assert any(re.search(message, line) for line in caplog.messages)
    return result


@stricts
def test_a_call_that_cannot_be_compressed(
    strict: Literal["raise", "warn", "fallback"], caplog: pytest.LogCaptureFixture
) -> None:
    """Unknown keywords, and masks that are no columns of tokens: dense attention over the same cache, or an error."""
    model, ids, step = tiny_llama(), prompts(2, 70), prompts(2, 1, 1)
    hidden = torch.ones(2, 1, 70, 70, dtype=torch.bool).tril()
    hidden[:, :, 40:, :40] = False
    additive = torch.zeros(hidden.shape).masked_fill(~hidden, torch.finfo(torch.float32).min)
    calls: list[tuple[dict[str, Any], str]] = [
        ({"position_bias": torch.ones(1), "cu_seqlens": 1}, "layer 0: the model passes cu_seqlens, position_bias to"),
        ({"attention_mask": additive}, "layer 0: the attention mask is no causal or sliding-window mask"),
        ({"is_causal": False}, "layer 0: attention is not causal here"),
    ]
    for options, message in calls:
        seen = {**options, "attention_mask": torch.zeros_like(additive)} if "is_causal" in options else options
        stock = logits(model, ids, **seen)
        with turbo_hf.patch(model, EXACT, strict=strict) as handle:
            cache = handle.new_cache()
            if strict == "raise":
                with pytest.raises(Unsupported, match=message):
                    logits(model, ids, past_key_values=cache, **options)
                continue
            ours = spoken(
                strict, message, caplog, lambda c=cache, o=options: logits(model, ids, past_key_values=c, **o)
            )
            torch.testing.assert_close(ours, stock)
            same = copy.deepcopy(cache)
            ours = logits(model, step, past_key_values=cache)
        torch.testing.assert_close(ours, logits(model, step, past_key_values=same))


def test_keywords_that_change_nothing_pass() -> None:
    model, ids = tiny_llama(), prompts(2, 70)
    with turbo_hf.patch(model, EXACT) as handle:
        plain = logits(model, ids, past_key_values=handle.new_cache())
        same = logits(
            model, ids, past_key_values=handle.new_cache(), position_bias=None, output_hidden_states=True, labels=ids
        )
    assert torch.equal(plain, same)


def test_packed_sequences() -> None:
    """Transformers finds them from positions, and only in a call without a cache."""
    model, ids = tiny_llama(attn_implementation="sdpa"), prompts(1, 70)
    packed = torch.cat((torch.arange(30), torch.arange(40)))[None]
    stock = logits(model, ids, position_ids=packed, use_cache=False)
    cached = logits(model, ids, position_ids=packed, past_key_values=DynamicCache(config=model.config))
    assert not torch.allclose(stock, cached)
    with turbo_hf.patch(model, EXACT) as handle:
        torch.testing.assert_close(logits(model, ids, position_ids=packed, use_cache=False), stock)
        ours = logits(model, ids, position_ids=packed, past_key_values=handle.new_cache())
        torch.testing.assert_close(ours, cached)


class Doubling(modeling_llama.LlamaAttention):
    """Attention that changes its keys after the cache has seen them, as DiffLlama and JetMoe do."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (project(hidden_states).view(shape).transpose(1, 2) for project in projections)
        query, key = modeling_llama.apply_rotary_pos_emb(query, key, *position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, modeling_llama.eager_attention_forward
        )
        out, weights = attention(self, query, 2 * key, value, attention_mask, scaling=self.scaling, **kwargs)
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), weights


@stricts
def test_attention_that_changes_keys_after_the_cache(strict: Literal["raise", "warn", "fallback"]) -> None:
    model = tiny_llama()
    model.model.layers[1].self_attn.__class__ = Doubling
    with (
        turbo_hf.patch(model, EXACT, strict=strict),
        pytest.raises(Unsupported, match=r"layer 1: this attention class changes keys or values .*dense_layers=\(1,\)"),
    ):
        generate(model)
    oracle = TurboCache(model.config, EXACT, attention_mask=padded()["attention_mask"], dense_layers=(1,))
    tokens = generate(model, past_key_values=oracle)
    with turbo_hf.patch(model, TurboConfig(block_size=32, attention="fp16", dense_layers=(1,)), strict=strict):
        assert torch.equal(generate(model), tokens)


@stricts
@pytest.mark.parametrize("version", ["5.16.2", "5.99.0", "6.0.0.dev0"])
def test_a_version_outside_the_tested_range(
    version: str,
    strict: Literal["raise", "warn", "fallback"],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = tiny_llama()
    monkeypatch.setattr("turbo_hf.versions.transformers.__version__", version)
    message = f"transformers {version} is outside the tested range {versions.OLDEST} to {versions.NEWEST}"
    if strict == "raise":
        with pytest.raises(Unsupported, match=message + r".*pass strict=\"warn\""):
            turbo_hf.patch(model, strict=strict)
        return
    with spoken(strict, message, caplog, lambda: turbo_hf.patch(model, strict=strict)) as handle:
        assert message in handle.report().warnings[0]
        generate(model)


def test_versions_inside_the_tested_range(monkeypatch: pytest.MonkeyPatch) -> None:
    assert versions.check_version() is None
    for version in (f"{versions.OLDEST}.0", f"{versions.NEWEST}.7", f"{versions.NEWEST}.0.dev0"):
        monkeypatch.setattr("turbo_hf.versions.transformers.__version__", version)
        assert versions.check_version() is None


# --- the key bias guard --------------------------------------------------------------------------------------------


class Packed(torch.nn.Module):
    """A linear layer whose weights are INT8 codes, as quantized checkpoints have them."""

    def __init__(self, linear: torch.nn.Linear):
        super().__init__()
        self.in_features, self.bias = linear.in_features, linear.bias
        self.scale = linear.weight.detach().abs().max() / 127
        self.weight = torch.nn.Parameter((linear.weight.detach() / self.scale).round().to(torch.int8), False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight * self.scale, self.bias)


@pytest.mark.parametrize("kind", ["plain", "packed", "offloaded", "bfloat16"])
def test_a_layer_with_a_huge_key_bias_is_kept_at_8_bit(kind: str) -> None:
    model: Any = tiny("qwen2")
    projection = model.model.layers[1].self_attn.k_proj
    projection.bias.data[3] = -1000.0
    heads = projection.weight.detach().T.unflatten(-1, (-1, model.model.layers[1].self_attn.head_dim))
    moves = rotate_keys(heads[None])[0].norm(dim=0).median()
    fixed = rotate_keys(projection.bias.detach().reshape(1, 1, *heads.shape[1:])).abs().max()
    step = float(fixed / 119 / moves)
    if kind == "packed":
        model.model.layers[1].self_attn.k_proj = Packed(projection)
    elif kind == "offloaded":
        cpu_offload(model, torch.device("cpu"))
        assert projection.bias.is_meta
    elif kind == "bfloat16":
        model.bfloat16()
    with pytest.warns(UserWarning, match=r"layer 1: its key bias alone makes an INT8 step of \d+\.\d ") as caught:
        handle = turbo_hf.patch(model, SMALL)
    assert handle.report().layers[1].bias_step == pytest.approx(step, rel=PROBE_ERROR)
    assert [record.filename for record in caught] == [__file__]
    assert [layer.storage for layer in handle.report().layers] == ["2 x 4 bit", "8 bit"]
    assert handle.report().layers[1].reason == "key bias"
    assert len(handle.report().warnings) == 1
    assert "note: layer 1: its key bias alone" in str(handle.report())
    assert [layer.config.bits for layer in handle.new_cache().turbo_layers()] == [4, 8]


def test_the_key_bias_guard_can_be_overruled() -> None:
    model: Any = tiny("qwen2")
    bias = model.model.layers[1].self_attn.k_proj.bias.data
    bias[3] = -1000.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for config in (TurboConfig(bits=8), TurboConfig(int8_layers=()), TurboConfig(int8_layers=(1,))):
            with turbo_hf.patch(model, config) as handle:
                assert not handle.report().warnings
        assert handle.report().layers[1].reason == "asked for by int8_layers"
        assert [layer.config.bits for layer in handle.new_cache().turbo_layers()] == [4, 8]
        bias[3] = 0.1
        with turbo_hf.patch(model, SMALL) as handle:
            assert [layer.storage for layer in handle.report().layers] == ["2 x 4 bit"] * 2


def test_a_model_without_weights_has_no_bias_to_judge() -> None:
    with torch.device("meta"):
        model = tiny("qwen2")
    with turbo_hf.patch(model, SMALL) as handle:
        assert not handle.report().warnings


# --- refusals ------------------------------------------------------------------------------------------------------


def test_bad_arguments() -> None:
    model: Any = tiny_llama()
    with pytest.raises(ValueError, match="strict must be one of raise, warn, fallback; got 'loud'"):
        turbo_hf.patch(model, strict="loud")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"presets int8, turbo4, turbo-mixed, turbo2.*; got 'turbo5'"):
        turbo_hf.patch(model, "turbo5")
    with pytest.raises(TypeError, match=r"model must be a .*PreTrainedModel; got Linear"):
        turbo_hf.patch(model.lm_head)
    with pytest.raises(ValueError, match="names layer 2; the model has layers 0 to 1"):
        turbo_hf.patch(model, TurboConfig(dense_layers=(0, 2)))
    with pytest.raises(ValueError, match="names layer 7; the model has layers 0 to 1"):
        turbo_hf.patch(model, TurboConfig(int8_layers=(7,)))
    with pytest.raises(Unsupported, match=r"no layer of LlamaForCausalLM .*: asked for by dense_layers"):
        turbo_hf.patch(model, TurboConfig(dense_layers=(0, 1)))
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


def test_continuous_batching_is_refused() -> None:
    model: Any = tiny_llama()
    with turbo_hf.patch(model):
        with pytest.raises(Unsupported, match=r"paged cache of its own.*Use generate, or remove the patch"):
            model.generate_batch([[1, 2, 3]])
        with pytest.raises(Unsupported, match="paged cache of its own"):
            model.init_continuous_batching()


def test_masks_and_caches_of_another_batch_or_model_are_refused() -> None:
    model, ids = tiny_mistral(WINDOW), padded()["input_ids"]
    mask = torch.ones(1, ids.shape[1])
    with turbo_hf.patch(model, SMALL) as handle:
        with pytest.raises(ValueError, match="attention_mask has 1 rows, this pass 3"):
            logits(model, ids, attention_mask=mask, past_key_values=handle.new_cache())
        for other, message in (
            (tiny_mistral(None), f"layer 0 of this TurboCache has the window None, the model's {WINDOW}"),
            (tiny_mistral(WINDOW, num_hidden_layers=3), "this TurboCache has 3 layers, the model 2"),
        ):
            with pytest.raises(Unsupported, match=message + r".*use handle.new_cache\(\)"):
                logits(model, ids, past_key_values=TurboCache(other.config, SMALL))


def test_a_cache_survives_a_call_that_failed() -> None:
    model, ids = tiny_llama(), prompts(2, 70)
    last: Any = model.model.layers[1].self_attn

    def fail(*_: Any) -> None:
        raise KeyError

    with turbo_hf.patch(model, EXACT) as handle:
        want = logits(model, ids, past_key_values=handle.new_cache())
        cache = handle.new_cache()
        for name in ("q_proj", "o_proj"):
            hook = getattr(last, name).register_forward_pre_hook(fail)
            with pytest.raises(KeyError):
                logits(model, ids, past_key_values=cache)
            hook.remove()
            assert not any(layer.claimed or layer.pending for layer in cache.turbo_layers())
            cache.reset()
        assert torch.equal(logits(model, ids, past_key_values=cache), want)


def test_rows_without_a_prompt_are_refused() -> None:
    model, batch = tiny_llama(), padded()
    batch["attention_mask"][1] = 0
    with turbo_hf.patch(model), pytest.raises(ValueError, match=r"rows \[1\] of attention_mask are all padding"):
        generate(model, **batch)


def test_caches_that_are_not_compressed_are_told() -> None:
    model = tiny_llama()
    stock = generate(model)
    with turbo_hf.patch(model, "turbo2") as handle:
        with pytest.warns(UserWarning, match="a DynamicCache was passed, so this call is not compressed"):
            assert torch.equal(generate(model, past_key_values=DynamicCache(config=model.config)), stock)
        with pytest.warns(UserWarning, match=r"cache_implementation='static' asks for .*generation_config\."):
            assert torch.equal(generate(model, cache_implementation="static"), stock)
        assert handle.memory() == Memory((), 0, 0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ours = generate(model)
            assert torch.equal(generate(model, past_key_values=handle.new_cache()), ours)
    assert not torch.equal(ours, stock)


# --- the self-check ------------------------------------------------------------------------------------------------


def test_check_passes_and_leaves_the_patch_on() -> None:
    model = tiny_llama()
    with turbo_hf.patch(model, "int8", check=True):
        assert model.config._attn_implementation == NAME


def test_check_that_fails_takes_the_patch_off(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    before = snapshot(model)
    monkeypatch.setattr(selfcheck, "LOST", 0.0)
    with pytest.raises(Unsupported, match=r"self-check failed: the logits differ by \d+% .*off again"):
        turbo_hf.patch(model, "turbo2", check=True)
    assert not changes(before, snapshot(model))


def test_check_that_meets_an_error_takes_the_patch_off() -> None:
    model = tiny_llama()
    model.model.layers[0].self_attn.__class__ = Doubling
    before = snapshot(model)
    with pytest.raises(Unsupported, match="changes keys or values"):
        turbo_hf.patch(model, check=True)
    assert not changes(before, snapshot(model))


# --- the handle ----------------------------------------------------------------------------------------------------


def test_report() -> None:
    model = tiny("gemma2", **MIXED)
    config = TurboConfig(low_bits=2, low_heads=0.5, int8_layers=(1,))
    with turbo_hf.patch(model, config) as handle:
        report = handle.report()
        assert str(report).splitlines() == [
            "Gemma2ForCausalLM (Gemma 2)",
            f"  {report.notes}",
            f"  layer 0: 1 x 4 bit + 1 x 2 bit, window {WINDOW}",
            "  layer 1: 8 bit; asked for by int8_layers",
            "  2-bit heads: chosen by each row's first 64 tokens (no calibration beside the checkpoint)",
            "  prompts: turbo (auto, without a GPU)",
            "  decode steps: CUDA graphs, once the model is on a GPU",
        ]
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
        logits(model, **renamed(batch), past_key_values=cache)
        living = handle.memory()
        assert living.tokens == sum(LENGTHS)
        # keys and values of 2 layers, 2 heads of 16 float32 channels
        assert living.full_precision == sum(LENGTHS) * 2 * 2 * 2 * 16 * 4
        assert living.total == sum(living.by_kind.values()) > 0
        longer = torch.nn.functional.pad(batch["attention_mask"], (0, 1), value=1)
        logits(model, prompts(3, 1), attention_mask=longer, past_key_values=cache)
        assert handle.memory().tokens == living.tokens + 3
        last = handle.memory()
        del cache
        gc.collect()
        assert handle.memory() == last
    assert handle.memory() == last


def test_new_cache_is_that_of_generate() -> None:
    model = tiny_mistral(WINDOW)
    ids = prompts(1, 70)
    with turbo_hf.patch(model, TurboConfig(block_size=32, dense_layers=(1,))) as handle:
        tokens, cache = generate(model, input_ids=ids), handle.new_cache()
        assert isinstance(cache, TurboCache)
        assert len(cache.turbo_layers()) == 1
        given = ids
        for _ in range(NEW):
            best = logits(model, given, past_key_values=cache)[:, -1:].argmax(-1)
            ids, given = torch.cat((ids, best), 1), best
        assert torch.equal(ids, tokens)


def test_sas_threshold_falls_with_the_context() -> None:
    assert sas_threshold(TurboConfig(), 5000) is None
    assert sas_threshold(TurboConfig(sas=True, sas_threshold=-4.0), 5000) == -4.0
    assert sas_threshold(TurboConfig(sas=True), 100) == sas_threshold(TurboConfig(sas=True), 1024) == -6.0
    long = sas_threshold(TurboConfig(sas=True), 2048)
    assert long is not None
    assert long == pytest.approx(-6 - torch.tensor(2.0).log().item())
