"""Families of models: compressed attention against Hugging Face's own eager attention over the same dequantised cache.

The oracle is the unpatched model, in eager mode, with a `TurboCache` of the same config: without the hook such a cache
stores the same codes and returns dense keys and values, so that all masks, windows, caps and sinks are Transformers'.
In attention mode "fp16" the patched model must then choose the same tokens, and miss the logits by rounding only.
"""

import copy
import importlib
import pkgutil
from typing import Any, NamedTuple

import pytest
import torch
from models import SHAPE, VOCABULARY, left_padded, prompts
from support import SLACK, check, float_budget, largest
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, Gemma3ForConditionalGeneration, PreTrainedModel
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import turbo_hf
import turbo_hf.patches
from turbo_hf import TurboCache, TurboConfig
from turbo_hf.attention import NAME
from turbo_hf.errors import Unsupported
from turbo_hf.patches import FAMILIES, Family
from turbo_hf.patches.generic import REFUSED

LENGTHS = (120, 97, 61)
NEW = 16
WINDOW = 40
TIE = 0.01
"""No two best tokens of an oracle may lie closer: several times what a code on the edge of its step does to a logit."""

SLIDING, FULL, LINEAR, CHUNKED = "sliding_attention", "full_attention", "linear_attention", "chunked_attention"
MIXED = {"layer_types": [SLIDING, FULL, SLIDING], "sliding_window": WINDOW}
# as many experts as are chosen: a router that changes its mind would hide what attention does
EXPERTS = {
    "num_local_experts": 2,
    "num_experts": 2,
    "n_routed_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 16}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 32,
    "first_k_dense_replace": 1,
}
SHARED = {
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "layer_types": [SLIDING, FULL] * 3,
    "sliding_window": WINDOW,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCABULARY,
}


class Case(NamedTuple):
    """dense: layers that the patch leaves to Hugging Face. variant: tells cases of one type apart."""

    model_type: str
    options: dict[str, Any]
    dense: tuple[int, ...] = ()
    variant: str = ""


FAMILY_CASES = (
    Case("llama", {}),
    Case("mistral", {"sliding_window": WINDOW}),
    Case("mixtral", {"sliding_window": WINDOW, **EXPERTS}),
    Case("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    Case("qwen3", {}),
    Case("qwen3_moe", EXPERTS),
    Case("phi3", {"partial_rotary_factor": 0.5}),
    Case("gemma2", {**MIXED, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16}),
    Case("gemma3_text", {**MIXED, "query_pre_attn_scalar": 16}),
    Case("gemma4_text", {**SHARED, "global_head_dim": 32}, dense=(2, 3, 4, 5)),
    Case(
        "gemma4_text",
        {**MIXED, "global_head_dim": 32, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
        variant="-heads",
    ),
    Case("gpt_oss", {**MIXED, **EXPERTS}),
    Case("olmo2", {}),
    Case("granite", {"attention_multiplier": 0.2}),
)
GENERIC_CASES = (
    Case("stablelm", {}),
    Case("starcoder2", {"sliding_window": WINDOW}),
    Case("smollm3", {"no_rope_layers": [1, 1, 0]}),
    Case("cohere2", {**MIXED, "logit_scale": 1.0}),
    Case("exaone4", MIXED),
    Case("glm4", {}),
    Case("olmo3", MIXED),
    Case("phi", {"partial_rotary_factor": 0.5}),
    Case("nemotron", {}),
    Case("phimoe", {"sliding_window": WINDOW, **EXPERTS}),
    Case("gpt2", {"n_embd": 64, "n_layer": 3, "n_head": 4}),
    Case("qwen3_next", {"layer_types": [LINEAR, FULL, LINEAR], **DELTA_NET, **EXPERTS}, dense=(0, 2)),
    Case("bamba", {"attn_layer_indices": [1], **MAMBA}, dense=(0, 2)),
    Case(
        "llama4_text",
        {
            "num_hidden_layers": 4,
            "layer_types": [CHUNKED, CHUNKED, CHUNKED, FULL],
            "attention_chunk_size": 48,
            "intermediate_size_mlp": 96,
            **EXPERTS,
        },
        dense=(0, 1, 2),
    ),
    Case(
        "gemma3n_text",
        {**SHARED, "activation_sparsity_pattern": [0.0] * 6, "laurel_rank": 8, "altup_num_inputs": 2},
        dense=(2, 3, 4, 5),
    ),
)
families = pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.model_type + case.variant) for case in FAMILY_CASES]
)
everything = pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.model_type + case.variant) for case in FAMILY_CASES + GENERIC_CASES]
)
widths = pytest.mark.parametrize("bits", [8, 4])


