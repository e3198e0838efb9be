"""Products of a few queries with sealed pages, whose codes are not dequantized for it.

A code c of a channel with step s and zero z stands for c s + z (TurboAttention eq. 5). So q . k = (q s) . c + q . z,
and the weighted sum of v is s times that of c, plus z times the sum of weights: all exact integers, also in float32.
"""

from collections.abc import Iterator

import torch

from turbo_hf.layout import KVStore, PagedHeads, half_merge, in_value_order
from turbo_hf.ops.store.reference_pages import by_index, index_of_slots

CODES = 1 << 19
"""Codes that are unpacked at a time, so that they stay in a CPU's cache."""


class SealedProducts:
    """Keys and values in the sealed blocks of every row, none of them 16-bit. T tokens: N blocks of b.

    Args:
        dtype: the type of products.
    """

    def __init__(self, store: KVStore, dtype: torch.dtype):
        self.store, self.dtype = store, dtype
        self._head_of_slot = index_of_slots(store.order)
        self._slot_of_head = self._head_of_slot.argsort()

    def scales(self) -> torch.Tensor:
        """Of keys and values, float32 [B, Hkv, T, 2]; where a row has no token, whatever."""
        table = self.store.table
        found = [p.scale.index_select(0, table.flatten()).unflatten(0, table.shape) for p in self.store.paged]
        scale = by_index(torch.cat(found, 2).transpose(1, 2), self._slot_of_head)
        return scale.repeat_interleave(self.store.block, 2)

    def scores(self, q: torch.Tensor) -> torch.Tensor:
        """q . k without the scales of keys: q [B, Hkv, R, D] -> [B, Hkv, R, T]."""
        q = by_index(q, self._head_of_slot)[:, None]
        blocks, block = self.store.table.shape[1], self.store.block
        score = q.new_empty(*q.shape[:1], *q.shape[2:4], blocks, block)
        for slots, part, pages, page in self._parts():
            own, codes = q[:, :, slots], self._codes(pages.k, page, pages.bits)
            if pages.bits < 8:
                step, zero = self._meta(pages, page, 0)
                found = (own * step) @ codes.mT + (own * zero).sum(-1, keepdim=True)
            else:
                found = own @ codes.mT
            score[:, slots, :, part] = found.permute(0, 2, 3, 1, 4)
        return by_index(score.flatten(3), self._slot_of_head)

    def weighted(self, weight: torch.Tensor, worth: torch.Tensor) -> torch.Tensor:
        """Sums of values: weight [B, Hkv, R, N, b], and what a block's are worth [B, Hkv, R, N] -> [B, Hkv, R, D]."""
        weight = by_index(in_value_order(weight), self._head_of_slot).permute(0, 3, 1, 2, 4)
        worth = by_index(worth, self._head_of_slot).permute(0, 3, 1, 2)[..., None]
        total = weight.new_zeros(weight.shape[0], *weight.shape[2:4], self.store.k_open.shape[3])
        for slots, part, pages, page in self._parts():
            own, codes = weight[:, part, slots], self._codes(pages.v, page, pages.bits)
            found = own @ codes.mT
            if pages.bits < 8:
                step, zero = self._meta(pages, page, 2)
                found = found * step + own.sum(-1, keepdim=True) * zero
            total[:, slots] += (found * worth[:, part, slots]).sum(1)
        return by_index(total, self._slot_of_head)

    def _parts(self) -> Iterator[tuple[slice, slice, PagedHeads, torch.Tensor]]:
        """Slots of one width, some blocks, the pages of that width, and those of the blocks, int64 [B x n]."""
        table, (_, _, _, dim) = self.store.table, self.store.k_open.shape
        first = 0
        for pages in self.store.paged:
            slots = slice(first, first + pages.k.shape[1])
            first = slots.stop
            step = max(1, CODES // (table.shape[0] * pages.k.shape[1] * self.store.block * dim))
            for begin in range(0, table.shape[1], step):
                yield slots, slice(begin, begin + step), pages, table[:, begin : begin + step].flatten()

    def _codes(self, packed: torch.Tensor, page: torch.Tensor, bits: int) -> torch.Tensor:
        """[B, n, S, b, D] of keys, [B, n, S, D, b] of values in VALUE_ORDER."""
        codes = packed.index_select(0, page)
        codes = codes if bits == 8 else half_merge(codes, bits)
        return codes.to(self.dtype).unflatten(0, (len(self.store.table), -1))

    def _meta(self, pages: PagedHeads, page: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Step and zero [B, n, S, 1, D] of keys (first: 0) or values (2)."""
        meta = pages.meta.index_select(0, page)[:, :, first : first + 2].to(self.dtype)
        step, zero = meta.unflatten(0, (len(self.store.table), -1)).split(1, 3)
        return step, zero
