"""Tiny random models of every decoder-only family of Transformers, from one rule and a dict of exceptions."""

from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

CAUSAL = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 99
LAYERS = 4
WINDOW = 24
SPREAD = 0.2
"""Standard deviation of the weights: logits of different tokens then lie apart, and a wrong mask shows."""

SIZES: dict[Any, tuple[str, ...]] = {
    None: ("pad_token_id", "bos_token_id", "eos_token_id"),
    VOCABULARY: ("vocab_size", "vocab_size_per_layer_input"),
    SPREAD: ("initializer_range", "init_std"),
    512: ("max_position_embeddings", "n_positions", "n_ctx"),
    WINDOW: ("sliding_window", "window_size", "local_attention", "attention_window_size", "sliding_window_size"),
    96: ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "intermediate_size_mlp"),
    64: ("hidden_size", "n_embd", "d_model", "embedding_dim", "lru_width"),
    48: (
        *("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"),
        *("dense_intermediate_size", "prefix_dense_intermediate_size"),
    ),
    32: ("attention_chunk_size", "mamba_d_head", "mamba_head_dim", "global_head_dim"),
    16: (
        *("head_dim", "swa_head_dim", "hidden_size_per_layer_input"),
        *("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "o_lora_rank"),
        *("index_head_dim", "index_topk", "linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"),
        *("mamba_d_state", "state_size", "ssm_state_size"),
    ),
    # else many scores of an indexer are 0, and which of them are chosen depends on where they stand
    8: ("laurel_rank", "index_n_heads"),
    4: (
        *("num_attention_heads", "n_head", "swa_num_attention_heads", "linear_num_value_heads", "linear_num_heads"),
        *("mamba_n_heads", "mamba_num_heads"),
    ),
    # as many experts as are chosen: a router that changes its mind would hide what attention does
    2: (
        *("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "linear_num_key_heads"),
        *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok"),
        *("num_experts_per_token", "moe_topk", "moe_k", "altup_num_inputs"),
    ),
    1: (
        *("n_group", "topk_group", "num_expert_group", "n_shared_experts", "num_shared_experts"),
        *("moe_num_shared_experts", "first_k_dense_replace", "mamba_n_groups", "mamba_ngroups", "n_groups"),
    ),
    # keys of other layers; multi-token heads are not used
    0: ("num_kv_shared_layers", "num_nextn_predict_layers"),
}
SMALL: dict[str, Any] = {
    **{name: size for size, names in SIZES.items() for name in names},
    "tie_word_embeddings": False,
    "attention_multiplier": 0.25,
    "use_mamba_kernels": False,
}
"""Sizes of the fields that families have in common, for those that a family's config has."""

SECOND_HALVES = ("musicgen", "musicgen_melody", "trocr", "whisper")
ENCODERS = ("bert-generation", "xlnet")

LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "num_blocks")

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
ALTERNATING = {"layer_types": [LINEAR, FULL] * 2}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e4}
TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
BYTES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
BYTES |= {"vocab_size": 260, "initializer_range": SPREAD}

