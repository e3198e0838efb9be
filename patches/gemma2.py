"""Gemma 2."""

from turbo_hf.patches.generic import Family

FAMILY = Family(
    name="Gemma 2",
    model_types=("gemma2",),
    notes=(
        "Scores are capped (`attn_logit_softcapping`), every other layer has a sliding window, and the "
        "scaling is query_pre_attn_scalar ** -0.5. SDPA cannot cap scores, so Hugging Face runs this family "
        "in eager mode."
    ),
)
