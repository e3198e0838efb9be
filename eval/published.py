"""A published way to store keys and values in few bits, KIVI (Liu et al. 2024, arXiv:2402.02750, alg. 1), simulated:
accuracy only.

Plain torch rounds and keeps the rounded values; bytes are computed, as nothing is packed. The first pass reads itself
in full precision, as in KIVI. A pass of one token reads it after it was stored, as KIVI's does; one of several reads
itself in full.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from turbo_hf.models.model_layers import layer_windows

SCALE_BYTES = 4
"""A group's scale and zero point, 16 bit each."""

AT_ONCE = 1 << 23
"""Numbers compressed per call, unless a row has more: about 32 MiB per float32 temporary."""


def rounded(x: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """x after asymmetric rounding: 2**bits levels from the least to the largest value along `dim`. float32."""
    x = x.float()
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    step = (high - low) / (2**bits - 1)
    # a group of equal values has no step, and equals its own minimum
    codes = torch.where(step > 0, (x - low) / step, torch.zeros_like(x)).round()
    near: torch.Tensor = codes * step + low
    return near


@dataclass(frozen=True, slots=True)
class Kivi:
    """KIVI: keys wait for `group` tokens and are rounded by channel; all but the newest values are rounded by token.

    bits, value_bits: of a key's and a value's code.
    group: tokens of a channel's group of keys, and channels of a token's group of values.
    window: newest values, in full precision.
    """

    bits: int
    value_bits: int
    group: int = 64
    window: int = 64

    def sealed(self, tokens: int) -> tuple[int, int]:
        """How many of a row's first `tokens` keys and values are compressed."""
        return tokens // self.group * self.group, max(0, tokens - self.window)

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        """Keys [B, H, T, D] that are compressed, as they are read from then on."""
        return rounded(x.unflatten(-2, (-1, self.group)), self.bits, -2).flatten(-3, -2).to(x.dtype)

    def values(self, x: torch.Tensor) -> torch.Tensor:
        """Values [B, H, T, D] that are compressed, as they are read from then on."""
        # a head that groups do not divide is one group
        size = self.group if x.shape[-1] % self.group == 0 else x.shape[-1]
        return rounded(x.unflatten(-1, (-1, size)), self.value_bits, -1).flatten(-2).to(x.dtype)

    def computed_bytes(self, tokens: int, heads: int, dim: int, itemsize: int) -> float:
        """Bytes of a row's keys and values in one layer: codes, 16-bit scales and zero points, and what waits."""
        keys, values = self.sealed(tokens)
        codes = (keys * self.bits + values * self.value_bits) * dim / 8
        scales = keys // self.group * dim + values * (dim // self.group if dim % self.group == 0 else 1)
        return heads * (codes + SCALE_BYTES * scales + itemsize * (2 * tokens - keys - values) * dim)


class CompressedLayer(DynamicLayer):
    """Keys and values of one layer, compressed by a scheme in place; `padding`: columns left of each row's text."""

    keys: Any
    values: Any

    def __init__(self, scheme: Kivi, padding: Sequence[int]):
        super().__init__()
        self.scheme, self.padding = scheme, tuple(padding)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values that this pass reads."""
        keys, values = super().update(key_states, value_states)
        columns, new = keys.shape[-2], key_states.shape[-2]
        # a copy: what this pass reads is not what stays
        read = (keys.clone(), values.clone()) if new > 1 else (keys, values)
        # rows that seal the same columns are compressed together
        groups: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        for row, left in enumerate(self.padding):
            ends = (self.scheme.sealed(max(0, at - left)) for at in (columns - new, columns))
            for part, (begin, end) in enumerate(zip(*ends, strict=True)):
                if end > begin:
                    groups[part, left + begin, left + end].append(row)
        for (part, begin, end), rows in groups.items():
            held, store = (self.keys, self.scheme.keys) if part == 0 else (self.values, self.scheme.values)
            size = max(1, AT_ONCE // ((end - begin) * held.shape[1] * held.shape[-1]))
            for at in torch.tensor(rows, device=held.device).split(size):
                held[at, :, begin:end] = store(held[at, :, begin:end])
        return read

    def computed_bytes(self) -> float:
        """Total bytes over all rows."""
        if not self.is_initialized:
            return 0.0
        _, heads, columns, dim = self.keys.shape
        return sum(
            self.scheme.computed_bytes(max(0, columns - left), heads, dim, self.keys.itemsize) for left in self.padding
        )


class SimulatedCache(Cache):
    """A cache whose bytes are computed."""

    def computed_bytes(self) -> float:
        """What the method would take for all rows and layers, packed."""
        layers: list[Any] = self.layers
        return float(sum(layer.computed_bytes() for layer in layers))

    def tokens(self) -> int:
        """Number of tokens over all rows, without padding."""
        layer: Any = self.layers[0]
        return sum(layer.get_seq_length() - left for left in layer.padding) if layer.is_initialized else 0


def simulated_cache(model: Any, scheme: Kivi, mask: torch.Tensor) -> SimulatedCache:
    """An empty cache for prompts with that mask [B, columns].

    Raises:
        ValueError: rows that are not padded at the left, or a model whose layers do not all have full attention.
    """
    text = model.config.get_text_config(decoder=True)
    kinds = {kind for kind, _ in layer_windows(text)}
    if kinds != {"full_attention"}:
        raise ValueError(
            f"simulated caches are for models whose layers all have full attention; got {', '.join(sorted(kinds))}."
        )
    real = mask.bool()
    left = (~real).sum(-1)
    if not bool((real == (torch.arange(mask.shape[-1], device=mask.device) >= left[:, None])).all()):
        raise ValueError("simulated caches want rows that are padded at the left and nowhere else.")
    padding = [int(n) for n in left]
    return SimulatedCache(layers=[CompressedLayer(scheme, padding) for _ in range(text.num_hidden_layers)])
