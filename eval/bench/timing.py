"""Time on a device, methods side by side, and the measured ceilings that a time is held against."""

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

WARM_UP = 3
"""Calls before the clock runs: compilation, handles, the allocator."""

LEAST_ROUNDS, MOST_ROUNDS = 5, 100

BURST_MS = 150.0
"""How long one method runs back to back, flushes included, as the layers of a model do: a GPU's clock follows its
power, and a single call after a pause runs at a clock that no prompt of a model sees."""

FLUSH_BYTES = 1 << 30
"""Written before each timed call on a GPU: pushes the inputs out of L2, and takes long enough that the host has queued
the call's kernels before the GPU is ready for them."""

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


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What this device was seen to reach on large plain work.

    size: n of the n x n x n products, random operands.
    bf16, int8, fp8: 10^12 operations per second; None where the device has no such product.
    copy: 10^12 bytes per second, read and written.
    """

    size: int
    bf16: float
    int8: float | None
    fp8: float | None
    copy: float

    @property
    def eight_bit(self) -> float:
        """The better of INT8 and FP8, whose units have one rate on the GPUs that have both; BF16 where none has."""
        return max(rate for rate in (self.bf16, self.int8, self.fp8) if rate is not None)

    def floor_ms(self, flops: float, bits: tuple[int, int], moved: float) -> float:
        """No version runs much faster: half of `flops` at each width's rate, or `moved` bytes, whichever is longer."""
        rates = [self.eight_bit if width == 8 else self.bf16 for width in bits]
        return 1e3 * max(sum(flops / 2 / (rate * 1e12) for rate in rates), moved / (self.copy * 1e12))


def ceilings(stopwatch: Stopwatch) -> Ceilings:
    """Measure them: matrix products of 8192 cubed and a copy of 2 GiB on a GPU, toy sizes elsewhere."""
    device = stopwatch.device
    size, copied = (8192, 1 << 31) if device.type == "cuda" else (256, 1 << 24)
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    one = torch.ones((), device=device)
    products: dict[str, Callable[[torch.Tensor, torch.Tensor], Call]] = {
        "bf16": lambda x, y: lambda: x @ y.T,
        "int8": lambda x, y: lambda: torch._int_mm(x, y.T),
        "fp8": lambda x, y: (
            lambda: torch._scaled_mm(x, y.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)
        ),
    }
    casts: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "bf16": lambda x: x,
        "int8": lambda x: (32 * x).clamp(-127, 127).to(torch.int8),
        "fp8": lambda x: x.to(torch.float8_e4m3fn),
    }
    rates: dict[str, Any] = {}
    for name, product in products.items():
        try:
            rates[name] = 2 * size**3 / _median_s(product(casts[name](a), casts[name](b)), stopwatch) / 1e12
        except RuntimeError:  # no such unit, or no such product in this torch
            rates[name] = None
    source = torch.randint(-128, 127, (copied,), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    copy = 2 * copied / _median_s(lambda: target.copy_(source), stopwatch) / 1e12
    return Ceilings(size, **rates, copy=copy)


def _median_s(call: Call, stopwatch: Stopwatch) -> float:
    return statistics.median([stopwatch(call) for _ in range(WARM_UP + 10)][WARM_UP:]) / 1e3
