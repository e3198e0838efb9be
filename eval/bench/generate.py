"""Tokens per second and peak memory of `generate`, patched and unpatched, against Hugging Face's quantized caches."""

import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from transformers import LogitsProcessor

from turbo_hf.config.turbo_config import resolve_config
from turbo_hf.errors import out_of_memory
from turbo_hf.eval.bench.timing import free_memory
from turbo_hf.eval.methods import BACKENDS
from turbo_hf.patching.patch_model import patch

SDPA = "SDPA"

Result = TypeVar("Result")

FINENESS = 16
"""One part in so many: how closely the largest batch is found by trying, or what a guess of it stays below."""

SAMPLE = (4, 16)
"""Numbers of rows whose memory use shows about how many fit."""


@dataclass(frozen=True, slots=True)
class Method:
    """How the cache is kept. preset: the patch's, None unpatched. options: further ones of `generate`.

    missing: the package without which it cannot run, "" if all are there. cuda_graphs: whether a patched model may
    replay its decode steps.
    """

    name: str
    preset: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    missing: str = ""
    cuda_graphs: bool = True


@dataclass(frozen=True, slots=True)
class Row:
    """One method, shape and size; figures are None where it did not run, and `note` says why.

    context: tokens of each prompt; new: tokens generated in each row; largest: whether batch is about all that fits.
    tokens_s: new tokens of all rows over the whole time, prompt included; first_ms: until the first token; step_ms:
    from one token to the next, mean; medians of the rounds. peak_bytes: the most memory allocated, weights included,
    None where it is not counted. speedup: tokens_s over that of SDPA at the same context, each at its own batch.
    """

    shape: str
    method: str
    context: int
    batch: int
    new: int
    largest: bool
    tokens_s: float | None = None
    first_ms: float | None = None
    step_ms: float | None = None
    peak_bytes: int | None = None
    speedup: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Work:
    """What is generated: `new` tokens after `context` random ones, in `rounds` timed rounds.

    chunk: tokens of a prompt that run at a time, None for all of them.
    """

    context: int
    new: int
    rounds: int
    chunk: int | None
    seed: int


