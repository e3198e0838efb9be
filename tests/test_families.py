"""Families of models: compressed attention against Hugging Face's own eager attention over the same dequantised cache.

In mode "native" the patched model must choose the same tokens, and miss the logits by rounding only. Then what
INT8 and bfloat16 cost, which is what they cost the model itself; the families that are refused; and multimodal models.
"""

import copy
from typing import Any

import families_support as cases
import pytest
import torch
from budgets import SLACK, check, float_budget, largest
from choices import flat_config
from models import SHAPE, VOCABULARY, prompts, tiny_llama
from tiny_multimodal import FIRST_SPECIAL, build_multimodal
from torch import Tensor
from transformers import AutoConfig, AutoModel, MllamaForCausalLM, PreTrainedModel
from transformers.masking_utils import sdpa_mask
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import turbo_hf
from turbo_hf import TurboCache, TurboConfig
from turbo_hf.attention import masks
from turbo_hf.attention.turbo_attention import NAME
from turbo_hf.errors import Unsupported
from turbo_hf.models.model_layers import INDEXED_TYPES, LATENT_TYPES, layer_windows
from turbo_hf.models.versions import CACHE
from turbo_hf.patches.families import FAMILIES, family_of
from turbo_hf.patches.generic import REFUSED, why_not_compressible


@pytest.mark.parametrize("case", cases.EVERYTHING)
def test_logits_are_those_of_eager_attention(case: cases.Case) -> None:
    model = cases.build(case.model_type, **case.options)
    with turbo_hf.patch(model, cases.exact(8)) as handle:
        stored = [layer.storage for layer in handle.report().layers]
    # up to Transformers 5.17 a cache has no place for the last layers of models that share keys
    dense = [i for i in case.dense if i < len(stored)]
    assert [i for i in range(len(stored)) if stored[i] == "dense"] == dense
    assert len(dense) < len(stored)
    check_step(model, cases.padded(), 8)


def check_step(model: PreTrainedModel, batch: dict[str, Tensor], bits: int) -> None:
    """The prompt's logits are the model's own, and a step's are those of eager attention on a copy of the cache."""
    mask, token = batch["attention_mask"], prompts(len(cases.LENGTHS), 1, 1)
    want, eager = cases.alone(model, batch), cases.logits(model, **batch)[mask.bool()]
    budget = float_budget(want, eager, largest(want), torch.float32)
    longer = torch.nn.functional.pad(mask, (0, 1), value=1)
    with turbo_hf.patch(model, cases.exact(bits)) as handle:
        check("without a cache", cases.logits(model, **batch)[mask.bool()], want, budget)
        cache = handle.new_cache()
        check("prompt", cases.logits(model, **batch, cache=cache)[mask.bool()], want, budget)
        same = copy.deepcopy(cache)
        ours = cases.logits(model, token, longer, cache)
    if not same._ends_in_keys():
        # nothing tells it where a pass of the model without a patch ends
        return
    step = cases.logits(model, token, longer, same)
    # a new key on the edge between two codes may fall on either side: such a row compares two different caches
    rows = [row for row in range(len(cases.LENGTHS)) if same_codes(cache, same, row)]
    assert len(rows) >= 2
    check("step", ours[rows], step[rows].double(), budget)


def same_codes(cache: TurboCache, other: TurboCache, row: int) -> bool:
    """Whether two caches hold the same newest token in a row."""
    for a, b in zip(cache.turbo_layers(), other.turbo_layers(), strict=True):
        at = a.state.open[row] - 1
        if not torch.equal(a.buffer.k[row, :, at], b.buffer.k[row, :, at]):
            return False
        if not torch.equal(a.buffer.v[row, :, :, at], b.buffer.v[row, :, :, at]):
            return False
    return True


