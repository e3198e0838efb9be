"""Products of a few queries with stored keys and values, whose codes are not dequantized for it.

A code c of a channel with step s and zero z stands for c s + z (TurboAttention eq. 5). So q . k = (q s) . c + q . z,
and the weighted sum of v is s times that of c, plus z times the sum of weights: all exact integers, also in float32.
"""

from collections.abc import Iterator

import torch

from turbo_hf.layout import KVStore, PagedHeads, half_merge, in_value_order
from turbo_hf.ops.store.reference_pages import by_index, index_of_slots

CODES = 1 << 19
"""Codes that are unpacked at a time, so that they stay in a CPU's cache."""


class StoredProducts:
    """Keys and values of every row, none of them 16-bit: N sealed blocks of b, then the open tokens, in whole blocks.

    T is what all of them take, whether a row has so many or not.

    Args:
        dtype: the type of products.
    """

    def __init__(self, store: KVStore, dtype: torch.dtype):
        # blocks that no row has sealed are left out: sums must not depend on what a table has room for
        self.store = store._replace(table=store.table[:, : int(store.sealed.max())])
        self.dtype = dtype
        self._head_of_slot = index_of_slots(store.order)
        self._slot_of_head = self._head_of_slot.argsort()
        self._sealed = self.store.table.shape[1] * store.block
        self._tail = -store.k_open.shape[2] % store.block

    def place(self) -> torch.Tensor:
        """int64 [B, T]: the token's place in its row, -1 where there is none."""
        sealed, opened = self.store.sealed[:, None] * self.store.block, self.store.open_len[:, None]
        at = torch.arange(self._sealed + self.store.k_open.shape[2] + self._tail, device=sealed.device)
        first = sealed - self._sealed
        return torch.where(
            at < self._sealed,
            torch.where(at < sealed, at, -1),
            torch.where(at - self._sealed < opened, at + first, -1),
        )

    def scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of keys and of values, float32 [B, Hkv, T]; where a row has no token, whatever."""
        store, table = self.store, self.store.table
        pad = torch.nn.functional.pad
        opened = (pad(store.k_scale, (0, self._tail)), pad(store.v_scale, (0, self._tail)))
        if not self._sealed:
            return opened
        parts = [p.scale.index_select(0, table.flatten()).unflatten(0, table.shape) for p in store.paged]
        scale = torch.cat(parts, 2) if len(parts) > 1 else parts[0]
        sealed = by_index(scale.transpose(1, 2), self._slot_of_head).repeat_interleave(store.block, 2)
        k, v = (torch.cat(both, 2) for both in zip(sealed.unbind(-1), opened, strict=True))
        return k, v

    def scores(self, q: torch.Tensor) -> torch.Tensor:
        """q . k without the scales of keys: q [B, Hkv, R, D] -> [B, Hkv, R, T]."""
        # in whole blocks, here and below, so that results do not depend on what else the buffer has room for
        opened = q @ torch.nn.functional.pad(self.store.k_open.to(self.dtype), (0, 0, 0, self._tail)).mT
        if not self._sealed:
            return opened
        q = by_index(q, self._head_of_slot)[:, None]
        blocks, block = self.store.table.shape[1], self.store.block
        score = q.new_empty(*q.shape[:1], *q.shape[2:4], blocks, block)
        for slots, part, pages, page in self._parts():
            query, codes = q[:, :, slots], self._codes(pages.k, page, pages.bits)
            if pages.bits < 8:
                step, zero = self._meta(pages, page, 0)
                products = (query * step) @ codes.mT + (query * zero).sum(-1, keepdim=True)
            else:
                products = query @ codes.mT
            score[:, slots, :, part] = products.permute(0, 2, 3, 1, 4)
        return torch.cat((by_index(score.flatten(3), self._slot_of_head), opened), 3)

    def weighted(self, weight: torch.Tensor, worth: torch.Tensor) -> torch.Tensor:
        """Sums of values: weight [B, Hkv, R, T/b, b], what a block's are worth [B, Hkv, R, T/b] -> [B, Hkv, R, D]."""
        store, blocks = self.store, self.store.table.shape[1]
        opened = (weight[..., blocks:, :] * worth[..., blocks:, None]).flatten(3)
        total = opened @ torch.nn.functional.pad(store.v_open.to(self.dtype), (0, self._tail)).mT
        if not self._sealed:
            return total
        weight = by_index(in_value_order(weight[..., :blocks, :]), self._head_of_slot).permute(0, 3, 1, 2, 4)
        worth = by_index(worth[..., :blocks], self._head_of_slot).permute(0, 3, 1, 2)[..., None]
        sealed = torch.zeros_like(total)
        for slots, part, pages, page in self._parts():
            share, codes = weight[:, part, slots], self._codes(pages.v, page, pages.value_bits)
            products = share @ codes.mT
            if pages.value_bits < 8:
                step, zero = self._meta(pages, page, pages.meta.shape[2] - 2)
                products = products * step + share.sum(-1, keepdim=True) * zero
            sealed[:, slots] += (products * worth[:, part, slots]).sum(1)
        return total + by_index(sealed, self._slot_of_head)

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
        numbers: torch.Tensor = codes.to(self.dtype).unflatten(0, (len(self.store.table), -1))
        return numbers

    def _meta(self, pages: PagedHeads, page: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Step and zero [B, n, S, 1, D] of keys (`first`: 0) or values (2, or 0 beside keys of 8 bit)."""
        meta = pages.meta.index_select(0, page)[:, :, first : first + 2].to(self.dtype)
        step, zero = meta.unflatten(0, (len(self.store.table), -1)).split(1, 3)
        return step, zero