EXCEPTIONS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": ALTERNATING,
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {
        "vocab_size": 260, "num_hidden_layers": 2, "encoder_hash_byte_group_vocab": 50, "patcher_config": BYTES,
        "global_config": BYTES, "encoder_config": {**BYTES, "hidden_size_global": 64},
        "decoder_config": {**BYTES, "hidden_size_global": 64},
    },
    "codegen": {"rotary_dim": 8},
    "cohere": {"logit_scale": 1.0},
    "cohere2": {"logit_scale": 1.0},
    "cohere2_moe": {"logit_scale": 1.0},
    "cohere_compass_text": {"logit_scale": 1.0, "rope_parameters": {FULL: PLAIN_ROPE}},
    "cpmant": {"dim_head": 16, "dim_ff": 96},
    "ctrl": {"dff": 96},
    "cwm": {"bos_token_id": 1},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 2, "moe_top_k": 2},
        "n_heads": 4,
        "rope_parameters": PLAIN_ROPE,
    },
    "dots3_note_text": {"num_key_value_heads": 4},
    "dory": {"n_input_layers": 1, "n_output_layers": 1},
    "emu3": {"pad_token_id": 0, "bos_token_id": 1},
    "falcon_h1": {"mamba_d_ssm": 128},
    "git": {"vision_config": TOWER},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_heads": 4},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": ALTERNATING,
    "hrm_text": {"num_hidden_layers": 2},
    "inkling2_loop_text": {"unpadded_vocab_size": VOCABULARY},
    "inkling2_text": {"unpadded_vocab_size": VOCABULARY},
    "inkling_text": {"logits_mup_width_multiplier": 1.0},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", FULL] * 2},
    "lfm2_moe": {"layer_types": ["conv", FULL] * 2},
    "longcat_flash": {"expert_ffn_hidden_size": 48, "zero_expert_num": 2},
    "mamba2": {"num_heads": 4, "head_dim": 32},
    "mllama": {"bos_token_id": 1, "cross_attention_layers": [1]},
    "modernbert-decoder": {"pad_token_id": 0, "bos_token_id": 1},
    "phi4_multimodal": {"vision_config": TOWER, "audio_config": {**TOWER, "num_blocks": 1}},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "xlstm": {"hidden_size": 128, "embedding_dim": 128, "num_heads": 2},
    "zamba2": {"layers_block_type": [LINEAR, "hybrid"] * 2, "num_key_value_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
"""By family: fields that its config needs on top of `SMALL`."""

SHARED = {"num_hidden_layers": 6, "num_kv_shared_layers": 2, "layer_types": [SLIDING, FULL] * 3}
WINDOWS = {"layer_types": [FULL, FULL, SLIDING, SLIDING], "use_sliding_window": True, "sliding_window": WINDOW}


def stretched(length: int, **more: float) -> dict[str, Any]:
    """longrope, with other factors beyond this length."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    rope |= {"factor": 4.0, "original_max_position_embeddings": length, **more}
    return {"original_max_position_embeddings": length, "rope_parameters": rope}


MSCALE = {"short_mscale": 1.1, "long_mscale": 1.2}

VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "cohere_compass_text": {"windows": {**WINDOWS, "rope_parameters": {FULL: PLAIN_ROPE, SLIDING: PLAIN_ROPE}}},
    "dots1": {"windows": WINDOWS},
    "falcon": {"alibi": {"alibi": True}, "new decoder architecture": {"new_decoder_architecture": True}},
    "gemma3_text": {"bidirectional": {"use_bidirectional_attention": True}},
    "gemma3n_text": {"shared keys": SHARED},
    "gemma4_text": {
        "shared keys": SHARED,
        "keys as values": {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    },
    "glm_moe_dsa": {"shared indices": {"indexer_types": ["full", "shared"] * 2}},
    "gpt2": {"upcast and scaled": {"reorder_and_upcast_attn": True, "scale_attn_by_inverse_layer_idx": True}},
    "gpt_bigcode": {"many KV heads": {"multi_query": False}},
    "gpt_neox": {"one residual": {"use_parallel_residual": False}},
    "granitemoehybrid": {"rotary": {"position_embedding_type": "rope"}},
    "laguna": {"windows, heads": {**WINDOWS, "num_attention_heads_per_layer": [4, 8, 4, 8]}},
    "llama": {"dynamic rope": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}},
    "mellum": {"windows": WINDOWS},
    "minimax_m3_vl_text": {
        "sparse layers": {
            "layer_types": [FULL, "minimax_m3_sparse"] * 2,
            "index_n_heads": 2,
            "index_block_size": 8,
            "index_topk_blocks": 2,
        }
    },
    "mistral": {"no window": {"sliding_window": None}},
    "olmo": {"clipped": {"clip_qkv": 1.0}},
    "phi3": {"longrope": stretched(40), "longrope in mid-answer": stretched(75)},
    "phi4_multimodal": {"longrope": stretched(40), "longrope in mid-answer": stretched(75)},
    "phimoe": {"longrope": stretched(40, **MSCALE), "longrope in mid-answer": stretched(75, **MSCALE)},
    "qwen2": {"windows": WINDOWS},
    "qwen2_moe": {"windows": WINDOWS},
    "qwen3": {"windows": WINDOWS},
    "smollm3": {"windows": WINDOWS},
    "stablelm": {"parallel residual": {"use_parallel_residual": True, "qk_layernorm": True}},
    "zamba2": {"rotary": {"use_mem_rope": True}},
    "zaya": {"windows": {"layer_types": ["hybrid", "hybrid_sliding"] * 2}},
}
"""By family: further configs, whose attention is another one."""


def kinds(config: Any) -> list[str] | None:
    """At least `LAYERS` layer types that hold each type of the config; None if it names none."""
    types = getattr(config, "layer_types", None)
    if not types:
        return None
    distinct = list(dict.fromkeys(types))
    return [distinct[i % len(distinct)] for i in range(max(LAYERS, len(distinct)))]


def tiny_config(kind: type[PreTrainedConfig], own: dict[str, Any]) -> PreTrainedConfig:
    """A tiny config: `SMALL` as far as it has the fields, and what is its own."""
    try:
        default = kind()
    except Exception:  # some have no valid default
        default = kind(**own)
    fields = default.to_dict()
    given = {name: size for name, size in SMALL.items() if name in fields}
    given |= {name: LAYERS for name in LAYER_COUNTS if name in fields}
    if "kv_lora_rank" in fields:
        # latent attention has as many KV heads as query heads
        given["num_key_value_heads"] = given["num_attention_heads"]
    types = kinds(default)
    if types is not None and "layer_types" in fields:
        given |= {"layer_types": types, "num_hidden_layers": len(types)}
    return kind(**{**given, **own})


def build(family: str, variant: str = "") -> PreTrainedModel:
    """A tiny random model of a family: float32, eager attention, eval, without an end token."""
    kind = getattr(transformers, str(CAUSAL[family]))
    own = {**EXCEPTIONS.get(family, {}), **(VARIANTS[family][variant] if variant else {})}
    torch.manual_seed(0)
    config = tiny_config(kind.config_class, own)
    model: PreTrainedModel = kind._from_config(config, attn_implementation="eager", experts_implementation="eager")
    model.eval()
    return model


def families() -> tuple[list[str], dict[str, list[str]]]:
    """Families of `AutoModelForCausalLM`, one per class of models, and the others by what leaves them out."""
    found: dict[str, list[str]] = {}
    apart: dict[str, list[str]] = {}
    for family, name in CAUSAL.items():
        reason = left_out(family, str(name))
        (apart.setdefault(reason, []) if reason else found.setdefault(str(name), [])).append(family)
    chosen = []
    for name, same in found.items():
        own = getattr(transformers, name).config_class.model_type
        first = own if own in same else same[0]
        chosen.append(first)
        for family in same:
            if family != first:
                apart.setdefault(f"the same class as {first}", []).append(family)
    return sorted(chosen), apart


def left_out(family: str, name: str) -> str:
    """Why a family is not tried; "" if it is."""
    if family in modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES or family in SECOND_HALVES:
        return "encoder-decoders, and decoders of such"
    if family in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES or family in ENCODERS:
        return "encoders that can be asked to decode"
    if family.endswith("_assistant"):
        return "drafters, which read the keys of another model"
    if family == "fuyu" or "ForConditionalGeneration" in name:
        return "multimodal models, whose language model is another row"
    return ""


def mistral4() -> Any:
    """Mistral 4, which scales queries by their position, and has no class of its own among causal models."""
    torch.manual_seed(0)
    config = transformers.Mistral4Config(
        vocab_size=99, hidden_size=64, intermediate_size=96, moe_intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=2, num_experts_per_tok=2, kv_lora_rank=32,
        q_lora_rank=16, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=32, initializer_range=0.2,
        eos_token_id=None, pad_token_id=0, first_k_dense_replace=1,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64,
            "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0,
        },
    )  # fmt: skip
    kind: Any = transformers.models.mistral4.modeling_mistral4.Mistral4ForCausalLM
    return kind._from_config(config, attn_implementation="eager", experts_implementation="eager").eval()
