"""The keys by which an indexer (DSA) scores the columns of a layer: all of them are read in each step."""

import torch

from turbo_hf.cache.pass_mark import ordinary
from turbo_hf.layout import E4M3_MAX

GRAIN = 64
"""Minimum number of columns by which they grow."""


class IndexKeys:
    """One key per column of each row, padding included, as the model's own cache has them.

    Below 16 bit they are FP8 (e4m3), a byte per channel: a norm has given all of them one length, so that no size per
    token is needed, and the model's own code scores them as they are. What lies past the last column is overwritten.

    Args:
        kept: [B, cap, D], the model's numbers, or uint8, the bytes of FP8.
    """

    def __init__(self, kept: torch.Tensor):
        self.kept = kept

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
        """The first `columns` keys, in FP8 or the model's dtype; None: all that there is room for."""
        kept = self.kept if columns is None else self.kept[:, :columns]
        return kept.view(torch.float8_e4m3fn) if kept.dtype == torch.uint8 else kept

    def select_rows(self, index: torch.Tensor, in_place: bool = False) -> None:
        """Row i becomes what row `index[i]` was. in_place: at its address."""
        chosen = self.kept[index]
        self.kept = self.kept.copy_(chosen) if in_place else chosen

    def _stored(self, new: torch.Tensor) -> torch.Tensor:
        if self.kept.dtype != torch.uint8:
            return new.to(self.kept.dtype)
        # beyond its range FP8 has NaN alone
        return new.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
