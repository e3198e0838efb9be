"""A pass or call that breaks off, wherever it does, also of captured steps: the cache is as before, or refused."""

import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from breaks_support import (
    ALLOCATIONS,
    HELD,
    OPERATIONS,
    ROUTES,
    SMALL,
    Broken,
    BrokenError,
    Operation,
    Route,
    every_call,
    every_line,
    launches,
)
from choices import flat_config
from graphs_support import Again, Graphs, replayed
from models import prompts, tiny_llama
from transformers import Cache

import turbo_hf
from turbo_hf import TurboCache, Unsupported
from turbo_hf.cache.layer import TurboLayer
from turbo_hf.cache.pass_mark import PassMark
from turbo_hf.graphs.devices import CudaDevice
from turbo_hf.graphs.replayable_steps import ReplayableSteps
from turbo_hf.models.versions import CACHE

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

PASSES = [operation for operation in OPERATIONS if operation.adds > 0]
CHANGES = [operation for operation in OPERATIONS if operation.adds <= 0]


def right(found: Counter[str], *allowed: str) -> bool:
    """Whether each cache was as before or refused. `found` shows in the assertion."""
    return set(found) <= {"before", "refused", *allowed}


# --- everywhere -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROUTES)
def test_an_exception_at_any_line_of_a_pass(name: str) -> None:
    """Each so-manieth line, by numbers without a common divisor; steps of 1 take them all."""
    route = ROUTES[name]()
    # nobody tells the end of a pass without a patch: it ends when the last layer has stored its tokens
    allowed = ("after",) if name.startswith("unpatched") else ()
    for operation, step, error in zip(PASSES, (331, 307, 313, 349), (Broken, BrokenError) * 2, strict=True):
        found = every_line(route, operation, error, step)
        assert right(found, *allowed), (operation.name, found)


@pytest.mark.parametrize("operation", CHANGES, ids=lambda operation: operation.name)
def test_an_exception_at_any_line_of_a_change(operation: Operation) -> None:
    found = every_line(ROUTES["compressed"](), operation, Broken, 29)
    assert right(found), found


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
@pytest.mark.parametrize("places", [ALLOCATIONS, launches()], ids=["allocation", "launch"])
def test_an_error_in_any_call_of_an_operation(places: list[tuple[Any, str]], operation: Operation) -> None:
    found = every_call(ROUTES["compressed"](), operation, places, 2 if len(places) > 60 else 9)
    assert right(found), found


# --- what is left of it -----------------------------------------------------------------------------------------------


def fails(*args: Any, **kwargs: Any) -> None:
    raise KeyboardInterrupt


def broken_off(route: Route, cache: TurboCache, module: Any, tokens: int = 1) -> None:
    """A pass that breaks off before `module`."""
    hook = module.register_forward_pre_hook(fails)
    with pytest.raises(KeyboardInterrupt):
        route.run(cache, cache.get_seq_length(), tokens)
    hook.remove()


@pytest.mark.parametrize("name", ["compressed", "deferring", "dense-first", "dense-last", "hybrid"])
def test_a_pass_that_fails_after_its_last_layer(name: str) -> None:
    route = ROUTES[name]()
    cache = route.new_cache()
    broken_off(route, cache, route.model.lm_head, tokens=HELD)
    uses: list[Callable[[], Any]] = [
        lambda: route.run(cache, HELD, 4),
        lambda: cache.crop(-4),
        lambda: cache.reorder_cache(torch.tensor([0, 1])),
        lambda: list(cache),
        lambda: route.model.generate(route.ids[:, : HELD + 9], **{CACHE: cache}, max_new_tokens=2),
    ]
    for use in uses:
        with pytest.raises(ValueError, match=r"an earlier pass over this TurboCache broke off .* reset\(\) it"):
            use()
    # other caches of the patch are as ever, and so is this one when it is empty
    want = route.run(route.new_cache(), 0, HELD)
    cache.reset()
    assert torch.equal(route.run(cache, 0, HELD), want)


