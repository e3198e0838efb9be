"""A pass or call that breaks off, wherever it does: the cache is as before, or refused with what to do."""

import copy
import signal
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
    ROWS,
    Broken,
    BrokenError,
    Operation,
    Route,
    every_call,
    every_line,
    launches,
    routes,
)
from models import prompts, tiny_llama
from transformers import Cache

import turbo_hf
from turbo_hf import TurboCache, TurboConfig
from turbo_hf.models.versions import CACHE

ROUTES = routes()
PASSES = [operation for operation in OPERATIONS if operation.adds > 0]
CHANGES = [operation for operation in OPERATIONS if operation.adds <= 0]
SMALL = TurboConfig(block_size=32)


def right(found: Counter[str]) -> bool:
    """Whether each cache was as before or refused. `found` shows in the assertion."""
    return set(found) <= {"before", "refused", "refused and rolled back"}


# --- everywhere -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in ROUTES if not name.startswith("unpatched")])
def test_an_exception_at_any_line_of_a_pass(name: str) -> None:
    """Each so-manieth line, by numbers without a common divisor; `break_everywhere.py` takes them all."""
    route = ROUTES[name]()
    for operation, step, error in zip(PASSES, (163, 149, 157, 173), (Broken, BrokenError) * 2, strict=True):
        found = every_line(route, operation, error, step)
        assert right(found), (operation.name, found)


@pytest.mark.parametrize("name", [name for name in ROUTES if name.startswith("unpatched")])
def test_an_exception_at_any_line_of_a_pass_without_a_patch(name: str) -> None:
    """Nobody tells the end of such a pass: it ends when the last layer has stored its tokens."""
    route = ROUTES[name]()
    for operation, step in zip(PASSES, (131, 113, 127, 137), strict=True):
        found = every_line(route, operation, Broken, step)
        assert right(found - Counter(after=found["after"])), (operation.name, found)


@pytest.mark.parametrize("operation", CHANGES, ids=lambda operation: operation.name)
def test_an_exception_at_any_line_of_a_change(operation: Operation) -> None:
    found = every_line(ROUTES["compressed"](), operation, Broken, 17)
    assert right(found), found


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
@pytest.mark.parametrize("places", [ALLOCATIONS, launches()], ids=["allocation", "launch"])
def test_an_error_in_any_call_of_an_operation_leaves_a_right_cache_or_a_refusal(
    places: list[tuple[Any, str]], operation: Operation
) -> None:
    found = every_call(ROUTES["compressed"](), operation, places, 1 if len(places) > 60 else 5)
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


@pytest.mark.parametrize("name", ["exact", "dense-first", "dense-last"])
def test_a_pass_that_fails_after_its_last_layer_is_taken_back(name: str) -> None:
    route = ROUTES[name]()
    cache, plain = route.prepared(), route.prepared()
    route.run(cache, HELD, 1)
    broken_off(route, cache, route.model.lm_head, tokens=4)
    assert cache.get_seq_length() == HELD + 5
    for use in (
        lambda: route.run(cache, HELD + 1, 4),
        lambda: cache.crop(-4),
        lambda: cache.reorder_cache(torch.tensor([0, 1])),
        lambda: route.model.generate(route.ids[:, : HELD + 9], **{CACHE: cache}, max_new_tokens=2),
    ):
        with pytest.raises(ValueError, match=r"broke off when 2 of its 2 layers held its tokens .* roll_back\(\)"):
            use()
    assert cache.roll_back() == 4
    assert cache.roll_back() == 0
    assert cache.get_seq_length() == HELD + 1
    route.run(plain, HELD, 1)
    for first in (HELD + 1, HELD + 2):
        assert (route.run(cache, first, 1) - route.run(plain, first, 1)).abs().max() < 1e-4