def test_every_family_of_the_table_is_tested_here() -> None:
    known = [kind for family in FAMILIES for kind in family.model_types]
    assert len(set(known)) == len(known)
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)
    # these came after the oldest version
    assert set(known) - set(CONFIG_MAPPING.keys()) <= {"bailing_hybrid", "sarvam_mla", *INDEXED_TYPES}
    assert all(family.notes for family in FAMILIES)
    tested = {case.model_type for case in cases.FAMILY_CASES}
    tested |= set() if cases.INDEXERS else set(INDEXED_TYPES)
    assert all(tested & set(family.model_types) for family in FAMILIES)
    assert all(family_of(kind) is not None for kind in tested)
    assert all(family_of(case.model_type) is None for case in cases.GENERIC_CASES)


# --- what INT8 and bfloat16 cost --------------------------------------------------------------------------------------


def relative(x: Tensor, y: Tensor) -> float:
    """|x - y| / |y|."""
    return float((x - y).norm() / y.norm())


# prompts of latent attention are not rounded; layers of linear attention sum the errors of a whole prompt
@pytest.mark.parametrize("case", [x for x in cases.CASES if x.id not in (*LATENT_TYPES, "qwen3_next")])
def test_turbo_mode_adds_no_more_than_int8_does(case: cases.Case) -> None:
    """Q and P in INT8 cost what K and V in INT8 cost, which attention mode "native" at 8 bit measures."""
    model, batch = cases.build(case.model_type, **case.options), cases.padded()
    mask, tail = batch["attention_mask"], prompts(len(cases.LENGTHS), cases.NEW, 1)
    longer = torch.nn.functional.pad(mask, (0, cases.NEW), value=1)
    whole = cases.logits(model, torch.cat((batch["input_ids"], tail), 1), longer)

    def errors(config: TurboConfig) -> tuple[float, float]:
        with turbo_hf.patch(model, config) as handle:
            cache = handle.new_cache()
            prompt = cases.logits(model, **batch, cache=cache)[mask.bool()]
            decoded = cases.logits(model, tail, longer, cache)
        return relative(prompt, whole[:, : -cases.NEW][mask.bool()]), relative(decoded, whole[:, -cases.NEW :])

    (_, int8), (_, stored) = errors(cases.exact(8)), errors(cases.exact(4))
    prompt, decoded = errors(flat_config(attention="turbo", block_size=32))
    # and it is not the exact mode under another name
    assert int8 / SLACK < prompt < SLACK * int8
    assert decoded < SLACK * (int8**2 + stored**2) ** 0.5


@cases.families
def test_bfloat16_costs_what_it_costs_the_model(case: cases.Case) -> None:
    model, batch = cases.build(case.model_type, **case.options), cases.padded()
    real = batch["attention_mask"].bool()
    want = cases.alone(model, batch)
    model.bfloat16()
    eager = cases.logits(model, **batch)[real]
    with turbo_hf.patch(model, cases.exact(8)) as handle:
        ours = cases.logits(model, **batch, cache=handle.new_cache())[real]
    assert ours.dtype == torch.bfloat16
    assert relative(ours.double(), want) < SLACK * relative(eager.double(), want)


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_refused_types_exist() -> None:
    # a type of a newer Transformers is refused there, and unknown before
    assert len(set(REFUSED) & set(CONFIG_MAPPING.keys())) >= len(REFUSED) - 1


ROUTED = {**cases.LATENT, **cases.EXPERTS, "num_key_value_heads": 4}


