"""The open part of one layer's cache: the first and the newest tokens of each row.

They are in INT8 with one scale per token and head. In a layer that has 16-bit heads: unquantized, with scale 1.
"""

from typing import NamedTuple

import torch

from turbo_hf.ops.host_device import shared


class Tokens(NamedTuple):
    """Tokens with one scale each. k, v: int8 or 16-bit [..., H, N, D]; k_scale, v_scale: float32 [..., H, N]."""

    k: torch.Tensor
    k_scale: torch.Tensor
    v: torch.Tensor
    v_scale: torch.Tensor


GRAIN = 16
"""Tokens by which the buffer grows. Its capacity is at least one grain, so that no op sees a cache of capacity 0."""


def _rounded(tokens: int) -> int:
    return max(GRAIN, -(-tokens // GRAIN) * GRAIN)


class OpenBuffer:
    """Open tokens of all rows, each row from place 0 on (shapes: `turbo_hf.layout`). `RowState` counts them.

    tokens: initial capacity. rotary_dim: of a layer of latent attention, as in `layout.page_bytes`. first: as in
    `KVStore`.
    """

    def __init__(
        self,
        rows: int,
        heads: int,
        dim: int,
        device: torch.device,
        dtype: torch.dtype = torch.int8,
        tokens: int = 0,
        rotary_dim: int | None = None,
        first: int = 0,
    ):
        self.first = first
        capacity = _rounded(tokens)
        self.k = torch.empty(rows, heads, capacity, dim, dtype=dtype, device=device)
        self.v = torch.empty(rows, heads, rotary_dim or dim, capacity, dtype=dtype, device=device)
        self.k_scale = torch.empty(rows, heads, capacity, dtype=torch.float32, device=device)
        self.v_scale = torch.empty(rows, heads, capacity, dtype=torch.float32, device=device)

    @property
    def capacity(self) -> int:
        """Maximum number of tokens per row."""
        return self.k.shape[2]

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """k, v, k_scale and v_scale, as a `KVStore` holds them."""
        return self.k, self.v, self.k_scale, self.v_scale

    def reserve(self, tokens: int, held: list[int]) -> None:
        """Grow to `tokens` tokens per row, keeping the `held[row]` that each row has."""
        if tokens > self.capacity:
            self._resize(tokens, [0] * len(held), held)

    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.k.nbytes + self.v.nbytes + self.k_scale.nbytes + self.v_scale.nbytes

    def append(self, new: Tokens, starts: list[int], held: list[int]) -> None:
        """Add tokens [B, H, M, ...], row r's from column `starts[r]` on, behind the `held[r]` that it has."""
        k, k_scale, v, v_scale = new
        tokens, device = k.shape[2], k.device
        self.reserve(max(count + tokens - start for count, start in zip(held, starts, strict=True)), held)
        begin = shared(starts, device)
        row, source = (torch.arange(tokens, device=device) >= begin[:, None]).nonzero().unbind(-1)
        target = shared(held, device)[row] + source - begin[row]
        self.k[row, :, target] = k[row, :, source]
        self.v[row, :, :, target] = v[row, :, source]
        self.k_scale[row, :, target] = k_scale[row, :, source]
        self.v_scale[row, :, target] = v_scale[row, :, source]

    def reorder(self, row: int, first: int, order: torch.Tensor) -> None:
        """Permute n tokens of a row: place `first + i` gets token `first + order[head, i]`; order: int64 [H, n]."""
        place = slice(first, first + order.shape[1])
        # head by head, which bounds the memory for long prompts
        for head, at in enumerate(order):
            self.k[row, head, place] = self.k[row, head, place][at]
            self.v[row, head, :, place] = self.v[row, head, :, place][:, at]
            self.k_scale[row, head, place] = self.k_scale[row, head, place][at]
            self.v_scale[row, head, place] = self.v_scale[row, head, place][at]

    def drop_front(self, counts: list[int], left: list[int], room: int = 0) -> None:
        """Drop `counts[row]` tokens of each row behind its first ones, which leaves `left[row]`; release the memory.

        room: tokens per row for which memory may be kept, if no token moves.
        """
        if self._moves(counts, left) or self.capacity > _rounded(room):
            self._resize(max(left), counts, left)

    def _moves(self, counts: list[int], left: list[int]) -> bool:
        return any(count and rest > self.first for count, rest in zip(counts, left, strict=True))

    def drop_front_in_place(self, counts: list[int], left: list[int]) -> None:
        """As `drop_front`; the memory stays where it is, and all of it is kept."""
        if not self._moves(counts, left):
            return
        held = self.tensors()
        self.drop_front(counts, left)
        for old, new, dim in zip(held, self.tensors(), (2, 3, 2, 2), strict=True):
            old.narrow(dim, 0, new.shape[dim]).copy_(new)
        self.k, self.v, self.k_scale, self.v_scale = held

    def select_rows(self, index: torch.Tensor) -> None:
        """Row i becomes what row `index[i]` was; index: on the buffer's device."""
        self.k, self.v = self.k[index], self.v[index]
        self.k_scale, self.v_scale = self.k_scale[index], self.v_scale[index]

    def _resize(self, tokens: int, skip: list[int], left: list[int]) -> None:
        """Capacity for `tokens` per row, rounded up to the grain; row r keeps `left[r]`, those behind its first ones
        from place `first + skip[r]` on."""
        capacity, even, first = _rounded(tokens), len(set(skip)) == 1, self.first
        kept = min(capacity, self.capacity - skip[0] * even) if max(left) else 0
        # where nothing is skipped, one copy takes all
        stay = min(first, kept) if skip[0] else 0
        place = None
        if kept and not even:
            place = torch.arange(kept, device=self.k.device)
            place = place + shared(skip, self.k.device)[:, None] * (place >= first)
            place = place.clamp(max=self.capacity - 1)[:, None]
        grown = []
        for x, dim in ((self.k, 2), (self.v, 3), (self.k_scale, 2), (self.v_scale, 2)):
            shape = list(x.shape)
            shape[dim] = capacity
            grown.append(x.new_empty(shape))
            if place is not None:
                pick = {(2, 4): place[..., None], (3, 4): place[:, :, None], (2, 3): place}[dim, x.dim()]
                grown[-1].narrow(dim, 0, kept).copy_(torch.take_along_dim(x, pick, dim))
                continue
            for begin, end, moved in ((0, stay, 0), (stay, kept, skip[0])):
                if begin < end:
                    grown[-1].narrow(dim, begin, end - begin).copy_(x.narrow(dim, begin + moved, end - begin))
        self.k, self.v, self.k_scale, self.v_scale = grown
