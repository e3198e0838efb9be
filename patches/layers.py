"""The layers of a model, each with its attention module and anything that prevents compressing its keys and values."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from turbo_hf.model_layers import COMPRESSED_TYPES, layer_windows
from turbo_hf.patches.generic import is_attention, obstacle, shares_keys


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One layer of a model.

    module: its attention module; None where it has none or several, or is of a kind whose window no cache of ours
    knows. window: tokens that a query sees; None: all. obstacle: why its keys and values are left alone; "" if nothing
    does. by_design: that is how the model is built, and no shortcoming of ours.
    """

    index: int
    module: Any
    window: int | None
    obstacle: str = ""
    by_design: bool = False


def attention_layers(model: PreTrainedModel) -> list[AttentionLayer]:
    """Every layer of the language model, in order."""
    text = model.config.get_text_config(decoder=True)
    found: defaultdict[int, list[Any]] = defaultdict(list)
    each: Iterable[Any] = model.modules()
    for module in each:
        if is_attention(module) and getattr(module, "config", None) is text:
            found[module.layer_idx].append(module)
    return [_layer(index, kind, window, found[index]) for index, (kind, window) in enumerate(layer_windows(text))]


def _layer(index: int, kind: str, window: int | None, modules: list[Any]) -> AttentionLayer:
    if kind not in COMPRESSED_TYPES:
        reason = f"{kind} is neither full nor sliding-window attention"
        return AttentionLayer(index, None, window, reason, by_design=True)
    if not modules:
        reason = "its attention class does not use Transformers' AttentionInterface with a Cache"
        return AttentionLayer(index, None, window, reason)
    if len(modules) > 1:
        return AttentionLayer(index, None, window, "it has more than one attention module (cross-attention)")
    module = modules[0]
    if shares_keys(module):
        reason = "it shares its keys and values with other layers"
        return AttentionLayer(index, module, window, reason, by_design=True)
    return AttentionLayer(index, module, window, obstacle(module) or "")
