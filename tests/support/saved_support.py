"""Caches of all kinds that can be saved, and files of anything."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from choices import flat_config
from graphs_support import an_index
from models import tiny_llama, tiny_mistral
from safetensors.torch import save_file
from sparse_cache_support import sparse
from tiny_families import build

import turbo_hf
from turbo_hf import TurboCache
from turbo_hf.cache.saved_files import ENTRY, Kind, facts_hash

Made = tuple[Any, TurboCache]
Make = Callable[[], Made]
MIXED: dict[str, Any] = {"low_bits": 2, "low_heads": 0.5}


def made(model: Any, config: Any, **options: Any) -> Made:
    """A patched model, and an empty cache of it."""
    return model, turbo_hf.patch(model.requires_grad_(False), config, **options).new_cache()


def llama(**options: Any) -> Make:
    """Of a Llama with these options."""
    return lambda: made(tiny_llama(), flat_config(**{"bits": 4, "block_size": 32, **options}))


def family(name: str) -> Make:
    """Of another family, at 4 bit."""
    return lambda: made(build(name), "turbo4")


def windows() -> Made:
    """A window in every layer, of which one is not compressed."""
    model = tiny_mistral(24)
    model.model.layers[1].self_attn.is_cross_attention = True
    return made(model, flat_config(block_size=32), strict="fallback")


def by_bucket() -> Made:
    """With buckets of keys."""
    model, config = tiny_llama(), sparse("kmeans-rotated", probes=2, window_tokens=8, read_all_layers=())
    return made(model, config, calibration=an_index(model, 8))


def written(folder: Path, kind: Kind, facts: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Write a file with a right hash, whatever it holds."""
    metadata = {ENTRY: json.dumps({**facts, "sha256": facts_hash(facts)})}
    save_file(tensors, folder / kind.file, metadata)
