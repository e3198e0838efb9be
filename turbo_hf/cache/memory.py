"""Bytes of a cache: measured on an existing one, or computed for the one that a config would make."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from turbo_hf.cache.layer import TurboLayer
from turbo_hf.config.turbo_config import TurboConfig
from turbo_hf.layout import HeadGroups, open_token_bytes, page_bytes

SHOWN = 16
"""Maximum number of lines about single layers, or groups of them, under `str()`."""


def group_layers(layers: Iterable[tuple[int, Hashable]]) -> list[tuple[str, Any]]:
    """Group (index, text) of layers by equal texts: for each group, its layers in words, and the text."""
    alike: dict[Hashable, list[int]] = {}
    for index, words in layers:
        alike.setdefault(words, []).append(index)
    return [(_in_words(indices), words) for words, indices in alike.items()]


def _in_words(indices: list[int]) -> str:
    """ "layer 3", or "layers 0 to 4, 6, 7"."""
    ends = [0, *(at for at, (one, other) in enumerate(pairwise(indices), 1) if other != one + 1), len(indices)]
    parts: list[str] = []
    for start, stop in pairwise(ends):
        run = indices[start:stop]
        parts += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run)
    return f"layer{'s' if len(indices) > 1 else ''} {', '.join(parts)}"


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one cache; `str()` shows them in a few lines, with layers of equal bytes together.

    layers: bytes of each layer by kind: "codes", "scales", "open" (tokens that do not fill a block yet), "index" (the
        buckets of a sparse layer's tokens, or an indexer's keys), or "dense" (not compressed).
    tokens: tokens of all rows, without padding.
    full_precision: bytes that the tokens of compressed layers would take in the model's dtype, `dtype`.
    ranks: how many ranks hold as much, each of its own heads (tensor parallel); bytes are those of one.
    dtype: the model's, such as "bfloat16"; "" for an empty cache.
    """

    layers: tuple[dict[str, int], ...]
    tokens: int
    full_precision: int
    ranks: int = 1
    dtype: str = ""

    @property
    def all_ranks(self) -> int:
        """Bytes of all layers on all ranks."""
        return self.total * self.ranks

    @property
    def total(self) -> int:
        """Bytes of all layers."""
        return sum(sum(layer.values()) for layer in self.layers)

    @property
    def by_kind(self) -> dict[str, int]:
        """Bytes of all layers by kind."""
        kinds = {kind for layer in self.layers for kind in layer}
        return {kind: sum(layer.get(kind, 0) for layer in self.layers) for kind in sorted(kinds)}

    @property
    def compression(self) -> float:
        """Full-precision bytes over compressed bytes, for the compressed layers; 1.0 for an empty cache."""
        stored = sum(n for layer in self.layers for kind, n in layer.items() if kind != "dense")
        return self.full_precision / stored if stored else 1.0

    def __str__(self) -> str:
        if not self.layers:
            return "no cache yet"
        each = f" on each of {self.ranks} ranks" if self.ranks > 1 else ""
        against = f" than in {self.dtype}" if self.dtype else ""
        lines = [
            f"{self.tokens:,} tokens in {self.total:,} bytes{each}; compressed layers: {self.compression:.2f} x "
            f"smaller{against}",
            f"  all layers: {_of_kinds(self.by_kind.items())}",
        ]
        groups = group_layers((index, tuple(layer.items())) for index, layer in enumerate(self.layers))
        for layers, kinds in groups[:SHOWN]:
            lines.append(f"  {'each of ' if layers.startswith('layers') else ''}{layers}: {_of_kinds(kinds)}")
        if len(groups) > SHOWN:
            lines.append(f"  and {len(groups) - SHOWN} lines more: see `layers`")
        return "\n".join(lines)


def _of_kinds(kinds: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{kind} {count:,}" for kind, count in kinds)


def measure(layers: list[Any], ranks: int = 1) -> Memory:
    """What the layers of a `TurboCache` currently have allocated. ranks: as in `Memory`."""
    turbo = [layer for layer in layers if isinstance(layer, TurboLayer) and layer.is_initialized]
    return Memory(
        tuple(layer_bytes(layer) for layer in layers),
        sum(turbo[0].lengths()) + sum(turbo[0].state.dropped) if turbo else 0,
        sum(layer.full_precision_bytes() for layer in turbo),
        ranks,
        str(turbo[0].dtype).removeprefix("torch.") if turbo else "",
    )


def layer_bytes(layer: Any) -> dict[str, int]:
    """Allocated bytes of a layer by kind; "dense" if it is not compressed."""
    if isinstance(layer, TurboLayer):
        return layer.nbytes()
    attributes = list(vars(layer).values())
    # layers with recurrent states keep them in dicts of tensors
    attributes += [x for d in attributes if isinstance(d, dict) for x in d.values()]
    # a window layer also has its window as a tensor
    return {"dense": sum(x.nbytes for x in attributes if isinstance(x, torch.Tensor) and x.dim())}


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Bytes that one layer's cache takes per row.

    per_token: bytes per token.
    window: maximum number of tokens; None: no limit.
    constant: bytes at any length (the states of linear attention).
    """

    per_token: float
    window: int | None
    constant: float = 0.0


def turbo_cost(
    config: TurboConfig,
    groups: HeadGroups,
    head_dim: int,
    window: int | None,
    index_bytes: int = 0,
    rotary_dim: int | None = None,
) -> LayerCost:
    """Cost of a compressed layer, sealed blocks, first and recent tokens only. groups: as in `TurboConfig.head_groups`.

    window: tokens that a query sees. index_bytes: per token and KV head, of a sparse layer. rotary_dim: as in
    `layout.page_bytes`, of a layer of latent attention, whose `head_dim` is the latent's.
    """
    block = config.expert.block_size
    page = sum(heads * page_bytes(head_dim, width, block, rotary_dim) for width, heads in groups)
    # a block leaves when its newest token has left the window of the next query
    most = None if window is None else -(-(window - 1) // block) * block
    heads = sum(heads for _, heads in groups)
    first = 0 if window is not None or index_bytes or rotary_dim else config.first_tokens
    staying = first + (0 if rotary_dim else config.recent)
    # a window shorter than that does not let them go
    instead = staying if most is None else min(staying, most)
    opened = staying * heads * open_token_bytes(head_dim) - instead * page / block
    return LayerCost(page / block + heads * index_bytes, most, opened)


def cache_bytes(costs: list[LayerCost], tokens: int) -> float:
    """Bytes of a row of `tokens` tokens."""
    return sum(c.constant + c.per_token * (tokens if c.window is None else min(tokens, c.window)) for c in costs)
