"""`turbo-hf bench serve`: many requests through continuous batching, patched and unpatched, and in static batches."""

import csv
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from packaging.version import Version

from turbo_hf.config.turbo_config import DEFAULT_PRESET, TurboConfig, resolve_config
from turbo_hf.console import Device, Json, mistakes_end_the_command, remark, show_table
from turbo_hf.eval.bench import runner
from turbo_hf.eval.bench.checked import print_notes
from turbo_hf.eval.bench.random_models import KINDS, bench_model, require_one_model
from turbo_hf.eval.bench.runner import figure
from turbo_hf.eval.bench.shapes import parse_tokens
from turbo_hf.eval.bench.timing import clocked, free_memory, vocabulary_of
from turbo_hf.models.versions import version_of
from turbo_hf.patching.continuous_batching import SINCE
from turbo_hf.patching.patch_model import patch

WORKLOADS = ("azure", "shared", "even")
"""Lengths of a trace; one long prompt that all requests begin with; all requests alike."""

AZURE = Path(__file__).resolve().parents[1] / "azure_conv.csv"
"""The first 1,000 requests of the conversation trace of Patel et al., Splitwise, ISCA 2024 (CC-BY, Azure)."""

UNPATCHED = "Transformers"
OWN_TOKENS = 128
"""Tokens of a prompt behind the shared one."""

Requests = Annotated[int, typer.Option(min=1, help="How many.")]
Context = Annotated[str, typer.Option(help="even: tokens of each prompt; azure: of the longest, with its reply.")]
Prefix = Annotated[str, typer.Option(help="shared: tokens that all prompts begin with.")]
New = Annotated[int, typer.Option(min=2, help="shared, even: tokens to generate.")]
Speedup = Annotated[float, typer.Option(min=0, help="azure: of the arrivals; 0: all are there at once.")]
Gap = Annotated[float, typer.Option(min=0, help="shared, even: seconds from one arrival to the next.")]

Served = tuple[list[list[float]], float | None]
"""The seconds of each job's tokens, and the share of prompt tokens that stored prefixes have saved."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request: when it arrives, in seconds after the first one, tokens of its prompt, and how many it shall get."""

    arrival: float
    context: int
    new: int
    prompt: list[int] = field(default_factory=list)


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


def azure_jobs(count: int, longest: int) -> list[Job]:
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
    return [Job(at - times[0], context, new) for at, (_, context, new) in zip(times, fit, strict=True)]


