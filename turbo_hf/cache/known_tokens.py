"""The tokens of a cache, as far as whoever passes them shows them."""

from typing import Any, NamedTuple

import torch


class KnownTokens(NamedTuple):
    """Token ids [*, columns], padding included. rows: row i of the cache is row `rows[i]` of them; None: row i.

    saved: whether they came from a file, and were not compared with the input of a `generate` call since.
    """

    ids: torch.Tensor
    rows: list[int] | None = None
    saved: bool = False

    def selected(self, rows: list[int]) -> "KnownTokens":
        """Row i becomes what row `rows[i]` was. On the host alone: beams come here in each step."""
        return self._replace(rows=rows if self.rows is None else [self.rows[row] for row in rows])

    def whole(self) -> torch.Tensor:
        """[B, columns]."""
        return self.ids if self.rows is None else self.ids[self.rows]

    def require_same(self, ids: torch.Tensor, seen: int, valid: torch.Tensor | None) -> None:
        """ValueError unless `ids`, the whole input of a `generate` call, begin with these tokens and go on.

        valid: bool [B, seen], which of them are no padding; None: all.
        """
        own = self.whole().to(ids.device)
        if len(own) != len(ids):
            raise ValueError(
                f"this saved cache holds {len(own)} rows, and input_ids has {len(ids)}. Repeat its rows for beams and "
                "returned sequences: cache.batch_repeat_interleave(n)."
            )
        if ids.shape[1] <= seen:
            raise ValueError(
                f"this saved cache holds {seen} columns, and input_ids has {ids.shape[1]}: pass the saved prompt and "
                "at least one token more."
            )
        differs = own != ids[:, :seen]
        if valid is not None:
            differs &= valid.to(ids.device)
        places = differs.nonzero()[:1].tolist()
        if places:
            row, column = places[0]
            raise ValueError(
                f"input_ids does not begin with the prompt of this saved cache: row {row} has token "
                f"{int(ids[row, column])} in column {column}, the saved prompt {int(own[row, column])}."
            )


class KnowsTokens:
    """The part of a `TurboCache` that knows its tokens, as far as it was shown them."""

    # may be of more or fewer tokens than the cache holds: then they are not known
    _known: KnownTokens | None = None

    def know(self, ids: torch.Tensor | None, saved: bool = False) -> None:
        """Note the tokens [B, columns] that it holds once the next pass is over; None: they are not known."""
        self._known = None if ids is None else KnownTokens(ids, None, saved)

    def known_ids(self) -> torch.Tensor | None:
        """int64 [B, columns], its tokens, padding included; None: not all of them are known."""
        cache: Any = self
        known = self._known
        fits = known is not None and known.ids.dim() == 2 and known.ids.shape[1] == cache.get_seq_length()
        return known.whole() if known is not None and fits else None

    def require_known(self, ids: torch.Tensor) -> None:
        """ValueError unless the input of a `generate` call begins with the tokens of a cache that was loaded."""
        cache: Any = self
        known = self._known
        if known is not None and known.saved:
            valid = next((layer.valid for layer in cache.turbo_layers() if layer.is_initialized), None)
            known.require_same(ids, cache.get_seq_length(), valid)

    def _cut_known(self) -> None:
        cache: Any = self
        if self._known is not None:
            self._known = self._known._replace(ids=self._known.ids[:, : cache.get_seq_length()])

    def _select_known(self, rows: list[int]) -> None:
        if self._known is not None:
            self._known = self._known.selected(rows)
