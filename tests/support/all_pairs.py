"""Parametrization by pairs: each two values of two parameters meet in some case, without the product of all."""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations, product
from typing import Any

import pytest
import torch

from turbo_hf.config.turbo_config import ATTENTION_MODES

PARAM = type(pytest.param())
Test = Callable[..., None]


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


def in_one_test(names: str | Sequence[str], cases: Iterable[Any]) -> Callable[[Test], Test]:
    """As `pytest.mark.parametrize`, in a single test, which runs all cases and names those that fail. For cases that
    take no time, such as refusals with the sentence of each."""
    keys, rows = [names] if isinstance(names, str) else list(names), list(cases)

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def all_cases(**fixtures: Any) -> None:
            failed: dict[str, BaseException] = {}
            for number, row in enumerate(rows):
                given = row.values if isinstance(row, PARAM) else row if len(keys) > 1 else (row,)
                torch.manual_seed(0)
                try:
                    with _anew(fixtures, number) as own:
                        test(**own, **dict(zip(keys, given, strict=True)))
                except (Exception, pytest.fail.Exception) as error:
                    failed[str(getattr(row, "id", None) or row)] = error
            for first in failed.values():
                first.add_note(f"{len(failed)} of {len(rows)} cases failed: {'; '.join(failed)}")
                raise first

        taken = inspect.signature(test)
        left = [each for name, each in taken.parameters.items() if name not in keys]
        vars(all_cases)["__signature__"] = taken.replace(parameters=left)
        return all_cases

    return decorate


@contextmanager
def _anew(fixtures: dict[str, Any], number: int) -> Iterator[dict[str, Any]]:
    """The fixtures of a test for one of its cases: a folder and patches of its own."""
    own = dict(fixtures)
    if "tmp_path" in own:
        own["tmp_path"] = own["tmp_path"] / str(number)
        own["tmp_path"].mkdir()
    if "monkeypatch" not in own:
        yield own
        return
    with own["monkeypatch"].context() as own["monkeypatch"]:
        yield own


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