def test_a_pass_refused_before_it_stores() -> None:
    model = tiny_llama()
    with turbo_hf.patch(model) as handle, torch.no_grad():
        cache, ids = handle.new_cache(), prompts(1, 20)
        model(ids, **{CACHE: cache})
        refused: list[BaseException] = []

        def two_rows() -> None:
            try:
                model(ids[:, :1], attention_mask=torch.ones(2, 21, dtype=torch.long), **{CACHE: cache})
            except ValueError as error:
                refused.append(error)

        thread = threading.Thread(target=two_rows)
        thread.start()
        thread.join()
        assert len(refused) == 1
        model(ids[:, :1], **{CACHE: cache})
        model.train()
        with pytest.raises(ValueError, match="training mode"):
            model(ids[:, :1], **{CACHE: cache})
        model.eval()
        model.model(ids[:, :1], **{CACHE: cache})
        model(ids[:, :1], **{CACHE: cache})
        assert cache.get_seq_length() == 23


def test_the_inner_model_is_a_pass_too() -> None:
    route = ROUTES["compressed"]()
    inner = route.model.model
    # broken off in the inner model, and behind it: neither goes on with the pass of the other
    for module, called in ((inner.norm, inner), (route.model.lm_head, route.model)):
        cache = route.prepared()
        hook = module.register_forward_pre_hook(fails)
        with pytest.raises(KeyboardInterrupt), torch.no_grad():
            called(route.ids[:, :1], **{CACHE: cache})
        hook.remove()
        for call in (inner, route.model):
            with pytest.raises(ValueError, match="broke off"), torch.no_grad():
                call(route.ids[:, :1], **{CACHE: cache})


def test_a_broken_pass_after_the_patch_was_taken_off() -> None:
    model, ids = tiny_llama(), prompts(1, 12)
    with turbo_hf.patch(model, SMALL) as handle:
        cache = handle.new_cache()
        with torch.no_grad():
            model(ids, **{CACHE: cache})
        hook = model.model.layers[1].self_attn.q_proj.register_forward_pre_hook(fails)
        with pytest.raises(KeyboardInterrupt), torch.no_grad():
            model(ids, **{CACHE: cache})
        hook.remove()
    with pytest.raises(ValueError, match="broke off"), torch.no_grad():
        model(ids, **{CACHE: cache})


