"""What evaluations share around `generate`: the bytes of its cache, the end of a reply, SDPA without cuDNN."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from turbo_hf.eval.published import SimulatedCache
from turbo_hf.patching.handle import Handle

NO_PLANS = "SDPA ran without cuDNN, which would make a plan for each new length of each step."


@contextmanager
def without_plans() -> Iterator[None]:
    """Inside, SDPA runs without cuDNN, and uses FlashAttention or torch's own kernels.

    cuDNN makes a plan for each shape that it has not seen, and every decode step has one. Seen on an H200, 64 steps
    of a 0.5B-shaped model after 1k tokens: 55 ms per step at first, 17.4 over the same lengths again, 19.2 without.
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def until(tokens: list[int], ends: set[int]) -> list[int]:
    """A reply without its end: the part before the first of `ends`."""
    stop = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[:stop]


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
