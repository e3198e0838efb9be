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
        # of a cache that has gone on since, or was cropped, the first tokens alone may be known
        own = self.whole().to(ids.device)[:, :seen]
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
        differs = own != ids[:, : own.shape[1]]
        if valid is not None:
            differs &= valid.to(ids.device)[:, : own.shape[1]]
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
    # a call of `generate` has begun whose tokens were not compared with those that are known
    _doubted: bool = False

    def know(self, ids: torch.Tensor | None, saved: bool = False) -> None:
        """Note the tokens [B, columns] that it holds once the next pass is over; None: they are not known."""
        self._known = None if ids is None else KnownTokens(ids, None, saved)

    def known_ids(self) -> torch.Tensor | None:
        """int64 [B, columns], its tokens, padding included; None: not all of them are known."""
        cache: Any = self
        known = self._known
        fits = known is not None and known.ids.dim() == 2 and known.ids.shape[1] == cache.get_seq_length()
        return known.whole() if known is not None and fits else None

    def doubt(self) -> None:
        """A call of `generate` begins: what it shows may be other tokens than the cache holds."""
        self._doubted = True

    def show(self, ids: torch.Tensor | None) -> None:
        """Know the whole input of a step of `generate`, [B, columns], if it begins with what is known; None: not shown.

        Raises:
            ValueError: the cache was loaded, and holds the keys and values of other tokens.
        """
        cache: Any = self
        seen, known, doubted = cache.get_seq_length(), self._known, self._doubted
        self._doubted = False
        if ids is not None and known is not None and known.saved:
            valid = next((layer.valid for layer in cache.turbo_layers() if layer.is_initialized), None)
            known.require_same(ids, seen, valid)
        if ids is not None and seen and (known is None or doubted):
            held = self.known_ids()
            if held is None or not torch.equal(held.to(ids.device), ids[:, :seen]):
                ids = None
        self.know(ids)

    def _cut_known(self) -> None:
        cache: Any = self
        if self._known is not None:
            self._known = self._known._replace(ids=self._known.ids[:, : cache.get_seq_length()])

    def _select_known(self, rows: list[int]) -> None:
        if self._known is not None:
            self._known = self._known.selected(rows)
