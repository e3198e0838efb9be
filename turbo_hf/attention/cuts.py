"""What a step that is captured cannot hold, and the host does between two graphs."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

_of_thread = threading.local()


class Cut(Protocol):
    """What records a step, and may be cut."""

    def aside(self, call: Callable[[], object]) -> None:
        """End what is recorded so far; each replay makes this call before it goes on."""


class Now:
    """A `Cut` of a step that is not recorded: a call is made at once."""

    def aside(self, call: Callable[[], object]) -> None:
        """As `Cut.aside`."""
        call()


NOW = Now()


def current() -> Cut | None:
    """What records what this thread runs; None: it runs no step that may be captured."""
    return getattr(_of_thread, "cut", None)


@contextmanager
def cutting(cut: Cut | None) -> Iterator[None]:
    """Inside, `current` gives this."""
    before, _of_thread.cut = current(), cut
    try:
        yield
    finally:
        _of_thread.cut = before