def asked_jobs(
    workloads: Sequence[str], requests: int, context: str, prefix: str, new: int, speedup: float, gap: float
) -> dict[str, list[Job]]:
    """The jobs of each workload, by the options of the command.

    Raises:
        ValueError: no such workload, no number of tokens, or no request of the trace is short enough.
    """
    asked: dict[str, list[Job]] = {}
    for name in workloads:
        if runner.one_of("workload", name, WORKLOADS) == "azure":
            found = azure_jobs(requests, parse_tokens(context))
            asked[name] = [replace(job, arrival=job.arrival / speedup if speedup else 0.0) for job in found]
            continue
        tokens = parse_tokens(prefix) + OWN_TOKENS if name == "shared" else parse_tokens(context)
        asked[name] = [Job(gap * n, tokens, new) for n in range(requests)]
    return asked


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """By nearest rank: the least value that this percentage of the values do not exceed."""
    order = sorted(values)
    return {f"p{percent}": order[max(0, -(-percent * len(order) // 100) - 1)] for percent in (50, 90, 99)}


def with_prompts(jobs: Sequence[Job], shared: int, vocabulary: int, seed: int) -> list[Job]:
    """The jobs with prompts of random tokens; the first `shared` are the same in all of them."""
    generator = torch.Generator().manual_seed(seed)

    def ids(count: int) -> list[int]:
        drawn: list[int] = torch.randint(10, vocabulary, (count,), generator=generator).tolist()
        return drawn

    common = ids(shared)
    return [replace(job, prompt=common + ids(job.context - shared)) for job in jobs]


def continuously(model: Any, jobs: Sequence[Job], config: TurboConfig | None, options: dict[str, Any]) -> Served:
    """Serve by continuous batching; config None: unpatched. options: of `ContinuousBatchingConfig`."""
    from transformers.generation.configuration_utils import (  # noqa: PLC0415 - lacks fields before 5.19
        ContinuousBatchingConfig,
        GenerationConfig,
    )

    generation = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=1)
    planned = ContinuousBatchingConfig(**options)
    with (
        patch(model, config) if config is not None else nullcontext() as handle,
        model.continuous_batching_context_manager(
            generation, continuous_batching_config=planned, warmup=False
        ) as manager,
    ):
        # kernels compile for each kind of pass, steps are captured, and torch's allocator gets its first blocks; other
        # tokens, so that a stored prefix of these is not found, and prompts that begin alike still do
        size = vocabulary_of(model)
        _collect(manager, [replace(job, prompt=[(token + 1) % size for token in job.prompt]) for job in jobs])
        before = _hits(handle)
        times = _collect(manager, jobs)
        saved, total = (now - then for now, then in zip(_hits(handle), before, strict=True))
    return times, saved / total if total else None


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


def in_batches(model: Any, jobs: Sequence[Job], config: TurboConfig | None, batch: int) -> Served:
    """Serve by `generate`, `batch` requests at a time in order of arrival, each batch as long as its longest reply.

    The clock of arrivals runs on while nothing is computed, without waiting for it.
    """
    times: list[list[float]] = []
    with patch(model, config) if config is not None else nullcontext(), torch.inference_mode():
        clocked(model, *_padded(model, jobs[:batch]), 4)
        now = 0.0
        for at in range(0, len(jobs), batch):
            rows = jobs[at : at + batch]
            begin = max(now, *(job.arrival for job in rows))
            clock, _ = clocked(model, *_padded(model, rows), max(job.new for job in rows))
            marks = [begin + clock.ms(0, n) / 1e3 for n in range(1, len(clock.marks))]
            times += [marks[: job.new] for job in rows]
            now = marks[-1]
    return times, None


def _padded(model: Any, jobs: Sequence[Job]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask [rows, longest prompt], padded at the left."""
    width = max(len(job.prompt) for job in jobs)
    ids = torch.tensor([[0] * (width - len(job.prompt)) + job.prompt for job in jobs])
    mask = torch.arange(width) >= width - torch.tensor([len(job.prompt) for job in jobs])[:, None]
    return ids.to(model.device), mask.long().to(model.device)


def summed(row: ServeRow, jobs: Sequence[Job], times: Sequence[Sequence[float]]) -> ServeRow:
    """The row with the figures of a replay. times: the seconds of each job's tokens."""
    whole = max(ends[-1] for ends in times) - min(job.arrival for job in jobs)
    between = [1e3 * (b - a) for ends in times for a, b in pairwise(ends)]
    return replace(
        row,
        tokens_s=sum(len(ends) for ends in times) / whole,
        first_ms=percentiles([1e3 * (ends[0] - job.arrival) for ends, job in zip(times, jobs, strict=True)]),
        between_ms=percentiles(between) if between else {},
        rows=sum(ends[-1] - ends[0] for ends in times) / whole,
    )


def measured(model: Any, row: ServeRow, jobs: Sequence[Job], serve: Callable[[], Served]) -> ServeRow:
    """The row with its figures, or with what went wrong: a method that fails must not cost the others theirs."""
    free_memory()
    cuda = model.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(model.device)
    try:
        times, hits = serve()
    except Exception as error:
        return replace(row, note=f"failed: {type(error).__name__}: {str(error).strip()}")
    peak = torch.cuda.max_memory_allocated(model.device) if cuda else None
    return replace(summed(row, jobs, times), hits=hits, peak_bytes=peak)


def serve_command(
    shape: Annotated[str | None, typer.Option(help=f"{', '.join(KINDS)}. Default: llama3-8b.")] = None,
    model_place: runner.ModelPlace = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers; default: as many as the model has.")] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(WORKLOADS)}; may be repeated. Default: these."),
    ] = None,
    requests: Requests = 128,
    context: Context = "8k",
    prefix: Prefix = "4k",
    new: New = 128,
    speedup: Speedup = 0,
    gap: Gap = 0,
    preset: Annotated[list[str] | None, typer.Option(help="Of the patch; may be repeated.")] = None,
    batch: Annotated[int, typer.Option(min=0, help="Rows of a static batch; 0: no static batches.")] = 32,
    unpatched: Annotated[bool, typer.Option("--unpatched/--patched-only", help="Also without the patch.")] = True,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a pass, of all requests.")] = 8192,
    pool: Annotated[str | None, typer.Option(help="Tokens that the pool holds; default: as memory allows.")] = None,
    tiny: runner.Tiny = False,
    seed: runner.Seed = 0,
    folder: runner.Folder = None,
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
        asked = asked_jobs(workload or WORKLOADS, requests, context, prefix, new, speedup, gap)
        where = runner.find_device(device)
        require_one_model(shape, model_place, layers, tiny, where)
        shape = runner.one_of("shape", shape or "llama3-8b", KINDS)
        configs = {name: resolve_config(name) for name in preset or [DEFAULT_PRESET]}
        bench = runner.BenchRun[ServeRow]("serve", where, folder)
    torch.manual_seed(seed)
    model = bench_model(shape, model_place, layers, where, tiny=tiny)
    options: dict[str, Any] = {"max_batch_tokens": batch_tokens, "page_size": 256}
    if pool is not None:
        options["num_blocks"] = -(-parse_tokens(pool) // 256)

    def measure(name: str, tell: Callable[[str], None]) -> list[ServeRow]:
        jobs = with_prompts(asked[name], parse_tokens(prefix) if name == "shared" else 0, vocabulary_of(model), seed)
        rows = []
        for method, config in {UNPATCHED: None, **configs}.items():
            ways = {
                method: partial(continuously, model, jobs, config, options),
                f"{method}, batches of {batch}": partial(in_batches, model, jobs, config, batch),
            }
            for way, serve in list(ways.items())[: 2 if batch else 1] if unpatched or config is not None else ():
                tell(f"{name}: {way}")
                rows.append(measured(model, ServeRow(name, way, len(jobs)), jobs, serve))
        return rows

    given["configs"] = {name: config.to_dict() for name, config in configs.items()}
    bench.each(asked, measure, print_rows, options=given)
    bench.finish(json_line, [f"{row.method}, {row.workload}: {row.note}" for row in bench.rows if row.note])


def require_version() -> None:
    """ValueError where Transformers is too old."""
    here = version_of("transformers")
    if here is None or Version(here).release[:2] < SINCE.release[:2]:
        raise ValueError(f"bench serve needs transformers {SINCE} or newer; {here} is installed. Upgrade it.")


def print_rows(workload: str, rows: Sequence[ServeRow]) -> None:
    """The table of one workload."""
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
