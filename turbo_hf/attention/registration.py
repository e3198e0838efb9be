"""The attention function under its name in Transformers, and which implementation a model's config names."""

from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from turbo_hf.attention.masks import turbo_mask
from turbo_hf.attention.step_operator import IN_LAYER, compiled_attention
from turbo_hf.attention.turbo_attention import NAME, turbo_attention
from turbo_hf.errors import Unsupported


def register() -> None:
    """Register the attention and its masks with Transformers. A second call changes nothing."""
    AttentionInterface.register(NAME, turbo_attention)
    AttentionInterface.register(IN_LAYER, compiled_attention)
    AttentionMaskInterface.register(NAME, turbo_mask)


def text_key(config: PreTrainedConfig) -> str | None:
    """The name under which a multimodal config holds its text config; None: not multimodal, or nested deeper."""
    text = config.get_text_config(decoder=True)
    return next((key for key in config.sub_configs if getattr(config, key, None) is text), None)


def switch_attention(model: PreTrainedModel, name: str) -> str | dict[str, str]:
    """Set the attention implementation of the language model; returns the argument for `set_attn_implementation` that
    restores the previous one.

    Raises `Unsupported` if the model does not let it be set.
    """
    text, key = model.config.get_text_config(decoder=True), text_key(model.config)
    # a plain string would also switch the vision tower of a multimodal model
    previous = text._attn_implementation if key is None else {key: text._attn_implementation}
    model.set_attn_implementation(name if key is None else {key: name})
    if text._attn_implementation != name:
        raise Unsupported(
            f"{type(model).__name__} does not let its attention implementation be set (remote code that does not use "
            "AttentionInterface). It cannot be patched."
        )
    return previous