def test_a_copy_of_a_broken_cache_is_broken() -> None:
    route = ROUTES["compressed"]()
    cache = route.prepared()
    broken_off(route, cache, route.model.model.layers[1].mlp)
    twin = copy.deepcopy(cache)
    for one in (cache, twin):
        with pytest.raises(ValueError, match="broke off"):
            route.run(one, HELD, 1)
    assert twin.roll_back() == 1
    route.run(twin, HELD, 1)
    with pytest.raises(ValueError, match="broke off"):
        route.run(cache, HELD, 1)


def test_what_fails_before_anything_is_stored_changes_nothing() -> None:
    route = ROUTES["compressed"]()
    cache, plain = route.prepared(), route.prepared()
    wrong: list[dict[str, Any]] = [
        {"attention_mask": torch.ones(ROWS, 5, dtype=torch.long)},
        {"attention_mask": torch.zeros(ROWS, HELD + 1, dtype=torch.long)},
    ]
    for options in wrong:
        with pytest.raises((ValueError, RuntimeError)), torch.no_grad():
            route.model(route.ids[:, HELD : HELD + 1], **{CACHE: cache}, **options)
    with pytest.raises(ValueError, match="the cache holds 2 rows"), torch.no_grad():
        route.model(prompts(3, 1), **{CACHE: cache})
    assert torch.equal(route.run(cache, HELD, 1), route.run(plain, HELD, 1))


def test_the_first_pass_is_taken_back_with_its_mask() -> None:
    model, ids = tiny_llama(), prompts(2, 40)
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    cache, plain = (TurboCache(model.config, SMALL, attention_mask=mask) for _ in range(2))
    hook = model.model.layers[1].self_attn.register_forward_pre_hook(fails)
    with torch.no_grad():
        with pytest.raises(KeyboardInterrupt):
            model(ids, attention_mask=mask, **{CACHE: cache})
        hook.remove()
        assert cache.roll_back() == 40
        assert cache.get_seq_length() == 0
        want, got = (model(ids, attention_mask=mask, **{CACHE: each}).logits for each in (plain, cache))
    assert torch.equal(got, want)


def test_what_does_not_keep_its_past_cannot_be_taken_back() -> None:
    for name, said in (("hybrid", "does not keep what it held"), ("dense-window", "What broke off cannot be taken")):
        route = ROUTES[name]()
        cache = route.prepared()
        broken_off(route, cache, route.model.lm_head)
        with pytest.raises(ValueError, match=rf"{said} .*reset\(\) it, or take a new one"):
            cache.roll_back()
        cache.reset()
        route.run(cache, 0, HELD)


def test_the_inner_model_is_a_pass_too() -> None:
    route = ROUTES["compressed"]()
    cache, inner = route.prepared(), route.model.model
    hook = inner.norm.register_forward_pre_hook(fails)
    with pytest.raises(KeyboardInterrupt), torch.no_grad():
        inner(route.ids[:, :1], **{CACHE: cache})
    hook.remove()
    for call in (inner, route.model):
        with pytest.raises(ValueError, match="broke off"), torch.no_grad():
            call(route.ids[:, :1], **{CACHE: cache})
    cache.roll_back()
    # a pass of the whole model that fails behind the inner one is not gone on with by the inner one
    broken_off(route, cache, route.model.lm_head)
    with pytest.raises(ValueError, match="broke off"), torch.no_grad():
        inner(route.ids[:, :1], **{CACHE: cache})


@pytest.mark.parametrize("layer", [0, 1])
def test_a_layer_that_was_about_to_store_when_the_patch_was_taken_off(layer: int) -> None:
    model, ids = tiny_llama(), prompts(1, 12)
    with turbo_hf.patch(model, SMALL) as handle:
        cache, kept = handle.new_cache(), handle.new_cache()
        with torch.no_grad():
            model(ids, **{CACHE: cache})
            model(ids, **{CACHE: kept})
        hook = model.model.layers[layer].self_attn.q_proj.register_forward_pre_hook(fails)
        with pytest.raises(KeyboardInterrupt), torch.no_grad():
            model(ids, **{CACHE: cache})
        hook.remove()
    with pytest.raises(ValueError, match=f"broke off when {layer} of its 2 layers"), torch.no_grad():
        model(ids, **{CACHE: cache})
    cache.roll_back()
    with torch.no_grad():
        assert torch.equal(*(model(ids, **{CACHE: each}).logits for each in (cache, kept)))