@pytest.mark.parametrize(
    ("model_type", "options", "reason"),
    [
        ("deepseek_v3", {**ROUTED, "kv_lora_rank": 24}, "kv_lora_rank 24 is no multiple of 16"),
        ("bloom", {}, "no attention module that uses Transformers' AttentionInterface"),
        ("llama", {"head_dim": 24}, "head dim 24 is no multiple of 16"),
        ("mimo_v2_flash", {"v_head_dim": 8, **cases.EXPERTS}, "16 channels per head and its values 8"),
        ("bert", {}, "its attention is not causal, as in encoders"),
        ("mamba", {}, "it keeps no keys and values, but a state of fixed size"),
        ("zamba", {"head_dim": 32}, "one attention module serves several of its layers"),
        ("hrm_text", {"num_layers_per_stack": 2}, "it runs its layers several times per token"),
        (
            "falcon_h1",
            {**cases.MAMBA, "mamba_d_ssm": 128},
            "one layer of the cache holds its keys and values and",
        ),
        # older versions of Transformers name no tokens to attention functions
        (
            (
                "qwen4_exp_text",
                {**cases.QWEN4, "layer_types": ["indexed_attention"] * 3},
                "its indexer .DSA. masks tokens",
            )
            if cases.INDEXERS
            else (
                "deepseek_v32",
                {**ROUTED, "index_n_heads": 2, "index_head_dim": 16},
                "need a newer Transformers",
            )
        ),
        ("bart", {"d_model": 64, "decoder_layers": 2}, "cross-attention"),
        ("gpt2", {"n_embd": 64, "n_head": 4, "add_cross_attention": True}, "cross-attention"),
        ("diffllama", {}, "changes values"),
        ("doge", {}, "joins the mask"),
        ("jetmoe", {"kv_channels": 16}, "repeats keys"),
        ("moshi", {}, "sees further than the window"),
        ("minimax", {**cases.EXPERTS, "layer_types": [cases.FULL] * 3}, "no cache but its own"),
        (
            "llama4_text",
            {**cases.EXPERTS, "layer_types": [cases.CHUNKED] * 3, "intermediate_size_mlp": 96},
            "is neither full nor sl",
        ),
    ],
)
def test_a_model_that_cannot_be_compressed_is_refused(model_type: str, options: dict[str, Any], reason: str) -> None:
    model = cases.build(model_type, **options)
    before = model.config._attn_implementation
    for strict in ("raise", "warn", "fallback"):
        with pytest.raises(Unsupported, match=f"no layer of .* can be compressed: .*{reason}"):
            turbo_hf.patch(model, strict=strict)
    assert model.config._attn_implementation is before
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_class_that_does_not_say_how_wide_its_heads_are() -> None:
    model: Any = tiny_llama()
    for layer in model.model.layers:
        del layer.self_attn.head_dim
    with pytest.raises(Unsupported, match="its class does not say how many channels a head has"):
        turbo_hf.patch(model)


def test_cross_attention_to_images_is_refused() -> None:
    config: Any = AutoConfig.for_model(
        "mllama_text_model", **{**SHAPE, "bos_token_id": 1, "cross_attention_layers": [1]}
    )
    model = MllamaForCausalLM(config)
    with pytest.raises(Unsupported, match="its cross-attention layers keep the keys of images, which are no tokens"):
        turbo_hf.patch(model, strict="warn")
    assert why_not_compressible(model.model.layers[1].cross_attn) == "cross-attention"


def test_a_config_that_does_not_say_how_many_layers_there_are() -> None:
    with pytest.raises(Unsupported, match="the config of blt does not say how many layers there are"):
        layer_windows(AutoConfig.for_model("blt"))


@pytest.mark.parametrize("model_type", ["t5", "bart"])
def test_encoder_decoders_are_refused(model_type: str) -> None:
    config = AutoConfig.for_model(model_type, d_model=64, d_kv=16, num_layers=1, vocab_size=VOCABULARY)
    with pytest.raises(Unsupported, match="is an encoder-decoder; only decoder-only models"):
        turbo_hf.patch(AutoModel.from_config(config), strict="fallback")


IMAGE = FIRST_SPECIAL + 2
"""The token that stands for a part of an image."""


@pytest.fixture
def gemma3() -> Any:
    """A tiny Gemma 3 with its vision tower."""
    return build_multimodal("gemma3")


def texts(gemma3: Any) -> tuple[dict[str, Tensor], Tensor]:
    """Padded prompts without tokens of images, and the logits after them over a cache without a patch."""
    batch = cases.padded()
    batch["input_ids"] %= IMAGE
    cache = TurboCache(gemma3.config, cases.exact(4), attention_mask=batch["attention_mask"])
    return batch, answer(gemma3, batch, **{CACHE: cache})


