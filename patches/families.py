"""The families that the tests cover, one row each: name, model types, and what is special about their attention.

All of them use the generic path (`generic.py`, `layers.py`). What code one needs stands here, or in a file of its own.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from turbo_hf.models.model_layers import LATENT_TYPES
from turbo_hf.patches.latent import EXPAND, keep_latent


def slice_queries(module: Any, hidden: Any, extra: Any, positions: Any, masks: Any, *args: Any, **kwargs: Any) -> Any:
    """`_maybe_slice_kv_shared_inputs` of Gemma 4, which cuts a prompt to its end before the layers that share keys.

    It cuts the rows of 4D masks. A 2D mask has one column per key and no rows of queries, so it stays whole.
    """
    masks_4d = {kind: mask if mask is not None and mask.dim() == 4 else None for kind, mask in masks.items()}
    original = type(module)._maybe_slice_kv_shared_inputs
    *cut, cut_masks = original(module, hidden, extra, positions, masks_4d, *args, **kwargs)
    return *cut, {kind: mask if masks_4d[kind] is None else cut_masks[kind] for kind, mask in masks.items()}


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
        "DeepSeek V2 and V3",
        LATENT_TYPES,
        "Also Kimi, GLM-4.7-Flash, Mistral 4 and others with latent attention (MLA): steps attend to the latents "
        "themselves, prompts expand them. 8 bit kept the accuracy of a small trained model, and so did 4 with one "
        "layer at 8.",
        {EXPAND: keep_latent},
    ),
)


def family_of(model_type: str) -> Family | None:
    """The tested family of a `config.model_type`; None: the generic path, untested."""
    return next((family for family in FAMILIES if model_type in family.model_types), None)