def test_a_layer_is_not_read_while_it_is_torn(monkeypatch: pytest.MonkeyPatch) -> None:
    route = ROUTES["compressed"]()
    cache = route.prepared()
    layer = cache.turbo_layers()[1]
    monkeypatch.setattr(layer.buffer, "reserve", fails)
    with pytest.raises(KeyboardInterrupt):
        route.run(cache, HELD, 1)
    message = "layer 1 of this TurboCache was being written when an earlier pass or call broke off"
    uses: list[Callable[[], Any]] = [
        lambda: layer.dequantized(4), cache.roll_back, cache.stop_recording, lambda: route.run(cache, HELD, 1)
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(ValueError, match=message):
            use()


def test_a_reset_that_breaks_off_is_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    route = ROUTES["compressed"]()
    cache = route.prepared()
    with monkeypatch.context() as patched:
        patched.setattr(cache.turbo_layers()[1], "reset", fails)
        with pytest.raises(KeyboardInterrupt):
            cache.reset()
    with pytest.raises(ValueError, match=r"an earlier reset\(\) of this TurboCache broke off midway"):
        route.run(cache, 0, 9)
    cache.reset()
    assert torch.equal(route.run(cache, 0, 9), route.run(route.new_cache(), 0, 9))


# --- at random --------------------------------------------------------------------------------------------------------


def test_ctrl_c_during_generate() -> None:
    route = ROUTES["compressed"]()
    ways: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
    whole = route.model.generate(route.ids[:, :HELD], **ways)

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    kept = signal.signal(signal.SIGALRM, interrupt)
    try:
        for attempt in range(20):
            cache = route.new_cache()
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.004 * (attempt + 1))
                route.model.generate(route.ids[:, :HELD], **{CACHE: cache}, **ways)
            except KeyboardInterrupt:
                pass
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            agrees_or_is_refused(route, cache, whole)
    finally:
        signal.signal(signal.SIGALRM, kept)


@torch.no_grad()
def agrees_or_is_refused(route: Route, cache: TurboCache, whole: torch.Tensor) -> None:
    """The cache goes on as one in which its tokens, as many as it says, were stored without a break."""
    held = cache.get_seq_length()
    try:
        got = route.model(whole[:, held : held + 1], **{CACHE: cache}).logits
    except ValueError as error:
        assert "reset() it" in str(error)  # noqa: PT017  what is accepted must agree
        return
    assert held in range(whole.shape[1])
    clean = route.new_cache()
    for first, end in ((0, HELD), *((n, n + 1) for n in range(HELD, held))):
        if first < held:
            route.model(whole[:, first:end], **{CACHE: clean})
    assert torch.equal(got, route.model(whole[:, held : held + 1], **{CACHE: clean}).logits)


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


def test_a_pass_that_failed_before_storing_can_be_repeated_in_another_thread() -> None:
    route = ROUTES["compressed"]()
    cache, plain = route.prepared(), route.prepared()

    def run() -> None:
        with pytest.raises(ValueError, match="attention_mask has 5 columns"), torch.no_grad():
            route.model(route.ids[:, :1], **{CACHE: cache}, attention_mask=torch.ones(ROWS, 5))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert torch.equal(route.run(cache, HELD, 1), route.run(plain, HELD, 1))


@pytest.mark.parametrize("name", ["hybrid", "unpatched-hybrid"])
def test_reading_a_state_between_passes_breaks_nothing(name: str) -> None:
    route = ROUTES[name]()
    cache = route.prepared()
    for step in range(3):
        for layer in (0, 2):
            assert cache.has_previous_state(layer)
            if hasattr(Cache, "get_conv_state"):
                # not in transformers 5.17
                assert cache.get_conv_state(layer) is not None
        route.run(cache, HELD + step, 1)
    cache.reorder_cache(torch.tensor([1, 0]))
