"""Models of latent attention (MLA): what `generate` does on them, patched, is what it does unpatched."""

import copy
import dataclasses
import functools
import re
from typing import Any

import pytest
import torch
import transformers
from choices import flat_config
from models import LAB_MODEL, left_padded, prompts
from tiny_families import build, mistral4
from transformers.integrations.finegrained_fp8 import FP8Linear

import turbo_hf
from turbo_hf import TurboConfig, Unsupported
from turbo_hf.layout import page_bytes
from turbo_hf.models.model_layers import INDEXED_TYPES, LATENT_TYPES
from turbo_hf.models.versions import CACHE
from turbo_hf.patches.generic import why_not_compressible
from turbo_hf.patches.latent import up_weight
from turbo_hf.patches.layers import attention_layers
from turbo_hf.patching import refusals
from turbo_hf.patching.handle import LayerReport
from turbo_hf.patching.refusals import disturbed_layers, refuse_latent_options

EXACT = TurboConfig(bits=16)
NEW = 12


@functools.cache
def model_of(family: str = "deepseek_v3") -> Any:
    """A tiny model in float64-like comfort: float16 storage of float32 leaves tokens apart by more than rounding."""
    return build(family)


def batch() -> dict[str, Any]:
    """Ragged left-padded prompts, longer and shorter than a block."""
    return left_padded([row[:n] % 97 + 1 for row, n in zip(prompts(3, 90), (90, 70, 13), strict=True)])


def generated(model: Any, given: dict[str, Any], **options: Any) -> torch.Tensor:
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0} | options
    out: torch.Tensor = model.generate(**given, **options)
    return out


def test_every_type_is_one_that_transformers_has() -> None:
    known = set(transformers.CONFIG_MAPPING)
    # what came with a later version than the oldest
    assert set(LATENT_TYPES) - known <= {"bailing_hybrid", "sarvam_mla", *INDEXED_TYPES}


@pytest.mark.parametrize("mode", ["plain", "beams", "chunks", "sampled", "assisted"])
def test_tokens_are_those_of_the_unpatched_model(mode: str) -> None:
    model, given = model_of(), batch()
    options: dict[str, Any] = {
        "plain": {},
        "beams": {"num_beams": 3, "num_return_sequences": 2},
        "chunks": {"prefill_chunk_size": 25},
        "sampled": {"do_sample": True, "num_return_sequences": 2, "top_k": 20},
        "assisted": {"prompt_lookup_num_tokens": 3},
    }[mode]
    if mode == "assisted":
        ids = batch()["input_ids"][:1, :40]
        given = {"input_ids": torch.cat((ids, ids), 1)}
        given["attention_mask"] = torch.ones_like(given["input_ids"])
    torch.manual_seed(5)
    want = generated(model, given, **options)
    with turbo_hf.patch(model, EXACT):
        torch.manual_seed(5)
        got = generated(model, given, **options)
    assert torch.equal(got, want)


@pytest.mark.parametrize("config", [EXACT, "int8", "turbo4"], ids=["16", "int8", "turbo4"])
def test_absorbed_steps_equal_expanded_ones_over_the_same_cache(config: Any) -> None:
    # the same cache on the unpatched model: Transformers expands what it dequantizes
    model, ids = model_of(), prompts(2, 140) % 97 + 1
    with turbo_hf.patch(model, config) as handle:
        cache = handle.new_cache()
        with torch.no_grad():
            model(ids[:, :130], **{CACHE: cache})
        other = copy.deepcopy(cache)
        got = [model(ids[:, n : n + 1], **{CACHE: cache}).logits for n in range(130, 140)]
    with torch.no_grad():
        want = [other_step(model, ids, n, other) for n in range(130, 140)]
    torch.testing.assert_close(torch.cat(got, 1), torch.cat(want, 1), rtol=2e-3, atol=2e-3)
    assert cache.get_seq_length() == other.get_seq_length() == 140


