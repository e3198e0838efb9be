"""`turbo-hf bench serve`: many requests through continuous batching, patched and unpatched, and in static batches."""

import csv
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from turbo_hf.config.turbo_config import DEFAULT_PRESET, TurboConfig, resolve_config
from turbo_hf.console import Device, Json, mistakes_end_the_command, remark, show_table
from turbo_hf.eval.bench.checked import print_notes
from turbo_hf.eval.bench.clock import clocked, vocabulary_of
from turbo_hf.eval.bench.random_models import KINDS, bench_model, require_one_model
from turbo_hf.eval.bench.runner import (
    BenchRun,
    Folder,
    ModelPlace,
    Seed,
    Tiny,
    figure,
    find_device,
    one_of,
    prepare_folder,
    require_choice,
)
from turbo_hf.eval.bench.shapes import parse_tokens
from turbo_hf.eval.bench.timing import free_memory
from turbo_hf.patching.continuous_batching import SINCE
from turbo_hf.patching.patch_model import patch

WORKLOADS = ("azure", "shared", "even")
"""Lengths of a trace; one long prompt that all requests begin with; all requests alike."""

AZURE = Path(__file__).resolve().parents[1] / "azure_conv.csv"
"""The first 1,000 requests of the conversation trace of Patel et al., Splitwise, ISCA 2024 (CC-BY, Azure)."""

UNPATCHED = "Transformers"
OWN_TOKENS = 128
"""Tokens of a prompt behind the shared one."""

PERCENTS = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Request:
    """Lengths of one request. arrival: seconds after the first one."""

    arrival: float
    context: int
    generated: int


@dataclass(frozen=True, slots=True)
class Job:
    """One request: when it arrives, in seconds, its prompt, and how many tokens it shall get."""

    arrival: float
    prompt: list[int]
    new: int


@dataclass(frozen=True, slots=True)
class ServeRow:
    """One way to serve a workload; figures are None where it did not run, and `note` says why.

    tokens_s: new tokens of all requests over the time from the first arrival to the last token.
    first_ms: percentiles of the time from a request's arrival to its first token.
    between_ms: the same from one token to the next.
    rows: requests between their first and last token, mean over the time.
    hits: share of the prompt tokens that a stored prefix has saved.
    peak_bytes: the most memory allocated, weights and the planned pool included; None where it is not counted.
    """

    workload: str
    method: str
    requests: int
    tokens_s: float | None = None
    first_ms: dict[str, float] = field(default_factory=dict)
    between_ms: dict[str, float] = field(default_factory=dict)
    rows: float | None = None
    hits: float | None = None
    peak_bytes: int | None = None
    note: str = ""


