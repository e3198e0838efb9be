"""One short file per family: what is special about its attention. All of them use the generic path, over `layers`."""

if not __name__.startswith("turbo_hf."):
    raise ImportError("Import this package as turbo_hf.patches: under another name it would exist twice.")

from turbo_hf.patches import (
    gemma2,
    gemma3,
    gemma4,
    gpt_bigcode,
    gpt_neox,
    gpt_oss,
    granite,
    llama,
    mistral,
    mixtral,
    olmo2,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
)
from turbo_hf.patches.generic import Family, lost_to_bias
from turbo_hf.patches.layers import AttentionLayer, attention_layers
from turbo_hf.patches.misfits import misfit

__all__ = [
    "FAMILIES",
    "AttentionLayer",
    "Family",
    "attention_layers",
    "family_of",
    "lost_to_bias",
    "misfit",
]

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    mistral.FAMILY,
    mixtral.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    qwen3_moe.FAMILY,
    phi3.FAMILY,
    gemma2.FAMILY,
    gemma3.FAMILY,
    gemma4.FAMILY,
    gpt_oss.FAMILY,
    gpt_neox.FAMILY,
    gpt_bigcode.FAMILY,
    olmo2.FAMILY,
    granite.FAMILY,
)
"""The families that the tests cover."""


def family_of(model_type: str) -> Family | None:
    """The tested family of a `config.model_type`; None: the generic path, untested."""
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    return None
