"""Mixtral."""

from turbo_hf.patches.generic import Family

FAMILY = Family(
    name="Mixtral",
    model_types=("mixtral",),
    notes=("Mistral's attention under a mixture of experts; the experts do not touch keys or values."),
)
