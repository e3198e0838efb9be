"""What attention knows of a cache for packed passes: rows of many requests side by side in one sequence."""

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from turbo_hf.cache.new_columns import NewQKV
from turbo_hf.layout import Scoring

PACKED_KEYWORDS = frozenset(
    {
        "cache",
        "block_table",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "logits_indices",
        "logits_processor_args",
        "max_length_k",
        "max_length_q",
        "read_index",
        "write_index",
    }
)
"""Keywords that Transformers' continuous batching passes to attention; the cache knows all of it from the host."""

_packed: ContextVar[bool] = ContextVar("turbo_hf_packed", default=False)


class PackedCache:
    """A cache that attends for all requests of a pass."""

    @abstractmethod
    def attend(self, module: Any, qkv: NewQKV, scoring: Scoring, window: int | None) -> torch.Tensor:
        """Store the new tokens of the pass and attend. qkv: [1, Hq, T, D] and [1, Hkv, T, D], all requests of the pass
        one after the other; of latent attention [1, H, T, nope + R], latents [1, 1, T, rank] and rotary parts
        [1, 1, T, R]. Returns [1, Hq, T, D], or [1, H, T, Dv]. module: the attention module, of the layer
        `layer_idx`."""


@contextmanager
def packed_pass() -> Iterator[None]:
    """Inside of it no mask is made in this thread: the cache keeps requests apart."""
    token = _packed.set(True)
    try:
        yield
    finally:
        _packed.reset(token)


def in_packed_pass() -> bool:
    """Whether this thread is in a `packed_pass`; never while torch.compile traces, which it does not do there."""
    return not torch.compiler.is_compiling() and _packed.get()


def packed_cache(options: dict[str, Any]) -> PackedCache | None:
    """The cache of a packed pass among the keywords of an attention call; None: it is no packed pass."""
    cache = options.get("cache")
    # to ask a protocol takes the host as long as a small launch
    return cache if cache is not None and isinstance(cache, PackedCache) else None
