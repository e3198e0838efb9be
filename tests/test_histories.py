"""Random histories of a cache: none may be wrong, and those of a faulty cache are found to be."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from histories import draw, fault_of, shrunk
from histories_acts import History
from histories_support import subject

from turbo_hf.cache.layer import TurboLayer
from turbo_hf.cache.open_buffer import OpenBuffer
from turbo_hf.cache.page_pool import PagePool

EACH = 50


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Tiny models wait for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("first", range(0, 1000, EACH))
def test_no_history_is_wrong(first: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(first, first + EACH):
        fault = fault_of(draw(seed), counts)
        assert fault is None, f"tests/support/histories.py --seed {seed} --count 1: {fault}"
    # what is refused or not drawn shows nothing
    assert counts["advance"] > 2 * EACH
    assert sum(counts[name] for name in ("crop", "choose", "fork")) > EACH


def keep(self: Any, *args: Any) -> None:
    """Does nothing."""


def off_by_one(self: OpenBuffer, counts: list[int]) -> None:
    """Leaves a token too many."""
    self.length = [held - max(0, count - 1) for held, count in zip(self.length, counts, strict=True)]
    self._device_length = None


def shares_pages(self: PagePool, memo: Any) -> PagePool:
    """A copy whose pages are those of the original."""
    made = object.__new__(PagePool)
    made.__dict__.update(self.__dict__)
    return made


def oldest_first(self: TurboLayer) -> list[int]:
    """Drops a block from the window too early."""
    if self.window is None:
        return [0] * self.rows
    return [max(0, length - self.window + 9) // self.config.block_size for length in self.lengths()]


PLANTED: list[Any] = [
    pytest.param(OpenBuffer, "drop_back", off_by_one, id="crop"),
    pytest.param(PagePool, "select_rows", keep, id="reorder"),
    pytest.param(PagePool, "__deepcopy__", shares_pages, id="copy"),
    pytest.param(TurboLayer, "leaving", oldest_first, id="window"),
]


@pytest.mark.parametrize(("owner", "name", "faulty"), PLANTED)
def test_a_planted_fault_is_found(owner: type, name: str, faulty: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, name, faulty, raising=False)
    assert any(fault_of(draw(seed)) is not None for seed in range(200))
    # their bounds are those of a faulty cache
    subject.cache_clear()


def test_a_history_is_the_same_each_time_and_is_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    assert draw(7) == draw(7)
    assert draw(7) != draw(8)
    monkeypatch.setattr(OpenBuffer, "drop_back", off_by_one)
    long = History(
        "llama", "exact", tuple((name, 5) for name in ("advance", "look", "fork", "crop", "look", "advance"))
    )
    first = fault_of(long)
    assert first == fault_of(copy.deepcopy(long))
    assert first is not None
    assert [name for name, _ in shrunk(long).acts] == ["advance", "crop"]
