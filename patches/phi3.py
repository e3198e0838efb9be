"""Phi-3, Phi-4."""

from turbo_hf.patches.generic import Family

FAMILY = Family(
    name="Phi-3, Phi-4",
    model_types=("phi3",),
    notes=(
        "q, k and v come from one fused projection, and only part of the head is rotated "
        "(`partial_rotary_factor`). Long-context checkpoints change frequencies with length: all keys are then "
        "computed again, into the same cache. Head dim 96 in Phi-3-mini."
    ),
)
