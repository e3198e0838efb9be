"""A model without its weights, on torch's meta device: built from a config alone, it shows what `patch` would do."""

import copy
import json
import warnings
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import transformers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
)

from turbo_hf.cache.memory import LayerCost, layer_bytes
from turbo_hf.config.turbo_config import TurboConfig
from turbo_hf.errors import Unsupported, shortened
from turbo_hf.models.model_layers import layer_windows
from turbo_hf.models.versions import CACHE
from turbo_hf.patches.balance import parents, rotary_shares
from turbo_hf.patches.layers import attention_layers
from turbo_hf.patching.handle import Report
from turbo_hf.patching.patch_model import patch
from turbo_hf.patching.refusals import FORECAST

PASSES = (2, 3)
"""Tokens of two passes without weights: the difference of their caches gives the bytes per token."""

ADAPTER = "adapter_config.json"
"""Names the model that an adapter (PEFT) belongs to."""


def gguf_options(gguf_file: str | None) -> dict[str, str]:
    """What `from_pretrained` is passed to load a GGUF file; without one nothing, not None."""
    return {} if gguf_file is None else {"gguf_file": gguf_file}


def read_config(name: str, gguf_file: str | None = None) -> PreTrainedConfig:
    """The config of a folder, a config.json or a Hub id, by the classes of Transformers; code beside it never runs.

    gguf_file: a GGUF file there, whose metadata are read instead; the dtype is then the one Transformers dequantizes
    weights to.

    Raises:
        ValueError: there is none, or Transformers has no class for it; one sentence says why.
    """
    if gguf_file is not None:
        try:
            of_file: PreTrainedConfig = AutoConfig.from_pretrained(name, gguf_file=gguf_file)
        except Exception as error:  # the reader may raise anything about bytes that are no GGUF file
            raise ValueError(f"Transformers cannot read the GGUF file {gguf_file!r}: {shortened(error)}") from error
        of_file.dtype = of_file.dtype or torch.float32
        return of_file
    adapter = Path(name) / ADAPTER
    try:
        if adapter.is_file():
            name = json.loads(adapter.read_text())["base_model_name_or_path"]
        config: PreTrainedConfig = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # a config's own class may raise anything about its fields
        raise ValueError(
            f"Transformers {transformers.__version__} cannot read a config from {name!r} (code beside it is never "
            f"run; load such a model yourself, and pass it to turbo_hf.patch): {shortened(error)}"
        ) from error
    return config


def auto_class(config: PreTrainedConfig) -> Any:
    """The auto class that loads a checkpoint of this config: with all its parts, if it is multimodal.

    Raises:
        Unsupported: an encoder-decoder, or a model that generates no text.
    """
    if config.is_encoder_decoder:
        raise Unsupported(f"{config.model_type} is an encoder-decoder; only decoder-only models are supported.")
    text = (MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM)
    multimodal = (
        (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoModelForImageTextToText),
        (MODEL_FOR_MULTIMODAL_LM_MAPPING, AutoModelForMultimodalLM),
    )
    plain = config.get_text_config(decoder=True) is config
    for mapping, cls in (text, *multimodal) if plain else (*multimodal, text):
        if type(config) in mapping:
            return cls
    raise Unsupported(
        f"{config.model_type} is no language model: Transformers has no class of it that generates text. Only "
        "decoder-only language models are supported, also as a part of a multimodal model."
    )


