"""Costs of a cache as the plan computes them, and as they are measured on a real one."""

import copy
from dataclasses import replace
from typing import Any

import torch
from models import VOCABULARY
from transformers import PreTrainedConfig

from turbo_hf import TurboConfig
from turbo_hf.cache.layer import TurboLayer
from turbo_hf.cache.memory import LayerCost, layer_bytes
from turbo_hf.cli.plan import layer_costs
from turbo_hf.patching.meta_model import meta_model, patch_report, uncompressed_layers

SMALL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCABULARY,
}  # fmt: skip
"""Fields of a small config, as a config.json holds them."""


def costs(
    config: PreTrainedConfig, turbo: TurboConfig | None = None, dtype: torch.dtype = torch.bfloat16
) -> list[LayerCost]:
    """What the plan computes for each layer; `turbo` None: unpatched."""
    config = copy.deepcopy(config)
    config.dtype = dtype
    model = meta_model(config)
    layers = uncompressed_layers(model)
    if turbo is None:
        return [layer.cost for layer in layers]
    return layer_costs(layers, patch_report(model, replace(turbo, sparse=None)), turbo.sparse)


def sealed_bytes(layer: Any) -> int:
    """Bytes of a layer's sealed blocks and index keys, of dense keys and values, and of states: what a plan counts."""
    if not isinstance(layer, TurboLayer):
        return sum(layer_bytes(layer).values())
    keys, tokens = layer.index_keys, layer.state.block * max(layer.state.sealed)
    index = 0 if keys is None else keys.kept[:, :tokens].nbytes
    return index + sum(x.nbytes for heads in layer.pool.paged for x in heads[1:])
