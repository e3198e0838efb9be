"""The index of one layer: the bucket of every cached token, by position in its row."""

from collections.abc import Mapping
from typing import Any

import torch

from turbo_hf.ops.host_device import nothing, shared
from turbo_hf.sparse.selectors import Centroids, Selector

GRAIN = 64
"""Minimum number of tokens by which the index grows."""

SPARE = 64
"""Tokens before the always-read newest ones that stay in time order too: this many can be cropped."""


class BucketIndex:
    """Buckets of all rows: int16 [B, Hkv, cap] in `buckets`; -1 where unknown.

    A token keeps its bucket, and also its place, with one exception: when a prompt is sealed, the tokens of each head
    that are not always read are sorted by bucket (`sort`), here and in the pages, so that a step reads whole blocks of
    what it visits. The smallest and largest bucket of such blocks are in `spans`, int16 [B, Hkv, blocks, 2]; -1 where
    unknown. Anything past a row's end will be overwritten.

    Args:
        rows, heads, device: of the layer.
        block: tokens per block.
        selector: what assigns the buckets; unless it is `Centroids`, keys have none.
    """

    def __init__(self, rows: int, heads: int, block: int, selector: Selector | None, device: torch.device):
        self.block, self.selector = block, selector
        # False: this layer reads all keys, or none by bucket
        self.bucketed = isinstance(selector, Centroids)
        self.buckets = nothing((rows, heads, 0), torch.int16, device)
        self.spans = nothing((rows, heads, 0, 2), torch.int16, device)
        self._all_known = True
        # for each row, the blocks in bucket order
        self.sorted_blocks: list[list[range]] = [[] for _ in range(rows)]

    @property
    def sorts(self) -> bool:
        """Whether tokens can be sorted by bucket: each has one, and it was always known."""
        return self.bucketed and self._all_known

    def append(self, new: torch.Tensor | None, held: list[int], tokens: int, starts: list[int] | None) -> None:
        """Note `tokens` new tokens, row r's from column `starts[r]` on, behind the `held[r]` that it holds.

        new: int16 [B, Hkv, tokens]; None: their buckets are not known.
        """
        if not self.bucketed or not tokens:
            return
        begin = [0] * len(held) if starts is None else starts
        after = [n + tokens - start for n, start in zip(held, begin, strict=True)]
        self.reserve(max(after))
        self._all_known &= new is not None
        new = self._known(new, tokens)
        if len(set(held)) == 1 and not any(begin):
            self.buckets[..., held[0] : after[0]] = new
            return
        rows = [row for row, start in enumerate(begin) if start < tokens]
        row, first, end = (shared([x[r] for r in rows], new.device)[:, None] for x in (range(len(held)), begin, held))
        # padding columns repeat the first token: finding the others would mean waiting for the device
        source = torch.maximum(torch.arange(tokens, device=new.device), first)
        self.buckets[row, :, end + source - first] = new[row, :, source]

    def noted(self, new: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What `StoreOps.append_step` takes to note one new token of each row; None without buckets."""
        return (self.buckets, self._known(new, 1)) if self.bucketed else None

    def _known(self, new: torch.Tensor | None, tokens: int) -> torch.Tensor:
        return self.buckets.new_full((*self.buckets.shape[:2], tokens), -1) if new is None else new

    def reserve(self, needed: int) -> None:
        """Grow to a capacity of `needed` tokens per row."""
        capacity = self.buckets.shape[-1]
        if self.bucketed and needed > capacity:
            # by a thirty-second, as pages grow
            more = max(needed - capacity, capacity // 32)
            self.buckets = torch.nn.functional.pad(self.buckets, (0, -(-more // GRAIN) * GRAIN), value=-1)

    def sortable(self, sealed: list[int], held: list[int], turn_start: list[int]) -> list[range]:
        """The unsealed blocks of each row that can be sorted by bucket; none where there are fewer than two.

        Left out are blocks of always-read tokens, and the first `turn_start[row]` of the `held[row]` tokens.
        """
        if self.selector is None or not self.sorts:
            return [range(0)] * len(held)
        sink, found = self.selector.config.sink_tokens, []
        for done, end, still in zip(sealed, self.outside(held), turn_start, strict=True):
            begin = max(done, -(-max(sink, still) // self.block))
            found.append(range(begin, end) if end - begin > 1 else range(0))
        return found

    def outside(self, held: list[int]) -> list[int]:
        """Blocks of rows of `held` tokens without one of the newest, which are always read or may be cropped."""
        newest = SPARE + (0 if self.selector is None else self.selector.window)
        return [max(0, tokens - newest) // self.block for tokens in held]

    def sort(self, row: int, blocks: range) -> torch.Tensor:
        """Sort the buckets of these blocks; returns the token that each place takes, int64 [Hkv, tokens]."""
        at = slice(blocks.start * self.block, blocks.stop * self.block)
        own, order = self.buckets[row, :, at].sort(stable=True, dim=-1)
        self.buckets[row, :, at] = own
        missing = blocks.stop - self.spans.shape[2]
        if missing > 0:
            self.spans = torch.nn.functional.pad(self.spans, (0, 0, 0, missing), value=-1)
        ends = torch.stack((own[:, :: self.block], own[:, self.block - 1 :: self.block]), -1)
        self.spans[row, :, blocks.start : blocks.stop] = ends
        self.sorted_blocks[row] = [*self.sorted_blocks[row], blocks]
        return order

    def require(self, row: int, tokens: int, call: str) -> None:
        """ValueError, which begins with `call`, unless the first `tokens` of a row can be all that is left of it.

        They cannot if that would keep only a part of blocks sorted together, or if the newest of them, which are always
        read, would not be in time order.
        """
        window = 0 if self.selector is None else self.selector.window
        for blocks in self.sorted_blocks[row]:
            begin, end = blocks.start * self.block, blocks.stop * self.block
            if begin < tokens < end + window - 1:
                raise ValueError(
                    f"{call} leaves {tokens} tokens of row {row}. Its tokens {begin} to {end} stand in the order of "
                    f"their buckets: leave at most {begin} tokens or at least {end + window - 1}, or use a new cache."
                )

    def cut(self, left: list[int]) -> None:
        """Drop everything after the first `left[row]` tokens of each row."""
        for row, tokens in enumerate(left):
            self.sorted_blocks[row] = [
                blocks for blocks in self.sorted_blocks[row] if blocks.start * self.block < tokens
            ]
            self.spans[row, :, tokens // self.block :] = -1

    def trim(self, held: int) -> None:
        """Shrink to a capacity of `held` tokens per row, if that frees enough memory."""
        capacity = -(-held // GRAIN) * GRAIN
        if self.buckets.shape[-1] - capacity > capacity // 32:
            self.buckets = self.buckets[..., :capacity].clone()

    def select_rows(self, rows: list[int], index: torch.Tensor) -> None:
        """Row i becomes what row `rows[i]` was; index: the same on the index's device."""
        self.buckets, self.spans = self.buckets[index], self.spans[index]
        self.sorted_blocks = [list(self.sorted_blocks[row]) for row in rows]

    def kept(self, held: int) -> dict[str, Any]:
        """What `hold` takes: the buckets of `held` tokens per row, without capacity for tokens to come."""
        capacity = min(self.buckets.shape[-1], -(-held // GRAIN) * GRAIN)
        buckets = self.buckets[..., :capacity]
        blocks = [[[each.start, each.stop] for each in row] for row in self.sorted_blocks]
        return {"buckets": buckets, "spans": self.spans, "known": self._all_known, "sorted": blocks}

    def hold(self, kept: Mapping[str, Any]) -> None:
        """Take what `kept` returned in place of what a new index has."""
        self.buckets, self.spans, self._all_known = kept["buckets"], kept["spans"], kept["known"]
        self.sorted_blocks = [[range(*each) for each in row] for row in kept["sorted"]]

    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.buckets.nbytes + self.spans.nbytes
