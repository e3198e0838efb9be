"""OLMo 2."""

from turbo_hf.patches.generic import Family

FAMILY = Family(
    name="OLMo 2",
    model_types=("olmo2",),
    notes=("RMS norm over all channels of q and k together, before they are split into heads."),
)
