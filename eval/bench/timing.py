"""Time on a device: methods side by side, decode steps replayed by a graph, and one `generate` of random prompts."""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
from transformers import LogitsProcessor

from turbo_hf.errors import out_of_memory
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


Result = TypeVar("Result")

CHECKED = 2
"""New tokens whose logits are recorded: those of the prompt pass, and of the first step over the cache."""


class Clock(LogitsProcessor):
    """Notes when the logits of each new token are there. On a GPU by events: the host waits for nothing.

    Marks: the start, the logits of each new token, the end. first_logits: of the first row, (tokens before it [1, N],
    logits [1, V]) for the first CHECKED new tokens, if `record`.
    """

    def __init__(self, device: torch.device, record: bool = False) -> None:
        self.device, self.record = device, record
        self.marks: list[Any] = []
        self.first_logits: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """`scores`, unchanged."""
        self.mark()
        if self.record and len(self.first_logits) < CHECKED:
            self.first_logits.append((input_ids[:1].clone(), scores[:1].clone().float()))
        return scores

    def mark(self) -> None:
        """Note the time, once the device has done what it was given so far."""
        if self.device.type != "cuda":
            self.marks.append(time.perf_counter())
            return
        with torch.cuda.device(self.device):
            event: Any = torch.cuda.Event(enable_timing=True)
            event.record()
        self.marks.append(event)

    def ms(self, start: int, end: int) -> float:
        """Milliseconds between two marks."""
        first, last = self.marks[start], self.marks[end]
        if self.device.type != "cuda":
            return 1e3 * float(last - first)
        last.synchronize()
        return float(first.elapsed_time(last))


def speed(clocks: Sequence[Clock], rows: int, new: int) -> dict[str, Any]:
    """Medians of several rounds of one `generate` of `new` tokens in each of `rows` rows.

    Returns:
        tokens_s: new tokens of all rows over the whole time, prompt included.
        first_ms: until the first token.
        first_spread: interquartile range of first_ms over it; None of a single round.
        step_ms: from one token to the next, mean of a round; None where there is no second one.
    """
    first = [clock.ms(0, 1) for clock in clocks]
    return {
        "tokens_s": 1e3 * rows * new / statistics.median(clock.ms(0, -1) for clock in clocks),
        "first_ms": statistics.median(first),
        "first_spread": spread(first) if len(first) > 1 else None,
        "step_ms": statistics.median(clock.ms(1, -2) / (new - 1) for clock in clocks) if new > 1 else None,
    }


def vocabulary_of(model: Any) -> int:
    """Tokens that the model knows."""
    size: int = model.config.get_text_config(decoder=True).vocab_size
    return size


def random_prompts(model: Any, rows: int, tokens: int, seed: int) -> torch.Tensor:
    """Ids, int64 [rows, tokens] on the model's device."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(10, vocabulary_of(model), (rows, tokens), generator=generator)
    return ids.to(model.device)


def clocked(
    model: Any, ids: torch.Tensor, mask: torch.Tensor, new: int, *, record: bool = False, **options: Any
) -> tuple[Clock, Any]:
    """One greedy `generate` of exactly `new` tokens: its clock, and what it returned as a dictionary.

    record: also the first logits. options: further ones of `generate`.
    """
    clock = Clock(model.device, record)
    clock.mark()
    made = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        pad_token_id=0,
        logits_processor=[clock],
        return_dict_in_generate=True,
        **options,
    )
    clock.mark()
    return clock, made


def attempt(call: Callable[[], Result]) -> Result | None:
    """What the call returns; None where the memory does not suffice. All other errors as they are."""
    try:
        return call()
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
    free_memory()  # behind the handler: the error holds the frames that hold the tensors
    return None