def answer(gemma3: Any, batch: dict[str, Tensor], **options: Any) -> Tensor:
    """Logits of the tokens that it generates, which 4 bit move by 0.15."""
    return torch.stack(list(cases.generate(gemma3, batch, **options).logits or ()))


def test_only_the_text_model_of_a_multimodal_one_is_patched(gemma3: Any) -> None:
    config: Any = gemma3.config
    parts = (config, config.text_config, config.vision_config)
    before = [part._attn_implementation for part in parts]
    batch, oracle = texts(gemma3)
    with turbo_hf.patch(gemma3, cases.exact(4)) as handle:
        assert [part._attn_implementation for part in parts] == [before[0], NAME, before[2]]
        assert handle.report().family == "Gemma 3"
        hooked = [name for name, module in gemma3.named_modules() if module._forward_pre_hooks]
        # what calls all layers is told of each pass
        assert hooked[:3] == ["", "model", "model.language_model"]
        assert hooked[3:] == [f"model.language_model.layers.{layer}.self_attn" for layer in range(4)]
        torch.testing.assert_close(answer(gemma3, batch), oracle, atol=0.01, rtol=0)
    assert all(part._attn_implementation is was for part, was in zip(parts, before, strict=True))


@pytest.mark.parametrize("part", [1 << 26, 999], ids=["whole", "parts"])
def test_a_text_without_an_image_is_compressed(gemma3: Any, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "PART", part)
    made: list[Tensor] = []

    def spy(*args: Any, **kwargs: Any) -> Any:
        mask: Any = sdpa_mask(*args, **kwargs)
        made.append(mask)
        return mask

    monkeypatch.setattr(masks, "sdpa_mask", spy)
    batch, oracle = texts(gemma3)
    without = {**batch, "token_type_ids": torch.zeros_like(batch["input_ids"])}
    with turbo_hf.patch(gemma3, cases.exact(4)) as handle:
        torch.testing.assert_close(answer(gemma3, without), oracle, atol=0.01, rtol=0)
        assert handle.memory().tokens == int(batch["attention_mask"].sum()) + 3 * (cases.NEW - 1)
    assert made
    # all rows of the batch, and a single query at least
    assert all(mask.numel() <= max(part, mask.shape[0] * mask.shape[-1]) for mask in made)


def with_image(gemma3: Any) -> tuple[dict[str, Tensor], Tensor]:
    """A prompt with an image and a shorter one without, padded at the left; and the mask."""
    ids = prompts(2, 50) % FIRST_SPECIAL
    ids[0, 10:14] = IMAGE
    mask = torch.ones_like(ids)
    mask[1, :15] = 0
    image = {"input_ids": ids, "pixel_values": torch.randn(1, 3, 32, 32), "token_type_ids": (ids == IMAGE).long()}
    return image, mask


def test_image_blocks_fall_back_to_dense_attention(gemma3: Any) -> None:
    image, mask = with_image(gemma3)
    real = mask.bool()
    stock = gemma3(**image, attention_mask=mask).logits
    token, longer = prompts(2, 1, seed=1), torch.nn.functional.pad(mask, (0, 1), value=1)
    with turbo_hf.patch(gemma3, cases.exact(8), strict="fallback") as handle:
        cache = handle.new_cache()
        without = gemma3(**image, attention_mask=mask, use_cache=False).logits
        torch.testing.assert_close(without[real], stock[real])
        torch.testing.assert_close(gemma3(**image, attention_mask=mask, **{CACHE: cache}).logits[real], stock[real])
        # the padding is known from the dense mask, so that decoding goes on compressed
        assert handle.memory().tokens == int(mask.sum())
        same = copy.deepcopy(cache)
        ours = gemma3(token, attention_mask=longer, **{CACHE: cache}).logits
    torch.testing.assert_close(ours, gemma3(token, attention_mask=longer, **{CACHE: same}).logits)
