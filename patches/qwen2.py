"""Qwen2, Qwen2.5."""

from turbo_hf.patches.generic import Family

FAMILY = Family(
    name="Qwen2, Qwen2.5",
    model_types=("qwen2",),
    notes=(
        "Biases on q, k and v. In some Qwen2.5 checkpoints the key bias of a few layers is hundreds of times "
        "a key's spread, which fills the INT8 range: such layers are found at patch time and kept at 8 bit, "
        "with a warning. Layers from `max_window_layers` on may have a sliding window."
    ),
)
