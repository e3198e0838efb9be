"""The families that the tests cover, one row each: name, model types, and what is special about their attention.

All of them use the generic path (`generic.py`, `layers.py`). A family that needs code has a file of its own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from turbo_hf.models.model_layers import LATENT_TYPES
from turbo_hf.patches.gemma4 import slice_queries
from turbo_hf.patches.latent import EXPAND, keep_latent


@dataclass(frozen=True, slots=True)
class Family:
    """One family of models.

    Args:
        name: its usual name.
        model_types: `config.model_type` of the text models.
        notes: what is special about its attention, in a few words; `doctor` prints it.
        methods: by name, replacements for methods of its modules while the patch is on.
    """

    name: str
    model_types: tuple[str, ...]
    notes: str
    methods: Mapping[str, Callable[..., Any]] = field(default_factory=dict)


FAMILIES = (
    Family(
        "Llama",
        ("llama",),
        "Grouped-query attention, rotary embedding over the whole head (half layout); Llama 3 stretches its "
        "frequencies. Nothing that the generic path does not cover.",
    ),
    Family(
        "Mistral",
        ("mistral",),
        "As Llama. Where `sliding_window` is set, every layer has it: blocks that leave the window are dropped, so "
        "the cache stops growing.",
    ),
    Family(
        "Mixtral",
        ("mixtral",),
        "Mistral's attention under a mixture of experts; the experts do not touch keys or values.",
    ),
    Family(
        "Qwen2, Qwen2.5",
        ("qwen2",),
        "Biases on q, k and v. In some Qwen2.5 checkpoints the key bias of a few layers is hundreds of times a "
        "key's spread, which fills the INT8 range: such layers are found at patch time and kept at 8 bit, with a "
        "warning. Layers from `max_window_layers` on may have a sliding window.",
    ),
    Family(
        "Qwen3",
        ("qwen3",),
        "No bias; RMS norm on each head of q and k before the rotary embedding, which keeps keys in a narrow range.",
    ),
    Family(
        "Qwen3-MoE",
        ("qwen3_moe",),
        "Qwen3's attention under a mixture of experts.",
    ),
    Family(
        "Phi-3, Phi-4",
        ("phi3",),
        "q, k and v come from one fused projection, and only part of the head is rotated (`partial_rotary_factor`). "
        "Long-context checkpoints change frequencies with length: all keys are then computed again, into the same "
        "cache. Head dim 96 in Phi-3-mini.",
    ),
    Family(
        "Gemma 2",
        ("gemma2",),
        "Scores are capped (`attn_logit_softcapping`), every other layer has a sliding window, and the scaling is "
        "query_pre_attn_scalar ** -0.5. SDPA cannot cap scores, so Hugging Face runs this family in eager mode.",
    ),
    Family(
        "Gemma 3",
        ("gemma3_text", "gemma3"),
        "Five of six layers have a sliding window, with rotary frequencies of their own; norms on q and k. In the "
        "multimodal model only the text model is patched; blocks of images see ahead in a "
        'prompt, which needs strict="warn".',
    ),
    Family(
        "Gemma 4",
        ("gemma4_text", "gemma4_unified_text", "gemma4", "gemma4_unified"),
        "Five of six layers have a sliding window; full layers may have another head dim and number of KV heads. "
        "The last layers of the small models read the keys of earlier ones (`num_kv_shared_layers`): both stay "
        "dense.",
        {"_maybe_slice_kv_shared_inputs": slice_queries},
    ),
    Family(
        "gpt-oss",
        ("gpt_oss",),
        "Attention sinks: one learned logit per head in the softmax denominator. Every other layer has a window of "
        "128. Hugging Face runs it in eager mode.",
    ),
    Family(
        "GPT-NeoX, Pythia",
        ("gpt_neox",),
        "q, k and v come from one fused projection with a bias, a quarter of the head is rotated (`rotary_pct`), "
        "and every query head has keys of its own. Its modules call the cache `layer_past`.",
    ),
    Family(
        "GPT-BigCode (StarCoder, SantaCoder)",
        ("gpt_bigcode",),
        "One KV head for all query heads (`multi_query`), from a fused projection with a bias; learned positions, "
        "and no rotary embedding. Its modules call the cache `layer_past`.",
    ),
    Family(
        "OLMo 2",
        ("olmo2",),
        "RMS norm over all channels of q and k together, before they are split into heads.",
    ),
    Family(
        "Granite",
        ("granite",),
        "As Llama, with the scaling given by the config (`attention_multiplier`), not by the head dim.",
    ),
    Family(
        "DeepSeek V2 and V3",
        LATENT_TYPES,
        "Also Kimi, GLM-4.7-Flash, Mistral 4, MiniCPM3, LongCat-Flash, Youtu, A.X K1, Bailing. Latent attention (MLA): "
        "a latent and a rotary part per token, for all heads. Steps attend to the latents "
        "themselves (absorbed up-projections); prompts expand them. Linear-attention layers stay as they are. 8 "
        "bit kept the accuracy of a small trained model, and so did 4 with one of its layers at 8; bits=16 rounds "
        "nothing in 16-bit models.",
        {EXPAND: keep_latent},
    ),
)


def family_of(model_type: str) -> Family | None:
    """The tested family of a `config.model_type`; None: the generic path, untested."""
    return next((family for family in FAMILIES if model_type in family.model_types), None)
