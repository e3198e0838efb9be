"""Granite."""

from turbo_hf.patches.generic import Family

FAMILY = Family(
    name="Granite",
    model_types=("granite",),
    notes=("As Llama, with the scaling given by the config (`attention_multiplier`), not by the head dim."),
)