def test_a_layer_is_not_read_while_it_is_torn(monkeypatch: pytest.MonkeyPatch) -> None:
    route = ROUTES["compressed"]()
    cache = route.prepared()
    layer = cache.turbo_layers()[1]
    monkeypatch.setattr(layer.buffer, "reserve", fails)
    with pytest.raises(KeyboardInterrupt):
        route.run(cache, HELD, 1)
    uses: list[Callable[[], Any]] = [
        lambda: layer.keys, lambda: layer.dequantized(4), cache.stop_recording, lambda: route.run(cache, HELD, 1)
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(ValueError, match="an earlier pass over this TurboCache broke off while layer 1 was writ"):
            use()


def test_an_error_in_a_write_that_the_model_catches(monkeypatch: pytest.MonkeyPatch) -> None:
    route = ROUTES["compressed"]()
    cache, last = route.prepared(), route.model.model.layers[1]
    monkeypatch.setattr(cache.turbo_layers()[1].buffer, "reserve", lambda *args: 1 / 0)
    forward = last.self_attn.forward

    def lenient(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except ZeroDivisionError:
            return kwargs["hidden_states"], None

    monkeypatch.setattr(last.self_attn, "forward", lenient)
    route.run(cache, HELD, 1)
    with pytest.raises(ValueError, match="broke off while layer 1 was written"):
        route.run(cache, HELD, 1)


@pytest.mark.parametrize("patched", [True, False], ids=["patched", "unpatched"])
def test_states_of_a_patched_model_are_no_others(patched: bool) -> None:
    """A state that is taken may change without a word: once a patched model has run, no other may take it."""
    route = ROUTES["hybrid"]()
    cache, plain = route.prepared(), route.prepared()
    model, ids = route.model, route.ids[:, HELD : HELD + 1]
    calls: list[Callable[[], Any]] = [lambda: cache.has_previous_state(0)]
    if hasattr(Cache, "get_conv_state"):
        # not in transformers 5.17
        calls += [lambda: cache.get_conv_state(0), lambda: cache.get_recurrent_state(2)]
    if not patched:
        route.handle.remove()
        calls = [lambda: model(ids, **{CACHE: cache})]
    for call in calls:
        with pytest.raises(Unsupported, match="patch the model"), torch.no_grad():
            call()
    if not patched:
        turbo_hf.patch(model, SMALL)
    assert torch.equal(route.run(cache, HELD, 1), route.run(plain, HELD, 1))


def test_a_pass_that_broke_off_between_two_states() -> None:
    route = ROUTES["unpatched-hybrid"]()
    cache = route.new_cache()
    with pytest.MonkeyPatch.context() as broken:
        broken.setattr(cache, "update_recurrent_state", fails)
        with pytest.raises(KeyboardInterrupt):
            route.run(cache, 0, HELD)
    # a step takes states, which the prompt has only stored
    with pytest.raises(ValueError, match="broke off"):
        route.run(cache, HELD, 1)


# --- at random --------------------------------------------------------------------------------------------------------


# a pass without a patch asks for the length before it marks the cache
@pytest.mark.parametrize("name", ["compressed", "dense-first", "dense-last"])
def test_two_threads_on_one_cache(name: str) -> None:
    route = ROUTES[name]()
    cache, plain = route.prepared(), route.prepared()
    # always the same token, so that only the number of those before it tells
    want = [route.run(plain, HELD, 1) for _ in range(40)]
    start, accepted, refused = threading.Barrier(2), [], []

    def run() -> None:
        start.wait()
        for _ in range(20):
            try:
                accepted.append(route.run(cache, HELD, 1))
            except ValueError as error:
                refused.append(str(error))

    threads, kept = [threading.Thread(target=run) for _ in range(2)], sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(kept)
    assert len(accepted) + len(refused) == 40
    assert all("another thread" in message for message in refused)
    places = [next(n for n, logits in enumerate(want) if torch.equal(got, logits)) for got in accepted]
    assert sorted(places) == list(range(len(accepted)))
    assert cache.get_seq_length() == HELD + len(accepted)


CONFIG = flat_config(bits=8, block_size=32)
STEPS = 4
HOLDS = pytest.mark.parametrize("held", [HELD - 20, HELD - 1], ids=["open", "seals"])
ERRORS = pytest.mark.parametrize("error", [Broken, BrokenError])


def judged(found: Counter[str]) -> None:
    assert set(found) <= {"before", "after", "refused"}, found
    assert found["refused"]


@pytest.fixture
def route(monkeypatch: pytest.MonkeyPatch) -> Route:
    """A model whose steps may be replayed without kernels."""
    monkeypatch.setattr(TurboLayer, "in_place", True)
    model = tiny_llama()
    return Route("replayed", model, turbo_hf.patch(model, CONFIG).new_cache)


@HOLDS
@pytest.mark.parametrize(("error", "within"), [(Broken, False), (BrokenError, False), (Broken, True)])
def test_an_exception_at_any_line_of_replayed_steps(
    held: int, error: type[BaseException], within: bool, route: Route
) -> None:
    """within: those of a beam search."""
    steps = replayed(Again, STEPS, within)
    judged(every_line(route, Operation("steps", held, STEPS, steps, one_by_one=True), error, 263))


@pytest.mark.parametrize(("held", "within"), [(HELD - 20, False), (HELD - 1, False), (HELD - 1, True)])
def test_an_exception_at_any_line_around_a_replay(held: int, within: bool, route: Route) -> None:
    around = tuple(str(sys.modules[name].__file__) for name in (ReplayableSteps.__module__, PassMark.__module__))
    steps = Operation("steps", held, STEPS, replayed(Graphs, STEPS, within), one_by_one=True)
    judged(every_line(route, steps, Broken, 11, files=around))


def test_an_exception_at_any_line_around_a_replay_of_a_hybrid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its states change in place: a step that breaks off is refused, or was never begun."""
    monkeypatch.setattr(TurboLayer, "in_place", True)
    around = tuple(str(sys.modules[name].__file__) for name in (ReplayableSteps.__module__, PassMark.__module__))
    steps = Operation("steps", HELD - 1, STEPS, replayed(Graphs, STEPS), one_by_one=True)
    judged(every_line(ROUTES["hybrid"](), steps, Broken, 11, files=around))


def test_an_exception_at_any_line_of_a_reordering_in_place(route: Route) -> None:
    def reorder(_: Route, cache: TurboCache) -> None:
        steps = ReplayableSteps(cache)
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
        steps = ReplayableSteps(cache)
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
