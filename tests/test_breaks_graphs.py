"""A decode step that breaks off where steps are captured and replayed: as without, right or refused."""

import sys
from collections import Counter
from typing import Any

import pytest
import torch
from breaks_support import HELD, Broken, BrokenError, Operation, Route, every_line
from graphs_support import Again, Graphs, replayed
from models import tiny_llama

import turbo_hf
from turbo_hf import TurboCache, TurboConfig
from turbo_hf.cache.layer import TurboLayer
from turbo_hf.cache.pass_mark import PassMark
from turbo_hf.graphs.devices import CudaDevice
from turbo_hf.graphs.replayable_steps import ReplayableSteps

CONFIG = TurboConfig(bits=8, block_size=32)
STEPS = 4
HOLDS = pytest.mark.parametrize("held", [HELD - 20, HELD - 1], ids=["open", "seals"])
ERRORS = pytest.mark.parametrize("error", [Broken, BrokenError])
# of a runner that is collected while the exception comes
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def judged(found: Counter[str]) -> None:
    assert set(found) <= {"before", "after", "refused"}, found
    assert found["refused"]


@pytest.fixture
def route(monkeypatch: pytest.MonkeyPatch) -> Route:
    """A model whose steps may be replayed without kernels."""
    monkeypatch.setattr(TurboLayer, "appends_in_place", lambda layer: True)
    model = tiny_llama()
    return Route("replayed", model, turbo_hf.patch(model, CONFIG).new_cache)


@HOLDS
@ERRORS
def test_an_exception_at_any_line_of_replayed_steps(held: int, error: type[BaseException], route: Route) -> None:
    steps = replayed(Again, STEPS)
    judged(every_line(route, Operation("steps", held, STEPS, steps, one_by_one=True), error, 263))


@pytest.mark.parametrize(("held", "error"), [(HELD - 20, BrokenError), (HELD - 1, Broken)])
def test_an_exception_at_any_line_of_the_steps_of_a_beam_search(
    held: int, error: type[BaseException], route: Route
) -> None:
    steps = replayed(Again, STEPS, within=True)
    judged(every_line(route, Operation("steps", held, STEPS, steps, one_by_one=True), error, 263))


@pytest.mark.parametrize(("held", "within"), [(HELD - 20, False), (HELD - 1, False), (HELD - 1, True)])
def test_an_exception_at_any_line_around_a_replay(held: int, within: bool, route: Route) -> None:
    around = tuple(str(sys.modules[name].__file__) for name in (ReplayableSteps.__module__, PassMark.__module__))
    steps = Operation("steps", held, STEPS, replayed(Graphs, STEPS, within), one_by_one=True)
    judged(every_line(route, steps, Broken, 11, files=around))


def test_an_exception_at_any_line_of_a_reordering_in_place(route: Route) -> None:
    def reorder(_: Route, cache: TurboCache) -> None:
        steps = ReplayableSteps(cache, None)
        cache.reorder_cache([1, 0])
        assert steps.intact()

    found = every_line(route, Operation("reorder", HELD, 0, reorder), Broken, 3)
    assert set(found) <= {"before", "after", "refused"}, found
    assert {"before", "after", "refused"} <= set(found)


@pytest.mark.parametrize("recorded", [False, True], ids=["open", "seals"])
def test_an_exception_at_any_line_of_a_crop_in_place(recorded: bool, route: Route) -> None:
    def new_cache() -> TurboCache:
        cache = route.new_cache()
        cache.activate_past_recording()
        return cache

    def crop(_: Route, cache: TurboCache) -> None:
        cache.activate_past_recording()
        steps = ReplayableSteps(cache, None)
        cache.crop(-5)
        assert steps.intact()

    chosen = Route("recorded", route.model, new_cache) if recorded else route
    found = every_line(chosen, Operation("crop", HELD, -5, crop), Broken, 3)
    assert set(found) <= {"before", "after", "refused"}, found
    assert {"before", "after", "refused"} <= set(found)


@pytest.mark.gpu
@HOLDS
@ERRORS
def test_on_a_gpu_an_exception_at_any_line_of_captured_steps(held: int, error: type[BaseException]) -> None:
    model: Any = tiny_llama(attn_implementation="sdpa").cuda()
    route = Route("captured", model, turbo_hf.patch(model, CONFIG).new_cache, near=1e-3)
    route.ids = route.ids.cuda()
    steps = replayed(lambda _: CudaDevice(model.device), STEPS)
    judged(every_line(route, Operation("steps", held, STEPS, steps, one_by_one=True), error, 37))
    torch.cuda.synchronize()
