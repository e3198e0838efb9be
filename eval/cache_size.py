"""Bytes and tokens of any cache that `generate` returns."""

from typing import Any

import torch

from turbo_hf.eval.published import SimulatedCache
from turbo_hf.patching.handle import Handle


def cache_size(cache: Any, rows: int, handle: Handle | None) -> tuple[int, int]:
    """(bytes, tokens): as `Handle.memory` says for a patched model, computed for a simulated cache, else allocated.

    A dense cache stores padding; its token count includes the padding, so that it is not charged for it in bytes per
    token.
    """
    if handle is not None:
        memory = handle.memory()
        return memory.total, memory.tokens
    if isinstance(cache, SimulatedCache):
        return round(cache.computed_bytes()), cache.tokens()
    return sum(_allocated(vars(layer)) for layer in cache.layers), rows * cache.get_seq_length()


def _allocated(held: Any) -> int:
    """Bytes of the tensors in there; packed ones of quantization libraries hold theirs as attributes or in pairs."""
    if isinstance(held, torch.Tensor):
        inner = [x for x in vars(held).values() if isinstance(x, torch.Tensor)]
        return sum(map(_allocated, inner)) if inner else held.nbytes
    if isinstance(held, dict):
        return sum(map(_allocated, held.values()))
    return sum(map(_allocated, held)) if isinstance(held, list | tuple) else 0
