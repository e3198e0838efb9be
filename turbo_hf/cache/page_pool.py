"""The sealed part of one layer's cache: a pool of pages, and the table of which row holds which pages."""

from collections.abc import Sequence
from functools import lru_cache

import torch

from turbo_hf.cache.open_buffer import Tokens
from turbo_hf.layout import UNQUANTIZED, PagedHeads, empty_pages
from turbo_hf.ops.host_device import nothing, send, shared
from turbo_hf.ops.store.quantize import unpack_blocks

TABLE_GRAIN = 16
"""Blocks by which the table grows at least."""


@lru_cache(maxsize=64)
def _no_pages(bits: int, slots: int, dim: int, block: int, device: torch.device, full: torch.dtype) -> PagedHeads:
    """What every pool begins with."""
    with torch.inference_mode(False):
        return empty_pages(bits, 0, slots, dim, block, device, full)


class PagePool:
    """Pages of all rows of a layer. A page may belong to several rows (beams of one prompt).

    The table is on the host, where it is read and written without waiting for the device; `device_table` is its copy.
    The lists that say what a row holds are replaced, never changed in place: layers whose rows hold the same may share
    them, and then also share their copies on the device.
    """

    def __init__(
        self,
        rows: int,
        groups: tuple[tuple[int, int], ...],
        dim: int,
        block: int,
        device: torch.device,
        full: torch.dtype = torch.float16,
    ):
        self.groups, self.dim, self.block, self.device = groups, dim, block, device
        self.full = full
        self.paged = tuple(_no_pages(bits, slots, dim, block, device, full) for bits, slots in groups)
        self.table = nothing((rows, 0), torch.int64, torch.device("cpu"))
        self.sealed = [0] * rows
        # pages of each row in the table: those that are sealed, and those that wait for a block
        self.reserved = [0] * rows
        self._free: list[int] = []
        self._device_table: torch.Tensor | None = nothing((rows, 0), torch.int64, device)
        self._device_sealed: torch.Tensor | None = None

    @property
    def pages(self) -> int:
        """Pages allocated, used or not."""
        return self.paged[0].k.shape[0]

    def device_table(self) -> torch.Tensor:
        """int64 [B, blocks] on the cache's device; at least as many blocks as the longest row has. Only to be read.

        With what is reserved: launches that are replayed find in it what lies beyond the longest row of today.
        """
        if self._device_table is None:
            held = self.table[:, : max(self.reserved, default=0)]
            self._device_table = shared(held, self.device).view(held.shape)
        return self._device_table

    def device_sealed(self) -> torch.Tensor:
        """int64 [B]: `sealed` on the cache's device. Only to be read, but after `unshare_sealed`."""
        if self._device_sealed is None:
            self._device_sealed = shared(self.sealed, self.device)
        return self._device_sealed

    def unshare_sealed(self) -> None:
        """Stop sharing `device_sealed` with other layers, for kernels that count in it."""
        self._device_sealed = send(self.sealed, self.device)

    def nbytes(self) -> tuple[int, int]:
        """Bytes of codes, and of their metadata: steps, zeros, scales, table."""
        codes = sum(h.k.nbytes + h.v.nbytes for h in self.paged)
        places = 8 * len(self.sealed) * (1 + max(self.reserved, default=0))
        return codes, sum(h.meta.nbytes + h.scale.nbytes for h in self.paged) + places

    def append(self, counts: Sequence[int]) -> None:
        """Pages for `counts[row]` more blocks of each row, for the caller to seal them to (`ops.append.seal_open`)."""
        self.reserve(counts)
        self.sealed = list(self.reserved)

    def reserve(self, ahead: Sequence[int]) -> None:
        """Pages for the next `ahead[row]` blocks of each row, in the table before kernels seal blocks to them."""
        self._release()
        self.reserved = self._enter(ahead, self._allocate(sum(ahead)))
        self._device_table = self._device_sealed = None

    def _enter(self, ahead: Sequence[int], pages: list[int]) -> list[int]:
        """`pages` to the table, `ahead[row]` of them behind those of each row; returns how many each row has then."""
        end = [held + count for held, count in zip(self.reserved, ahead, strict=True)]
        missing = max(end) - self.table.shape[1]
        if missing > 0:
            # doubling: the table is a thousandth of what it describes
            more = -(-max(missing, self.table.shape[1]) // TABLE_GRAIN) * TABLE_GRAIN
            self.table = torch.nn.functional.pad(self.table, (0, more))
        # by numpy, which shares its memory and takes less of the host
        table, first = self.table.numpy(), 0
        for row, (held, count) in enumerate(zip(self.reserved, ahead, strict=True)):
            table[row, held : held + count] = pages[first : first + count]
            first += count
        return end

    def trim(self) -> None:
        """Release the pages that hold no block, reserved or free, if it is worth it."""
        self._reclaim()

    def _release(self) -> None:
        """Take back the pages that no block was sealed to."""
        if self.reserved == self.sealed:
            return
        spans = [(row, n) for row in range(len(self.reserved)) for n in range(self.sealed[row], self.reserved[row])]
        where = torch.tensor(spans, device="cpu").T
        self._free += self.table[where[0], where[1]].tolist()
        self.reserved = list(self.sealed)

    def _allocate(self, count: int) -> list[int]:
        missing = count - len(self._free)
        if missing > 0:
            # growth by a thirty-second: copying stays a constant cost a token, the slack under 1.05 of what is sealed
            first, grow = self.pages, max(missing, self.pages // 32)
            self._resize(range(first), grow)
            self._free += range(first, first + grow)
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def _resize(self, keep: torch.Tensor | range, extra: int) -> None:
        """Keep the pages `keep`, in that order, and add `extra` uninitialized ones. A range: all, from the first on."""
        grown = []
        for old, (bits, slots) in zip(self.paged, self.groups, strict=True):
            shape = (len(keep) + extra, slots, self.dim, self.block)
            new = empty_pages(bits, *shape, self.device, self.full)
            for source, target in zip(old[1:], new[1:], strict=True) if len(keep) else ():
                if isinstance(keep, range):
                    target[: len(keep)] = source
                else:
                    torch.index_select(source, 0, keep, out=target[: len(keep)])
            grown.append(new)
        self.paged = tuple(grown)

    def drop_front(self, counts: list[int], shrink: bool = True) -> None:
        """Drop the oldest `counts[row]` blocks of each row. shrink: release memory, if it is worth it."""
        for row, count in enumerate(counts):
            if count:
                self.table[row, : self.sealed[row] - count] = self.table[row, count : self.sealed[row]].clone()
        self.sealed = [held - count for held, count in zip(self.sealed, counts, strict=True)]
        self._reclaim(shrink)

    def drop_back(self, counts: list[int]) -> None:
        """Drop the newest `counts[row]` blocks of each row."""
        self.sealed = [held - count for held, count in zip(self.sealed, counts, strict=True)]
        self._reclaim()

    def select_rows(self, rows: list[int]) -> None:
        """Row i becomes what row `rows[i]` was. Pages are shared, not copied."""
        self.table = self.table[rows]
        self.sealed = [self.sealed[row] for row in rows]
        self._reclaim()

    def _reclaim(self, shrink: bool = True) -> None:
        """Find the free pages. shrink: release them, if it is worth it."""
        held = torch.arange(self.table.shape[1], device="cpu") < torch.tensor(self.sealed, device="cpu")[:, None]
        used = self.table[held].unique()
        if shrink and self.pages - len(used) > self.pages // 32:
            # first what may find no memory
            self._resize(used.to(self.device, non_blocking=True), 0)
            self.table = torch.where(held, torch.searchsorted(used, self.table), 0)
            self._free = []
        else:
            free = torch.ones(self.pages, dtype=torch.bool, device="cpu")
            free[used] = False
            self._free = free.nonzero().flatten().tolist()
        self.reserved = list(self.sealed)
        self._device_table = self._device_sealed = None

    def reopen(self, counts: list[int], order: torch.Tensor) -> tuple[Tokens, list[int]]:
        """Drop the newest `counts[row]` tokens of each row's blocks, including whole blocks.

        Returns what is left of the blocks that were cut, exact: tokens [B, Hkv, M, ...], row r's from column
        `starts[r]` on; and `starts`.
        """
        cut = [-(-count // self.block) for count in counts]
        left = [n * self.block - count for n, count in zip(cut, counts, strict=True)]
        most = max(left)
        shape = (len(counts), order.shape[1], most, self.dim)
        opened = self.full if UNQUANTIZED in dict(self.groups) else torch.int8
        codes = torch.zeros(shape, dtype=opened, device=self.device)
        scale = torch.zeros(shape[:3], device=self.device)
        tokens = Tokens(codes, scale, codes.clone(), scale.clone())
        for row, keep in enumerate(left):
            if keep:
                parts = self.block_tokens(row, self.sealed[row] - cut[row], order)
                for x, part in zip(tokens, parts, strict=True):
                    x[row, :, most - keep :] = part[:, :keep]
        self.drop_back(cut)
        return tokens, [most - keep for keep in left]

    def block_tokens(self, row: int, block: int, order: torch.Tensor) -> Tokens:
        """The tokens of one sealed block [Hkv, b, ...] as the open buffer holds them, heads in the model's order."""
        at = int(self.table[row, block])
        keys, values, scales = [], [], []
        for pages in self.paged:
            page = PagedHeads(pages.bits, *(x[at : at + 1] for x in pages[1:]))
            k, v = unpack_blocks(page)
            keys.append(k[0])
            values.append(v[0])
            scales.append(pages.scale[at])
        slot = order[row].argsort()
        k, v, scale = (torch.cat(parts)[slot] for parts in (keys, values, scales))
        k_scale, v_scale = (s[:, None].expand(-1, self.block) for s in scale.unbind(-1))
        if UNQUANTIZED in dict(self.groups):
            k, v = ((x * s[..., None]).to(self.full) for x, s in ((k, k_scale), (v, v_scale)))
            k_scale = v_scale = torch.ones_like(k_scale)
        return Tokens(k, k_scale, v, v_scale)
