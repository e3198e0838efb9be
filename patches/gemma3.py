"""Gemma 3."""

from turbo_hf.patches.generic import Family

FAMILY = Family(
    name="Gemma 3",
    model_types=(
        "gemma3_text",
        "gemma3",
    ),
    notes=(
        "Five of six layers have a sliding window, with rotary frequencies of their own; norms on q and k. In "
        "the multimodal model only the text model is patched; image blocks need bidirectional attention "
        "inside a prompt, which the compressed cache refuses."
    ),
)
