"""A patch that is put on, or taken off, while another thread generates."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from models import tiny_llama
from patching_support import changes, generate, snapshot
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

import turbo_hf
from turbo_hf.patching import other_threads

LATE = 60.0
"""Seconds after which a test gives up: never reached, however slow the machine."""


class Held(LogitsProcessor):
    """Holds a generation up after its first token."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.begun.set()
        assert self.go_on.wait(LATE)
        return scores


@contextmanager
def generating(model: Any, **options: Any) -> Iterator[tuple[Held, list[Tensor]]]:
    """A thread that has begun to generate, and what it gives in the end."""
    held, found = Held(), list[Tensor]()
    call = {"logits_processor": LogitsProcessorList([held]), **options}
    thread = threading.Thread(target=lambda: found.append(generate(model, **call)), name="of the test")
    thread.start()
    try:
        assert held.begun.wait(LATE)
        yield held, found
    finally:
        held.go_on.set()
        thread.join(LATE)


def test_a_patch_is_refused_while_another_thread_generates(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    stock, before = generate(model), snapshot(model)
    monkeypatch.setattr(other_threads, "PATIENCE", 0.0)
    with generating(model) as (_, found):
        with pytest.raises(ValueError, match=r"thread 'of the test' runs this model, and patch\(\) would change it"):
            turbo_hf.patch(model)
        assert not changes(before, snapshot(model))
    assert torch.equal(found[0], stock)
    turbo_hf.patch(model).remove()


def test_a_removal_is_refused_while_another_thread_generates(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    stock = generate(model)
    monkeypatch.setattr(other_threads, "PATIENCE", 0.0)
    handle = turbo_hf.patch(model, "turbo2")
    ours, patched = generate(model), snapshot(model)
    with generating(model) as (_, found):
        with pytest.raises(ValueError, match=r"remove\(\) would change it in the middle of a pass\. Wait until that"):
            handle.remove()
        assert not changes(patched, snapshot(model))
    assert torch.equal(found[0], ours)
    assert not torch.equal(ours, stock)
    handle.remove()
    assert torch.equal(generate(model), stock)


def test_a_removal_waits_for_a_generation_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_threads, "PATIENCE", LATE)
    model = tiny_llama()
    stock = generate(model)
    handle = turbo_hf.patch(model, "turbo2")
    ours = generate(model)
    with generating(model) as (held, found):
        threading.Timer(0.05, held.go_on.set).start()
        handle.remove()
        assert held.go_on.is_set()
    assert torch.equal(found[0], ours)
    assert torch.equal(generate(model), stock)


def test_a_model_that_generates_again_and_again_is_patched_between_two_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_threads, "PATIENCE", LATE)
    model, errors, done = tiny_llama(), list[BaseException](), threading.Event()
    want = [generate(model)]
    with turbo_hf.patch(model, "turbo2"):
        want.append(generate(model))

    def run() -> None:
        try:
            while not done.is_set():
                got = generate(model)
                assert any(torch.equal(got, each) for each in want)
        except BaseException as error:
            errors.append(error)

    threads, kept = [threading.Thread(target=run) for _ in range(2)], sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for _ in range(60):
            turbo_hf.patch(model, "turbo2").remove()
    finally:
        sys.setswitchinterval(kept)
        done.set()
        for thread in threads:
            thread.join(LATE)
    assert not errors
