"""What the tokens of a layer lie in: an open buffer for the first and the newest, a pool of pages for sealed blocks.

Open tokens are in INT8 with one scale per token and head; in a layer that has 16-bit heads unquantized, with scale 1.
A table says which row holds which pages.
"""

import operator
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from turbo_hf.cache.pass_mark import once, ordinary
from turbo_hf.layout import UNQUANTIZED, HeadGroups, PagedHeads, Width, empty_pages
from turbo_hf.ops.host_device import shared
from turbo_hf.ops.store.reference import sealed_tokens

GRAIN = 16
"""Tokens by which the buffer grows. Its capacity is at least one grain, so that no op sees a cache of capacity 0."""


class Tokens(NamedTuple):
    """Tokens with one scale each. k, v: int8 or 16-bit [..., H, N, D]; k_scale, v_scale: float32 [..., H, N]."""

    k: torch.Tensor
    k_scale: torch.Tensor
    v: torch.Tensor
    v_scale: torch.Tensor


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

    def append(self, new: Tokens, counts: list[int], held: list[int]) -> None:
        """Add the first `counts[r]` of row r's tokens [B, H, M, ...], behind the `held[r]` that it has."""
        k, k_scale, v, v_scale = new
        self.reserve(max(map(operator.add, held, counts)), held)
        place = torch.arange(k.shape[2], device=k.device)
        row, source = (place < shared(counts, k.device)[:, None]).nonzero().unbind(-1)
        target = shared(held, k.device)[row] + source
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

    def move(self, memory: tuple[torch.Tensor, ...], held: int) -> None:
        """To other memory, of this shape but for its capacity, which suffices for the `held` tokens of a row."""
        for old, new, dim in zip(self.tensors(), memory, (2, 3, 2, 2), strict=True):
            if new is not old:
                new.narrow(dim, 0, held).copy_(old.narrow(dim, 0, held))
        self.k, self.v, self.k_scale, self.v_scale = memory

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


