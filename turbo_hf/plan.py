"""Memory before and after, from the config alone: bytes per token, the longest context, the largest batch."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from turbo_hf.config import PRESETS, TurboConfig
from turbo_hf.memory import LayerCost, cache_bytes, layer_costs

FULL_PRECISION = "fp16"
KEPT_FREE = 0.1
"""Share of the GPU left for activations and the allocator."""


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One method: bytes per token and of the whole requested cache, and what fits beside the weights."""

    method: str
    bytes_per_token: float
    compression: float
    cache_bytes: float
    fits: bool
    longest_context: int
    largest_batch: int


def weight_bytes(config: PreTrainedConfig) -> int:
    """Bytes of the model's weights in the config's dtype (bfloat16 if it names none); nothing is loaded."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype or torch.bfloat16)
    # parameters() shows a tied weight once
    return sum(p.numel() * p.element_size() for p in model.parameters())


def plan(config: PreTrainedConfig, *, context: int, batch: int, gpu_bytes: float, weights: int) -> list[PlanRow]:
    """Rows for full precision (2 bytes per number) and for each preset.

    Args:
        config: the model's config.
        context, batch: planned tokens per row, and number of rows.
        gpu_bytes: the GPU's memory; a tenth of it is left for activations.
        weights: bytes of it that the weights take.

    Raises:
        ValueError: context or batch below 1, or a model without a KV cache.
    """
    if context < 1 or batch < 1:
        raise ValueError(f"context and batch must be at least 1; got {context} and {batch}.")
    room = gpu_bytes * (1 - KEPT_FREE) - weights
    dense = layer_costs(config, None)
    if not dense:
        raise ValueError(f"a {config.model_type} has no attention layer that keeps keys and values; nothing to plan.")
    methods: dict[str, TurboConfig | None] = {FULL_PRECISION: None, **PRESETS}
    rows = []
    for name, preset in methods.items():
        costs = layer_costs(config, preset)
        needed = batch * cache_bytes(costs, context)
        rows.append(
            PlanRow(
                method=name,
                bytes_per_token=sum(cost.per_token for cost in costs),
                compression=cache_bytes(dense, context) / cache_bytes(costs, context),
                cache_bytes=needed,
                fits=needed <= room,
                longest_context=longest_context(costs, room / batch),
                largest_batch=max(0, int(room // cache_bytes(costs, context))),
            )
        )
    return rows


def longest_context(costs: list[LayerCost], room: float) -> int:
    """Maximum tokens of one row that fit in `room` bytes; -1: no limit (every layer has a window)."""
    if room < 0:
        return 0
    if all(cost.window is not None for cost in costs):
        widest = max((cost.window or 0) for cost in costs)
        if cache_bytes(costs, widest) <= room:
            return -1
    low, high = 0, 1
    while cache_bytes(costs, high) <= room:
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cache_bytes(costs, middle) <= room else (low, middle)
    return low


UNITS = {"GB": 10**9, "GIB": 2**30, "MB": 10**6, "MIB": 2**20, "TB": 10**12}


def parse_bytes(text: str) -> float:
    """ "80GB", "24 GiB", "512MB" -> bytes. ValueError says what is expected."""
    cleaned = text.replace(" ", "").upper()
    unit = next((u for u in ("GIB", "MIB", "GB", "MB", "TB") if cleaned.endswith(u)), None)
    number: Any = cleaned[: -len(unit)] if unit else ""
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    if unit is None or not 0 < value < float("inf"):
        raise ValueError(f"expected an amount of memory like 80GB, 24GiB or 512MB; got {text!r}.")
    return value * UNITS[unit]