def build(model_type: str, **options: Any) -> PreTrainedModel:
    """A random model of three layers: 4 query heads on 2 KV heads of 16 channels, float32, eager, eval."""
    shape = {**SHAPE, "num_hidden_layers": 3, "initializer_range": 0.15, "tie_word_embeddings": False, **options}
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **shape)
    # grouped matrix products know no float64
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    model.eval()
    return model


def padded(seed: int = 0) -> dict[str, Tensor]:
    """Three prompts of different length, padded at the left."""
    ids = prompts(len(LENGTHS), max(LENGTHS), seed)
    return left_padded([row[-length:] for row, length in zip(ids, LENGTHS, strict=True)])


def exact(bits: int) -> TurboConfig:
    """Attention on the dequantised cache; blocks of 32, so that all prompts seal some."""
    return TurboConfig(attention="fp16", bits=bits, block_size=32)


def generate(model: Any, batch: dict[str, Tensor], **options: Any) -> GenerateDecoderOnlyOutput:
    """NEW greedy tokens and their logits."""
    out: GenerateDecoderOnlyOutput = model.generate(
        **batch, max_new_tokens=NEW, do_sample=False, output_logits=True, return_dict_in_generate=True, **options
    )
    return out


@torch.no_grad()
def logits(model: Any, ids: Tensor, mask: Tensor, cache: Any = None) -> Tensor:
    """Logits of a pass over `ids`, the newest columns of `mask`."""
    place = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    options = {"attention_mask": mask, "position_ids": place, "past_key_values": cache, "use_cache": cache is not None}
    return torch.as_tensor(model(ids, **options).logits)


