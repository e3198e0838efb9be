"""Llama."""

from turbo_hf.patches.generic import Family

FAMILY = Family(
    name="Llama",
    model_types=("llama",),
    notes=(
        "Grouped-query attention, rotary embedding over the whole head (half layout); Llama 3 stretches its "
        "frequencies. Nothing that the generic path does not cover."
    ),
)
