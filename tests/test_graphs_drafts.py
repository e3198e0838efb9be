"""Assisted and prompt-lookup decoding as CUDA graphs: passes over several tokens, and crops between replays."""

import copy
import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from choices import flat_config
from graphs_support import SMALL, an_index, answer
from models import prompts, tiny_llama, tiny_mistral
from steps_support import (
    CONFIGS,
    DIM,
    HEADS,
    assert_same,
    assert_shows_same,
    by_both,
    by_host,
    by_steps,
    filled,
    new_tokens,
    without_kernels,
)
from stores import tokens
from torch import Tensor

import turbo_hf
from turbo_hf import SparseConfig, TurboCache, TurboConfig
from turbo_hf.cache.rows import NewColumns
from turbo_hf.config.turbo_config import with_options
from turbo_hf.graphs import replayable_steps as steps
from turbo_hf.graphs.replayable_steps import ReplayableSteps
from turbo_hf.graphs.step_runner import StepRunner
from turbo_hf.graphs.why_not import why_no_replay
from turbo_hf.layout import FIRST

# --- the same tokens -----------------------------------------------------------------------------------------------


def repeating() -> dict[str, Tensor]:
    """A prompt in which what comes next has been there before."""
    ids = torch.cat((prompts(1, 37),) * 3, 1)
    # what a model says may be the pad token, which is no padding here
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def drafter_of(model: Any, schedule: str, noise: float = 0.05) -> Any:
    """A model that is often of the same opinion."""
    drafter = copy.deepcopy(model)
    # with 1 a draft holds the pad token, which a drafter takes for padding (docs/limits.md)
    torch.manual_seed(2)
    for weight in drafter.parameters():
        weight.data += noise * weight.std() * torch.randn_like(weight)
    drafter.generation_config.update(
        num_assistant_tokens=5, num_assistant_tokens_schedule=schedule, assistant_confidence_threshold=0.0
    )
    return drafter


@pytest.mark.parametrize(
    ("way", "config", "window"),
    [
        ("heuristic", SMALL, None),
        ("constant", with_options(SMALL, low_heads=0.5, low_bits=2), 40),
        ("unpatched", replace(SMALL, dense_layers=(1,)), 40),
        ("lookup", with_options(SMALL, bits=2), None),
        ("early", SMALL, 40),
        ("heuristic", replace(SMALL, dense_layers=(1,)), 40),
        ("lookup", with_options(SMALL, low_heads=0.5, low_bits=2), None),
    ],
)
def test_tokens_are_those_without_graphs(
    way: str, config: TurboConfig, window: int | None, runners: list[StepRunner], monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
) -> None:  # fmt: skip
    # pages are reserved, and steps captured again, while it generates
    monkeypatch.setattr(steps, "AHEAD", 1)
    model = (tiny_llama() if window is None else tiny_mistral(window)).to(device)
    model.eval()
    found = []
    for own in (replace(config, cuda_graphs=False), config):
        options: dict[str, Any] = {**repeating(), "max_new_tokens": 90}
        if way == "lookup":
            options["prompt_lookup_num_tokens"] = 6
        elif way == "early":
            options["assistant_early_exit"] = 1
        else:
            schedule = "heuristic" if way == "unpatched" else way
            # with a window, 5.17 fails to make the mask of an unpatched drafter
            drafts = model if way != "unpatched" or window is None else tiny_mistral(None).to(device)
            options["assistant_model"] = drafter_of(drafts, schedule)
            if way != "unpatched":
                turbo_hf.patch(options["assistant_model"], own)
        assert not runners
        found.append(answer(model, own, **options))
    assert torch.equal(*found)
    # the model's own, and that of all drafts
    assert len(runners) == (1 if way in ("lookup", "unpatched") else 2)
    assert all(1 <= runner.captures <= 20 for runner in runners)


def test_most_passes_are_replayed(runners: list[StepRunner]) -> None:
    model = tiny_llama()
    # else Transformers takes pad tokens that the model says for padding of the drafter's prompt
    model.generation_config.pad_token_id = None
    drafter = drafter_of(model, "constant", noise=0.0)
    with turbo_hf.patch(model, SMALL), turbo_hf.patch(drafter, SMALL):
        model.generate(**repeating(), max_new_tokens=120, do_sample=False, assistant_model=drafter)
    for runner in runners:
        device: Any = runner.device
        assert device.replayed > 3 * device.warmed
        assert runner.warmups == 1


def test_what_is_not_captured_runs_as_before(runners: list[StepRunner]) -> None:
    """Sparse layers and `disable_compile`."""
    model = tiny_llama()
    sparse = SparseConfig(selector="saap", probes=3, window_tokens=12, read_all_layers=())
    index = an_index(model)
    ways: list[tuple[TurboConfig, dict[str, Any]]] = [
        (replace(SMALL, sparse=sparse), {}),
        (SMALL, {"disable_compile": True}),
    ]
    for config, options in ways:
        found = []
        for own in (replace(config, cuda_graphs=False), config):
            with turbo_hf.patch(model, own, calibration=index if own.sparse else None):
                call = {"max_new_tokens": 30, "do_sample": False, "prompt_lookup_num_tokens": 4, **options}
                found.append(model.generate(**repeating(), **call))
        assert torch.equal(*found)
    assert not any(runner.captures for runner in runners)


