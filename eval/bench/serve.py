"""`turbo-hf bench serve`: many requests through continuous batching, patched and unpatched, and in static batches."""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import DynamicCache

from turbo_hf.cache.turbo_cache import TurboCache
from turbo_hf.config.turbo_config import DEFAULT_PRESET, TurboConfig, resolve_config
from turbo_hf.console import Device, Json, mistakes_end_the_command, remark, show_table
from turbo_hf.eval.bench.clock import clocked
from turbo_hf.eval.bench.options import Folder, Seed, Tiny, figure, find_device, one_of, prepare_folder, require_choice
from turbo_hf.eval.bench.random_models import KINDS, random_model
from turbo_hf.eval.bench.runner import BenchRun
from turbo_hf.eval.bench.shapes import parse_tokens
from turbo_hf.eval.bench.tables import print_notes
from turbo_hf.eval.bench.timing import free_memory
from turbo_hf.eval.serve import Request, chosen, percentiles, read_trace
from turbo_hf.layout import PagedHeads
from turbo_hf.models.versions import CACHE
from turbo_hf.patching.continuous_batching import SINCE
from turbo_hf.patching.patch_model import patch

WORKLOADS = ("azure", "shared", "even")
"""Lengths of a trace; one long prompt that all requests begin with; all requests alike."""

COPIED = "copied"
"""A further workload, for who asks: one long prompt, computed once. Each request gets blocks of its own, which hold a
copy of it, so that passes over long contexts can be measured without the minutes of their prompts."""

AZURE = Path(__file__).resolve().parents[1] / "azure_conv.csv"
"""The first 1,000 requests of the conversation trace of Patel et al., Splitwise, ISCA 2024 (CC-BY, Azure)."""

UNPATCHED = "Transformers"
OWN_TOKENS = 128
"""Tokens of a prompt behind the shared one."""


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
    hit_ms, miss_ms: medians of first_ms of the requests that a stored prefix has saved tokens, and of the others.
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
    hit_ms: float | None = None
    miss_ms: float | None = None
    peak_bytes: int | None = None
    note: str = ""


def jobs_of(requests: Sequence[Request], shared: int, vocabulary: int, seed: int, own_every: int = 0) -> list[Job]:
    """Requests of these lengths with random tokens; `shared` of them are the same in all prompts, but for every one in
    `own_every`, the first of them included; 0: in all."""
    generator = torch.Generator().manual_seed(seed)

    def ids(count: int) -> list[int]:
        drawn: list[int] = torch.randint(10, vocabulary, (count,), generator=generator).tolist()
        return drawn

    common = ids(shared)
    begins = [ids(shared) if own_every and n % own_every == 0 else common for n in range(len(requests))]
    return [
        Job(one.arrival, begin + ids(one.context - shared), one.generated)
        for one, begin in zip(requests, begins, strict=True)
    ]


def continuously(
    model: Any, jobs: Sequence[Job], config: TurboConfig | None, options: dict[str, Any], *, copied: bool = False
) -> ServeRow:
    """Serve by continuous batching; config None: unpatched. options: of `ContinuousBatchingConfig`.

    copied: `COPIED`.
    """
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
            if copied:
                _collect(manager, [replace(jobs[0], new=4)])
                _copy_prefixes(manager.batch_processor)
                _collect(manager, [replace(job, new=4) for job in jobs])
            else:
                _collect(manager, [replace(job, prompt=_others(job.prompt, model.config.vocab_size)) for job in jobs])
            before, found = _hits(handle), _note_hits(manager.batch_processor.cache)
            times = _collect(manager, jobs)
            after = _hits(handle)
    finally:
        if handle is not None:
            handle.remove()
    row, total = summed("", "", jobs, times), after[1] - before[1]
    waits: dict[bool, list[float]] = {True: [], False: []}
    for n, (job, ends) in enumerate(zip(jobs, times, strict=True)):
        waits[str(n) in found].append(1e3 * (ends[0] - job.arrival))
    hit, miss = (statistics.median(each) if each else None for each in waits.values())
    return replace(row, hits=(after[0] - before[0]) / total if total else None, hit_ms=hit, miss_ms=miss)


