"""Caches for Transformers that store as published methods do and return what would be read: accuracy only.

The first pass reads itself in full precision, as in KIVI (alg. 1), GEAR and StreamingLLM: only what stays is compressed
or dropped. A pass of one token reads it after it was stored, as KIVI's does; one of several reads itself in full.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from turbo_hf.eval.published.simulate import Scheme
from turbo_hf.models.model_layers import layer_windows
from turbo_hf.sparse.undo_rotary import undo_rotary

SINKS = 4
"""First tokens that StreamingLLM keeps (Xiao et al. 2024, arXiv:2309.17453, sec. 3.2)."""

AT_ONCE = 1 << 23
"""Numbers compressed per call, unless a piece is larger: about 32 MiB per float32 temporary."""


class CompressedLayer(DynamicLayer):
    """Keys and values of one layer, compressed by a `Scheme` in place; `padding`: columns left of each row's text."""

    keys: Any
    values: Any

    def __init__(self, scheme: Scheme, padding: Sequence[int]):
        super().__init__()
        self.scheme, self.padding = scheme, tuple(padding)
        self.first = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values that this pass reads."""
        keys, values = super().update(key_states, value_states)
        columns, new = keys.shape[-2], key_states.shape[-2]
        # a copy: what this pass reads is not what stays
        read = (keys.clone(), values.clone()) if new > 1 else (keys, values)
        prompt = not self.first
        self.first = self.first or columns
        for part, length, where in pieces(self.scheme, self.padding, self.first, columns - new, columns, keys.device):
            held, store = (self.keys, self.scheme.keys) if part == 0 else (self.values, self.scheme.values)
            size = max(1, AT_ONCE // (length * held.shape[1] * held.shape[-1]))
            if isinstance(where[0], slice):
                for own in held[where[0], :, where[1]].split(size):
                    own.copy_(store(own, prompt=prompt))
                continue
            for rows, at in zip(*(index.split(size) for index in where), strict=True):
                # an index on either side of the heads puts them after the tokens
                together = held[rows, :, at].transpose(1, 2).contiguous()
                held[rows, :, at] = store(together, prompt=prompt).transpose(1, 2)
        return read

    def computed_bytes(self) -> float:
        """Total bytes over all rows."""
        if not self.is_initialized:
            return 0.0
        _, heads, columns, dim = self.keys.shape
        return sum(
            self.scheme.computed_bytes(columns - left, max(0, self.first - left), heads, dim, self.keys.itemsize)
            for left in self.padding
        )


@lru_cache(maxsize=1)
def pieces(
    scheme: Scheme, padding: tuple[int, ...], first: int, before: int, columns: int, device: torch.device
) -> list[tuple[int, int, tuple[Any, Any]]]:
    """What a pass compresses. The last answer is kept: all layers ask the same, and one copy to the device does.

    Args:
        padding: columns left of each row's text. first: columns of the first pass. before, columns: before this pass
            and after it; before is 0 in the first pass.

    Returns:
        (part, T, (rows, columns)) of pieces of T tokens, each compressed by itself; part is 0 for keys, 1 for values.
        Rows and columns are slices, or index tensors [N, 1] and [N, T].
    """
    # a row may begin after the first pass
    starts = [max(0, first - left) for left in padding]
    now, then = (
        [scheme.sealed(max(0, at - left), start) for left, start in zip(padding, starts, strict=True)]
        for at in (columns, before)
    )
    if not before:
        then = [(0, 0)] * len(now)
    if now == then:
        return []
    left, begin, end = torch.tensor(padding), torch.tensor(then), torch.tensor(now)
    found: list[tuple[int, int, tuple[Any, Any]]] = []
    for part in (0, 1):
        tokens = end[:, part] - begin[:, part]
        unit = scheme.unit(part, prompt=not before)
        for length in [unit] if unit else sorted({*tokens.tolist()} - {0}):
            counts = tokens // length if unit else (tokens == length).long()
            rows = torch.arange(len(padding)).repeat_interleave(counts)
            if not len(rows):
                continue
            number = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[rows]
            start = (left + begin[:, part])[rows] + number * length
            low, at = int(rows[0]), int(start[0])
            if int(rows[-1]) - low + 1 == len(rows) and bool((start == at).all()):
                found.append((part, length, (slice(low, low + len(rows)), slice(at, at + length))))
                continue
            # a copy that does not block the host
            its = torch.stack([rows, start]).to(device, non_blocking=True)
            columns_of = its[1, :, None] + torch.arange(length, device=device)
            found.append((part, length, (its[0, :, None], columns_of)))
    return found


class WindowLayer(DynamicLayer):
    """StreamingLLM: the first four tokens and the newest, `window` in all, with positions counted inside the window.

    Newest keys and queries keep their positions, which leaves their distances; the first keys are turned to the
    places just before the window.
    """

    keys: Any
    values: Any

    def __init__(self, window: int, padding: list[int], rotary: Any, attention: Any):
        super().__init__()
        self.window, self.padding = window, padding
        self.rotary, self.attention = rotary, attention
        self.seen = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The kept keys and values, the first ones at their places before the window, and the new ones."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        kept = self._placed() if self.seen else self.keys
        keys, values = torch.cat([kept, key_states], -2), torch.cat([self.values, value_states], -2)
        self.keys, self.values = torch.cat([self.keys, key_states], -2), values
        before, self.seen = self.seen, self.seen + key_states.shape[-2]
        self._drop(before)
        return keys, values

    def _placed(self) -> torch.Tensor:
        shift = torch.tensor([max(0, self.seen - left - self.window) for left in self.padding])
        keys: torch.Tensor = self.keys
        if not bool(shift.any()):
            return keys
        sinks = keys[:, :, :SINKS]
        places = shift[:, None].expand(-1, sinks.shape[2]).to(self.keys.device)
        cos, sin = (x.float() for x in self.rotary(sinks, places))
        scale = (cos * cos + sin * sin).mean().sqrt()
        # the other way round is onwards
        turned = undo_rotary(self.attention, sinks, (cos / scale, -sin / scale)).to(self.keys.dtype)
        # a row that has lost nothing yet has no room between its first tokens and the others
        moved = (shift > 0).to(self.keys.device)[:, None, None, None]
        return torch.cat([torch.where(moved, turned, sinks), self.keys[:, :, SINKS:]], -2)

    def _drop(self, before: int) -> None:
        columns = self.keys.shape[-2]
        keep = min(columns, self.window)
        if keep == columns:
            return
        # a row's columns lie at the right: [padding, first tokens, newest], and its first ones may be further left
        index = torch.arange(columns - keep, columns).repeat(len(self.padding), 1)
        lengths = self.seen - torch.tensor(self.padding)
        moved = lengths - (self.seen - before) > self.window
        begin = torch.where(moved, 0, columns - lengths)
        first = begin[:, None] + torch.arange(SINKS)
        index[:, :SINKS] = torch.where((lengths > self.window)[:, None], first, index[:, :SINKS])
        at = index.to(self.keys.device)[:, None, :, None].expand(-1, self.keys.shape[1], -1, self.keys.shape[-1])
        self.keys, self.values = self.keys.gather(-2, at), self.values.gather(-2, at)

    def get_seq_length(self) -> int:
        """Columns that were given, those dropped included."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(columns, first column) that a mask covers: as many real ones as each row has kept."""
        kept = min(self.seen, self.window)
        return kept + query_length, self.seen - kept

    def computed_bytes(self) -> float:
        """Total bytes over all rows."""
        if not self.is_initialized:
            return 0.0
        rows = sum(min(self.seen - left, self.window) for left in self.padding)
        return float(2 * rows * self.keys.shape[1] * self.keys.shape[-1] * self.keys.itemsize)