def alone(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Logits of all real tokens in float64, each row without the others and without padding."""
    double = copy.deepcopy(model).double()
    rows = [ids[keep.bool()][None] for ids, keep in zip(*batch.values(), strict=True)]
    return torch.cat([logits(double, row, torch.ones_like(row))[0] for row in rows])


def settle(model: PreTrainedModel, config: TurboConfig, dense: list[int]) -> tuple[dict[str, Tensor], Tensor]:
    """Prompts after which no two tokens nearly tie, so that rounding cannot choose, and the oracle's answer to them."""
    for seed in range(300):
        batch = padded(seed)
        cache = TurboCache(model.config, config, attention_mask=batch["attention_mask"], dense_layers=dense)
        oracle = generate(model, batch, past_key_values=cache)
        assert oracle.logits is not None
        best = torch.stack(oracle.logits).topk(2, -1).values
        if float((best[..., 0] - best[..., 1]).min()) > TIE:
            return batch, torch.as_tensor(oracle.sequences)
    raise AssertionError("all prompts have ties")


def relative(x: Tensor, y: Tensor) -> float:
    """|x - y| / |y|."""
    return float((x - y).norm() / y.norm())


# --- the oracle ----------------------------------------------------------------------------------------------------


@everything
@widths
def test_tokens_are_those_of_eager_attention_on_the_same_cache(case: Case, bits: int) -> None:
    model, config = build(case.model_type, **case.options), exact(bits)
    with turbo_hf.patch(model, config) as handle:
        stored = [layer.storage for layer in handle.report().layers]
    # up to Transformers 5.17 a cache has no place for the last layers of models that share keys
    dense = [i for i in case.dense if i < len(stored)]
    assert [i for i in range(len(stored)) if stored[i] == "dense"] == dense
    assert len(dense) < len(stored)
    batch, oracle = settle(model, config, dense)
    with turbo_hf.patch(model, config):
        assert torch.equal(generate(model, batch).sequences, oracle)


@everything
def test_prompt_logits_are_those_of_the_model(case: Case) -> None:
    model, batch = build(case.model_type, **case.options), padded()
    real = batch["attention_mask"].bool()
    want, eager = alone(model, batch), logits(model, **renamed(batch))[real]
    with turbo_hf.patch(model, exact(4)) as handle:
        ours = logits(model, **renamed(batch), cache=handle.new_cache())[real]
        without = logits(model, **renamed(batch))[real]
    budget = float_budget(want, eager, largest(want), torch.float32)
    check("with a cache", ours, want, budget)
    check("without a cache", without, want, budget)


@families
@widths
def test_step_logits_are_those_of_eager_attention_on_the_same_cache(case: Case, bits: int) -> None:
    check_step(build(case.model_type, **case.options), padded(), bits)


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
@pytest.mark.parametrize(("first", "last"), [(60, 80), (40, 60)], ids=["right", "middle"])
def test_padding_in_other_places(name: str, first: int, last: int) -> None:
    """In full attention. A window counts tokens here, and columns in Transformers, where padding lies between them."""
    case = next(case for case in FAMILY_CASES if case.model_type == name)
    options = {**case.options, "layer_types": [FULL] * 3} if "layer_types" in case.options else case.options
    ids = prompts(3, 80)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    batch["attention_mask"][1, first:last] = 0
    check_step(build(name, **options), batch, 4)


def check_step(model: PreTrainedModel, batch: dict[str, Tensor], bits: int) -> None:
    """The prompt's logits are the model's own, and a step's are those of eager attention on a copy of the cache."""
    mask, token = batch["attention_mask"], prompts(len(LENGTHS), 1, 1)
    want, eager = alone(model, batch), logits(model, **renamed(batch))[mask.bool()]
    budget = float_budget(want, eager, largest(want), torch.float32)
    longer = torch.nn.functional.pad(mask, (0, 1), value=1)
    with turbo_hf.patch(model, exact(bits)) as handle:
        cache = handle.new_cache()
        check("prompt", logits(model, **renamed(batch), cache=cache)[mask.bool()], want, budget)
        same = copy.deepcopy(cache)
        ours = logits(model, token, longer, cache)
    step = logits(model, token, longer, same)
    # a new key on the edge between two codes may fall on either side: such a row compares two different caches
    rows = [row for row in range(len(LENGTHS)) if same_codes(cache, same, row)]
    assert len(rows) >= 2
    check("step", ours[rows], step[rows].double(), budget)


def renamed(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The arguments of `logits`."""
    return {"ids": batch["input_ids"], "mask": batch["attention_mask"]}


def same_codes(cache: TurboCache, other: TurboCache, row: int) -> bool:
    """Whether two caches hold the same newest token in a row."""
    for a, b in zip(cache.turbo_layers(), other.turbo_layers(), strict=True):
        at = a.buffer.length[row] - 1
        if not torch.equal(a.buffer.k[row, :, at], b.buffer.k[row, :, at]):
            return False
        if not torch.equal(a.buffer.v[row, :, :, at], b.buffer.v[row, :, :, at]):
            return False
    return True


@pytest.mark.parametrize("dropped", ["padding", "window"])
def test_oracle_notices_what_is_dropped(dropped: str) -> None:
    case = FAMILY_CASES[1]
    model, batch = build(case.model_type, **case.options), padded()
    real = batch["attention_mask"].bool()
    eager = logits(model, **renamed(batch))[real]
    want = alone(model, batch)
    budget = float_budget(want, eager, largest(want), torch.float32)
    if dropped == "window":
        model = build(case.model_type, **{**case.options, "sliding_window": None})
    else:
        batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    with turbo_hf.patch(model, exact(8)) as handle:
        ours = logits(model, **renamed(batch), cache=handle.new_cache())[real]
    with pytest.raises(AssertionError, match="exceeds its budget"):
        check(dropped, ours, want, budget)
    assert largest(ours - want) > 1000 * budget


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"num_beams": 3}, id="beams"),
        pytest.param({"do_sample": True, "num_return_sequences": 2}, id="samples"),
        pytest.param({"prefill_chunk_size": 24}, id="chunks"),
    ],
)
def test_other_ways_to_generate(name: str, options: dict[str, Any]) -> None:
    case = next(case for case in FAMILY_CASES if case.model_type == name)
    model, batch, config = build(name, **case.options), padded(), exact(4)
    rows = options.get("num_beams", options.get("num_return_sequences", 1))
    mask = batch["attention_mask"].repeat_interleave(rows, 0)

    def run(**more: Any) -> Tensor:
        torch.manual_seed(0)
        given = {"max_new_tokens": NEW, "do_sample": False, **options, **more}
        return torch.as_tensor(model.generate(**batch, **given))  # type: ignore[operator]

    oracle = run(past_key_values=TurboCache(model.config, config, attention_mask=mask))
    with turbo_hf.patch(model, config):
        assert torch.equal(run(), oracle)


# --- the default mode ----------------------------------------------------------------------------------------------


@families
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_turbo_mode_adds_no_more_than_int8_does(case: Case, bits: int) -> None:
    """Q and P in INT8 cost what K and V in INT8 cost, which attention mode "fp16" at 8 bit measures."""
    model, batch = build(case.model_type, **case.options), padded()
    mask, tail = batch["attention_mask"], prompts(len(LENGTHS), NEW, 1)
    longer = torch.nn.functional.pad(mask, (0, NEW), value=1)
    whole = logits(model, torch.cat((batch["input_ids"], tail), 1), longer)

    def errors(config: TurboConfig) -> tuple[float, float]:
        with turbo_hf.patch(model, config) as handle:
            cache = handle.new_cache()
            prompt = logits(model, **renamed(batch), cache=cache)[mask.bool()]
            decoded = logits(model, tail, longer, cache)
        return relative(prompt, whole[:, :-NEW][mask.bool()]), relative(decoded, whole[:, -NEW:])

    (_, int8), (_, stored) = errors(exact(8)), errors(exact(bits))
    prompt, decoded = errors(TurboConfig(bits=bits, block_size=32))
    # and it is not the exact mode under another name
    assert int8 / SLACK < prompt < SLACK * int8
    assert decoded < SLACK * (int8**2 + stored**2) ** 0.5


@families
def test_bfloat16_costs_what_it_costs_the_model(case: Case) -> None:
    model, batch = build(case.model_type, **case.options), padded()
    real = batch["attention_mask"].bool()
    want = alone(model, batch)
    model.bfloat16()
    eager = logits(model, **renamed(batch))[real]
    with turbo_hf.patch(model, exact(8)) as handle:
        ours = logits(model, **renamed(batch), cache=handle.new_cache())[real]
    assert ours.dtype == torch.bfloat16
    assert relative(ours.double(), want) < SLACK * relative(eager.double(), want)


# --- what the folder holds -----------------------------------------------------------------------------------------


def test_every_family_file_names_a_family_that_is_tested_here() -> None:
    files = [
        name for _, name, _ in pkgutil.iter_modules(turbo_hf.patches.__path__) if name not in ("generic", "layers")
    ]
    families = [importlib.import_module(f"turbo_hf.patches.{name}").FAMILY for name in files]
    assert all(isinstance(family, Family) and family.notes for family in families)
    assert {family.name for family in families} == {family.name for family in FAMILIES}
    known = {kind for family in families for kind in family.model_types}
    assert known <= set(CONFIG_MAPPING.keys())
    tested = {case.model_type for case in FAMILY_CASES}
    assert all(tested & set(family.model_types) for family in families)
    assert all(turbo_hf.patches.family_of(kind) is not None for kind in tested)
    assert all(turbo_hf.patches.family_of(case.model_type) is None for case in GENERIC_CASES)


def test_refused_types_exist() -> None:
    # a type of a newer Transformers is refused there, and unknown before
    assert len(set(REFUSED) & set(CONFIG_MAPPING.keys())) >= len(REFUSED) - 1


# --- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "options", "reason"),
    [
        pytest.param("deepseek_v3", {**LATENT, **EXPERTS, "num_key_value_heads": 4}, "latent attention", id="latent"),
        pytest.param("deepseek_v2", {**LATENT, **EXPERTS, "num_key_value_heads": 4}, "latent attention", id="latent-2"),
        pytest.param("gpt_neox", {}, "does not use Transformers' AttentionInterface", id="other-interface"),
        pytest.param("gpt_bigcode", {}, "does not use Transformers' AttentionInterface", id="fused-cache"),
        pytest.param("llama", {"head_dim": 24}, "head dim 24 is no multiple of 16", id="head-dim"),
        pytest.param("mimo_v2_flash", {"v_head_dim": 8, **EXPERTS}, "16 channels a head and its values 8", id="values"),
        pytest.param("bert", {"is_decoder": True}, "names no head_dim", id="no-head-dim"),
        pytest.param("bart", {"d_model": 64, "decoder_layers": 2}, "cross-attention", id="cross-attention"),
        pytest.param(
            "gpt2", {"n_embd": 64, "n_head": 4, "add_cross_attention": True}, "cross-attention", id="cross-attention-2"
        ),
        pytest.param("diffllama", {}, "changes values", id="diffllama"),
        pytest.param("doge", {}, "joins the mask", id="doge"),
        pytest.param("jetmoe", {"kv_channels": 16}, "repeats keys", id="jetmoe"),
        pytest.param("moshi", {}, "sees further than the window", id="moshi"),
        pytest.param("minimax", {**EXPERTS, "layer_types": [FULL] * 3}, "no cache but its own", id="minimax"),
        pytest.param(
            "llama4_text",
            {"layer_types": [CHUNKED] * 3, "intermediate_size_mlp": 96, **EXPERTS},
            "chunked_attention is neither full nor sliding",
            id="chunked",
        ),
    ],
)
@pytest.mark.parametrize("strict", ["raise", "warn", "fallback"])
def test_a_model_that_cannot_be_compressed_is_refused(
    model_type: str, options: dict[str, Any], reason: str, strict: Any
) -> None:
    model = build(model_type, **options)
    before = model.config._attn_implementation
    with pytest.raises(Unsupported, match=f"no layer of .* can be compressed: .*{reason}"):
        turbo_hf.patch(model, strict=strict)
    assert model.config._attn_implementation is before
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("model_type", ["t5", "bart"])
def test_encoder_decoders_are_refused(model_type: str) -> None:
    config = AutoConfig.for_model(model_type, d_model=64, d_kv=16, num_layers=1, vocab_size=VOCABULARY)
    with pytest.raises(Unsupported, match="is an encoder-decoder; only decoder-only models"):
        turbo_hf.patch(AutoModel.from_config(config), strict="fallback")


# --- multimodal ----------------------------------------------------------------------------------------------------


IMAGE = 90
"""The token that stands for a part of an image."""


@pytest.fixture
def gemma3() -> PreTrainedModel:
    """A tiny Gemma 3 with its vision tower."""
    text = {**SHAPE, **MIXED, "num_hidden_layers": 3, "initializer_range": 0.15, "query_pre_attn_scalar": 16}
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
    }
    torch.manual_seed(0)
    config: Any = AutoConfig.for_model(
        "gemma3",
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_id=IMAGE,
        tie_word_embeddings=False,
        initializer_range=0.15,
    )
    config.vision_config._attn_implementation = "sdpa"
    model = Gemma3ForConditionalGeneration(config)
    model.eval()
    return model


def test_only_the_text_model_of_a_multimodal_one_is_patched(gemma3: PreTrainedModel) -> None:
    config: Any = gemma3.config
    parts = (config, config.text_config, config.vision_config)
    before = [part._attn_implementation for part in parts]
    batch, oracle = settle(gemma3, exact(4), [])
    with turbo_hf.patch(gemma3, exact(4)) as handle:
        assert [part._attn_implementation for part in parts] == [before[0], NAME, "sdpa"]
        assert handle.report().family == "Gemma 3"
        hooked = [name for name, module in gemma3.named_modules() if module._forward_pre_hooks]
        assert len(hooked) == 3
        assert all("language_model" in name for name in hooked)
        ours = generate(gemma3, batch)
    assert torch.equal(ours.sequences, oracle)
    assert all(part._attn_implementation is was for part, was in zip(parts, before, strict=True))


def with_image(gemma3: PreTrainedModel) -> tuple[dict[str, Tensor], Tensor]:
    """A prompt with an image and a shorter one without, padded at the left; and the mask."""
    ids = prompts(2, 50)
    ids[ids == IMAGE] = 1
    ids[0, 10:14] = IMAGE
    mask = torch.ones_like(ids)
    mask[1, :15] = 0
    image = {"input_ids": ids, "pixel_values": torch.randn(1, 3, 16, 16), "token_type_ids": (ids == IMAGE).long()}
    return image, mask


def test_image_blocks_are_refused(gemma3: PreTrainedModel) -> None:
    image, mask = with_image(gemma3)
    call: Any = gemma3
    with turbo_hf.patch(gemma3, exact(8)) as handle, pytest.raises(Unsupported, match="prefix or image blocks"):
        call(**image, attention_mask=mask, past_key_values=handle.new_cache())


def test_image_blocks_fall_back_to_dense_attention(gemma3: PreTrainedModel) -> None:
    image, mask = with_image(gemma3)
    call: Any = gemma3
    real = mask.bool()
    stock = call(**image, attention_mask=mask).logits
    token, longer = prompts(2, 1, seed=1), torch.nn.functional.pad(mask, (0, 1), value=1)
    with turbo_hf.patch(gemma3, exact(8), strict="fallback") as handle:
        cache = handle.new_cache()
        without = call(**image, attention_mask=mask, use_cache=False).logits
        torch.testing.assert_close(without[real], stock[real])
        torch.testing.assert_close(call(**image, attention_mask=mask, past_key_values=cache).logits[real], stock[real])
        # the padding is known from the dense mask, so that decoding goes on compressed
        assert handle.memory().tokens == int(mask.sum())
        same = copy.deepcopy(cache)
        ours = call(token, attention_mask=longer, past_key_values=cache).logits
    torch.testing.assert_close(ours, call(token, attention_mask=longer, past_key_values=same).logits)
