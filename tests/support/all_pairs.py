"""Parametrization by pairs: each two values of two parameters meet in some case, without the product of all."""

from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest
import torch

from turbo_hf.config.turbo_config import ATTENTION_MODES

PARAM = type(pytest.param())


def all_pairs(**parameters: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test: every value of a parameter meets every value of each other one, in as few cases as a greedy
    choice finds, and always in the same ones. Of two parameters that is the product."""
    values = {name: list(each) for name, each in parameters.items()}
    cases = [
        [values[name][at] for name, at in zip(values, row, strict=True)] for row in covering(*map(len, values.values()))
    ]
    return _table(list(values), cases)


def in_modes(*full: str, **parameter: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by one parameter and `mode`: all values in the modes `full` ("turbo" and "fp16" unless given),
    the last value in every other mode too. Modes differ in how they round and in nothing else."""
    (name, values), full = *parameter.items(), full or ("turbo", "fp16")
    cases = [(value, mode) for value in values for mode in ATTENTION_MODES if mode in full or value is values[-1]]
    return _table([name, "mode"], cases)


def in_turn(**parameters: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize a test: every value of the longest parameter once, and beside it those of the others in turn. For
    what no code looks at together."""
    count = max(map(len, parameters.values()))
    return _table(list(parameters), [[each[at % len(each)] for each in parameters.values()] for at in range(count)])


def covering(*sizes: int) -> list[tuple[int, ...]]:
    """Rows of indices, one below each size, in which each pair of columns holds each pair of indices."""
    columns = list(combinations(range(len(sizes)), 2))
    left = {(a, b, i, j) for a, b in columns for i in range(sizes[a]) for j in range(sizes[b])}
    rows: list[tuple[int, ...]] = []

    def worth(row: tuple[int, ...]) -> tuple[int, int]:
        # of rows that bring as many new pairs the one whose values have been taken least, so that all are taken alike
        taken = sum(other[at] == row[at] for other in rows for at in range(len(sizes)))
        return sum((a, b, row[a], row[b]) in left for a, b in columns), -taken

    while left:
        row = max(product(*map(range, sizes)), key=worth)
        left -= {(a, b, row[a], row[b]) for a, b in columns}
        rows.append(row)
    return rows


def _table(names: list[str], cases: Iterable[Sequence[Any]]) -> pytest.MarkDecorator:
    rows = []
    for case in cases:
        named = [x if isinstance(x, PARAM) else pytest.param(x, id=_id(x)) for x in case]
        marks = [mark for x in named for mark in x.marks]
        rows.append(pytest.param(*(x.values[0] for x in named), marks=marks, id="-".join(str(x.id) for x in named)))
    return pytest.mark.parametrize(names, rows)


def _id(value: Any) -> str:
    if isinstance(value, tuple):
        return "-".join(map(_id, value))
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return str(getattr(value, "__name__", value))
