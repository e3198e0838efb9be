"""Random histories of a cache: none may be wrong, and those of a faulty cache are found to be."""

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from histories import History, draw, fault_of, shrunk
from histories_support import FAMILIES

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


def off_by_one(self: RowState, columns: int, counts: list[int]) -> RowState:
    """Leaves a token too many of those that are open."""
    after = CROPPED(self, columns, counts)
    rows = zip(after.open, self.open, counts, strict=True)
    return after._replace(open=[left + (0 < count <= held) for left, held, count in rows])


def test_a_history_is_the_same_each_time_and_is_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    assert draw(7) == draw(7)
    assert draw(7) != draw(8)
    monkeypatch.setattr(RowState, "cropped", off_by_one)
    long = History(
        "llama", "exact", tuple((name, 5) for name in ("advance", "look", "fork", "crop", "look", "advance"))
    )
    first: Any = fault_of(long)
    assert first == fault_of(copy.deepcopy(long))
    assert [name for name, _ in shrunk(long).acts] == ["advance", "crop"]
