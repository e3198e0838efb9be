"""The sealed part of one layer's cache: a pool of pages, and the table of which row holds which pages."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from turbo_hf.cache.guards import ordinary
from turbo_hf.cache.open_buffer import Tokens
from turbo_hf.layout import UNQUANTIZED, HeadGroups, PagedHeads, Width, empty_pages, narrowed
from turbo_hf.ops.host_device import nothing, shared
from turbo_hf.ops.store.reference_pages import reference_unpack_blocks, token_sizes
from turbo_hf.parallel.context import WHOLE, ContextRanks

TABLE_GRAIN = 16
"""Blocks by which the table grows at least."""


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
    """Pages of all rows of a layer. A page may belong to several rows (beams of one prompt).

    The table is on the host, where it is read and written without waiting for the device; `device_table` is its copy.
    `RowState` counts the sealed blocks: the argument `sealed` is its `pages` before the call.

    rotary_dim: of a layer of latent attention, as in `layout.page_bytes`.
    """

    def __init__(
        self,
        rows: int,
        groups: HeadGroups,
        dim: int,
        block: int,
        device: torch.device,
        dtype_16bit: torch.dtype = torch.float16,
        rotary_dim: int | None = None,
    ):
        self.groups, self.dim, self.block, self.device = groups, dim, block, device
        self.dtype_16bit, self.rotary_dim = dtype_16bit, rotary_dim
        self.paged = tuple(
            _no_pages(width, slots, dim, block, device, dtype_16bit, rotary_dim) for width, slots in groups
        )
        self.table = nothing((rows, 0), torch.int64, torch.device("cpu"))
        # pages of each row in the table: sealed ones, and those reserved for blocks to come
        self.reserved = [0] * rows
        self._free: list[int] = []
        # whether rows have dropped pages that `_free` does not name yet
        self._dropped = False
        # whether the device's table is this pool's alone, and keeps its address while rows are reordered
        self._own_table = False
        self._device_table: torch.Tensor | None = nothing((rows, 0), torch.int64, device)

    @property
    def pages(self) -> int:
        """Pages allocated, used or not."""
        return self.paged[0].k.shape[0]

    def device_table(self) -> torch.Tensor:
        """int64 [B, blocks] on the cache's device; at least as many blocks as the longest row has. Only to be read.

        It includes reserved pages, so that replayed launches find the pages of blocks to come.
        """
        if self._device_table is None:
            sent = self._sent_table()
            self._device_table = ordinary(sent.clone)() if self._own_table else sent
        return self._device_table

    def _sent_table(self) -> torch.Tensor:
        table = self.table[:, : max(self.reserved, default=0)]
        return shared(table, self.device).view(table.shape)

    def nbytes(self) -> tuple[int, int]:
        """Bytes of codes, and of their metadata: zeros, spans, sizes, table."""
        codes = sum(h.k.nbytes + h.v.nbytes for h in self.paged)
        places = 8 * len(self.reserved) * (1 + max(self.reserved, default=0))
        return codes, sum(h.meta.nbytes + h.size.nbytes for h in self.paged) + places

    def reserve(self, sealed: list[int], ahead: Sequence[int]) -> None:
        """Pages for the next `ahead[row]` blocks of each row, in the table before blocks are sealed to them."""
        if self._dropped:
            self.trim(sealed, shrink=False)
        self._release(sealed)
        self.reserved = self._enter(ahead, self._allocate(sum(ahead)))
        self._device_table = None

    def _enter(self, ahead: Sequence[int], pages: list[int]) -> list[int]:
        """Append `ahead[row]` of `pages` to each row of the table; returns how many pages each row then has."""
        end = [held + count for held, count in zip(self.reserved, ahead, strict=True)]
        missing = max(end) - self.table.shape[1]
        if missing > 0:
            # doubling is affordable: the table is a thousandth of the pages
            more = -(-max(missing, self.table.shape[1]) // TABLE_GRAIN) * TABLE_GRAIN
            self.table = torch.nn.functional.pad(self.table, (0, more))
        # NumPy shares the memory, and takes less time on the host
        table, first = self.table.numpy(), 0
        for row, (held, count) in enumerate(zip(self.reserved, ahead, strict=True)):
            table[row, held : held + count] = pages[first : first + count]
            first += count
        return end

    def _in_use(self, sealed: list[int]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Which places of the table name a sealed block, bool [B, blocks]; and the pages that they name, each once."""
        table = self.table.numpy()
        in_use = np.arange(table.shape[1]) < np.array(sealed)[:, None]
        return in_use, np.unique(table[in_use])

    def kept(self, sealed: list[int]) -> tuple[list[list[torch.Tensor]], torch.Tensor]:
        """What `hold` takes: k, v, meta and size of the pages in use, for each width, and the table [B, most blocks]
        of their numbers."""
        in_use, used = self._in_use(sealed)
        pick = torch.from_numpy(used).to(self.device)
        pages = [[x.index_select(0, pick) for x in heads[1:]] for heads in self.paged]
        table = np.where(in_use, np.searchsorted(used, self.table.numpy()), 0)[:, : max(sealed)]
        return pages, torch.from_numpy(table)

    def hold(self, paged: tuple[PagedHeads, ...], table: torch.Tensor, sealed: list[int]) -> None:
        """Take these pages, all in use, and this table of them, in place of those of a new pool."""
        self.paged, self.table, self.reserved, self._device_table = paged, table, list(sealed), None

    def trim(self, sealed: list[int], shrink: bool = True) -> None:
        """Free the pages that hold none of the `sealed[row]` oldest blocks of each row. shrink: release their memory,
        if it is worth it."""
        table = self.table.numpy()
        in_use, used = self._in_use(sealed)
        if shrink and self.pages - len(used) > self.pages // 32:
            # first, since it may run out of memory
            self._resize(torch.from_numpy(used).to(self.device, non_blocking=True), 0)
            self.table = torch.from_numpy(np.where(in_use, np.searchsorted(used, table), 0))
            self._free = []
        else:
            free = np.ones(self.pages, dtype=bool)
            free[used] = False
            self._free = np.flatnonzero(free).tolist()
        self._dropped = False
        self.reserved = list(sealed)
        self._device_table = None

    def _release(self, sealed: list[int]) -> None:
        """Take back reserved pages to which no block was sealed."""
        if self.reserved == sealed:
            return
        spans = [(row, n) for row in range(len(sealed)) for n in range(sealed[row], self.reserved[row])]
        where = torch.tensor(spans, device="cpu").T
        self._free += self.table[where[0], where[1]].tolist()
        self.reserved = list(sealed)

    def _allocate(self, count: int) -> list[int]:
        missing = count - len(self._free)
        if missing > 0:
            # growth by 1/32: copying stays a constant cost per token, and unused pages stay below 5 %
            first, grow = self.pages, max(missing, self.pages // 32)
            self._resize(range(first), grow)
            self._free += range(first, first + grow)
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def _resize(self, keep: torch.Tensor | range, extra: int) -> None:
        """Keep the pages `keep`, in that order, and add `extra` uninitialized ones. A range: all, from the first on."""
        grown = []
        for old, (width, slots) in zip(self.paged, self.groups, strict=True):
            shape = (len(keep) + extra, slots, self.dim, self.block)
            new = empty_pages(width, *shape, self.device, self.dtype_16bit, self.rotary_dim)
            self._keep(old[1:], new[1:], keep)
            grown.append(new)
        self.paged = tuple(grown)

    @staticmethod
    def _keep(old: Sequence[torch.Tensor], new: Sequence[torch.Tensor], keep: torch.Tensor | range) -> None:
        """Copy the pages `keep` of each tensor to the front of its successor."""
        for source, target in zip(old, new, strict=True) if len(keep) else ():
            if isinstance(keep, range):
                target[: len(keep)] = source
            else:
                torch.index_select(source, 0, keep, out=target[: len(keep)])

    def drop_front(self, sealed: list[int], counts: Sequence[int], shrink: bool = True) -> None:
        """Drop the oldest `counts[row]` blocks of each row. shrink: as in `trim`."""
        for row, count in enumerate(counts):
            if count:
                self.table[row, : sealed[row] - count] = self.table[row, count : sealed[row]].clone()
        self.trim([held - count for held, count in zip(sealed, counts, strict=True)], shrink)

    def select_rows(self, sealed: list[int], rows: list[int]) -> None:
        """Row i becomes what row `rows[i]` was. Pages are shared, not copied."""
        self.table = self.table[rows]
        self.trim([sealed[row] for row in rows])

    def select_rows_in_place(self, sealed: list[int], rows: list[int]) -> None:
        """As `select_rows`, of rows with as many blocks as those whose place they take. Every row keeps the pages that
        are reserved for it; the device's table keeps its address, from the second time on."""
        table = self.table.numpy()
        held = np.arange(table.shape[1]) < np.array(sealed)[:, None]
        self.table = torch.from_numpy(np.where(held, table[rows], table))
        self._dropped = True
        if self._own_table and self._device_table is not None:
            self._device_table.copy_(self._sent_table())
        else:
            self._own_table, self._device_table = True, None

    def reopen(
        self, sealed: list[int], counts: list[int], order: torch.Tensor, context: ContextRanks = WHOLE
    ) -> tuple[Tokens, list[int]]:
        """Drop the newest `counts[row]` tokens of each row's blocks, including whole blocks.

        context: which blocks are in this process; `sealed` and `counts` are of the blocks of all.

        Returns what is left of the blocks that were cut, as `block_tokens` has it: tokens [B, Hkv, M, ...], row r's
        from column `starts[r]` on; and `starts`.
        """
        cut = [-(-count // self.block) for count in counts]
        left = [n * self.block - count for n, count in zip(cut, counts, strict=True)]
        most = max(left)
        shape = (len(counts), order.shape[1], most, self.dim)
        opened = self.dtype_16bit if UNQUANTIZED in dict(self.groups) else torch.int8
        codes = torch.zeros(shape, dtype=opened, device=self.device)
        scale = torch.zeros(shape[:3], device=self.device)
        values = codes.new_zeros(*shape[:3], self.rotary_dim or self.dim)
        tokens = Tokens(codes, scale, values, scale.clone())
        for row, keep in enumerate(left):
            block = sealed[row] - cut[row]
            if keep and context.holds(block):
                parts = self.block_tokens(row, context.own(block), order)
                for x, part in zip(tokens, parts, strict=True):
                    x[row, :, most - keep :] = part[:, :keep]
        whole = [held - count for held, count in zip(sealed, cut, strict=True)]
        self.trim(context.pages(whole))
        return Tokens(*map(context.summed, tokens)), [most - keep for keep in left]

    def block_tokens(self, row: int, block: int, order: torch.Tensor) -> Tokens:
        """The tokens of one sealed block [Hkv, b, ...] as the open buffer holds them, heads in the model's order.

        Exact at 8 and at 16 bit. Below, the open buffer's INT8 codes are in units of the token's size, so that numbers
        move by up to half of it.
        """
        at, wide = int(self.table[row, block]), UNQUANTIZED in dict(self.groups)
        keys, values, sizes = [], [], []
        for pages in self.paged:
            page = PagedHeads(pages.bits, *(x[at : at + 1] for x in pages[1:]))
            k, v = reference_unpack_blocks(page)
            keys.append(k[0].float())
            values.append(v[0].float())
            sizes.append(token_sizes(page)[0])
        slot = order[row].argsort()
        k, v, size = (torch.cat(parts)[slot] for parts in (keys, values, sizes))
        k_size, v_size = size.unbind(1)
        if wide:
            k, v = (narrowed(x * s[..., None], self.dtype_16bit) for x, s in ((k, k_size), (v, v_size)))
            one = torch.ones_like(k_size)
            return Tokens(k, one, v, one)
        return Tokens(k.round().to(torch.int8), k_size, v.round().to(torch.int8), v_size)
