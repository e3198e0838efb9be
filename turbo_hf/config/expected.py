"""What a tree read from a file must be, as a tree of its own, and the check that names the first place that differs."""

import reprlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Types that "any floating-point type" means."""
FINITE = (-torch.finfo(torch.float64).max, torch.finfo(torch.float64).max)


class Whole(NamedTuple):
    """A whole number in a range, both ends included."""

    least: int
    most: int


class Each(NamedTuple):
    """A list of any length whose entries are as `wanted` says."""

    wanted: Any


class OneOf(NamedTuple):
    """Anything that one of these allows."""

    wanted: Sequence[Any]


class Stored(NamedTuple):
    """A tensor.

    shape: None in the place of a size: any.
    dtype: None: any of `FLOATS`.
    least, most: of its numbers, both ends included; then none is NaN. None: any.
    """

    shape: tuple[int | None, ...]
    dtype: torch.dtype | None
    least: float | None = None
    most: float | None = None

    def fits(self, x: object) -> bool:
        """Whether it is such a tensor. On the meta device, numbers are left out."""
        if type(x) is not torch.Tensor or len(x.shape) != len(self.shape):
            return False
        if x.dtype not in (FLOATS if self.dtype is None else (self.dtype,)):
            return False
        if any(size not in (None, own) for size, own in zip(self.shape, x.shape, strict=True)):
            return False
        if self.least is None or self.most is None or x.is_meta or not x.numel():
            return True
        # both are NaN if any is
        least, most = torch.stack(torch.aminmax(x)).tolist()
        return bool(self.least <= least and most <= self.most)

    def __str__(self) -> str:
        dtype = "floating point" if self.dtype is None else str(self.dtype).removeprefix("torch.")
        shape = ", ".join("any" if size is None else str(size) for size in self.shape)
        if self.least is None:
            return f"{dtype} [{shape}]"
        ends = "of finite numbers" if self.least < -(2**15) else f"from {self.least:g} to {self.most:g}"
        return f"{dtype} [{shape}] {ends}"


def require(found: Any, wanted: Any, name: str) -> None:
    """ValueError, with the place, what should be there and what is, unless `found` is as `wanted` says.

    name: of `found`, for the message; "": it has none.
    wanted: a dict or list: one of just these entries; a type: a value of this type (`object`: any); `Whole`, `Each`,
        `OneOf`, `Stored`; anything else: an equal value of the same type.
    """
    under = name and f"{name}."
    if isinstance(wanted, dict) and isinstance(found, dict):
        for words, names in (("lacks", wanted.keys() - found.keys()), ("has", found.keys() - wanted.keys())):
            if names:
                raise ValueError(
                    f"{name or 'it'} {words} {_said(min(names, key=str))}, and should hold {_said([*wanted])}"
                )
        for key, each in wanted.items():
            require(found[key], each, f"{under}{key}")
    elif isinstance(wanted, list | Each) and isinstance(found, list):
        entries = [wanted.wanted] * len(found) if isinstance(wanted, Each) else wanted
        if len(found) != len(entries):
            raise ValueError(f"{name or 'it'} has {len(found)} entries, and should have {len(entries)}")
        for n, (own, each) in enumerate(zip(found, entries, strict=True)):
            require(own, each, f"{under}{n}")
    elif not _fits(found, wanted):
        raise ValueError(f"{name or 'it'} is {_said(found)}, and should be {_said(wanted)}")


def _fits(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, OneOf):
        return any(_allows(found, each) for each in wanted.wanted)
    if isinstance(wanted, Whole):
        return type(found) is int and wanted.least <= found <= wanted.most
    if isinstance(wanted, Stored):
        return wanted.fits(found)
    if isinstance(wanted, type):
        return wanted is object or type(found) is wanted
    return type(found) is type(wanted) and not isinstance(wanted, list | dict | Each) and bool(found == wanted)


def _allows(found: Any, wanted: Any) -> bool:
    try:
        require(found, wanted, "")
    except ValueError:
        return False
    return True


def _said(what: Any) -> str:
    """A short name of a value, or of what is wanted."""
    if isinstance(what, OneOf):
        return " or ".join(map(_said, what.wanted))
    if isinstance(what, Whole):
        return f"a whole number from {what.least} to {what.most}"
    if isinstance(what, torch.Tensor):
        words = f"{str(what.dtype).removeprefix('torch.')} {list(what.shape)}"
        if what.is_meta or not what.numel() or what.dtype not in (*FLOATS, torch.int8, torch.int16, torch.int64):
            return words
        return "{} from {:g} to {:g}".format(words, *torch.stack(torch.aminmax(what)).tolist())
    if isinstance(what, Stored):
        return str(what)
    if isinstance(what, dict | Each):
        return "a mapping" if isinstance(what, dict) else "a list"
    return f"a {what.__name__}" if isinstance(what, type) else reprlib.repr(what)
