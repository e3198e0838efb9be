"""Selectors: assign keys to buckets, and choose the buckets that a query visits."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from turbo_hf.config.turbo_config import SparseConfig
from turbo_hf.layout import Rotary
from turbo_hf.ops.sparse.contract import SparseOps


@dataclass(frozen=True, slots=True)
class Selectivity:
    """What the decode steps of one layer have read since the patch: keys, over rows, KV heads and query tokens.

    layer: the layer's number.
    there: keys that the cache held, which full attention would read.
    dense: those of them that are always read (the first and the newest ones).
    read: all keys that were read; a key that several query heads of a KV head read counts once.
    """

    layer: int
    there: int
    dense: int
    read: int

    @property
    def share(self) -> float:
        """Keys read over all keys; 0 before the first step."""
        return self.read / max(1, self.there)

    @property
    def share_beyond(self) -> float:
        """The same without the always-read tokens."""
        return (self.read - self.dense) / max(1, self.there - self.dense)

    def __str__(self) -> str:
        if self.there == self.dense:
            return "every key read: all are always read"
        return f"{self.share:.2%} of the keys read, {self.share_beyond:.2%} of those not always read"


@dataclass(slots=True)
class Tally:
    """Keys counted by the steps of one layer: device-side counts stay on the device, and nothing waits for them."""

    there: int = 0
    dense: int = 0
    # int64 [1] of each device: keys read
    counts: dict[torch.device, torch.Tensor] = field(default_factory=dict)

    def __reduce__(self) -> Any:
        # a cache that was unpickled belongs to no patch, so nothing is counted
        return Tally, ()

    def counter(self, device: torch.device) -> torch.Tensor:
        """int64 [1] for `SparseOps.sparse_decode(read=...)`."""
        if device not in self.counts:
            # a cache may be used in inference mode first, and outside it later
            with torch.inference_mode(False):
                self.counts[device] = torch.zeros(1, dtype=torch.int64, device=device)
        return self.counts[device]

    def add(self, lengths: list[int], tokens: list[int], heads: int, always: int) -> None:
        """Note a step: row r holds `lengths[r]` tokens; the newest `tokens[r]` ask."""
        seen = [n for length, new in zip(lengths, tokens, strict=True) for n in range(length - new + 1, length + 1)]
        self.there += heads * sum(seen)
        short = [n for n in seen if n < always]
        self.dense += heads * (sum(short) + always * (len(seen) - len(short)))

    def selectivity(self, layer: int) -> Selectivity:
        """Read from the device."""
        return Selectivity(layer, self.there, self.dense, sum(int(x) for x in self.counts.values()))


EVERY = 1 << 30
"""More tokens than a row has."""


class Selector:
    """The selectors "window" and "full", and what all share. One per layer, for every cache of a patched model.

    window: how many of the newest tokens are always read; "full" reads every key on the same code path.
    """

    def __init__(self, config: SparseConfig, layer: int):
        self.config, self.layer = config, layer
        self.window = EVERY if config.selector == "full" else config.window_tokens
        self.tally = Tally()

    def __deepcopy__(self, memo: Any) -> "Selector":
        # a copied cache belongs to the same patch
        return self

    def weights(self) -> Mapping[str, torch.Tensor]:
        """What a calibration has trained of it."""
        return {}

    def tensors(self) -> list[torch.Tensor]:
        """Tensors that its launches use in every step."""
        return []

    def count(self, lengths: list[int], tokens: list[int], heads: int) -> None:
        """Note in `tally` what the host knows of a step; arguments as there."""
        self.tally.add(lengths, tokens, heads, self.config.sink_tokens + self.window)

    def __str__(self) -> str:
        return self.config.selector


class Centroids(Selector):
    """Buckets by the nearest centroid [Hkv, C, D]; visits by inner product with it ("kmeans"), or by a query
    classifier of a calibration ("saap").

    choices: buckets per head; it visits `probes` of them.
    pre_rotary: whether it needs queries and keys before rotary embedding.
    classifier: as of `SparseOps.assign_and_score`; empty without.
    """

    def __init__(
        self,
        config: SparseConfig,
        layer: int,
        centroids: torch.Tensor,
        pre_rotary: bool,
        classifier: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ):
        super().__init__(config, layer)
        self.choices = centroids.shape[1]
        config.check_buckets(self.choices)
        self.pre_rotary = pre_rotary
        self._weights = {"centroids": centroids, **classifier}
        self._moved: dict[str, torch.Tensor] = {}

    def _on(self, name: str, device: torch.device) -> torch.Tensor:
        """A weight on the device of use: in its own precision on a GPU, in float32 on a CPU; moved once."""
        held = self._moved.get(name)
        if held is None or held.device != device:
            own = self._weights[name]
            with torch.inference_mode(False):
                held = own.to(device, torch.float32 if device.type == "cpu" else own.dtype).contiguous()
            self._moved[name] = held
        return held

    def buckets(self, ops: SparseOps, keys: torch.Tensor, rotary: Rotary | None = None) -> torch.Tensor:
        """int16 [B, Hkv, M] of keys [B, Hkv, M, D]; rotary: what is undone first, if it is `pre_rotary`."""
        return ops.assign(keys, self._on("centroids", keys.device), rotary=rotary)

    def buckets_and_logits(
        self, ops: SparseOps, keys: torch.Tensor, queries: torch.Tensor, rotary: Rotary | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Buckets of new keys, as `buckets` gives them, and logits [B, Hkv, M, C] for `visited`.

        queries: [B, Hkv, M, G, D], grouped by KV head. rotary: of both, as in `buckets`.
        """
        weights = {name: self._on(name, keys.device) for name in self._weights}
        centroids = weights.pop("centroids")
        return ops.assign_and_score(keys, queries, centroids, weights or None, rotary=rotary)

    def visited(self, ops: SparseOps, logits: torch.Tensor) -> torch.Tensor:
        """bool [B, Hkv, M, C]: the `probes` best buckets of each query."""
        return ops.visit(logits, probes=self.config.count)

    def weights(self) -> Mapping[str, torch.Tensor]:
        return self._weights

    def tensors(self) -> list[torch.Tensor]:
        return list(self._moved.values())

    def __str__(self) -> str:
        return f"{super().__str__()}, {self.config.count} of {self.choices} buckets"
