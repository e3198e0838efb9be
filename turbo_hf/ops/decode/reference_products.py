"""Products of a few queries with stored keys and values, whose codes are not dequantized for it.

A code c of a channel with span s and zero z stands for (c s + L z) / L, L = 2^bits - 1, in units of its token's size
(TurboAttention eq. 5). So L q . k = (q s) . c + L q . z, and L times the weighted sum of v is s times that of c, plus
L z times the sum of weights: sums of integers. Sizes are divided by L.

Codes of queries have 16 bit. Kernels need q s in 16 bit too, as two INT8 digits (`ops.kernel_unpack.folded`): it is
counted in units of 256, and so is L q . z, both rounded to the nearest integer, halves up.
"""

import torch

from turbo_hf.layout import KVStore, PagedHeads, half_merge, in_value_order
from turbo_hf.ops.store.reference_pages import by_index, index_of_slots

FOLD = 256
"""What products of queries with spans and zeros are divided by."""

CODES = 1 << 19
"""Codes that are unpacked at a time, so that they stay in a CPU's cache."""


class StoredProducts:
    """Keys and values of every row, none of them 16-bit: N sealed blocks of b, then the open tokens, in whole blocks.

    T is what all of them take, whether a row has so many or not.

    Args:
        dtype: the type of products.

    Attributes:
        tokens: T.
        opened: how many of these are places for open tokens.
    """

    def __init__(self, store: KVStore, dtype: torch.dtype):
        # blocks that no row has sealed are left out: sums must not depend on what a table has room for
        self.store = store._replace(table=store.table[:, : int(store.sealed.max())])
        self.dtype = dtype
        self._head_of_slot = index_of_slots(store.order)
        # heads that are stored in their own order are not looked up
        self._in_order = torch.equal(self._head_of_slot, torch.arange(store.order.numel(), device=store.order.device))
        self._slot_of_head = self._head_of_slot.argsort()
        self._sealed = self.store.table.shape[1] * store.block
        self._tail = -store.k_open.shape[2] % store.block
        self.opened = store.k_open.shape[2] + self._tail
        self.tokens = self._sealed + self.opened
        # slots of one width, some blocks, the pages of that width, and which of them: a slice, or int64 [B x n]
        self._parts: list[tuple[slice, slice, PagedHeads, slice | torch.Tensor]] = []
        table, first = self.store.table, 0
        for pages in store.paged:
            slots = slice(first, first + pages.k.shape[1])
            first = slots.stop
            step = max(1, CODES // (table.shape[0] * pages.k.shape[1] * store.block * store.k_open.shape[3]))
            for begin in range(0, table.shape[1], step):
                part = slice(begin, min(begin + step, table.shape[1]))
                self._parts.append((slots, part, pages, _pages(table[:, part])))
        # of keys and of values
        self._sizes = self._sizes_of_blocks() if self._sealed else None

    def place(self) -> torch.Tensor:
        """int64 [B, T]: the token's place in its row, -1 where there is none."""
        sealed, opened = self.store.sealed[:, None] * self.store.block, self.store.open_len[:, None]
        at = torch.arange(self.tokens, device=sealed.device)
        first = sealed - self._sealed
        return torch.where(
            at < self._sealed,
            torch.where(at < sealed, at, -1),
            torch.where(at - self._sealed < opened, at + first, -1),
        )

    def _sizes_of_blocks(self) -> torch.Tensor:
        """float32 [2, B, Hkv, blocks x b]: sizes over L."""
        page, parts = _pages(self.store.table), []
        for pages in self.store.paged:
            # a share of a query counts FOLD of its codes
            units = _levels(pages.bits) / (FOLD if pages.bits < 8 else 1), _levels(pages.value_bits)
            levels = torch.tensor(units, dtype=torch.float32, device=pages.size.device)
            parts.append(_taken(pages.size, page).float() / levels[:, None])
        size = torch.cat(parts, 1).unflatten(0, self.store.table.shape).transpose(1, 2)
        return (size if self._in_order else by_index(size, self._slot_of_head)).permute(3, 0, 1, 2, 4).flatten(3)

    def scales(self) -> torch.Tensor:
        """Of keys and of values, new float32 [2, B, Hkv, T]; where a row has no token, whatever."""
        parts = [torch.stack((self.store.k_scale, self.store.v_scale))]
        if self._sizes is not None:
            parts.insert(0, self._sizes)
        if self._tail:
            parts.append(parts[0].new_zeros(*parts[0].shape[:3], self._tail))
        return torch.cat(parts, 3) if len(parts) > 1 else parts[0]

    def scores(self, q: torch.Tensor) -> torch.Tensor:
        """q . k without the scales of keys: codes q [B, Hkv, R, D] -> [B, Hkv, R, T]."""
        block = self.store.block
        score: torch.Tensor = q.new_empty(*q.shape[:3], self.tokens)
        # in whole blocks, here and below, so that results do not depend on what else the buffer has room for
        score[..., self._sealed :] = q @ self._whole(self.store.k_open, 2).mT
        if not self._sealed:
            return score
        of_slot = (q if self._in_order else by_index(q, self._head_of_slot))[:, None]
        shares, half = of_slot / FOLD, of_slot.new_tensor(0.5)
        sealed = score[..., : self._sealed] if self._in_order else q.new_empty(*q.shape[:3], self._sealed)
        tiles = sealed.unflatten(-1, (-1, block))
        for slots, part, pages, page in self._parts:
            codes = self._codes(pages.k, page, pages.bits)
            if pages.bits < 8:
                zero, span = self._ranges(pages.meta[:, :, :2], page, pages.bits)
                folded = torch.addcmul(half, shares[:, :, slots], span).floor_()
                of_zeros = (shares[:, :, slots] * zero).sum(-1, keepdim=True).add_(half).floor_()
                products = (folded @ codes.mT).add_(of_zeros)
            else:
                products = of_slot[:, :, slots] @ codes.mT
            tiles[:, slots, :, part] = products.permute(0, 2, 3, 1, 4)
        if not self._in_order:
            score[..., : self._sealed] = by_index(sealed, self._slot_of_head)
        return score

    def weighted(self, weight: torch.Tensor, worth: torch.Tensor) -> torch.Tensor:
        """Sums of values: weight [B, Hkv, R, T/b, b], what a block's are worth [B, Hkv, R, T/b] -> [B, Hkv, R, D]."""
        store, blocks = self.store, self.store.table.shape[1]
        values = self._whole(store.v_open, 3).unflatten(3, (-1, store.block)).permute(0, 1, 3, 4, 2)
        tiles = weight[..., blocks:, :].transpose(2, 3) @ values
        total: torch.Tensor = tiles.mul_(worth[..., blocks:, None].transpose(2, 3)).sum(2)
        if not self._sealed:
            return total
        weight, worth = in_value_order(weight[..., :blocks, :]), worth[..., :blocks]
        if not self._in_order:
            weight, worth = by_index(weight, self._head_of_slot), by_index(worth, self._head_of_slot)
        weight, worth = weight.permute(0, 3, 1, 2, 4), worth.permute(0, 3, 1, 2)[..., None]
        sealed = torch.zeros_like(total)
        for slots, part, pages, page in self._parts:
            share, codes = weight[:, part, slots], self._codes(pages.v, page, pages.value_bits)
            products = share @ codes.mT
            if pages.value_bits < 8:
                zero, span = self._ranges(pages.meta[:, :, -2:], page, pages.value_bits)
                products = products.mul_(span).add_(share.sum(-1, keepdim=True) * zero)
            sealed[:, slots].add_(products.mul_(worth[:, part, slots]).sum(1))
        return total.add_(sealed if self._in_order else by_index(sealed, self._slot_of_head))

    def _whole(self, codes: torch.Tensor, dim: int) -> torch.Tensor:
        """Open codes as numbers, in whole blocks of tokens, which are dimension `dim` of 4."""
        numbers = codes.to(self.dtype)
        return torch.nn.functional.pad(numbers, (0, 0) * (3 - dim) + (0, self._tail)) if self._tail else numbers

    def _codes(self, packed: torch.Tensor, page: slice | torch.Tensor, bits: int) -> torch.Tensor:
        """[B, n, S, b, D] of keys, [B, n, S, D, b] of values in VALUE_ORDER."""
        codes = _taken(packed, page)
        codes = (codes if bits == 8 else half_merge(codes, bits)).to(self.dtype)
        return codes.view(len(self.store.table), -1, *codes.shape[1:])

    def _ranges(self, lines: torch.Tensor, page: slice | torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
        """L times the zero, and the span, [B, n, S, 1, D], of these two of the lines of `meta` [P, S, 2, D]."""
        lines = _taken(lines, page)
        zero, span = lines.unflatten(0, (len(self.store.table), -1)).split(1, 3)
        return zero.to(self.dtype).mul_(_levels(bits)), span.view(torch.uint8).to(self.dtype)


def _levels(bits: int) -> int:
    """What sums of codes of `bits` bits are to be divided by."""
    return 2**bits - 1 if bits < 8 else 1


def _pages(table: torch.Tensor) -> slice | torch.Tensor:
    """The pages of a table [B, n]: a slice if they follow each other, which is a view and not a copy."""
    page = table.flatten()
    first = int(page[0]) if page.numel() else 0
    follow = torch.equal(page, torch.arange(first, first + page.numel(), device=page.device))
    return slice(first, first + page.numel()) if follow else page


def _taken(x: torch.Tensor, page: slice | torch.Tensor) -> torch.Tensor:
    return x[page] if isinstance(page, slice) else x.index_select(0, page)