class Clock(LogitsProcessor):
    """Notes when the logits of each new token are there. On a GPU by events: the host waits for nothing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[Any] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """`scores`, unchanged."""
        self.mark()
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


def methods(presets: list[str], cuda_graphs: bool = True) -> list[Method]:
    """SDPA with its DynamicCache, the presets, and 4 bit of Hugging Face's QuantizedCache by quanto and by hqq.

    cuda_graphs: of the presets.

    Raises:
        ValueError: an unknown preset.
    """
    for preset in presets:
        resolve_config(preset)
    quantized = [
        Method(
            f"{name} 4 bit",
            options={"cache_implementation": "quantized", "cache_config": {"backend": name, "nbits": 4, **axes}},
            missing="" if _installed(package) else package,
        )
        for name, (package, _, axes) in BACKENDS.items()
    ]
    return [Method(SDPA), *(Method(preset, preset, cuda_graphs=cuda_graphs) for preset in presets), *quantized]


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def compare(
    model: Any,
    shape: str,
    chosen: list[Method],
    work: Work,
    batch: int | None,
    most: int,
    tell: Callable[[str], None] = lambda step: None,
) -> list[Row]:
    """A row a method, at one context and batch; batch None: at the largest up to `most` that fits, each its own."""
    rows = []
    for method in chosen:
        tell(f"{shape}, {work.context} tokens: {method.name}")
        row = Row(shape, method.name, work.context, batch or 0, work.new, batch is None)
        if method.missing:
            rows.append(replace(row, note=f"{method.missing} is not installed"))
            continue
        try:
            rows.append(_measured(model, row, method, work, most))
        except Exception as error:  # a failing method must not cost the others their figures
            rows.append(replace(row, note=f"failed: {type(error).__name__}: {str(error).strip()}"))
        free_memory()
    base = next((row.tokens_s for row in rows if row.method == SDPA), None)
    return [replace(row, speedup=row.tokens_s / base if base and row.tokens_s else None) for row in rows]


def _measured(model: Any, row: Row, method: Method, work: Work, most: int) -> Row:
    batch = row.batch
    if row.largest:
        # as long a prompt as the rows will be at the end: two passes show what all of them would
        whole = replace(work, context=work.context + work.new - 2, new=2, rounds=1)
        guess = _guess(model, method, whole, most) if model.device.type == "cuda" else None
        batch = largest(_holds(model, method, whole), most) if guess is None else guess
    while batch:
        found = attempt(partial(_timed, model, replace(row, batch=batch), method, work))
        if found is not None:
            return found
        # a guess may be too high, and what was free when a batch was tried may not be free now
        batch = batch - max(1, batch // FINENESS) if row.largest else 0
    return replace(row, note="does not fit the memory")


def _holds(model: Any, method: Method, work: Work) -> Callable[[int], bool]:
    return lambda rows: attempt(partial(_run, model, method, rows, work)) is not None


def _guess(model: Any, method: Method, work: Work, most: int) -> int | None:
    """How many rows fit, by what a few and some more take, less a part of FINENESS; None where these do not fit."""
    few, more = SAMPLE
    if most < more:
        return None
    peaks = []
    for rows in (few, few, more):  # the first pass compiles, and leaves workspaces behind
        torch.cuda.reset_peak_memory_stats(model.device)
        if not _holds(model, method, work)(rows):
            return None
        peaks.append(torch.cuda.max_memory_allocated(model.device))
    each = max(1, peaks[2] - peaks[1]) / (more - few)
    free_memory()
    free, _ = torch.cuda.mem_get_info(model.device)
    room = free + torch.cuda.memory_allocated(model.device) - (peaks[1] - few * each)
    return max(1, min(most, int(room / each * (1 - 1 / FINENESS))))


def attempt(call: Callable[[], Result]) -> Result | None:
    """What the call returns; None where the memory does not suffice. All other errors as they are."""
    try:
        return call()
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
    free_memory()  # behind the handler: the error holds the frames that hold the tensors
    return None


def largest(holds: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that holds, by doubling and bisection to one part in FINENESS; 0: none does."""
    low, high = 0, 1
    while high <= most and holds(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > max(1, low // FINENESS):
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


@contextmanager
def _cache_of(model: Any, method: Method) -> Iterator[None]:
    how: AbstractContextManager[Any] = nullcontext()
    if method.preset is not None:
        config = resolve_config(method.preset)
        how = patch(model, config if method.cuda_graphs else replace(config, cuda_graphs=False))
    with how, torch.inference_mode():
        yield


def _run(model: Any, method: Method, batch: int, work: Work) -> Clock:
    with _cache_of(model, method):
        return _generate(model, method, batch, work)


def _timed(model: Any, row: Row, method: Method, work: Work) -> Row:
    cuda = model.device.type == "cuda"
    with _cache_of(model, method):
        # compilation, the allocator's first blocks, and the plan that cuDNN makes for each length
        _generate(model, method, row.batch, work)
        if cuda:
            torch.cuda.reset_peak_memory_stats(model.device)
        clocks = [_generate(model, method, row.batch, work) for _ in range(work.rounds)]
    whole = statistics.median(clock.ms(0, -1) for clock in clocks)
    steps = [clock.ms(1, -2) / (work.new - 1) for clock in clocks if work.new > 1]
    return replace(
        row,
        tokens_s=1e3 * row.batch * work.new / whole,
        first_ms=statistics.median(clock.ms(0, 1) for clock in clocks),
        step_ms=statistics.median(steps) if steps else None,
        peak_bytes=torch.cuda.max_memory_allocated(model.device) if cuda else None,
    )


def _generate(model: Any, method: Method, batch: int, work: Work) -> Clock:
    """One `generate`. Marks: the start, each new token's logits, the end."""
    generator = torch.Generator().manual_seed(work.seed)
    ids = torch.randint(10, model.config.vocab_size, (batch, work.context), generator=generator).to(model.device)
    chunk = {} if work.chunk is None else {"prefill_chunk_size": work.chunk}
    clock = Clock(model.device)
    clock.mark()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=work.new,
        min_new_tokens=work.new,
        do_sample=False,
        pad_token_id=0,
        logits_processor=[clock],
        **chunk,
        **method.options,
    )
    clock.mark()
    return clock
