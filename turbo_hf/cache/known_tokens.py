"""The tokens of a cache, as far as whoever passes them shows them."""

from typing import Any

import torch


class KnowsTokens:
    """The part of a `TurboCache` that knows its tokens, as far as it was shown them."""

    # [B, n], the first n columns, padding included; None: not known
    _known: torch.Tensor | None = None
    # they came from a file, and were not compared with the input of a `generate` call since
    _saved: bool = False

    def know(self, ids: torch.Tensor | None, saved: bool = False) -> None:
        """Note the tokens [B, columns] that an empty cache will hold once a pass is over; None: they are not known."""
        self._known, self._saved = ids, saved

    def known_ids(self) -> torch.Tensor | None:
        """int64 [B, columns], its tokens, padding included; None: not all of them are known."""
        cache: Any = self
        ids = self._known
        return ids if ids is not None and ids.dim() == 2 and ids.shape[1] == cache.get_seq_length() else None

    def compare(self, ids: torch.Tensor | None) -> None:
        """The first `generate` step over a loaded cache begins: its whole input is [B, columns]; None: not shown.

        Raises:
            ValueError: the cache holds the keys and values of other tokens.
        """
        cache: Any = self
        if ids is not None and self._saved and self._known is not None:
            valid = next((layer.valid for layer in cache.turbo_layers() if layer.is_initialized), None)
            _require_same(self._known.to(ids.device), ids, cache.get_seq_length(), valid)
        self._saved = False

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
    if len(own) != len(ids):
        raise ValueError(
            f"this saved cache holds {len(own)} rows, and input_ids has {len(ids)}. Repeat its rows for beams and "
            "returned sequences: cache.batch_repeat_interleave(n)."
        )
    if ids.shape[1] <= seen:
        raise ValueError(
            f"this saved cache holds {seen} columns, and input_ids has {ids.shape[1]}: pass the saved prompt and at "
            "least one token more."
        )
    differs = own != ids[:, : own.shape[1]]
    if valid is not None:
        differs &= valid.to(ids.device)[:, : own.shape[1]]
    for row, column in differs.nonzero()[:1].tolist():
        raise ValueError(
            f"input_ids does not begin with the prompt of this saved cache: row {row} has token "
            f"{int(ids[row, column])} in column {column}, the saved prompt {int(own[row, column])}."
        )