def azure_requests(count: int, longest: int) -> list[Request]:
    """The first `count` requests of AZURE whose prompt and reply take `longest` tokens at most, by arrival.

    Raises:
        ValueError: there is none.
    """
    with AZURE.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    lengths = [(row["TIMESTAMP"], int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in rows]
    fit = [each for each in sorted(lengths) if each[2] and each[1] + each[2] <= longest][:count]
    if not fit:
        raise ValueError(f"no request of the trace has {longest} tokens or fewer, prompt and reply together.")
    # the trace has seven digits of a second; Python reads six
    times = [datetime.fromisoformat(stamp[:26]).timestamp() for stamp, _, _ in fit]
    return [Request(at - times[0], context, new) for at, (_, context, new) in zip(times, fit, strict=True)]


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """By nearest rank: the least value that this percentage of the values do not exceed."""
    order = sorted(values)
    return {f"p{percent}": order[max(0, -(-percent * len(order) // 100) - 1)] for percent in PERCENTS}


def jobs_of(requests: Sequence[Request], shared: int, vocabulary: int, seed: int) -> list[Job]:
    """Requests of these lengths with random tokens; the first `shared` are the same in all prompts."""
    generator = torch.Generator().manual_seed(seed)

    def ids(count: int) -> list[int]:
        drawn: list[int] = torch.randint(10, vocabulary, (count,), generator=generator).tolist()
        return drawn

    common = ids(shared)
    return [Job(one.arrival, common + ids(one.context - shared), one.generated) for one in requests]


def continuously(model: Any, jobs: Sequence[Job], config: TurboConfig | None, options: dict[str, Any]) -> ServeRow:
    """Serve by continuous batching; config None: unpatched. options: of `ContinuousBatchingConfig`."""
    from transformers.generation.configuration_utils import (  # noqa: PLC0415 - lacks fields before 5.19
        ContinuousBatchingConfig,
        GenerationConfig,
    )

    generation = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=1)
    planned = ContinuousBatchingConfig(**options)
    handle = None if config is None else patch(model, config)
    try:
        with model.continuous_batching_context_manager(
            generation, continuous_batching_config=planned, warmup=False
        ) as manager:
            # kernels compile for each kind of pass, steps are captured, and torch's allocator gets its first blocks
            vocabulary = vocabulary_of(model)
            _collect(manager, [replace(job, prompt=_others(job.prompt, vocabulary)) for job in jobs])
            before = _hits(handle)
            times = _collect(manager, jobs)
            after = _hits(handle)
    finally:
        if handle is not None:
            handle.remove()
    total = after[1] - before[1]
    return replace(summed("", "", jobs, times), hits=(after[0] - before[0]) / total if total else None)


def _others(prompt: list[int], vocabulary: int) -> list[int]:
    """Other tokens, so that a stored prefix of these is not found; prompts that begin alike still do."""
    return [(token + 1) % vocabulary for token in prompt]


def _hits(handle: Any) -> tuple[int, int]:
    """Prompt tokens that stored prefixes have saved, and all of them."""
    serving = None if handle is None else handle._maker.serving
    return (0, 0) if serving is None else (serving.hit_tokens, serving.prompt_tokens)


def _collect(manager: Any, jobs: Sequence[Job]) -> list[list[float]]:
    """Send each job when it arrives, its number its id, and return the seconds of its tokens, from the first arrival
    on."""
    begin, waiting = time.perf_counter(), list(enumerate(jobs))[::-1]
    times: list[list[float]] = [[] for _ in jobs]
    missing = len(jobs)
    while missing:
        while waiting and waiting[-1][1].arrival <= time.perf_counter() - begin:
            n, job = waiting.pop()
            manager.add_request(job.prompt, str(n), max_new_tokens=job.new, record_timestamps=True)
        output = manager.get_result(timeout=0.01 if waiting else 1)
        if output is None:
            if not manager.is_running():
                raise RuntimeError("the manager has ended")
            continue
        if output.error:
            raise RuntimeError(output.error)
        if output.is_finished():
            times[int(output.request_id)], missing = [at - begin for at in output.timestamps], missing - 1
    return times


def in_batches(model: Any, jobs: Sequence[Job], config: TurboConfig | None, batch: int) -> ServeRow:
    """Serve by `generate`, `batch` requests at a time in order of arrival, each batch as long as its longest reply.

    The clock of arrivals runs on while nothing is computed, without waiting for it.
    """
    handle = None if config is None else patch(model, config)
    times: list[list[float]] = []
    try:
        with torch.inference_mode():
            clocked(model, *_padded(model, jobs[:batch]), 4)
            now = 0.0
            for at in range(0, len(jobs), batch):
                rows = jobs[at : at + batch]
                begin = max(now, *(job.arrival for job in rows))
                clock, _ = clocked(model, *_padded(model, rows), max(job.new for job in rows))
                marks = [begin + clock.ms(0, n) / 1e3 for n in range(1, len(clock.marks))]
                times += [marks[: job.new] for job in rows]
                now = marks[-1]
    finally:
        if handle is not None:
            handle.remove()
    return summed("", "", jobs, times)


def _padded(model: Any, jobs: Sequence[Job]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask [rows, longest prompt], padded at the left."""
    width = max(len(job.prompt) for job in jobs)
    ids = torch.tensor([[0] * (width - len(job.prompt)) + job.prompt for job in jobs])
    mask = torch.arange(width) >= width - torch.tensor([len(job.prompt) for job in jobs])[:, None]
    return ids.to(model.device), mask.long().to(model.device)


def summed(workload: str, method: str, jobs: Sequence[Job], times: Sequence[Sequence[float]]) -> ServeRow:
    """The figures of a replay. times: the seconds of each job's tokens."""
    whole = max(ends[-1] for ends in times) - min(job.arrival for job in jobs)
    between = [1e3 * (b - a) for ends in times for a, b in pairwise(ends)]
    return ServeRow(
        workload,
        method,
        len(jobs),
        tokens_s=sum(len(ends) for ends in times) / whole,
        first_ms=percentiles([1e3 * (ends[0] - job.arrival) for ends, job in zip(times, jobs, strict=True)]),
        between_ms=percentiles(between) if between else {},
        rows=sum(ends[-1] - ends[0] for ends in times) / whole,
    )


def measured(model: Any, row: ServeRow, serve: Callable[[], ServeRow]) -> ServeRow:
    """The row with its figures, or with what went wrong: a method that fails must not cost the others theirs."""
    free_memory()
    cuda = model.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(model.device)
    try:
        found = serve()
    except Exception as error:
        return replace(row, note=f"failed: {type(error).__name__}: {str(error).strip()}")
    peak = torch.cuda.max_memory_allocated(model.device) if cuda else None
    return replace(found, workload=row.workload, method=row.method, peak_bytes=peak)


def serve_command(
    shape: Annotated[str | None, typer.Option(help=f"{', '.join(KINDS)}. Default: llama3-8b.")] = None,
    model_place: ModelPlace = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers; default: as many as the model has.")] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(WORKLOADS)}; may be repeated. Default: these."),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="How many.")] = 128,
    context: Annotated[
        str, typer.Option(help="even: tokens of each prompt; azure: of the longest, with its reply.")
    ] = ("8k"),
    prefix: Annotated[str, typer.Option(help="shared: tokens that all prompts begin with.")] = "4k",
    new: Annotated[int, typer.Option(min=2, help="shared, even: tokens to generate.")] = 128,
    speedup: Annotated[float, typer.Option(min=0, help="azure: of the arrivals; 0: all are there at once.")] = 0,
    gap: Annotated[float, typer.Option(min=0, help="shared, even: seconds from one arrival to the next.")] = 0,
    preset: Annotated[list[str] | None, typer.Option(help="Of the patch; may be repeated.")] = None,
    batch: Annotated[int, typer.Option(min=0, help="Rows of a static batch; 0: no static batches.")] = 32,
    unpatched: Annotated[bool, typer.Option("--unpatched/--patched-only", help="Also without the patch.")] = True,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a pass, of all requests.")] = 8192,
    pool: Annotated[str | None, typer.Option(help="Tokens that the pool holds; default: as memory allows.")] = None,
    tiny: Tiny = False,
    seed: Seed = 0,
    folder: Folder = None,
    device: Device = "auto",
    json_line: Json = False,
) -> None:
    """Tokens per second, waits and memory of many requests, by models with random weights.

    Compares Transformers' continuous batching, unpatched (SDPA, or FlashAttention where it is installed) and patched,
    with static batches of `generate`. Needs transformers 5.19.
    """
    given = dict(locals())
    with mistakes_end_the_command():
        require_version()
        workloads = [one_of("workload", name, WORKLOADS) for name in workload or WORKLOADS]
        require_one_model(shape, model_place, layers, tiny)
        shape = one_of("shape", shape or "llama3-8b", KINDS)
        configs = {name: resolve_config(name) for name in preset or [DEFAULT_PRESET]}
        where = find_device(device)
        require_choice(where, bool(tiny or layers or model_place), "--model, --layers 1, or --tiny to try the command")
        lengths = {name: _requests(name, requests, context, prefix, new, speedup, gap) for name in workloads}
        prepare_folder(folder)
    bench = BenchRun[ServeRow]("serve", where, folder)
    torch.manual_seed(seed)
    model = bench_model(shape, model_place, layers, where, tiny=tiny)
    options: dict[str, Any] = {"max_batch_tokens": batch_tokens, "page_size": 256}
    if pool is not None:
        options["num_blocks"] = -(-parse_tokens(pool) // 256)

    def measure(name: str, tell: Callable[[str], None]) -> list[ServeRow]:
        jobs = jobs_of(lengths[name], parse_tokens(prefix) if name == "shared" else 0, vocabulary_of(model), seed)
        ways: list[tuple[str, Callable[[], ServeRow]]] = []
        for method, config in {UNPATCHED: None, **configs}.items():
            if config is not None or unpatched:
                ways.append((method, lambda config=config: continuously(model, jobs, config, options)))  # type: ignore[misc]
                if batch:
                    static = lambda config=config: in_batches(model, jobs, config, batch)  # noqa: E731
                    ways.append((f"{method}, batches of {batch}", static))
        rows = []
        for method, serve in ways:
            tell(f"{name}: {method}")
            rows.append(measured(model, ServeRow(name, method, len(jobs)), serve))
        return rows

    given["configs"] = {name: config.to_dict() for name, config in configs.items()}
    bench.each(workloads, measure, _print, options=given)
    bench.finish(json_line, [f"{row.method}, {row.workload}: {row.note}" for row in bench.rows if row.note])


def require_version() -> None:
    """ValueError where Transformers is too old."""
    import transformers  # noqa: PLC0415 - only its version
    from packaging.version import Version  # noqa: PLC0415

    here = Version(transformers.__version__)
    if Version(f"{here.major}.{here.minor}") < SINCE:
        raise ValueError(f"bench serve needs transformers {SINCE} or newer; {here} is installed. Upgrade it.")


def _requests(
    workload: str, count: int, context: str, prefix: str, new: int, speedup: float, gap: float
) -> list[Request]:
    """Lengths and arrivals."""
    if workload == "azure":
        found = azure_requests(count, parse_tokens(context))
        return [replace(one, arrival=one.arrival / speedup if speedup else 0.0) for one in found]
    tokens = parse_tokens(prefix) + OWN_TOKENS if workload == "shared" else parse_tokens(context)
    return [Request(gap * n, tokens, new) for n in range(count)]


def _print(workload: str, rows: Sequence[ServeRow]) -> None:
    cells = []
    for row in rows:
        waits = [figure(of.get(name), ".1f") for of in (row.first_ms, row.between_ms) for name in ("p50", "p99")]
        peak = figure(row.peak_bytes and row.peak_bytes / 1e9, ".1f")
        own = figure(row.rows, ".1f"), figure(row.hits, ".0%"), peak
        cells.append([row.method, figure(row.tokens_s, ".1f"), *waits, *own])
    headings = ("", "tokens/s", "first ms", "p99", "between", "p99", "rows", "hits", "GB")
    show_table(f"{workload}, {rows[0].requests} requests", headings, cells)
    remark("first, between: ms to the first token and from one to the next, medians and p99.")
    print_notes((row.method, row.note) for row in rows)
