"""When the next batch is prepared, where batches are prepared while others run."""

from collections import deque
from collections.abc import Hashable

MARGIN = 0.001
"""Seconds by which a batch shall be launched before the pass ahead of it ends."""

MOST_WAIT = 0.25
"""Seconds that are waited at most: a pass that was held up once shall not hold up requests again."""

KEPT = 0.9
"""The share of the slowest preparation's time that counts one batch later."""


class Pace:
    """When to prepare the next batch: so late that requests which arrive while a pass runs join it, and so early that
    it is launched before that pass ends and the GPU never waits.

    A pass is expected to take as long as the quicker one of the last two of its kind. Times are in seconds, on any
    clock.
    """

    def __init__(self) -> None:
        # by kind, the last two, the newest last
        self._took: dict[Hashable, tuple[float, float]] = {}
        self._preparation = 0.0
        # passes that have not been waited for, the oldest first: its kind, and since when it can have run
        self._running: deque[tuple[Hashable, float]] = deque(maxlen=2)

    def wait(self, now: float) -> float:
        """How long to wait before the next batch is prepared; 0 where nothing is known of the pass that runs."""
        kind, began = self._running[-1] if self._running else (None, now)
        if kind not in self._took:
            return 0.0
        return min(MOST_WAIT, max(0.0, began + min(self._took[kind]) - self._preparation - MARGIN - now))

    def launched(self, kind: Hashable | None, begun: float, now: float) -> None:
        """A pass was launched, whose preparation began at `begun`. kind: of passes that take equally long and are
        quickly launched; None: of no such kind."""
        if kind is not None:
            self._preparation = max(KEPT * self._preparation, now - begun)
        self._running.append((kind, now))

    def ended(self, now: float, just_now: bool) -> None:
        """The oldest pass has ended. just_now: not some time ago."""
        if not self._running:
            return
        kind, began = self._running.popleft()
        took = now - began
        if kind is not None and just_now:
            self._took[kind] = self._took.get(kind, (took, took))[1], took
        elif kind in self._took and took < min(self._took[kind]):
            # it was quicker than expected; how quick, the next one will show
            del self._took[kind]
        if self._running:
            # it ran no earlier
            self._running[0] = self._running[0][0], max(now, self._running[0][1])

    def reset(self) -> None:
        """Nothing runs."""
        self._running.clear()