def _others(prompt: list[int], vocabulary: int) -> list[int]:
    """Other tokens, so that a stored prefix of these is not found; prompts that begin alike still do."""
    return [(token + 1) % vocabulary for token in prompt]


def _copy_prefixes(processor: Any) -> None:
    """From now on a stored prefix is not shared: each request that finds one gets a copy of its blocks. The prefix
    itself stays for good."""
    cache = processor.cache
    search, compute = cache.search_prefix_match, processor.inputs_and_outputs.compute_stream

    def search_and_copy(request_id: str, prompt_ids: list[int]) -> int:
        found = int(search(request_id, prompt_ids))
        pairs = {}
        for name, allocator in cache.cache_allocators.items():
            shared = allocator.block_table.get(request_id, [])
            while cache.pool.count_free_blocks(allocator.index) < len(shared):
                if not cache.pool.num_free_sectors:
                    raise RuntimeError(f"a copied prompt of {found} tokens does not fit. Ask for fewer requests.")
                cache.pool.allocate_sector(allocator.index)
            own = cache.pool.get_free_blocks(allocator.index, len(shared))
            allocator.block_table[request_id] = list(own)
            pairs[name] = (list(shared), own)
        with torch.cuda.stream(compute) if compute is not None else nullcontext():
            cache.perform_cache_copy(pairs)
        return found

    cache.search_prefix_match = search_and_copy


def _hits(handle: Any) -> tuple[int, int]:
    """Prompt tokens that stored prefixes have saved, and all of them."""
    serving = None if handle is None else handle._maker.serving
    return (0, 0) if serving is None else (serving.hit_tokens, serving.prompt_tokens)


def _note_hits(cache: Any) -> set[str]:
    """The ids of the requests to come for which a stored prefix is found."""
    search = cache.search_prefix_match
    hits: set[str] = set()

    def search_and_note(request_id: str, prompt_ids: list[int]) -> int:
        found = int(search(request_id, prompt_ids))
        if found:
            hits.add(request_id)
        return found

    cache.search_prefix_match = search_and_note
    return hits


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


def in_batches(
    model: Any, jobs: Sequence[Job], config: TurboConfig | None, batch: int, *, copied: bool = False
) -> ServeRow:
    """Serve by `generate`, `batch` requests at a time in order of arrival, each batch as long as its longest reply.

    The clock of arrivals runs on while nothing is computed, without waiting for it. copied: `COPIED`; all jobs are
    alike, and the time begins when the prompt is there in each row.
    """
    handle = None if config is None else patch(model, config)
    times: list[list[float]] = []
    try:
        with torch.inference_mode():
            ids, mask = _padded(model, jobs[:batch])
            clocked(model, ids, mask, 4, **_copies(model, handle, ids, copied))
            now = 0.0
            for at in range(0, len(jobs), batch):
                rows = jobs[at : at + batch]
                ids, mask = _padded(model, rows)
                begin = max(now, *(job.arrival for job in rows))
                past = _copies(model, handle, ids, copied)
                clock, _ = clocked(model, ids, mask, max(job.new for job in rows), **past)
                marks = [begin + clock.ms(0, n) / 1e3 for n in range(1, len(clock.marks))]
                times += [marks[: job.new] for job in rows]
                now = marks[-1]
    finally:
        if handle is not None:
            handle.remove()
    return summed("", "", jobs, times)


def _copies(model: Any, handle: Any, ids: torch.Tensor, copied: bool) -> dict[str, Any]:
    """Options of `generate`: the cache of all but the last token of ids, whose rows are alike; {} unless `copied`."""
    if not copied:
        return {}
    cache = DynamicCache(config=model.config) if handle is None else handle.new_cache()
    for part in ids[:1, :-1].split(8192, 1):
        model(part, logits_to_keep=1, **{CACHE: cache})
    cache.batch_repeat_interleave(len(ids))
    if isinstance(cache, TurboCache):
        _unshare(cache)
    free_memory()
    return {CACHE: cache}


