"""Time on a device: methods side by side, and decode steps replayed by a graph."""

import gc
import statistics
import time
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch

from turbo_hf.layout import HeadGroups, widths_of
from turbo_hf.ops.layer_ops import LayerOps

WARM_UP = 3
"""Calls before the clock runs: compilation, handles, the allocator."""

LEAST_ROUNDS, MOST_ROUNDS = 5, 100

BURST_MS = 150.0
"""How long one method runs back to back, flushes included, as the layers of a model do: a GPU's clock follows its
power, and a single call after a pause runs at a clock that no prompt of a model sees."""

FLUSH_BYTES = 1 << 30
"""Written before each timed call on a GPU: pushes the inputs out of L2, and takes long enough that the host has queued
the call's kernels before the GPU is ready for them."""

LAUNCHES = 8
"""Minimum launches per graph: they share the cost of a replay and of reading the clock."""

MOST_COPIES = 1024
"""Maximum number of copies: below the size where it is reached, the launch and not memory takes the time."""

EAGER_CALLS = 50

Call = Callable[[], object]


class Stopwatch:
    """Times calls on one device, in milliseconds: CUDA events on a GPU, the wall clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._events = device.type == "cuda"
        self.burst_ms = BURST_MS if self._events else 0.0
        self._flush = torch.empty(FLUSH_BYTES if self._events else 0, dtype=torch.int8, device=device)
        # a call of microseconds waits longer for this than it runs
        self.flush_ms = self._flushing() if self._events else 0.0

    def _flushing(self) -> float:
        with torch.cuda.device(self.device):
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
            for mark in marks:
                self._flush.zero_()
                mark.record()
            marks[-1].synchronize()
        return float(marks[1].elapsed_time(marks[-1])) / 2

    def __call__(self, call: Call, burst: int = 1) -> float:
        """Median of `burst` calls, one right after the other."""
        if not self._events:
            start = time.perf_counter()
            for _ in range(burst):
                call()
            return 1e3 * (time.perf_counter() - start) / burst
        with torch.cuda.device(self.device):  # events are recorded on the current device's stream
            pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(burst)]
            for begin, end in pairs:
                self._flush.zero_()
                begin.record()
                call()
                end.record()
            pairs[-1][1].synchronize()
        return statistics.median(float(begin.elapsed_time(end)) for begin, end in pairs)


class Conditions(NamedTuple):
    """How each case of a bench runs.

    backend: which one of ours. seed: of random inputs.
    seconds: approximate timing duration.
    tell: called with a line at each step.
    """

    stopwatch: Stopwatch
    backend: str
    seed: int
    seconds: float
    tell: Callable[[str], None] = lambda step: None

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.stopwatch.device

    def ops(self, like: torch.Tensor, groups: HeadGroups, rotary_dim: int | None = None) -> LayerOps:
        """Ours, of a layer; arguments as of `ops_of`."""
        bits = max(widths_of(width)[0] for width, _ in groups)
        return LayerOps(self.backend, like.device, like.dtype, like.shape[-1], rotary_dim, bits=bits)


def side_by_side(calls: dict[str, Call], stopwatch: Stopwatch, seconds: float) -> dict[str, list[float]]:
    """Milliseconds of each call in each round; a round runs all of them, each round beginning with the next one.

    Rounds go on for about `seconds`, at least LEAST_ROUNDS and at most MOST_ROUNDS of them, after a warm-up.
    """
    # the last of the warm-up calls, compiled and loaded, says how long a round takes
    once = {name: [stopwatch(call) for _ in range(WARM_UP)][-1] for name, call in calls.items()}
    each = {name: max(ms, 1e-3) + stopwatch.flush_ms for name, ms in once.items()}
    bursts = {name: max(1, round(stopwatch.burst_ms / ms)) for name, ms in each.items()}
    whole = sum(bursts[name] * ms for name, ms in each.items())
    rounds = min(max(int(1e3 * seconds / whole), LEAST_ROUNDS), MOST_ROUNDS)
    times: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for _ in range(rounds):
        for name in order:
            times[name].append(stopwatch(calls[name], bursts[name]))
        order = order[1:] + order[:1]
    return times


def spread(times: list[float]) -> float:
    """Interquartile range over the median: differences below it are noise."""
    low, _, high = statistics.quantiles(times, n=4)
    return (high - low) / statistics.median(times)


def speedup(ours: list[float], theirs: list[float]) -> float:
    """How many times as fast `ours` is: the median of the ratios of the rounds."""
    return statistics.median(b / a for a, b in zip(ours, theirs, strict=True))


def free_memory() -> None:
    """Give a GPU's unused memory back: blocks cut for one case seldom fit the next one's tensors."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def copy_bandwidth(stopwatch: Stopwatch) -> float:
    """10^12 bytes per second, read and written, of a copy of 2 GiB on a GPU, of a toy size elsewhere."""
    copied = 1 << 31 if stopwatch.device.type == "cuda" else 1 << 24
    source = torch.randint(-128, 127, (copied,), dtype=torch.int8, device=stopwatch.device)
    target = torch.empty_like(source)
    times = [stopwatch(lambda: target.copy_(source)) for _ in range(WARM_UP + 10)][WARM_UP:]
    return 2 * copied / statistics.median(times) / 1e9


def cold_copies(size: int, device: torch.device) -> int:
    """How many copies of `size` bytes, read one after the other, leave nothing of the first in L2; 2 without a GPU.

    At most MOST_COPIES: of caches below 4 x L2 / MOST_COPIES a part is in L2.
    """
    if device.type != "cuda":
        return 2
    cache: int = torch.cuda.get_device_properties(device).L2_cache_size
    return min(4 * cache // size + 1, MOST_COPIES)


class Rotation:
    """One call that runs `calls` in turn, `launches` launches in all: on a GPU the replay of a CUDA graph."""

    def __init__(self, calls: list[Call], device: torch.device) -> None:
        self.first, self.device = calls[0], device
        self.launches = max(len(calls), LAUNCHES if device.type == "cuda" else 0)
        self._calls = [calls[i % len(calls)] for i in range(self.launches)]
        self._graph = self._captured() if device.type == "cuda" else None

    def __call__(self) -> None:
        if self._graph is None:
            self._run()
        else:
            self._graph.replay()

    def eager_us(self) -> float:
        """Microseconds of a call without a graph, by the wall clock: the host's time, or the device's if longer."""
        if self.device.type != "cuda":
            return self._wall_us(1)
        with torch.cuda.device(self.device):
            self._wall_us(3)
            return self._wall_us(EAGER_CALLS)

    def _wall_us(self, calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            self.first()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return 1e6 * (time.perf_counter() - start) / calls

    def _run(self) -> None:
        for call in self._calls:
            call()

    def _captured(self) -> torch.cuda.CUDAGraph:
        with torch.cuda.device(self.device):
            stream = _capture_stream(self.device)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._run()  # plans, workspaces and compilation: a capture may not allocate or wait for them
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                self._run()
        return graph


@lru_cache(maxsize=8)
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all graphs, which refer to workspaces: launches keep one per stream and shape, and only the newest 16."""
    return torch.cuda.Stream(device)