def other_step(model: Any, ids: torch.Tensor, n: int, cache: Any) -> torch.Tensor:
    logits: torch.Tensor = model(ids[:, n : n + 1], **{CACHE: cache}).logits
    return logits


def test_crop_and_copies_go_back_to_what_was() -> None:
    model, ids = model_of(), prompts(2, 140) % 97 + 1
    with turbo_hf.patch(model, EXACT) as handle, torch.no_grad():
        cache = handle.new_cache()
        model(ids[:, :100], **{CACHE: cache})
        kept = copy.deepcopy(cache)
        want = model(ids[:, 100:101], **{CACHE: cache}).logits
        model(ids[:, 101:140], **{CACHE: cache})
        # into a sealed block
        cache.crop(-40)
        for again in (cache, kept):
            assert again.get_seq_length() == 100
            torch.testing.assert_close(model(ids[:, 100:101], **{CACHE: again}).logits, want)


def test_bytes_are_those_of_latents() -> None:
    # DeepSeek's own sizes: 512 and 64 channels, blocks of 64 tokens
    assert page_bytes(512, 4, 64, 64) / 64 == 340
    assert page_bytes(512, 8, 64, 64) / 64 == 580
    model, ids = model_of(), prompts(1, 128) % 97 + 1
    with turbo_hf.patch(model, "turbo4") as handle, torch.no_grad():
        cache = handle.new_cache()
        model(ids, **{CACHE: cache})
        layer = cache.memory().layers[0]
    # two pages, and what the host needs of a row
    assert 2 * page_bytes(16, 4, 64, 16) <= layer["codes"] + layer["scales"] <= 2 * page_bytes(16, 4, 64, 16) + 120


def test_remove_restores_the_model() -> None:
    model, given = model_of(), batch()
    want = generated(model, given)
    modules = [module for module in model.modules() if hasattr(type(module), "expand_kv")]
    with turbo_hf.patch(model, "turbo4") as handle:
        assert all("expand_kv" in vars(module) for module in modules)
        assert "latent 4 bit" in str(handle.report())
        # a call without a cache, and one with Transformers' own, are the unpatched model's
        assert torch.equal(generated(model, given, use_cache=False), want)
        with pytest.warns(UserWarning, match="not compressed"):
            own = generated(model, given, **{CACHE: transformers.DynamicCache(config=model.config)})
        assert torch.equal(own, want)
    assert not any("expand_kv" in vars(module) for module in modules)
    assert torch.equal(generated(model, given), want)


def test_dense_layers_keep_latents_unrounded() -> None:
    model, given = model_of(), batch()
    want = generated(model, given)
    with turbo_hf.patch(model, TurboConfig(bits=2, int8_layers=(1, 3), dense_layers=(0, 1, 2, 3))) as handle:
        assert torch.equal(generated(model, given), want)
        assert [at.storage for at in handle.report().layers] == ["latent 16 bit"] * 4
    with turbo_hf.patch(model, TurboConfig(bits=4, int8_layers=(), dense_layers=(0, 2))) as handle:
        generated(model, given)
        assert [at.storage for at in handle.report().layers] == ["latent 16 bit", "latent 4 bit"] * 2


@pytest.mark.parametrize(
    "options",
    [
        {"sas": True}, {"attention": "int8"}, {"compile": True},
        {"value_bits": 2}, {"layer_bits": (2, 4, 2, 4)}, {"recent_tokens": 64},
        {"sparse": turbo_hf.SparseConfig(selector="window")},
    ],
)  # fmt: skip
def test_options_of_single_heads_are_refused(options: dict[str, Any]) -> None:
    model = model_of()
    with pytest.raises(Unsupported, match=f"{next(iter(options))}.* is not for latent attention"):
        turbo_hf.patch(model, flat_config(**options), strict="fallback")
    assert not any("expand_kv" in vars(module) for module in model.modules())


