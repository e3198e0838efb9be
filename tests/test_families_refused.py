"""Families of models that cannot be compressed, and the reason that each is given."""

from typing import Any

import pytest
from families_support import CHUNKED, EXPERTS, FULL, build
from models import VOCABULARY
from transformers import AutoConfig, AutoModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import turbo_hf
from turbo_hf.errors import Unsupported
from turbo_hf.patches.generic import REFUSED

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
