"""The families that the tests cover, one row each: name, model types, and what is special about their attention.

All of them use the generic path (`generic.py`, `layers.py`). A family that needs code has a file of its own.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from turbo_hf.models.model_layers import INDEXED_TYPES, LATENT_TYPES
from turbo_hf.patches.gemma4 import slice_queries
from turbo_hf.patches.latent import EXPAND, keep_latent


class Family(NamedTuple):
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
    methods: Mapping[str, Callable[..., Any]] = {}


GEMMA_4 = ("gemma4_text", "gemma4_unified_text", "gemma4", "gemma4_unified")
FAMILIES = (
    Family("Llama", ("llama",), "Nothing that the generic path does not cover."),
    Family("Mistral", ("mistral",), "Blocks that leave its window are dropped: the cache stops growing."),
    Family("Mixtral", ("mixtral",), "Mistral's attention under a mixture of experts."),
    Family("Qwen2, Qwen2.5", ("qwen2",), "Large key biases are balanced, or kept at 8 bit with a warning."),
    Family("Qwen3", ("qwen3",), "Norms on each head keep keys in a narrow range."),
    Family("Qwen3-MoE", ("qwen3_moe",), "Qwen3's attention under a mixture of experts."),
    Family("Phi-3, Phi-4", ("phi3",), "Longrope checkpoints compute all keys again, into the same cache."),
    Family("Gemma 2", ("gemma2",), "Scores are capped; every other layer has a window."),
    Family(
        "Gemma 3",
        ("gemma3_text", "gemma3"),
        'Five of six layers have a window; images, whose blocks see ahead, need strict="warn".',
    ),
    Family(
        "Gemma 4",
        GEMMA_4,
        "As Gemma 3; layers that share keys stay dense.",
        {"_maybe_slice_kv_shared_inputs": slice_queries},
    ),
    Family("gpt-oss", ("gpt_oss",), "Attention sinks; every other layer has a window of 128."),
    Family("GPT-NeoX, Pythia", ("gpt_neox",), "Every query head has keys of its own, of which a quarter is rotated."),
    Family("GPT-BigCode (StarCoder, SantaCoder)", ("gpt_bigcode",), "One KV head for all; no rotary embedding."),
    Family("OLMo 2", ("olmo2",), "A norm over the channels of all heads together."),
    Family("Granite", ("granite",), "As Llama, with a scaling of its own."),
    Family(
        "Qwen3-Next, Qwen3.5",
        ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
        "Three of four layers keep a state of fixed size in place of keys.",
    ),
    Family(
        "Bamba, Granite 4, Jamba, LFM2, Nemotron-H, OLMo Hybrid",
        ("bamba", "granitemoehybrid", "jamba", "lfm2", "lfm2_moe", "nemotron_h", "olmo_hybrid"),
        "Most layers keep a state of fixed size in place of keys.",
    ),
    Family(
        "DeepSeek V2 and V3",
        tuple(x for x in LATENT_TYPES if x not in INDEXED_TYPES),
        "Also Kimi, GLM-4.7-Flash, Mistral 4 and others with latent attention (MLA): steps attend to the latents "
        "themselves, prompts expand them. 8 bit kept the accuracy of a small trained model, and so did 4 with one "
        "layer at 8.",
        {EXPAND: keep_latent},
    ),
    Family(
        "DeepSeek V3.2, GLM-5",
        INDEXED_TYPES,
        "Also A.X K2, HY-V4, Mistral Large 4, Dots 3 Note: steps attend to the latents that an indexer names (DSA), "
        "whose keys have 8 bit, or 16.",
        {EXPAND: keep_latent},
    ),
)


def family_of(model_type: str) -> Family | None:
    """The tested family of a `config.model_type`; None: the generic path, untested."""
    return next((family for family in FAMILIES if model_type in family.model_types), None)
