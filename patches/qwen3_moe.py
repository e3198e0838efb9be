"""Qwen3-MoE."""

from turbo_hf.patches.generic import Family

FAMILY = Family(
    name="Qwen3-MoE",
    model_types=("qwen3_moe",),
    notes=("Qwen3's attention under a mixture of experts."),
)
