"""The keys by which an indexer (DSA) scores the columns of a layer: all of them are read in each step."""

from typing import Any

import torch

from turbo_hf.cache.pass_mark import ordinary
from turbo_hf.layout import CODE_MAX, LEAST, UNQUANTIZED

GRAIN = 64
"""Minimum number of columns by which they grow."""

SIZE_BYTES = 4
"""Bytes of the size of a key, behind its codes."""


class IndexKeys:
    """One key per column of each row, padding included, as the model's own cache has them.

    Below 16 bit they are INT8 codes with a size for each key. What lies past the last column is overwritten.

    Args:
        kept: [B, cap, D], the model's numbers; or uint8 [B, cap, D + 4], codes, and a size in float32.
    """

    def __init__(self, kept: torch.Tensor):
        self.kept = kept

    @property
    def channels(self) -> int:
        """Of a key."""
        return self.kept.shape[2] - SIZE_BYTES * (self.kept.dtype == torch.uint8)

    def reserve(self, columns: int) -> None:
        """Grow to a capacity of so many columns."""
        capacity = self.kept.shape[1]
        if columns > capacity:
            # by a thirty-second, as pages grow
            more = -(-max(columns - capacity, capacity // 32) // GRAIN) * GRAIN
            self.kept = torch.nn.functional.pad(self.kept, (0, 0, 0, more))

    def trim(self, columns: int) -> None:
        """Shrink to a capacity of so many columns, if that frees enough memory."""
        capacity = -(-columns // GRAIN) * GRAIN
        if self.kept.shape[1] - capacity > capacity // 32:
            self.kept = self.kept[:, :capacity].clone()

    @ordinary
    def put(self, new: torch.Tensor, past: int) -> None:
        """Store the keys [B, M, D] of the columns behind the first `past`."""
        end = past + new.shape[1]
        self.reserve(end)
        self.kept[:, past:end] = self._stored(new)

    def put_at(self, new: torch.Tensor, columns: torch.Tensor) -> None:
        """Store the keys [B, M, D] of these columns, int64 [M], for which there is room."""
        self.kept.index_copy_(1, columns, self._stored(new))

    def read(self, columns: int | None = None) -> torch.Tensor:
        """The first `columns` keys [B, columns, D], float32 if they are rounded; None: all that there is room for."""
        kept = self.kept if columns is None else self.kept[:, :columns]
        if kept.dtype != torch.uint8:
            return kept
        codes, size = kept[..., :-SIZE_BYTES].view(torch.int8), kept[..., -SIZE_BYTES:].view(torch.float32)
        # one launch: an indexer scores in float32 in any case
        return codes * size

    def select_rows(self, index: torch.Tensor) -> None:
        """Row i becomes what row `index[i]` was."""
        self.kept = self.kept[index]

    def _stored(self, new: torch.Tensor) -> torch.Tensor:
        if self.kept.dtype != torch.uint8:
            return new.to(self.kept.dtype)
        size = new.float().abs().amax(-1, keepdim=True).clamp(min=LEAST) / CODE_MAX
        codes = (new / size).round().to(torch.int8)
        return torch.cat((codes.view(torch.uint8), size.view(torch.uint8)), -1)


def store_index_keys(layer: Any, new: torch.Tensor, past: int) -> torch.Tensor:
    """Store the index keys [B, M, D] of a layer's columns behind the first `past`; returns what the indexer reads.

    In steps, all as they are stored, in a replayed one those of columns to come, too; in prompts the new ones
    themselves behind those of the past.

    Args:
        layer: a `LayerStorage`.

    Raises:
        ValueError: other rows or channels than the cache holds.
    """
    rows, tokens, channels = new.shape
    if not past:
        wide = layer.config.bits == UNQUANTIZED
        shape, dtype = (rows, 0, channels + SIZE_BYTES * (not wide)), new.dtype if wide else torch.uint8
        layer.index_keys = IndexKeys(torch.empty(shape, dtype=dtype, device=new.device))
    held: IndexKeys | None = layer.index_keys
    known = (0, 0) if held is None else (len(held.kept), held.channels)
    if held is None or known != (rows, channels):
        raise ValueError(
            f"layer {layer.index}: the cache holds index keys of {known[0]} rows and {known[1]} channels; this pass "
            f"brings {rows} and {channels}. Use a new TurboCache, or reset() this one."
        )
    if layer.replay is not None:
        held.put_at(new, newest_columns(layer, tokens))
        return held.read()
    held.put(new, past)
    if past and layer.is_decoding(tokens):
        return held.read(past + tokens)
    return torch.cat((held.read(past).to(new.dtype), new), 1) if past else new


def newest_columns(layer: Any, tokens: int) -> torch.Tensor:
    """int64 [tokens], the columns that a replayed step stores: they are counted on the device."""
    state, counts = layer.state, layer.device_counts
    padding = state.seen - state.lengths()[0]
    first = counts.sealed(state)[0] * state.block + counts.open(state)[0] + padding
    newest: torch.Tensor = first + torch.arange(tokens, device=layer.device)
    return newest
