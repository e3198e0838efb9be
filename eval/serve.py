"""Memory and speed of `generate` at given sizes, and a length trace replayed through it in static batches."""

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from turbo_hf.eval.bench.clock import Clock, attempt, clocked, random_prompts, speed
from turbo_hf.eval.bench.timing import free_memory
from turbo_hf.eval.cache_size import cache_size
from turbo_hf.eval.methods import Method, applied
from turbo_hf.eval.without_cudnn_plans import without_plans
from turbo_hf.models.versions import CACHE

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
"""Columns of a trace in Azure's format (Patel et al., Splitwise, ISCA 2024)."""

PERCENTS = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Request:
    """One line of a trace. arrival: seconds after the first one."""

    arrival: float
    context: int
    generated: int


@dataclass(frozen=True, slots=True)
class Level:
    """One method at one size; None where it does not fit or a GPU would be needed.

    tokens_s, first_ms, step_ms: as in `clock.Speed`.
    peak_bytes: the most that was allocated, weights included.
    steady_bytes: allocated when `generate` returns, weights and cache.
    kv_bytes: of the cache.
    """

    method: str
    context: int
    batch: int
    new: int
    tokens_s: float | None = None
    first_ms: float | None = None
    step_ms: float | None = None
    peak_bytes: int | None = None
    steady_bytes: int | None = None
    kv_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Served:
    """One request of a replay.

    first_ms: from its batch's start to the first token.
    done_ms: from its batch's start to its own last token.
    latency_ms: from its arrival to that.
    """

    context: int
    generated: int
    first_ms: float
    done_ms: float
    latency_ms: float


def read_trace(path: Path) -> list[Request]:
    """The requests of a CSV file in order of arrival.

    Raises:
        ValueError: no such file, other columns, or no request.
    """
    if not path.is_file():
        raise ValueError(f"expected a trace at {path}; there is no such file.")
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if not set(COLUMNS) <= set(reader.fieldnames or ()):
            raise ValueError(f"expected the columns {', '.join(COLUMNS)} in {path}; got {reader.fieldnames}.")
        rows = [(_seconds(row["TIMESTAMP"]), int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in reader]
    rows.sort()
    if not rows:
        raise ValueError(f"{path} holds no request.")
    return [Request(at - rows[0][0], context, generated) for at, context, generated in rows]


def _seconds(stamp: str) -> float:
    # Azure writes seven digits of a second; Python reads six
    return datetime.fromisoformat(stamp[:26]).timestamp()


def chosen(trace: Sequence[Request], count: int, longest: int) -> tuple[list[Request], int]:
    """The first `count` requests whose prompt and reply take `longest` tokens at most, and how many were passed by."""
    fit = [request for request in trace if request.generated >= 1 and request.context + request.generated <= longest]
    taken = fit[:count]
    if not taken:
        raise ValueError(f"no request of the trace has {longest} tokens or fewer, prompt and reply together.")
    return taken, trace.index(taken[-1]) + 1 - len(taken)


def level(model: Any, method: Method, context: int, batch: int, new: int, rounds: int, seed: int) -> Level:
    """Measure one method at one size."""
    empty = Level(method.name, context, batch, new)
    return attempt(lambda: _level(model, method, empty, rounds, seed)) or empty


def _level(model: Any, method: Method, at: Level, rounds: int, seed: int) -> Level:
    cuda = model.device.type == "cuda"
    clocks: list[Clock] = []
    peak = steady = kv_bytes = None
    with applied(model, method) as handle, torch.inference_mode(), without_plans():
        lengths = [at.context] * at.batch
        # compilation, and the allocator's first blocks
        _generate(model, method, lengths, at.new, seed)
        free_memory()
        for _ in range(rounds):
            if cuda:
                torch.cuda.reset_peak_memory_stats(model.device)
            clock, cache = _generate(model, method, lengths, at.new, seed)
            clocks.append(clock)
            kv_bytes, _ = cache_size(cache, at.batch, handle)
            if cuda:
                peak, steady = torch.cuda.max_memory_allocated(model.device), torch.cuda.memory_allocated(model.device)
            del cache
    found = speed(clocks, at.batch, at.new)
    return replace(
        at,
        tokens_s=found.tokens_s,
        first_ms=found.first_ms,
        step_ms=found.step_ms,
        peak_bytes=peak,
        steady_bytes=steady,
        kv_bytes=kv_bytes,
    )


def replay(
    model: Any,
    method: Method,
    requests: Sequence[Request],
    batch: int,
    seed: int,
    advance: Callable[[int], None] = lambda done: None,
) -> tuple[list[Served], float] | None:
    """Serve the requests in static batches, in order of arrival: each request's times, and the busy seconds.

    A batch starts when the previous one has ended and its own requests have arrived, by the trace's clock; it takes as
    long as its longest reply. The device does not wait in between: only its busy time is real. None: a batch does not
    fit in memory.
    """
    served: list[Served] = []
    clock_s = busy_s = 0.0
    with applied(model, method), torch.inference_mode(), without_plans():
        # warm up with the widest batch, so that figures include neither compilation nor allocation
        widest = max(range(0, len(requests), batch), key=lambda at: max(r.context for r in requests[at : at + batch]))
        lengths = [request.context for request in requests[widest : widest + batch]]
        if attempt(lambda: _generate(model, method, lengths, 3, seed)) is None:
            return None
        for at in range(0, len(requests), batch):
            rows = requests[at : at + batch]
            new = max(request.generated for request in rows)
            made = attempt(lambda: _generate(model, method, [r.context for r in rows], new, seed)[0])  # noqa: B023
            if made is None:
                return None
            begin = max(clock_s, *(request.arrival for request in rows))
            first, whole = made.ms(0, 1), made.ms(0, -1)
            for request in rows:
                # the mark of its last token: later marks belong to longer replies of the batch
                done = made.ms(0, request.generated)
                waited = 1e3 * (begin - request.arrival)
                served.append(Served(request.context, request.generated, first, done, waited + done))
            clock_s, busy_s = begin + whole / 1e3, busy_s + whole / 1e3
            advance(len(rows))
    return served, busy_s


def _generate(model: Any, method: Method, lengths: Sequence[int], new: int, seed: int) -> tuple[Clock, Any]:
    """One `generate` over random left-padded prompts: its clock and its cache."""
    ids, mask = random_prompts(model, lengths, seed)
    given = {} if method.make is None else {CACHE: method.make(model, mask)}
    clock, made = clocked(model, ids, mask, new, **given)
    return clock, made[CACHE]


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """By nearest rank: the least value that this percentage of the values do not exceed."""
    order = sorted(values)
    return {f"p{percent}": order[max(0, -(-percent * len(order) // 100) - 1)] for percent in PERCENTS}


def summary(served: Sequence[Served], busy_s: float) -> dict[str, Any]:
    """Throughput over the busy time, and percentiles in ms, for JSON."""
    return {
        "requests": len(served),
        "new_tokens": sum(one.generated for one in served),
        "busy_s": busy_s,
        "tokens_s": sum(one.generated for one in served) / busy_s,
        "requests_s": len(served) / busy_s,
        "first_ms": percentiles([one.first_ms for one in served]),
        "done_ms": percentiles([one.done_ms for one in served]),
        "latency_ms": percentiles([one.latency_ms for one in served]),
    }