def meta_model(config: PreTrainedConfig) -> PreTrainedModel:
    """A model of this config on the meta device, in the config's dtype (bfloat16 if it names none).

    Raises:
        Unsupported: an encoder-decoder, or a model that generates no text.
        ValueError: Transformers cannot build it; the error says what it said.
    """
    layers = getattr(config.get_text_config(decoder=True), "num_hidden_layers", None)
    if isinstance(layers, int) and layers < 0:
        raise ValueError(f"num_hidden_layers must be a number of layers; the config has {layers}. Correct it there.")
    cls = auto_class(config)
    named = config.dtype or config.get_text_config(decoder=True).dtype
    # a narrower dtype is that of quantized weights
    dtype = named if isinstance(named, torch.dtype) and named.itemsize > 1 else torch.bfloat16
    try:
        with torch.device("meta"):
            # from_config writes to the config; experts in one product need no numbers, unlike a loop over them
            model: PreTrainedModel = cls.from_config(
                copy.deepcopy(config), dtype=dtype, experts_implementation="batched_mm", trust_remote_code=False
            )
    except Exception as error:  # a model's class may raise anything about its config
        raise ValueError(
            f"Transformers cannot build a {config.model_type} of this config: {shortened(error)}"
        ) from error
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            # it looks for padding in the ids, which are no numbers here
            vars(part)["warn_if_padding_and_no_attention_mask"] = lambda *args: None
    vars(model)[FORECAST] = True
    model.eval()
    return model


def patch_report(model: PreTrainedModel, config: str | TurboConfig) -> Report:
    """What `patch` does with a model of this config; `Unsupported` if it refuses it."""
    with warnings.catch_warnings():
        # they are in the report
        warnings.simplefilter("ignore")
        with patch(model, config, calibration=None) as handle:
            return handle.report()


def key_bias_note(model: PreTrainedModel, report: Report) -> str | None:
    """A sentence if compressed layers have key biases that cannot be balanced, whose effect the config does not tell;
    None: they have none."""
    compressed, above = {at.index for at in report.layers if at.groups}, parents(model)
    modules = [at.module for at in attention_layers(model) if at.index in compressed]
    biased = [x for x in modules if getattr(getattr(x, "k_proj", None), "bias", None) is not None]
    if all(rotary_shares(module, above) is not None for module in biased):
        return None
    return (
        "Keys have a bias, which only the weights tell: a layer whose INT8 range it fills is kept at 8 bit, and takes "
        "more than a row of fewer bits says."
    )


class UncompressedLayer(NamedTuple):
    """A layer of Transformers' own cache.

    Args:
        cost: bytes that it takes.
        heads: KV heads; 0: it keeps no keys.
        head_dim: channels of a key; 0: it keeps none.
        value_dim: channels of a value.
        index_dim: channels of an indexer's key; 0: none is kept.
    """

    cost: LayerCost
    heads: int
    head_dim: int
    value_dim: int
    index_dim: int


@torch.no_grad()
def uncompressed_layers(model: PreTrainedModel) -> list[UncompressedLayer]:
    """What each layer of Transformers' own cache takes in a meta model, measured in passes without numbers.

    Raises:
        ValueError: the model cannot run without weights.
    """
    text, call = model.config.get_text_config(decoder=True), cast(Any, model)
    caches = []
    for tokens in PASSES:
        cache = DynamicCache(config=text)
        ids = torch.ones(1, tokens, dtype=torch.long, device="meta")
        try:
            call(input_ids=ids, use_cache=True, **{CACHE: cache})
        except Exception as error:  # meta tensors have no numbers to read
            raise ValueError(
                f"what the cache of a {model.config.model_type} takes cannot be told without its weights: "
                f"{shortened(error)}"
            ) from error
        caches.append(cache.layers)
    layers = []
    for (_, window), few, more in zip(layer_windows(text), *caches, strict=True):
        at_first, then = (sum(layer_bytes(layer).values()) for layer in (few, more))
        token = then - at_first
        # of a window, the newest token leaves no room for the oldest
        cost = LayerCost(token, None if window is None else window - 1, at_first - PASSES[0] * token)
        keys = getattr(few, "keys", None)
        values = getattr(few, "values", None)
        heads, head_dim = (keys.shape[1], keys.shape[3]) if isinstance(keys, torch.Tensor) else (0, 0)
        value_dim = values.shape[3] if isinstance(values, torch.Tensor) else 0
        indexed = getattr(few, "indexer_keys", None)
        index_dim = indexed.shape[-1] if isinstance(indexed, torch.Tensor) else 0
        layers.append(UncompressedLayer(cost, heads, head_dim, value_dim, index_dim))
    return layers
