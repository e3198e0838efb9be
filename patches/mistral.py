"""Mistral."""

from turbo_hf.patches.generic import Family

FAMILY = Family(
    name="Mistral",
    model_types=("mistral",),
    notes=(
        "As Llama. Where `sliding_window` is set, every layer has it: blocks that leave the window are "
        "dropped, so the cache stops growing."
    ),
)
