"""Qwen3."""

from turbo_hf.patches.generic import Family

FAMILY = Family(
    name="Qwen3",
    model_types=("qwen3",),
    notes=(
        "No bias; RMS norm on each head of q and k before the rotary embedding, which keeps keys in a narrow range."
    ),
)