class SimulatedCache(Cache):
    """A cache whose bytes are computed, with a single kind of layer."""

    def computed_bytes(self) -> float:
        """What the method would take for all rows and layers, packed."""
        layers: list[Any] = self.layers
        return float(sum(layer.computed_bytes() for layer in layers))

    def tokens(self) -> int:
        """Number of tokens over all rows, without padding."""
        layer: Any = self.layers[0]
        return sum(layer.get_seq_length() - left for left in layer.padding) if layer.is_initialized else 0


def compressed_cache(model: Any, scheme: Scheme, mask: torch.Tensor) -> SimulatedCache:
    """An empty cache for prompts with that mask [B, columns]."""
    padding = _padding(mask)
    return SimulatedCache(layers=[CompressedLayer(scheme, padding) for _ in range(_layers(model))])


def window_cache(model: Any, window: int, mask: torch.Tensor) -> SimulatedCache:
    """An empty StreamingLLM cache; ValueError for a model without a rotary embedding of the usual kind."""
    padding, count = _padding(mask), _layers(model)
    body = model.get_decoder()
    rotary = getattr(body, "rotary_emb", None)
    blocks = getattr(body, "layers", None)
    attention = getattr(blocks[0], "self_attn", None) if blocks is not None else None
    if rotary is None or attention is None:
        raise ValueError("a StreamingLLM window needs one rotary embedding for all layers; this model has none.")
    return SimulatedCache(layers=[WindowLayer(window, padding, rotary, attention) for _ in range(count)])


def _layers(model: Any) -> int:
    kinds = {kind for kind, _ in layer_windows(model.config.get_text_config(decoder=True))}
    if kinds != {"full_attention"}:
        raise ValueError(
            f"simulated caches are for models whose layers all have full attention; got {', '.join(sorted(kinds))}."
        )
    return int(model.config.get_text_config(decoder=True).num_hidden_layers)


def _padding(mask: torch.Tensor) -> list[int]:
    real = mask.bool()
    left = (~real).sum(-1)
    columns = torch.arange(mask.shape[-1], device=mask.device)
    if not bool((real == (columns >= left[:, None])).all()):
        raise ValueError("simulated caches want rows that are padded at the left and nowhere else.")
    return [int(n) for n in left]
