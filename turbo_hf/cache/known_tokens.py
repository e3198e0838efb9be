"""The tokens of a cache, as far as whoever passes them shows them."""

from typing import NamedTuple

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
