"""The runner that `generate` and continuous batching share: passes are launched, captured and replayed by kind."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from graphs_support import Again

from turbo_hf.graphs.runner import Runner


class Bench:
    """A runner over a stand-in, whose passes note the tokens that they read."""

    def __init__(self, warmups: int = 1, **options: Any):
        self.device = Again(**options)
        self.runner = Runner(self.device)
        self.runner.warmups = warmups
        self.read: list[list[int]] = []

    def pass_(self, key: str, *tokens: int, size: int | None = None, mode: Any = None, **others: Any) -> Any:
        memory = self.runner.take(key, {"ids": torch.tensor(tokens), **others}, size, mode)
        return self.runner.run(key, lambda: self.read.append(memory["ids"].tolist()), nullcontext)

    @property
    def counts(self) -> tuple[int, int, int]:
        """Passes that were launched, captures, replays."""
        return self.device.warmed, self.device.captured, self.device.replayed


def test_passes_of_a_kind_are_launched_then_captured_then_replayed() -> None:
    bench = Bench(warmups=2)
    for n in range(5):
        bench.pass_("a", n, n)
    bench.pass_("b", 7)
    assert bench.read == [[0, 0], [1, 1], [2, 2], [3, 3], [4, 4], [7]]
    assert bench.counts == (3, 1, 3)
    assert bench.runner.captures == 1
    assert bench.runner.captured("a")
    assert not bench.runner.captured("b")
    assert list(bench.runner.kinds) == ["a", "b"]
    bench.pass_("a", 5, 5)
    assert list(bench.runner.kinds) == ["b", "a"]


def test_inputs_are_filled_up_and_keep_their_memory() -> None:
    bench = Bench()
    first = bench.runner.take("a", {"ids": torch.tensor([[1, 2, 3]])}, 4)["ids"]
    assert first.tolist() == [[1, 2, 3, 3]]
    assert bench.runner.take("a", {"ids": torch.tensor([[5]])}, 4)["ids"] is first
    assert first.tolist() == [[5, 5, 5, 5]]


@pytest.mark.parametrize("change", [{"mode": "autocast"}, {"flag": True}, {"ids": torch.ones(2, 2)}, {"flag": None}])
def test_what_no_longer_fits_is_captured_anew(change: dict[str, Any]) -> None:
    bench = Bench()
    for _ in range(3):
        bench.pass_("a", 1, flag=False)
    assert bench.counts == (1, 1, 2)
    bench.runner.take("a", {"ids": torch.tensor([1]), "flag": False})
    assert bench.runner.captured("a")
    mode = change.get("mode")
    others = {name: value for name, value in change.items() if name != "mode"}
    bench.runner.take("a", {"ids": torch.tensor([1]), "flag": False, **others}, None, mode)
    assert not bench.runner.captured("a")
    assert bench.runner.kinds["a"].launched == 0
