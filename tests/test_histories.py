"""Random histories of a cache: none may be wrong, and those of a faulty cache are found to be."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from histories import History, draw, fault_of, shrunk
from histories_support import FAMILIES, subject

from turbo_hf.cache.page_pool import PagePool
from turbo_hf.cache.rows import RowState

SEEDS = range(600)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Tiny models wait for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_history_is_wrong(family: str) -> None:
    counts: Counter[str] = Counter()
    # those of a family by one process, as each that needs a model makes it
    histories = {seed: history for seed in SEEDS if (history := draw(seed)).family == family}
    for seed, history in histories.items():
        fault = fault_of(history, counts)
        assert fault is None, f"seed {seed}: {fault}; {shrunk(history)}"
    # what is refused or not drawn shows nothing
    assert counts["advance"] > 2 * len(histories) > len(SEEDS) / len(FAMILIES)
    assert sum(counts[name] for name in ("crop", "choose", "fork")) > len(histories) // 2


CROPPED = RowState.cropped


def keep(self: Any, *args: Any) -> None:
    """Does nothing."""


def off_by_one(self: RowState, columns: int, counts: list[int]) -> RowState:
    """Leaves a token too many of those that are open."""
    after = CROPPED(self, columns, counts)
    rows = zip(after.open, self.open, counts, strict=True)
    return after._replace(open=[left + (0 < count <= held) for left, held, count in rows])


def shares_pages(self: PagePool, memo: Any) -> PagePool:
    """A copy whose pages are those of the original."""
    made = object.__new__(PagePool)
    made.__dict__.update(self.__dict__)
    return made


def oldest_first(self: RowState, window: int | None, kept: int = 0) -> list[int]:
    """Drops a block from the window too early."""
    if window is None:
        return [0] * len(self.open)
    return [max(0, length - kept - window + 9) // self.block for length in self.lengths()]


# the seed from which the search begins, as some take long to find
PLANTED: list[Any] = [
    pytest.param(RowState, "cropped", off_by_one, 0, id="crop"),
    pytest.param(PagePool, "select_rows", keep, 0, id="reorder"),
    pytest.param(PagePool, "__deepcopy__", shares_pages, 270, id="copy"),
    pytest.param(RowState, "leaving", oldest_first, 70, id="window"),
]


@pytest.mark.parametrize(("owner", "name", "faulty", "first"), PLANTED)
def test_a_planted_fault_is_found(
    owner: type, name: str, faulty: Any, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(first, first + 200):
        history = draw(seed)
        # whose bounds are those of a cache without the fault
        subject(history.family, history.config)
        with monkeypatch.context() as planted:
            planted.setattr(owner, name, faulty, raising=False)
            if fault_of(history) is not None:
                return
    pytest.fail(f"200 histories show nothing of a fault in {owner.__name__}.{name}")


def test_a_history_is_the_same_each_time_and_is_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    assert draw(7) == draw(7)
    assert draw(7) != draw(8)
    monkeypatch.setattr(RowState, "cropped", off_by_one)
    long = History(
        "llama", "exact", tuple((name, 5) for name in ("advance", "look", "fork", "crop", "look", "advance"))
    )
    first = fault_of(long)
    assert first == fault_of(copy.deepcopy(long))
    assert first is not None
    assert [name for name, _ in shrunk(long).acts] == ["advance", "crop"]
