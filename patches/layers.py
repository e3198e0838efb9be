"""The layers of a model, each with its attention module and anything that prevents compressing its keys and values."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from turbo_hf.models.model_layers import COMPRESSED_TYPES, INDEXED, layer_windows
from turbo_hf.models.sources import hands_indices
from turbo_hf.patches.generic import NO_INDICES, REFUSED, is_attention, shares_keys, why_not_compressible

NO_KEYS = "it keeps no keys and values"
BESIDES = "one layer of the cache holds its keys and values and a recurrent state"

LEFT_ALONE = {
    "linear_attention": f"{NO_KEYS}, but a state of fixed size (linear attention)",
    "conv": f"{NO_KEYS}, but its last inputs (convolution)",
    "moe": NO_KEYS,
    "mlp": NO_KEYS,
    "dummy": NO_KEYS,
    "chunked_attention": "chunked_attention is neither full nor sliding-window attention",
    "hybrid": BESIDES,
    "hybrid_sliding": BESIDES,
}
"""Kinds of layers that work uncompressed beside compressed ones, and why they are not compressed."""


WITHOUT_KEYS = frozenset(LEFT_ALONE[kind] for kind in ("linear_attention", "conv", "dummy"))
"""Why layers are not compressed whose steps are captured all the same: a state of fixed size, or nothing at all."""


DSA = {
    INDEXED: NO_INDICES,
    "qwen_sparse_attention": NO_INDICES,
    "deepseek_sparse_attention": "its layers with an indexer (DSA) need a newer Transformers",
}
"""Kinds of layers that read the tokens that an indexer chooses, up to transformers 5.17 the last two, and why they are
refused."""


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One layer of a model.

    Args:
        index: the layer's number.
        module: its attention module; None where it has none or several, or is of a kind whose window `TurboCache` does
            not know.
        window: tokens that a query sees; None: all.
        reason: why its keys and values are not compressed; "" if they can be.
        by_design: whether the model is built that way, so that nothing is missing here.
        unknown: whether the layer may be wrong on a patched model even in full precision.
    """

    index: int
    module: Any
    window: int | None
    reason: str = ""
    by_design: bool = False
    unknown: bool = False


def attention_layers(model: PreTrainedModel) -> list[AttentionLayer]:
    """Every layer of the language model, in order."""
    text = model.config.get_text_config(decoder=True)
    modules: defaultdict[int, list[Any]] = defaultdict(list)
    each: Iterable[Any] = model.modules()
    for module in each:
        if is_attention(type(module)) and hasattr(module, "layer_idx") and getattr(module, "config", None) is text:
            modules[module.layer_idx].append(module)
    reason = REFUSED.get(text.model_type)
    return [
        _layer(index, kind, window, modules[index], reason) for index, (kind, window) in enumerate(layer_windows(text))
    ]


def _layer(index: int, kind: str, window: int | None, modules: list[Any], known: str | None) -> AttentionLayer:
    """One layer. known: why no layer of this type of model can be compressed, if so."""
    if known is not None:
        return AttentionLayer(index, None, window, known, unknown=True)
    only = modules[0] if len(modules) == 1 else None
    shared = None if only is None else shares_keys(only)
    if kind in LEFT_ALONE:
        # for these layers, the window in the cache is the layer's own
        module = only if LEFT_ALONE[kind] is BESIDES else None
        return AttentionLayer(index, module, window, shared or LEFT_ALONE[kind], by_design=True)
    if kind not in COMPRESSED_TYPES and not (kind == INDEXED and only is not None and hands_indices(type(only))):
        reason = f"{kind} is neither full nor sliding-window attention, nor anything that is known here"
        reason = DSA.get(kind, reason)
    elif not modules:
        reason = "it has no attention module that uses Transformers' AttentionInterface with a Cache"
    elif only is None:
        reason = "it has more than one attention module (cross-attention)"
    else:
        reason = shared or why_not_compressible(only) or ""
        return AttentionLayer(index, only, window, reason, by_design=shared is not None)
    return AttentionLayer(index, None, window, reason, unknown=True)