def test_latents_that_are_not_known_are_refused() -> None:
    model = copy.deepcopy(model_of())
    module: Any = model.model.layers[0].self_attn
    cases: Any = (
        ("qk_rope_head_dim", 24, "qk_rope_head_dim 24 is no multiple of 16"),
        ("indexer", torch.nn.Linear(2, 2), r"its indexer \(DSA\) masks tokens"),
        ("config", model.config.__class__(), "latent attention of another is not known here"),
    )
    for name, value, reason in cases:
        before = getattr(module, name, None)
        setattr(module, name, value)
        if name == "config":
            value.model_type = "another"
        assert re.search(reason, str(why_not_compressible(module)))
        setattr(module, name, before)
    assert why_not_compressible(module) is None


def test_up_projections_that_are_no_plain_linear_are_refused() -> None:
    model = copy.deepcopy(model_of())
    attention = model.model.layers[1].self_attn

    class Wrapped(torch.nn.Linear):
        """As quantized and adapted layers are."""

    wrapped = Wrapped(attention.kv_b_proj.in_features, attention.kv_b_proj.out_features, bias=False)
    kept, attention.kv_b_proj = attention.kv_b_proj, wrapped
    with pytest.raises(Unsupported, match="layers 1 cannot be compressed: its kv_b_proj is no plain Linear"):
        turbo_hf.patch(model)
    attention.kv_b_proj = kept
    with turbo_hf.patch(model), torch.no_grad():
        # an adapter that is added after the patch
        attention.kv_b_proj = wrapped
        with pytest.raises(Unsupported, match="kv_b_proj is no plain Linear"):
            generated(model, {"input_ids": torch.ones(1, 5, dtype=torch.long)})


def in_fp8(up: Any, block: tuple[int, int] | None) -> Any:
    """A Linear in Transformers' FP8, and the same weights in `up`. Its own product needs a GPU."""
    small = FP8Linear(up.in_features, up.out_features, block_size=block)
    scale = torch.rand_like(small.weight_scale_inv) / 50 + 0.01
    codes = (torch.randn_like(up.weight) * 4).to(torch.float8_e4m3fn)
    wide = scale
    for dim, size in enumerate(block or ()):
        wide = wide.repeat_interleave(size, dim).narrow(dim, 0, codes.shape[dim])
    up.weight.data = codes.float() * wide
    small.weight.data, small.weight_scale_inv.data = codes, scale
    vars(small)["forward"] = up.forward
    return small


@pytest.mark.parametrize("block", [(16, 24), None], ids=["blocks", "whole"])
def test_fp8_up_projections_are_dequantized_once_and_told(block: tuple[int, int] | None) -> None:
    model, given = copy.deepcopy(model_of()), batch()
    attentions = [layer.self_attn for layer in model.model.layers]
    small = [in_fp8(attention.kv_b_proj, block) for attention in attentions]
    want = generated(model, given)
    for attention, own in zip(attentions, small, strict=True):
        attention.kv_b_proj = own
    with turbo_hf.patch(model, EXACT) as handle:
        assert f"the up-projections of {len(small)} layers are FP8" in " ".join(handle.report().warnings)
        assert torch.equal(generated(model, given), want)
        made = [up_weight(own, torch.float32) for own in small]
        assert all(x is up_weight(own, torch.float32) for x, own in zip(made, small, strict=True))
        with torch.no_grad():
            small[0].weight_scale_inv.mul_(2)
        torch.testing.assert_close(up_weight(small[0], torch.float32), 2 * made[0])


def test_nan_is_reported() -> None:
    model = copy.deepcopy(model_of())
    with turbo_hf.patch(model) as handle, torch.no_grad():
        cache = handle.new_cache()
        model(torch.ones(1, 5, dtype=torch.long), **{CACHE: cache})
        model.model.layers[0].self_attn.kv_a_layernorm.weight.fill_(torch.nan)
        with pytest.raises(ValueError, match=r"layer 0.*NaN"):
            model(torch.ones(1, 1, dtype=torch.long), **{CACHE: cache})


