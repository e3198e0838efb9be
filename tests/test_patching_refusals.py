"""What `patch` refuses, what it guards against, its own check; attention in full precision, and what `strict` says."""

import copy
import logging
import re
import warnings
from typing import Any

import pytest
import torch
from accelerate import cpu_offload  # type: ignore[import-untyped] # it has no types
from choices import flat_config
from models import prompts, tiny_llama, tiny_mistral
from patching_support import EXACT, MIXED, SMALL, WINDOW, Doubling, changes, generate, logits, padded, snapshot, tiny
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers import masking_utils as hf

import turbo_hf
from turbo_hf import TurboCache, TurboConfig
from turbo_hf.attention.masks import turbo_mask
from turbo_hf.attention.turbo_attention import NAME
from turbo_hf.cache.memory import Memory
from turbo_hf.errors import Unsupported
from turbo_hf.models import versions
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
    with pytest.raises(ValueError, match="check must be True or False; got 'yes'"):
        turbo_hf.patch(model, check="yes")  # type: ignore[arg-type]


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
        named = (
            r"cache_implementation='static' asks for .* leave out that argument, or set it to None in the generation_c"
        )
        with pytest.warns(UserWarning, match=named) as caught:
            assert torch.equal(generate(model, cache_implementation="static"), stock)
        assert len(caught) == 1, "nothing is said of an argument that was not passed"
        model.generation_config.cache_implementation = "static"
        with pytest.warns(UserWarning, match=named):
            assert torch.equal(generate(model), stock)
        model.generation_config.cache_implementation = None
        assert handle.memory() == Memory((), 0, 0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ours = generate(model)
            assert torch.equal(generate(model, **{CACHE: handle.new_cache()}), ours)
    assert not torch.equal(ours, stock)


# --- the self-check ------------------------------------------------------------------------------------------------


def test_check_of_a_model_with_few_positions() -> None:
    # learned positions: one more would be none
    model = tiny("gpt2", n_embd=64, n_layer=2, n_head=4, max_position_embeddings=100)
    assert model.config.n_positions == 100 < selfcheck.PROMPT
    with turbo_hf.patch(model, "int8", check=True):
        assert model.config._attn_implementation == NAME


def test_check_that_fails_or_meets_an_error_takes_the_patch_off(monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = tiny_llama(), tiny_llama()
    other.model.layers[0].self_attn.__class__ = Doubling
    monkeypatch.setattr(selfcheck, "MOST", 0.0)
    differ = r"self-check failed: .* the logits differ by [\d.]+% .*off again"
    for checked, message in ((model, differ), (other, "changes keys or values")):
        before = snapshot(checked)
        with pytest.raises(Unsupported, match=message):
            turbo_hf.patch(checked, "int8", check=True)
        assert not changes(before, snapshot(checked))


EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2}
stricts = pytest.mark.parametrize("strict", ["raise", "warn", "fallback"])


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
    real, step = mask.bool(), prompts(len(ids), 1)
    longer = torch.nn.functional.pad(mask, (0, 1), value=1)

    def run() -> list[Tensor]:
        caches: dict[str, Any] = {
            "none": lambda: None,
            "dynamic": lambda: DynamicCache(config=model.config),
            "static": lambda: StaticCache(config=model.config, max_cache_len=256),
        }
        cache = caches[kind]()
        passes = [logits(model, ids, attention_mask=mask, **{CACHE: cache})[real]]
        if cache is not None:
            passes.append(logits(model, step, attention_mask=longer, **{CACHE: cache}))
        cache = caches[kind]()
        passes.append(logits(model, ids, **{CACHE: cache}))
        if cache is not None:
            passes.append(logits(model, ids[:, :3], **{CACHE: cache}))
            passes.append(logits(model, step, **{CACHE: cache}))
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
def test_dense_layers_are_not_rounded(model_type: str, options: dict[str, Any]) -> None:
    model = tiny(model_type, **options)
    config = flat_config(block_size=32, attention="native", bits=8, dense_layers=(0,))
    cache = TurboCache(model.config, config, attention_mask=padded()["attention_mask"])
    oracle = generate(model, **{CACHE: cache})
    with turbo_hf.patch(model, config) as handle:
        assert torch.equal(generate(model), oracle)
        assert [layer.storage for layer in handle.report().layers] == ["2 x 16 bit", "2 x 8 bit"]
        assert handle.report().layers[0].reason == "asked for by dense_layers"
        assert "dense_layers are kept in float16, which rounds the float32" in handle.report().warnings[0]
    # whatever else rounds, they are those of bits=16
    model.bfloat16()
    exact = flat_config(bits=16, attention="native", block_size=32)
    rounds = flat_config(low_heads=0.5, low_bits=3, recent_tokens=32, sas=True, block_size=32, dense_layers=(0, 1))
    answers = []
    for own in (exact, rounds):
        with turbo_hf.patch(model, own) as handle:
            answers.append(generate(model))
            assert not any("dense_layers" in text for text in handle.report().warnings)
    assert torch.equal(*answers)


@pytest.mark.parametrize("rows", [1, 2])
def test_masks_of_one_form_are_passed_on(rows: int) -> None:
    mask = torch.ones(rows, 9, dtype=torch.bool)
    plain = (hf.causal_mask_function, hf.sliding_window_causal_mask_function(4))
    # blocks of an image are allowed for, and there is none
    without = hf.blockwise_overlay(torch.full((rows, 9), -1))
    for function in (*plain, *(hf.or_masks(each, without) for each in plain)):
        given: dict[str, Any] = {"batch_size": rows, "mask_function": function}
        assert turbo_mask(q_length=9, kv_length=9, attention_mask=mask, **given) is mask
        assert turbo_mask(q_length=9, kv_length=9, attention_mask=None, **given) is None
        assert turbo_mask(q_length=2, kv_length=5, q_offset=7, kv_offset=4, attention_mask=mask, **given) is mask


def test_other_masks_are_made_dense() -> None:
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, :3] = False
    packed = hf.packed_sequence_mask_function(torch.tensor([[0] * 5 + [1] * 4]).expand(2, -1))
    functions = [
        hf.chunked_causal_mask_function(4, torch.tensor([0, 3])),
        hf.bidirectional_mask_function,
        hf.and_masks(hf.causal_mask_function, packed),
        hf.and_masks(hf.sliding_window_overlay(4), hf.bidirectional_mask_function),
        hf.and_masks(hf.sliding_window_causal_mask_function(4), packed),
        hf.and_masks(hf.causal_mask_function, hf.causal_mask_function, hf.causal_mask_function),
        lambda batch, head, q, kv: kv <= q,
        hf.or_masks(hf.causal_mask_function, packed),
        # a block that reaches back beyond the window; chunks, of which a layer knows nothing
        hf.or_masks(hf.sliding_window_causal_mask_function(4), hf.blockwise_overlay(torch.zeros(2, 9))),
        hf.or_masks(
            hf.chunked_causal_mask_function(9, torch.tensor([0, 3])), hf.blockwise_overlay(torch.full((2, 9), -1))
        ),
    ]
    for function in functions:
        given: dict[str, Any] = {"batch_size": 2, "q_length": 9, "kv_length": 9, "attention_mask": mask}
        ours: Any = turbo_mask(mask_function=function, **given)
        want: Any = hf.sdpa_mask(mask_function=function, allow_is_causal_skip=False, **given)
        assert torch.equal(ours, want)
        assert ours.shape == (2, 1, 9, 9)
    # at the last token of a chunk its mask is that of a window, which the layer would not apply
    chunk = hf.chunked_causal_mask_function(8, torch.tensor([0]))
    ours = turbo_mask(batch_size=1, q_length=1, kv_length=24, q_offset=23, mask_function=chunk, local_size=8)
    assert ours is not None
    # a static cache has columns that no token has reached
    ours = turbo_mask(batch_size=2, q_length=1, kv_length=9, q_offset=torch.tensor(5), attention_mask=mask)
    assert ours[:, 0, 0].tolist() == [[True] * 6 + [False] * 3, [False] * 3 + [True] * 3 + [False] * 3]