class PageTable:
    """Which page of a pool holds which block of which row: one table for all layers that count alike.

    It is on the host, where it is read without waiting for the device; `on` is a copy there. It is never changed: what
    follows it is another table, in which each of these layers finds its pages. The argument `sealed` is that of
    `RowState`.

    numbers: int64 [B, blocks], the page of each block, 0 past a row's end. A page may belong to several rows (beams of
        one prompt). Those that no sealed block has are free.
    reserved: pages of each row: those of sealed blocks, and of blocks to come.
    pages: of the pool, used or not.
    keep: the pages of the pool before that stay, in their new order; None: all do, and new ones follow them.
    """

    def __init__(self, numbers: Any = None, reserved: Sequence[int] = (), pages: int = 0, keep: Any = None):
        self.numbers, self.reserved, self.pages, self.keep = numbers, list(reserved), pages, keep
        self._sent: dict[torch.device, torch.Tensor] = {}

    @once
    def with_rows(self, rows: int) -> "PageTable":
        """A table of so many rows, without pages."""
        return PageTable(np.zeros((rows, 0), dtype=np.int64), [0] * rows, 0)

    def on(self, device: torch.device) -> torch.Tensor:
        """int64 [B, blocks] on a device; at least as many blocks as the longest row has. Only to be read.

        It includes reserved pages, so that replayed launches find the pages of blocks to come.
        """
        sent = self._sent.get(device)
        return self._send(device) if sent is None else sent

    @ordinary
    def _send(self, device: torch.device) -> torch.Tensor:
        self.send_to(torch.empty(self.numbers.shape, dtype=torch.int64, device=device))
        return self._sent[device]

    def send_to(self, memory: torch.Tensor) -> None:
        """Let this be the copy on its device."""
        if self._sent.get(memory.device) is not memory:
            self._sent[memory.device] = memory.copy_(torch.from_numpy(self.numbers), non_blocking=True)

    def _in_use(self, sealed: Sequence[int]) -> Any:
        """Which places name a sealed block, bool [B, blocks]."""
        return np.arange(self.numbers.shape[1]) < np.array(sealed)[:, None]

    @once
    def reserve(self, sealed: list[int], ahead: list[int]) -> "PageTable":
        """With pages for the next `ahead[row]` blocks of each row."""
        if self.reserved == sealed and not any(ahead):
            return self
        in_use, free = self._in_use(sealed), np.ones(self.pages, dtype=bool)
        free[self.numbers[in_use]] = False
        missing = sum(ahead) - int(free.sum())
        # growth by 1/32: copying stays a constant cost per token, and unused pages stay below 5 %
        pages = self.pages + (max(missing, self.pages // 32) if missing > 0 else 0)
        found = np.concatenate((free.nonzero()[0], np.arange(self.pages, pages)))
        end = [held + more for held, more in zip(sealed, ahead, strict=True)]
        numbers = np.zeros((len(end), max(end)), dtype=np.int64)
        column, held = np.arange(max(end)), np.where(in_use, self.numbers, 0)[:, : max(end)]
        numbers[:, : held.shape[1]] = held
        new = (column >= np.array(sealed)[:, None]) & (column < np.array(end)[:, None])
        numbers[new] = found[: sum(ahead)]
        return PageTable(numbers, end, pages)

    def within(self, sealed: list[int], ahead: list[int], pages: int, blocks: int) -> "PageTable | None":
        """In a pool of so many pages, with so many columns: it has what `reserve` has, and as many pages more as there
        are. None: they are too few."""
        spare = pages - len(np.unique(self.numbers[self._in_use(sealed)])) - sum(ahead)
        if self.pages > pages or spare < 0 or any(x + y > blocks for x, y in zip(sealed, ahead, strict=True)):
            return None
        more = [min(blocks - held, n + spare // len(sealed)) for n, held in zip(ahead, sealed, strict=True)]
        found = PageTable(self.numbers, (), pages).reserve(sealed, more)
        numbers = np.zeros((len(sealed), blocks), dtype=np.int64)
        numbers[:, : found.numbers.shape[1]] = found.numbers
        return PageTable(numbers, found.reserved, pages)

    def compact(self, sealed: Sequence[int]) -> "PageTable":
        """Without the pages that hold none of the `sealed[row]` oldest blocks of each row."""
        in_use = self._in_use(sealed)
        used = np.unique(self.numbers[in_use])
        numbers = np.where(in_use, np.searchsorted(used, self.numbers), 0)[:, : max(sealed)]
        return PageTable(numbers, sealed, len(used), used)

    @once
    def trim(self, sealed: list[int], shrink: bool = True) -> "PageTable":
        """Without reserved pages. shrink: also `compact`, if it is worth it."""
        least = self.compact(sealed)
        if shrink and self.pages - least.pages > self.pages // 32:
            return least
        return self if self.reserved == sealed else PageTable(self.numbers, sealed, self.pages)

    @once
    def drop_front(self, sealed: list[int], counts: list[int], shrink: bool = True) -> "PageTable":
        """Without the oldest `counts[row]` blocks of each row. shrink: as in `trim`."""
        place = np.arange(self.numbers.shape[1]) + np.array(counts)[:, None]
        numbers = np.take_along_axis(self.numbers, place.clip(max=self.numbers.shape[1] - 1), 1)
        left = [held - count for held, count in zip(sealed, counts, strict=True)]
        return PageTable(numbers, left, self.pages).trim(left, shrink)

    @once
    def select_rows(self, sealed: list[int], rows: list[int]) -> "PageTable":
        """Row i becomes what row `rows[i]` was. Pages are shared, not copied."""
        left = [sealed[row] for row in rows]
        return PageTable(self.numbers[rows], left, self.pages).trim(left)

    @once
    @ordinary
    def select_rows_in_place(self, sealed: list[int], rows: list[int]) -> "PageTable":
        """As `select_rows`, of rows with as many blocks as those whose place they take. Every row keeps the pages that
        are reserved for it; copies on devices keep their address."""
        numbers = np.where(self._in_use(sealed), self.numbers[rows], self.numbers)
        after = PageTable(numbers, self.reserved, self.pages)
        after._sent, self._sent = self._sent, {}
        for sent in after._sent.values():
            sent.copy_(torch.from_numpy(numbers), non_blocking=True)
        return after


@lru_cache(maxsize=64)
def _no_pages(
    width: Width,
    slots: int,
    dim: int,
    block: int,
    device: torch.device,
    dtype_16bit: torch.dtype,
    rotary_dim: int | None,
) -> PagedHeads:
    """The empty pages that every pool begins with."""
    with torch.inference_mode(False):
        return empty_pages(width, 0, slots, dim, block, device, dtype_16bit, rotary_dim)


class PagePool:
    """Pages of all rows of a layer, which follow their `table`. The argument `sealed` is as in `PageTable`.

    rotary_dim: of a layer of latent attention, as in `layout.page_bytes`.
    """

    def __init__(
        self,
        table: PageTable,
        groups: HeadGroups,
        dim: int,
        block: int,
        device: torch.device,
        dtype_16bit: torch.dtype = torch.float16,
        rotary_dim: int | None = None,
    ):
        self.groups, self.dim, self.block, self.device = groups, dim, block, device
        self.dtype_16bit, self.rotary_dim, self.table = dtype_16bit, rotary_dim, table
        self.paged = tuple(
            _no_pages(width, slots, dim, block, device, dtype_16bit, rotary_dim) for width, slots in groups
        )

    @property
    def pages(self) -> int:
        """Pages allocated, used or not."""
        return self.paged[0].k.shape[0]

    def nbytes(self) -> tuple[int, int]:
        """Bytes of codes, and of their metadata: zeros, spans, sizes, table."""
        codes, reserved = sum(h.k.nbytes + h.v.nbytes for h in self.paged), self.table.reserved
        places = 8 * len(reserved) * (1 + max(reserved, default=0))
        return codes, sum(h.meta.nbytes + h.size.nbytes for h in self.paged) + places

    def kept(self, sealed: list[int]) -> tuple[list[list[torch.Tensor]], torch.Tensor]:
        """What `hold` takes: k, v, meta and size of the pages in use, for each width, and the table [B, most blocks]
        of their numbers."""
        table = self.table.compact(sealed)
        pick = shared(torch.from_numpy(table.keep), self.device)
        return [[x.index_select(0, pick) for x in heads[1:]] for heads in self.paged], torch.from_numpy(table.numbers)

    def hold(self, paged: tuple[PagedHeads, ...], table: torch.Tensor, sealed: list[int]) -> None:
        """Take these pages, all in use, and this table of them, in place of those of a new pool."""
        self.paged, self.table = paged, PageTable(table.numpy(), sealed, len(paged[0].k))

    def follow(self, table: PageTable) -> None:
        """Take a table that follows the pool's own, and the pages that it asks for: allocate, or release their memory.

        First the pages, since memory may run out.
        """
        if table.keep is not None and table is not self.table:
            self._resize(shared(torch.from_numpy(table.keep), self.device), 0)
        elif table.pages > self.pages:
            self._resize(range(self.pages), table.pages - self.pages)
        self.table = table

    def move(self, paged: tuple[PagedHeads, ...], table: PageTable, sent: torch.Tensor) -> None:
        """To the pages of another pool, at least as many, and a table `within` them. sent: memory for it."""
        if paged is not self.paged:
            for old, new in zip(self.paged, paged, strict=True):
                for source, target in zip(old[1:], new[1:], strict=True):
                    target[: len(source)] = source
        self.paged, self.table = paged, table
        table.send_to(sent)

    def _resize(self, keep: torch.Tensor | range, extra: int) -> None:
        """Keep the pages `keep`, in that order, and add `extra` uninitialized ones. A range: all, from the first on."""
        grown = []
        for old, (width, slots) in zip(self.paged, self.groups, strict=True):
            shape = (len(keep) + extra, slots, self.dim, self.block)
            new = empty_pages(width, *shape, self.device, self.dtype_16bit, self.rotary_dim)
            for source, target in zip(old[1:], new[1:], strict=True) if len(keep) else ():
                if isinstance(keep, range):
                    target[: len(keep)] = source
                else:
                    torch.index_select(source, 0, keep, out=target[: len(keep)])
            grown.append(new)
        self.paged = tuple(grown)

    def reopen(self, sealed: list[int], counts: list[int], order: torch.Tensor) -> tuple[Tokens, list[int]]:
        """Drop the newest `counts[row]` tokens of each row's blocks, including whole blocks.

        Returns the blocks that were cut, as the open buffer holds tokens, [B, Hkv, b, ...], and how many of each row's
        are left, from the first on.

        Exact at 8 and at 16 bit. Below, the open buffer's INT8 codes are in units of the token's size, so that numbers
        move by up to half of it.
        """
        cut = [-(-count // self.block) for count in counts]
        left = [n * self.block - count for n, count in zip(cut, counts, strict=True)]
        whole = [held - count for held, count in zip(sealed, cut, strict=True)]
        pages = [int(self.table.numbers[row, whole[row]]) if keep else 0 for row, keep in enumerate(left)]
        k, k_scale, v, v_scale = sealed_tokens(self.paged, order, shared(pages, self.device)[:, None])
        if UNQUANTIZED in dict(self.groups):
            k, v = k.to(self.dtype_16bit), v.to(self.dtype_16bit)
        else:
            k, v = k.round().to(torch.int8), v.round().to(torch.int8)
        self.follow(self.table.trim(whole))
        return Tokens(k, k_scale, v, v_scale), left