@pytest.mark.parametrize("family", ["deepseek_v2", "mistral4"])
def test_other_layouts_of_rotary_embedding_and_queries(family: str) -> None:
    # DeepSeek V2 turns complex numbers; Mistral 4 scales queries by their position
    model = model_of("deepseek_v2") if family == "deepseek_v2" else mistral4()
    given = batch()
    want = generated(model, given)
    with turbo_hf.patch(model, EXACT) as handle:
        assert torch.equal(generated(model, given), want)
        assert handle.report().layers[0].storage == "latent 16 bit"


def test_tensor_parallel_is_refused() -> None:
    layer = LayerReport(0, ((4, 1),), None, "", latent=True)
    refuse_latent_options([layer], TurboConfig(), False)
    with pytest.raises(Unsupported, match="tensor parallel is not for latent attention"):
        refuse_latent_options([layer], TurboConfig(), True)


@functools.cache
def trained() -> tuple[Any, Any]:
    """examples/lab-deepseek-3m in float32, and its tokenizer (pads left)."""
    folder = LAB_MODEL.with_name("lab-deepseek-3m")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(folder)


def test_the_layers_whose_scores_4_bits_disturb_the_most_keep_8(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = trained()
    with turbo_hf.patch(model, "turbo4") as handle:
        layers = handle.report().layers
        assert [at.groups[0][0] for at in layers] == [4, 4, 4, 4, 8, 4]
        assert "layer 4: latent 8 bit; its weights make large scores" in str(handle.report())
    # queries of a low rank, and layers that are not asked for
    for one, config in ((model, TurboConfig(int8_layers=())), (model_of(), "turbo4")):
        with turbo_hf.patch(one, config) as handle:
            assert all(at.groups[0][0] == 4 for at in handle.report().layers)
    # one in 20, those with the largest errors
    errors = iter([0.3 + n % 7 for n in range(40)])
    monkeypatch.setattr(refusals, "score_error", lambda module: next(errors))
    at = attention_layers(model)[0]
    assert disturbed_layers([dataclasses.replace(at, index=n) for n in range(40)], TurboConfig()) == {6, 13}


def test_queries_that_cannot_be_measured_are_told() -> None:
    model = copy.deepcopy(model_of())
    attention = model.model.layers[0].self_attn
    attention.q_b_proj = torch.nn.Linear(3, 5)
    with pytest.raises(Unsupported, match=r"a query projection .* is a Linear, .*int8_layers=\(\)"):
        turbo_hf.patch(model, "turbo4")
    # at 8 bit there is nothing to choose
    turbo_hf.patch(model, "int8").remove()


@pytest.mark.parametrize("config", [EXACT, "int8", "turbo4"])
def test_a_trained_model_finds_its_needles(config: Any) -> None:
    model, tokenizer = trained()
    hidden, noise = (
        {"brave-river": 7316248, "quiet-lamp": 5092731},
        " The grass is green. The sky is blue. Here we go." * 10,
    )
    needles = [f" One of the special magic numbers for {key} is: {number}." for key, number in hidden.items()]
    head = "Some special magic numbers are hidden within the following text. Make sure to memorize it."
    ask = "\nWhat is the special magic number for {0} mentioned in the provided text? The special magic number for {0} "
    texts = [
        head + noise.join(("", *needles, "")) + ask.format(key) + "mentioned in the provided text is" for key in hidden
    ]
    given = tokenizer(texts, return_tensors="pt", padding=True)
    with turbo_hf.patch(model, config):
        out = generated(model, given, pad_token_id=tokenizer.pad_token_id)
    said = tokenizer.batch_decode(out[:, given.input_ids.shape[1] :])
    assert [text.strip()[:7] for text in said] == [str(number) for number in hidden.values()]