# --- strict --------------------------------------------------------------------------------------------------------


@stricts
def test_a_layer_that_cannot_be_compressed(strict: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_llama()
    layer: Any = model.model.layers[1].self_attn
    layer.is_cross_attention = True
    message = r"layers 1 cannot be compressed: cross-attention"
    if strict == "raise":
        with pytest.raises(Unsupported, match=message + r"\. Pass strict=\"warn\" to leave them"):
            turbo_hf.patch(model, EXACT, strict=strict)
        assert model.config._attn_implementation == "eager"
        return
    handle = spoken(strict, message, caplog, lambda: turbo_hf.patch(model, EXACT, strict=strict))
    assert [layer.storage for layer in handle.report().layers] == ["2 x 4 bit", "dense"]
    assert handle.report().warnings == ("layers 1 cannot be compressed: cross-attention.",)
    ours = generate(model)
    handle.remove()
    cache = TurboCache(model.config, EXACT, attention_mask=padded()["attention_mask"], uncompressed_layers=(1,))
    assert torch.equal(ours, generate(model, **{CACHE: cache}))


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
def test_a_call_that_cannot_be_compressed(strict: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Keywords of SDPA, and masks that are no columns of tokens: dense attention over the same cache, or an error."""
    model, ids, step = tiny_llama(), prompts(2, 70), prompts(2, 1, 1)
    hidden = torch.ones(2, 1, 70, 70, dtype=torch.bool).tril()
    hidden[:, :, 40:, :40] = False
    additive = torch.zeros(hidden.shape).masked_fill(~hidden, torch.finfo(torch.float32).min)
    calls: list[tuple[dict[str, Any], str]] = [
        # SDPA reads it, and a constant changes nothing
        ({"position_bias": torch.ones(1)}, "layer 0: the model passes position_bias to"),
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
                    logits(model, ids, **{CACHE: cache}, **options)
                continue
            ours = spoken(strict, message, caplog, lambda c=cache, o=options: logits(model, ids, **{CACHE: c}, **o))
            torch.testing.assert_close(ours, stock)
            same = copy.deepcopy(cache)
            ours = logits(model, step, **{CACHE: cache})
        torch.testing.assert_close(ours, logits(model, step, **{CACHE: same}))


def test_keywords_that_change_nothing_pass() -> None:
    model, ids = tiny_llama(), prompts(2, 70)
    with turbo_hf.patch(model, EXACT) as handle:
        plain = logits(model, ids, **{CACHE: handle.new_cache()})
        same = logits(
            model, ids, **{CACHE: handle.new_cache()}, position_bias=None, output_hidden_states=True, labels=ids
        )
    assert torch.equal(plain, same)


def test_packed_sequences() -> None:
    """Transformers finds them from positions, and only in a call without a cache."""
    model, ids = tiny_llama(attn_implementation="sdpa"), prompts(1, 70)
    packed = torch.cat((torch.arange(30), torch.arange(40)))[None]
    stock = logits(model, ids, position_ids=packed, use_cache=False)
    cached = logits(model, ids, position_ids=packed, **{CACHE: DynamicCache(config=model.config)})
    assert not torch.allclose(stock, cached)
    with turbo_hf.patch(model, EXACT) as handle:
        torch.testing.assert_close(logits(model, ids, position_ids=packed, use_cache=False), stock)
        ours = logits(model, ids, position_ids=packed, **{CACHE: handle.new_cache()})
        torch.testing.assert_close(ours, cached)


@stricts
def test_attention_that_changes_keys_after_the_cache(strict: Any) -> None:
    model = tiny_llama()
    model.model.layers[1].self_attn.__class__ = Doubling
    with (
        turbo_hf.patch(model, EXACT, strict=strict),
        pytest.raises(Unsupported, match=r"layer 1: this attention class changes keys or values .*without the patch"),
    ):
        generate(model)


@stricts
@pytest.mark.parametrize("version", ["5.16.2", "5.99.0", "6.0.0.dev0"])
def test_a_version_outside_the_tested_range(
    version: str,
    strict: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = tiny_llama()
    monkeypatch.setattr("turbo_hf.models.versions.transformers.__version__", version)
    message = f"transformers {version} is outside the tested range {versions.OLDEST} to {versions.NEWEST}"
    if strict == "raise":
        with pytest.raises(Unsupported, match=message + r".*pass strict=\"warn\""):
            turbo_hf.patch(model, strict=strict)
        return
    with spoken(strict, message, caplog, lambda: turbo_hf.patch(model, strict=strict)) as handle:
        assert message in handle.report().warnings[0]
        generate(model)


def test_versions_inside_the_tested_range(monkeypatch: pytest.MonkeyPatch) -> None:
    assert versions.version_problem() is None
    for version in (f"{versions.OLDEST}.0", f"{versions.NEWEST}.7", f"{versions.NEWEST}.0.dev0"):
        monkeypatch.setattr("turbo_hf.models.versions.transformers.__version__", version)
        assert versions.version_problem() is None
