"""Families of models that cannot be compressed, and the reason that each is given."""

from typing import Any

import pytest
from all_pairs import in_one_test
from families_support import CHUNKED, EXPERTS, FULL, MAMBA, build
from models import SHAPE, VOCABULARY, tiny_llama
from transformers import AutoConfig, AutoModel, MllamaForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import turbo_hf
from turbo_hf.errors import Unsupported
from turbo_hf.models.model_layers import layer_windows
from turbo_hf.patches.generic import REFUSED, why_not_compressible

LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 32,
    "first_k_dense_replace": 1,
}


def test_refused_types_exist() -> None:
    # a type of a newer Transformers is refused there, and unknown before
    assert len(set(REFUSED) & set(CONFIG_MAPPING.keys())) >= len(REFUSED) - 1


@pytest.mark.parametrize(
    ("model_type", "options", "reason"),
    [
        pytest.param(
            "deepseek_v3",
            {**LATENT, **EXPERTS, "num_key_value_heads": 4, "kv_lora_rank": 24},
            "kv_lora_rank 24 is no multiple of 16",
            id="latent",
        ),
        pytest.param("bloom", {}, "no attention module that uses Transformers' AttentionInterface", id="interface"),
        pytest.param(
            "mpt", {"d_model": 64, "n_heads": 4}, "no attention module that uses Transformers' Att", id="interface-2"
        ),
        pytest.param("llama", {"head_dim": 24}, "head dim 24 is no multiple of 16", id="head-dim"),
        pytest.param(
            "mimo_v2_flash", {"v_head_dim": 8, **EXPERTS}, "16 channels per head and its values 8", id="values"
        ),
        pytest.param("bert", {}, "its attention is not causal, as in encoders", id="encoder"),
        pytest.param("mamba", {}, "it keeps no keys and values, but a state of fixed size", id="no-attention"),
        pytest.param("zamba", {"head_dim": 32}, "one attention module serves several of its layers", id="zamba"),
        pytest.param("hrm_text", {"num_layers_per_stack": 2}, "it runs its layers several times per token", id="hrm"),
        pytest.param(
            "falcon_h1",
            {**MAMBA, "mamba_d_ssm": 128},
            "one layer of the cache holds its keys and values and a rec",
            id="hybrid",
        ),
        pytest.param(
            "deepseek_v32",
            {**LATENT, **EXPERTS, "num_key_value_heads": 4, "index_n_heads": 2, "index_head_dim": 16},
            "_attention is neither full nor sliding-window attention, nor anything that is known here: an indexer",
            id="unknown-kind",
        ),
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
@in_one_test("strict", ["raise", "warn", "fallback"])
def test_a_model_that_cannot_be_compressed_is_refused(
    model_type: str, options: dict[str, Any], reason: str, strict: Any
) -> None:
    model = build(model_type, **options)
    before = model.config._attn_implementation
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
