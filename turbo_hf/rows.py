"""Which rows of a batch a cache is told to keep, as Transformers' own caches may be told it."""

import operator
from typing import Any

import torch

from turbo_hf.errors import out_of_memory


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
    try:
        # an empty list would be one of floats
        found = torch.as_tensor(list(chosen) if isinstance(chosen, range | tuple) else chosen)
    except (TypeError, ValueError, RuntimeError) as error:
        if out_of_memory(error):
            raise
        found = None
    if found is not None and not found.numel():
        found = found.to(torch.int64)
    # uint8 is a mask to torch's indexing, and numbers to everything else
    if found is None or found.dim() != 1 or found.dtype not in (torch.bool, torch.int64, torch.int32, torch.int16):
        came = type(chosen).__name__ if found is None else f"{found.dtype} {list(found.shape)}"
        raise ValueError(f"rows are chosen by one list of whole numbers (int64), a bool mask or a slice; got {came}.")
    return found.cpu() if found.dtype == torch.bool else found.to("cpu", torch.int64)
