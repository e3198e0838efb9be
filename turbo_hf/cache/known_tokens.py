"""The tokens of a cache, as far as whoever passes them shows them."""

from typing import Any

import torch


class KnowsTokens:
    """The part of a `TurboCache` that knows its tokens, as far as it was shown them."""

    # [B, columns], padding included; may be of more or fewer tokens than the cache holds: then they are not known
    _known: torch.Tensor | None = None
    # they came from a file, and were not compared with the input of a `generate` call since
    _saved: bool = False
    # a call of `generate` has begun whose tokens were not compared with those that are known
    _doubted: bool = False

    def know(self, ids: torch.Tensor | None, saved: bool = False) -> None:
        """Note the tokens [B, columns] that it holds once the next pass is over; None: they are not known."""
        self._known, self._saved = ids, saved

    def known_ids(self) -> torch.Tensor | None:
        """int64 [B, columns], its tokens, padding included; None: not all of them are known."""
        cache: Any = self
        ids = self._known
        return ids if ids is not None and ids.dim() == 2 and ids.shape[1] == cache.get_seq_length() else None

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
        if ids is not None and known is not None and self._saved:
            valid = next((layer.valid for layer in cache.turbo_layers() if layer.is_initialized), None)
            _require_same(known.to(ids.device)[:, :seen], ids, seen, valid)
        if ids is not None and seen and (known is None or doubted):
            held = self.known_ids()
            if held is None or not torch.equal(held.to(ids.device), ids[:, :seen]):
                ids = None
        self.know(ids)

    def _cut_known(self) -> None:
        cache: Any = self
        if self._known is not None:
            self._known = self._known[:, : cache.get_seq_length()]

    def _select_known(self, rows: list[int]) -> None:
        if self._known is not None:
            self._known = self._known[rows]


def _require_same(own: torch.Tensor, ids: torch.Tensor, seen: int, valid: torch.Tensor | None) -> None:
    """ValueError unless `ids`, the whole input of a `generate` call, begin with the tokens `own` and go on.

    own: the first tokens of a cache of `seen` columns. valid: bool [B, seen], which are no padding; None: all.
    """
    said = None
    if len(own) != len(ids):
        said = (
            f"this saved cache holds {len(own)} rows, and input_ids has {len(ids)}. Repeat its rows for beams and "
            "returned sequences: cache.batch_repeat_interleave(n)."
        )
    elif ids.shape[1] <= seen:
        said = (
            f"this saved cache holds {seen} columns, and input_ids has {ids.shape[1]}: pass the saved prompt and at "
            "least one token more."
        )
    else:
        differs = own != ids[:, : own.shape[1]]
        if valid is not None:
            differs &= valid.to(ids.device)[:, : own.shape[1]]
        for row, column in differs.nonzero()[:1].tolist():
            said = (
                f"input_ids does not begin with the prompt of this saved cache: row {row} has token "
                f"{int(ids[row, column])} in column {column}, the saved prompt {int(own[row, column])}."
            )
    if said is not None:
        raise ValueError(said)
