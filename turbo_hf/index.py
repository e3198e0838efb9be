"""The index of one layer: the bucket of every cached token, by place in its row."""

import torch

from turbo_hf.transfer import send

GRAIN = 64
"""Tokens by which the index grows, at least."""


class BucketIndex:
    """Buckets of all rows: int16 [B, Hkv, tables, cap] at `buckets`; -1 where none is known.

    Tokens have their bucket for life and a place that never moves, so that sealing a block changes nothing here, and
    dropping the newest tokens neither: what lies past a row's end is written again.
    """

    def __init__(self, rows: int, heads: int, tables: int, device: torch.device):
        self.buckets = torch.empty(rows, heads, tables, 0, dtype=torch.int16, device=device)

    @property
    def tables(self) -> int:
        """Buckets of a token; 0: this layer reads all keys, or none by its bucket."""
        return self.buckets.shape[2]

    def append(self, new: torch.Tensor | None, held: list[int], tokens: int, starts: list[int] | None) -> None:
        """Note `tokens` new tokens, row r's from column `starts[r]` on, behind the `held[r]` that it holds.

        new: int16 [B, Hkv, tables, tokens]; None: their buckets are not known.
        """
        if not self.tables or not tokens:
            return
        begin = [0] * len(held) if starts is None else starts
        after = [n + tokens - start for n, start in zip(held, begin, strict=True)]
        self.reserve(max(after))
        new = self._known(new, tokens)
        if len(set(held)) == 1 and not any(begin):
            self.buckets[..., held[0] : after[0]] = new
            return
        rows = [row for row, start in enumerate(begin) if start < tokens]
        row, first, end = (send([x[r] for r in rows], new.device)[:, None] for x in (range(len(held)), begin, held))
        # columns of padding repeat the first token: to find the others would be to wait for the device
        source = torch.maximum(torch.arange(tokens, device=new.device), first)
        self.buckets[row, :, :, end + source - first] = new[row, :, :, source]

    def noted(self, new: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What `ops.append.append_step` takes to note one new token of each row; None without tables."""
        return (self.buckets, self._known(new, 1)) if self.tables else None

    def _known(self, new: torch.Tensor | None, tokens: int) -> torch.Tensor:
        return self.buckets.new_full((*self.buckets.shape[:3], tokens), -1) if new is None else new

    def reserve(self, needed: int) -> None:
        """Room for `needed` tokens of a row in all."""
        room = self.buckets.shape[-1]
        if self.tables and needed > room:
            # by a thirty-second, as pages grow
            more = max(needed - room, room // 32)
            self.buckets = torch.nn.functional.pad(self.buckets, (0, -(-more // GRAIN) * GRAIN), value=-1)

    def sizes(self, count: int, tokens: torch.Tensor) -> torch.Tensor:
        """Of the first `tokens` [B] of each row, how many each of `count` buckets has: float32 [B, Hkv, count]."""
        own = self.buckets[:, :, 0].long()
        live = (torch.arange(own.shape[-1], device=own.device) < tokens[:, None])[:, None] & (own >= 0)
        found = torch.zeros(*own.shape[:2], count, device=own.device)
        return found.scatter_add_(2, own.clamp(min=0), live.to(found.dtype))

    def trim(self, held: int) -> None:
        """Give back the room behind `held` tokens of a row, where it is worth it."""
        room = -(-held // GRAIN) * GRAIN
        if self.buckets.shape[-1] - room > room // 32:
            self.buckets = self.buckets[..., :room].clone()

    def select_rows(self, rows: torch.Tensor) -> None:
        """Row i becomes what row `rows[i]` was."""
        self.buckets = self.buckets[rows.to(self.buckets.device)]

    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.buckets.nbytes