def _unshare(cache: TurboCache) -> None:
    """Give each row pages of its own: those that all rows share would be read from the GPU's L2 cache."""
    for layer in cache.turbo_layers():
        pool, sealed = layer.pool, layer.state.sealed
        at = pool.table[:, : max(sealed)].to(pool.device)
        index = at.flatten()
        paged = tuple(PagedHeads(x.bits, *(part.index_select(0, index) for part in x[1:])) for x in pool.paged)
        pool.hold(paged, torch.arange(len(index)).view(at.shape), sealed)


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
    shape: Annotated[str, typer.Option(help=f"{', '.join(KINDS)}.")] = "llama3-8b",
    layers: Annotated[int | None, typer.Option(min=1, help="Layers; default: as many as the model has.")] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(WORKLOADS)}; may be repeated. Default: these. {COPIED}: one prompt, copied."),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="How many.")] = 128,
    context: Annotated[
        str, typer.Option(help="even, copied: tokens of each prompt; azure: of the longest, with its reply.")
    ] = ("8k"),
    prefix: Annotated[str, typer.Option(help="shared: tokens that all prompts begin with.")] = "4k",
    own_every: Annotated[
        int, typer.Option(min=0, help="shared: one prompt in so many begins with tokens of its own; 0: none does.")
    ] = 0,
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
    with mistakes_end_the_command():
        require_version()
        workloads = [one_of("workload", name, (*WORKLOADS, COPIED)) for name in workload or WORKLOADS]
        one_of("shape", shape, KINDS)
        configs = {name: resolve_config(name) for name in preset or [DEFAULT_PRESET]}
        where = find_device(device)
        require_choice(where, tiny or layers is not None, "--layers 1, or --tiny to try the command")
        lengths = {name: _requests(name, requests, context, prefix, new, speedup, gap) for name in workloads}
        prepare_folder(folder)
    bench = BenchRun[ServeRow]("serve", where, folder)
    torch.manual_seed(seed)
    model = random_model(shape, layers, where, tiny=tiny)
    options: dict[str, Any] = {"max_batch_tokens": batch_tokens, "page_size": 256}
    if pool is not None:
        options["num_blocks"] = -(-parse_tokens(pool) // 256)

    def measure(name: str, tell: Callable[[str], None]) -> list[ServeRow]:
        copied = name == COPIED
        common = {"shared": parse_tokens(prefix), COPIED: parse_tokens(context)}.get(name, 0)
        own = own_every if name == "shared" else 0
        jobs = jobs_of(lengths[name], common, model.config.vocab_size, seed, own)
        ways: list[tuple[str, Callable[[], ServeRow]]] = []
        for method, config in {UNPATCHED: None, **configs}.items():
            if config is not None or unpatched:
                ways.append((method, lambda config=config: continuously(model, jobs, config, options, copied=copied)))  # type: ignore[misc]
                if batch:
                    static = lambda config=config: in_batches(model, jobs, config, batch, copied=copied)  # noqa: E731
                    ways.append((f"{method}, batches of {batch}", static))
        rows = []
        for method, serve in ways:
            tell(f"{name}: {method}")
            rows.append(measured(model, ServeRow(name, method, len(jobs)), serve))
        return rows

    given = {"shape": shape, "layers": model.config.num_hidden_layers, "context": context, "prefix": prefix, "new": new}
    given |= {"requests": requests, "speedup": speedup, "gap": gap, "batch": batch, "pool": pool, "tiny": tiny}
    given["own_every"] = own_every
    given |= {
        "seed": seed,
        "batch_tokens": batch_tokens,
        "configs": {name: config.to_dict() for name, config in configs.items()},
    }
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
        found, _ = chosen(read_trace(AZURE), count, parse_tokens(context))
        return [replace(one, arrival=(one.arrival - found[0].arrival) / speedup if speedup else 0.0) for one in found]
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
    for row in rows:
        if row.hit_ms is not None and row.miss_ms is not None:
            share = f"{row.hit_ms:.1f} ms after hits, {row.miss_ms:.1f} after misses ({row.hit_ms / row.miss_ms:.0%})"
            remark(f"{row.method}: first tokens {share}, medians.")
    print_notes((row.method, row.note) for row in rows)
