"""Checks of models, and what configs and attention modules say about each layer: kind, window, KV heads, head dim."""

import functools
import importlib
from types import CodeType
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from turbo_hf.errors import Unsupported
from turbo_hf.models.sources import functions_of
from turbo_hf.models.versions import CACHE

COMPRESSED_TYPES = ("full_attention", "sliding_attention")

INDEXED = "indexed_attention"
"""Layers that read the tokens that an indexer names (DSA)."""

INDEXED_TYPES = (
    "axk2",
    "deepseek_v32",
    "dots3_note_text",
    "glm_moe_dsa",
    "hy_v4",
    "hy_v4_vl_text",
    "mistral_large4_text",
)
"""Types of text models whose indexed layers keep a latent and a rotary part (MLA)."""

LATENT_TYPES = (
    *INDEXED_TYPES,
    "axk1",
    "bailing_hybrid",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe_lite",
    "kimi_linear",
    "longcat_flash",
    "minicpm3",
    "mistral4",
    "sarvam_mla",
    "youtu",
)
"""Types of text models whose layers keep a latent and a rotary part (MLA); all but indexed ones read all of them."""

CACHE_KEYWORDS = tuple(dict.fromkeys((CACHE, "past_key_values", "layer_past")))
"""Names under which attention modules are given the cache."""

WINDOW_MASK = "create_sliding_window_causal_mask"
"""The function by which models of Transformers mask by a window."""

HEAD_DIMS = ("head_dim", "head_size", "attention_head_size")
"""Names under which attention modules keep the channels of a head."""


def require_model(model: object) -> None:
    """TypeError unless it is a Transformers model."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model must be a transformers.PreTrainedModel; got {type(model).__name__}. If another "
            "library wrapped the model, pass the one inside (PEFT: model.get_base_model(), a pipeline: pipe.model)."
        )


def is_compressed(kind: str, model_type: str) -> bool:
    """Whether a TurboCache compresses layers of this kind; those that an indexer serves if they keep latents."""
    return kind in COMPRESSED_TYPES or (kind == INDEXED and model_type in LATENT_TYPES)


def layer_types(config: PreTrainedConfig) -> list[tuple[str, dict[str, Any]]]:
    """(layer type, keywords of the cache layer for it) of each decoder layer, as Transformers' own caches see them.

    Raises:
        Unsupported: the config does not say how many layers there are.
    """
    if getattr(config, "num_hidden_layers", None) is None:
        raise Unsupported(
            f"the config of {config.model_type} does not say how many layers there are (num_hidden_layers): its parts "
            "have configs of their own, and no cache in common that could be compressed."
        )
    types, kwargs = get_layer_types_and_kwargs(config)
    reads_windows = masks_by_window(type(config))  # type: ignore[arg-type]  # a class has a hash
    # a draft by the first layers alone (assistant_early_exit) lowers their number, and leaves the list of their types
    types = types[: config.num_hidden_layers]
    # one dict for all layers up to transformers 5.17, one per layer from 5.23 on
    each = [dict(kwargs) for _ in types] if isinstance(kwargs, dict) else kwargs
    for index, keywords in enumerate(each):
        if types[index] == "sliding_attention" and not reads_windows:
            types[index] = "full_attention"
        kind = types[index]
        if kind == "full_attention":
            # that one dict holds the window of the other layers
            keywords.pop("sliding_window", None)
        window = keywords.get("sliding_window")
        if kind == "sliding_attention" and (window is None or window < 1):
            raise Unsupported(
                f"layer {index} of this {config.model_type} has a sliding window of {window} tokens, with which "
                "Transformers cannot run it either. Correct sliding_window in its config."
            )
    return list(zip(types, each, strict=True))


@functools.cache
def masks_by_window(kind: type[PreTrainedConfig]) -> bool:
    """Whether the models of a class of configs make masks with a window. A config may carry a window that its model
    never reads (a Llama's `sliding_window`). True for remote code, which is not looked into."""
    home = next((base for base in kind.__mro__ if base.__module__.startswith("transformers.models.")), None)
    if home is None:
        return True
    try:
        code = importlib.import_module(home.__module__.replace("configuration_", "modeling_"))
    except ImportError:
        # a config whose model is another one's
        return True
    models = [x for x in vars(code).values() if isinstance(x, type) and getattr(x, "config_class", None) is home]
    functions = [function.__code__ for model in models for function in functions_of(model)]
    return any(_names(function, WINDOW_MASK) for function in functions) if functions else hasattr(code, WINDOW_MASK)


def _names(code: CodeType, name: str) -> bool:
    """Whether a function, or one in it, names this global."""
    return name in code.co_names or any(isinstance(x, CodeType) and _names(x, name) for x in code.co_consts)


def stray_window(config: PreTrainedConfig) -> int | None:
    """The window in a config whose model never masks by it; None: there is none."""
    window = getattr(config, "sliding_window", None)
    if window is None or masks_by_window(type(config)):  # type: ignore[arg-type]  # a class has a hash
        return None
    return window if "sliding_attention" in get_layer_types_and_kwargs(config)[0] else None


def layer_windows(config: PreTrainedConfig) -> list[tuple[str, int | None]]:
    """(layer type, window or None) of each decoder layer."""
    return [(kind, kwargs.get("sliding_window")) for kind, kwargs in layer_types(config)]


def kv_heads(config: PreTrainedConfig, layer: int) -> int:
    """KV heads of one layer: some models (Gemma 4) have a different number in their full-attention layers."""
    of_layer = config.per_layer_config[layer]
    return int(getattr(of_layer, "num_key_value_heads", None) or of_layer.num_attention_heads)


def head_dim(config: PreTrainedConfig, layer: int) -> int:
    """Channels of one layer's heads."""
    of_layer = config.per_layer_config[layer]
    return int(getattr(of_layer, "head_dim", None) or of_layer.hidden_size // of_layer.num_attention_heads)


def shape_field(config: PreTrainedConfig, name: str) -> Any:
    """A field of the config; None if missing; a list with one value per layer if layers differ in it."""
    each = [getattr(of_layer, name, None) for of_layer in config.per_layer_config]
    return each if any(value != each[0] for value in each) else each[0]


def module_head_dim(module: nn.Module) -> int | None:
    """Channels of a head of an attention module; None if its class keeps that number under no name known here."""
    values = (getattr(module, name, None) for name in HEAD_DIMS)
    return next((number for number in values if isinstance(number, int)), None)
