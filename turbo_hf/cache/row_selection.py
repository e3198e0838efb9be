"""Which rows of a batch a call names."""

import operator
from typing import Any

import torch


def chosen_rows(chosen: Any, rows: int) -> torch.Tensor:
    """The rows that `chosen` names among `rows`, int64 [n] on the host: each from 0 to rows - 1, at least one.

    chosen: row numbers (negative ones count from the end) as a tensor, a NumPy array, a list, a tuple or a range; a
    bool mask as any of them; or a slice.

    Raises:
        ValueError: anything else, a row that does not exist, a mask of another length, or no row.
    """
    named = _numbers(range(rows)[chosen]) if isinstance(chosen, slice) else _numbers(chosen)
    if named.dtype == torch.bool:
        if len(named) != rows:
            raise ValueError(f"a mask of {len(named)} rows was given; the cache holds {rows}. Pass one bool for each.")
        named = named.nonzero().flatten()
    outside = named[(named < -rows) | (named >= rows)].tolist()
    if outside:
        raise ValueError(f"rows {outside} do not exist: the cache holds {rows} rows, 0 to {rows - 1}.")
    if not len(named):
        raise ValueError("no row was chosen. Choose at least one, or reset() the cache.")
    return torch.where(named < 0, named + rows, named)


def repeated_rows(repeats: Any, rows: int) -> torch.Tensor:
    """Each of `rows` rows `repeats` times, side by side: int64 [rows * repeats]. ValueError unless a number above 0."""
    try:
        count = 0 if isinstance(repeats, bool) else operator.index(repeats)
    except TypeError:
        count = 0
    if count < 1:
        raise ValueError(f"repeats must be a whole number of at least 1; got {repeats!r}.")
    return torch.arange(rows).repeat_interleave(count)


def _numbers(chosen: Any) -> torch.Tensor:
    """int64 or bool [n] on the host."""
    if isinstance(chosen, torch.Tensor):
        # uint8 is a mask to torch's indexing, and numbers to everything else
        if chosen.dim() == 1 and chosen.dtype in (torch.bool, torch.int64, torch.int32, torch.int16):
            return chosen.cpu() if chosen.dtype == torch.bool else chosen.to("cpu", torch.int64)
        raise _not_rows(f"{chosen.dtype} {list(chosen.shape)}")
    # a NumPy array has such a method too
    given = chosen.tolist() if hasattr(chosen, "tolist") else chosen
    if not isinstance(given, list | tuple | range):
        raise _not_rows(repr(chosen))
    masks = sum(isinstance(one, bool) for one in given)
    try:
        numbers = [operator.index(one) for one in given]
    except TypeError:
        raise _not_rows(repr(chosen)) from None
    if masks and masks < len(numbers):
        raise _not_rows(repr(chosen))
    return torch.tensor(numbers, dtype=torch.bool if masks else torch.int64)


def _not_rows(came: str) -> ValueError:
    return ValueError(f"rows are chosen by one list of whole numbers (int64), a bool mask or a slice; got {came}.")