def test_the_drafters_cache_goes_with_the_call(runners: list[StepRunner], monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    drafter = drafter_of(model, "constant")
    made: list[Any] = []
    with turbo_hf.patch(model, SMALL), turbo_hf.patch(drafter, SMALL) as handle:
        make = type(handle._maker).make

        def watched(maker: Any, config: Any) -> TurboCache:
            cache = make(maker, config)
            made.append(weakref.ref(cache))
            return cache

        monkeypatch.setattr(type(handle._maker), "make", watched)
        gc.disable()
        try:
            model.generate(**repeating(), max_new_tokens=20, do_sample=False, assistant_model=drafter)
            # the stand-in for a graph holds its runner
            for runner in runners:
                runner._forget()
            runners.clear()
            assert [cache() for cache in made] == [None, None]
        finally:
            gc.enable()


# --- bit by bit ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "lengths"), [(None, [70]), (None, [70, 33, 5]), (40, [70, 33, 5])], ids=["one-row", "ragged", "window"]
)
@pytest.mark.parametrize("config", [*CONFIGS[:5], pytest.param(flat_config(block_size=32, low_heads=0.5), id="mixed")])
def test_drafts_store_what_the_host_stores(
    config: TurboConfig, window: int | None, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_kernels(monkeypatch)
    monkeypatch.setattr(steps, "AHEAD", 2)
    caches = [filled(config, window, lengths) for _ in range(2)]
    for cache in caches:
        cache.activate_past_recording()
    replayed, plain = caches
    run, drawn = ReplayableSteps(replayed), torch.Generator().manual_seed(0)
    moved = 0
    for _ in range(60):
        count = int(torch.randint(1, 12, (1,), generator=drawn))
        new = new_tokens(len(lengths), count)
        refused, before = int(torch.randint(0, count + 1, (1,), generator=drawn)), run.tensors()
        by_host(plain, new)
        by_steps(run, new, surplus=count % 3)
        for cache in caches:
            cache.crop(-refused)
        assert run.intact()
        moved += any(a is not b for a, b in zip(before, run.tensors(), strict=True))
        if window is None:
            assert_same(replayed, plain)
    if window is not None:
        # blocks that have left the window are dropped when pages are reserved
        assert_shows_same(replayed, plain, 39)
        assert all(max(layer.lengths()) <= 40 + 5 * 32 for layer in replayed.turbo_layers())
    assert 1 <= moved <= 12
    for cache in caches:
        cache.stop_recording()
    by_host(replayed, new)
    by_host(plain, new)
    if window is None:
        assert_same(replayed, plain)


@pytest.mark.parametrize("reach", [62, 92])
def test_a_crop_into_a_page_is_that_of_the_host(reach: int, monkeypatch: pytest.MonkeyPatch) -> None:
    without_kernels(monkeypatch)
    caches = [filled(flat_config(block_size=32), lengths=[102]) for _ in range(2)]
    for cache in caches:
        cache.activate_past_recording()
    replayed, plain = caches
    run = ReplayableSteps(replayed)
    by_both(run, plain, 1, 7)
    for cache in caches:
        cache.crop(-reach)
    assert not run.intact()
    assert_same(replayed, plain)


def test_captures_keep_no_pages_that_a_crop_has_replaced(
    runners: list[StepRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captures of several numbers of tokens would each keep a copy of the cache."""
    monkeypatch.setattr(steps, "AHEAD", 1)
    crop, replaced = ReplayableSteps.crop, 0

    def watched(run: ReplayableSteps, columns: int) -> bool:
        nonlocal replaced
        before, sizes = weakref.ref(run.layers[0].pool.paged[0].k), len(run.used)
        done = crop(run, columns)
        if run.layers[0].pool.paged[0].k is not before():
            replaced += sizes > 1
            assert before() is None
        return done

    monkeypatch.setattr(ReplayableSteps, "crop", watched)
    answer(tiny_llama(), SMALL, **repeating(), prompt_lookup_num_tokens=5, max_new_tokens=150)
    assert replaced


def test_nan_in_a_draft_is_reported_before_it_is_sealed(monkeypatch: pytest.MonkeyPatch) -> None:
    without_kernels(monkeypatch)
    cache = filled(flat_config(block_size=32), lengths=[FIRST + 70])
    cache.activate_past_recording()
    run = ReplayableSteps(cache)
    new = new_tokens(1, 7)
    new[1][0][0, 0, 3, 1] = torch.nan
    for _ in range(3):
        by_steps(run, new, 0)
        cache.crop(0)
    by_steps(run, new, 0)
    with pytest.raises(ValueError, match="layer 1: keys or values hold NaN"):
        cache.crop(0)
    with pytest.raises(ValueError, match="reset"):
        cache.crop(0)


@pytest.mark.parametrize("window", [None, 40])
def test_a_first_prompt_is_sealed_before_its_first_draft(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for so many tokens that no draft reaches into a page."""
    without_kernels(monkeypatch)
    config = flat_config(block_size=32, recent_tokens=0)
    caches = [TurboCache(tiny_llama().config, config) for _ in range(2)]
    k, v = tokens(1, HEADS, 200, DIM), tokens(1, HEADS, 200, DIM)
    for cache in caches:
        cache.activate_past_recording()
        for layer in cache.turbo_layers():
            layer.window = window
            layer.state = layer.state._replace(first=0 if window else FIRST)
            layer.append(k, v, NewColumns(200))
            layer.commit()
    replayed, plain = caches
    assert why_no_replay(replayed) is None
    run = ReplayableSteps(replayed)
    first = replayed.turbo_layers()[0].state
    # of a window of 40 before the last 32 tokens, whole blocks
    assert (first.sealed, first.open, first.dropped) == (([4], [72], [0]) if window is None else ([1], [40], [128]))
    by_both(run, plain, 1, 7)
    for cache in caches:
        cache.crop(-8)
        cache.stop_recording()
    assert not why_no_replay(replayed)
    assert_shows_same(replayed, plain, 39)
