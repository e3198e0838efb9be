"""No other thread generates with a model while its hooks and methods are changed: it would see some of them alone."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

GENERATE = "generate"
CALLS = ("_wrapped_call_impl", GENERATE)
"""What is on the stack of a thread that runs a module, or generates: torch's call of a module, and `generate`."""

PATIENCE = 5.0
"""Seconds to wait for such a thread: one that has streamed its last token is still to leave `generate`."""

_one_at_a_time = threading.Lock()


@contextmanager
def alone(model: torch.nn.Module, change: str) -> Iterator[None]:
    """Inside, no other thread generates: calls under way are over, and those that come to `generate` wait.

    change: what is done inside, for the error.

    Raises:
        ValueError: another thread still runs the model, or a module of it, after `PATIENCE` seconds.
    """
    done = threading.Event()

    def generate_after(*args: Any, **kwargs: Any) -> Any:
        done.wait()
        return getattr(model, GENERATE)(*args, **kwargs)

    with _one_at_a_time:
        before = vars(model).get(GENERATE)
        if hasattr(type(model), GENERATE):
            vars(model)[GENERATE] = generate_after
        try:
            _wait_for_others(model, change)
            yield
        finally:
            if before is None:
                vars(model).pop(GENERATE, None)
            else:
                vars(model)[GENERATE] = before
            done.set()


def _wait_for_others(model: torch.nn.Module, change: str) -> None:
    end = time.monotonic() + PATIENCE
    while threads := _running(model):
        if time.monotonic() > end:
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            raise ValueError(
                f"thread {names.get(threads[0], threads[0])!r} runs this model, and {change} would change it in the "
                f"middle of a pass. Wait until that thread is done (join), then call {change} again."
            )
        time.sleep(0.01)


def _running(model: torch.nn.Module) -> list[int]:
    """The other threads that are in a call of a module of the model."""
    stacks = {thread: frame for thread, frame in sys._current_frames().items() if thread != threading.get_ident()}
    modules = {id(module) for module in model.modules()} if stacks else set()
    return [thread for thread, frame in stacks.items() if _calls(frame, modules)]


def _calls(frame: Any, modules: set[int]) -> bool:
    while frame is not None:
        if frame.f_code.co_name in CALLS and id(frame.f_locals.get("self")) in modules:
            return True
        frame = frame.f_back
    return False
