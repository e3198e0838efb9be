"""gpt-oss."""

from turbo_hf.patches.generic import Family

FAMILY = Family(
    name="gpt-oss",
    model_types=("gpt_oss",),
    notes=(
        "Attention sinks: one learned logit a head in the softmax denominator. Every other layer has a window "
        "of 128. Hugging Face runs it in eager mode."
    ),
)
