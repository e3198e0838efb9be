"""`turbo-hf bench decode`: speed of `ops.decode` over compressed caches beside FP16 attention.

Every result is checked first, then all methods are timed in the same rounds.
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Annotated

import torch
import typer

from turbo_hf.config.turbo_config import BACKENDS
from turbo_hf.console import Device, Json, mistakes_end_the_command, out
from turbo_hf.eval.bench import checked, runner
from turbo_hf.eval.bench.latent import latent_bytes, latent_step, torch_calls
from turbo_hf.eval.bench.random_cache import draw, packed_stores
from turbo_hf.eval.bench.rivals import CUDNN, FLASH, MATH, Rival, sdpa_rivals
from turbo_hf.eval.bench.shapes import DECODE_SHAPES, LATENT_SHAPES, WIDTHS, Case, choose_cases, groups_of
from turbo_hf.eval.bench.sparse import SELECTORS, SHARES, SPARSE_SIZES, Choice, bucket_steps
from turbo_hf.eval.bench.timing import Call, Conditions, Rotation, Stopwatch, cold_copies, copy_bandwidth, side_by_side
from turbo_hf.layout import AttentionOutput, KVStore, Scoring, in_words
from turbo_hf.ops.decode.reference import reference_decode

BURST_MS = 40.0
"""For how long one method is replayed per turn. Decode is bound by memory, whose clock does not depend on power."""

PADDED = "rows padded to the longest, without a mask"


def run_case(
    case: Case, widths: list[str], how: Conditions, copy: float, sparse: Sequence[Choice] = ()
) -> list[checked.Row]:
    """Check, then time decode at every width and every rival on one case, over tokens that are N(0, 1).

    Args:
        widths: of WIDTHS. sparse: what sparse steps read, each at every width.
        copy: measured bandwidth, 10^12 bytes per second.

    Returns:
        The rivals' rows, then those of the widths, then sparse steps'. A method that is wrong, cannot run or does not
        fit has a note and no time.
    """
    if case.shape in LATENT_SHAPES:
        return _time_all(case, _latent_steps(case, widths, how), how, copy)
    generator = torch.Generator(how.device).manual_seed(how.seed)
    q = draw(generator, len(case.lengths), case.heads.query, 1, case.heads.dim)
    found = []
    for width in widths:
        how.tell(f"{case}: {width} bit")
        found.append(dense_step(case, width, q, how))
        for choice in sparse:
            found += bucket_steps(case, width, q, choice, how)
    how.tell(f"{case}: FP16")
    return _time_all(case, rivals_of(case, q, generator) + found, how, copy)


def _latent_steps(case: Case, widths: list[str], how: Conditions) -> list[checked.Found]:
    """Torch over 16-bit latents and over what they expand to; our kernel at 16 bit, then at the other widths."""
    found: list[checked.Found] = []
    sixteen = latent_bytes(case, "16")
    for name, ready in torch_calls(case, how.device, how.seed).items():
        how.tell(f"{case}: {name}")
        row = checked.new_row(case, name, False, sixteen)
        try:
            found.append((row, ready()))
        except RuntimeError as error:
            found.append((replace(row, note=f"cannot run: {str(error).splitlines()[0]}"), None))
    for width in dict.fromkeys(("16", *widths)):
        how.tell(f"{case}: {width} bit")
        found.append(latent_step(case, width, how))
    return found


def _time_all(case: Case, found: list[checked.Found], how: Conditions, copy: float) -> list[checked.Row]:
    """The rows, with the times of all methods, taken in the same rounds."""
    calls = {row.method: rotation for row, rotation in found if rotation is not None}
    how.tell(f"{case}: timing")
    eager = {name: rotation.eager_us() for name, rotation in calls.items()}
    watched: dict[str, Call] = dict(calls)
    times = side_by_side(watched, how.stopwatch, how.seconds) if calls else {}
    each = {name: [1e3 * ms / calls[name].launches for ms in own] for name, own in times.items()}
    return [_timed(row, each, eager, copy) for row, _ in found]


def check_decode(case: Case, q: torch.Tensor, store: KVStore, got: AttentionOutput) -> checked.Check:
    """Check a sample as `check_heads` does. q: [B, Hq, 1, D]."""
    scoring = Scoring(case.heads.dim**-0.5)
    return checked.check_heads(case, q, store, got, lambda query, part, *_: reference_decode(query, part, scoring))


def dense_step(case: Case, width: str, q: torch.Tensor, how: Conditions) -> checked.Found:
    """The row of one width with its check, and what to time if the result is right."""
    groups = groups_of(width, case.heads.kv)
    size, ops = case.packed_bytes(groups), how.ops(q, groups)
    name = f"{width} bit" if width.isdigit() else width
    if width == "mixed":
        name += " " + "/".join(in_words(each) for each, _ in groups)

    def step(store: KVStore) -> AttentionOutput:
        return ops.decode(q, store, Scoring(case.heads.dim**-0.5))

    def prepare() -> checked.Prepared:
        # another seed: keys that begin like the query would be the only ones that it sees
        stores = packed_stores(case, groups, cold_copies(size, q.device), q.device, how.seed + 1)
        return [partial(step, store) for store in stores], partial(check_decode, case, q, stores[0])

    return checked.our_step(case, name, size, q.device, prepare)


def rivals_of(case: Case, q: torch.Tensor, generator: torch.Generator) -> list[checked.Found]:
    """FP16 attention of the same heads and lengths; what does not fit the memory is left out, and its row says so."""
    size, device = case.dense_bytes(q.element_size()), q.device
    note = PADDED if case.ragged else ""
    shape = (2, len(case.lengths), case.heads.kv, max(case.lengths), case.heads.dim)
    names = (CUDNN, FLASH) if device.type == "cuda" else (MATH,)
    theirs: list[checked.Found] = []
    try:
        copies = [draw(generator, *shape) for _ in range(cold_copies(size, device))]
        found = [sdpa_rivals(q, k, v, scaling=case.heads.dim**-0.5, causal=False) for k, v in copies]
        for each in zip(*found, strict=True):
            rotation, problem = _rotation(each, device)
            notes = "; ".join(text for text in (note, problem) if text)
            theirs.append((checked.new_row(case, each[0].name, False, size, notes), rotation))
    except torch.OutOfMemoryError:
        gone = f"left out: {size / 1e9:.3g} GB of FP16 keys and values do not fit beside the rest"
        return [(checked.new_row(case, name, False, size, gone), None) for name in names]
    return theirs


def _rotation(copies: Sequence[Rival], device: torch.device) -> tuple[Rotation | None, str]:
    """One rival over its copies of keys and values, and its note; None where it cannot run, and the note says why."""
    ready = [copy.call for copy in copies if copy.call is not None]
    note = copies[0].note
    if len(ready) < len(copies):
        return None, note
    try:
        return Rotation(ready, device), note
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        return None, f"cannot run in a graph: {error}"


def _timed(row: checked.Row, times: dict[str, list[float]], eager: dict[str, float], copy: float) -> checked.Row:
    if row.method not in times:
        return row
    us = statistics.median(times[row.method])
    rate = row.bytes / us / 1e6
    return checked.timed(row, times, {"us": us, "eager us": eager[row.method], "TB/s": rate, "of copy": rate / copy})


def decode_command(
    shape: Annotated[list[str] | None, typer.Option(help=f"{', '.join(DECODE_SHAPES)}; may be repeated.")] = None,
    size: Annotated[list[str] | None, typer.Option(help="Rows x tokens, such as 16x4k or 1x1M; may be repeated.")] = (
        None
    ),
    width: Annotated[list[str] | None, typer.Option(help=f"Bits: {', '.join(WIDTHS)}; may be repeated.")] = None,
    ragged: Annotated[bool, typer.Option("--ragged", help="Rows with 1/8 to all of the tokens.")] = False,
    selector: Annotated[
        list[str] | None, typer.Option(help=f"Sparse steps, too: {', '.join(SELECTORS)}; may be repeated.")
    ] = None,
    share: Annotated[
        list[float] | None, typer.Option(help="Sparse: share of buckets that are read; may be repeated.")
    ] = None,
    backend: runner.Backend = "auto",
    seconds: Annotated[float, typer.Option(min=0, help="Approximate seconds per case, in 5 to 100 rounds.")] = 1.0,
    seed: runner.Seed = 0,
    folder: runner.Folder = None,
    device: Device = "auto",
    json_line: Json = False,
) -> None:
    """One decode step over a compressed cache, against cuDNN and FlashAttention-2 over FP16: checked first, then timed.

    Default: 65 cases at 4 bit; with --selector 32k to 524k tokens of Llama-3-8B. Times are of CUDA graphs that rotate
    over more caches than fit in L2; a launch without a graph is shown separately. Exits with 1 if a result is wrong,
    which is then not timed, or a launch fails.
    """
    given = dict(locals())
    with mistakes_end_the_command():
        widths = [runner.one_of("width", name, WIDTHS) for name in width or ("4",)]
        selectors = [runner.one_of("selector", name, SELECTORS) for name in selector or ()]
        runner.one_of("backend", backend, BACKENDS)
        shares = tuple(share or SHARES)
        if not all(0 < each <= 1 for each in shares):
            raise ValueError(f"a share must be above 0 and at most 1; got {list(shares)}.")
        if share and not selectors:
            raise ValueError("--share is of sparse steps: add --selector saap.")
        if selectors:
            shape, size = shape or ["llama3-8b"], size or list(SPARSE_SIZES)
        cases = choose_cases(shape or [], size or [], ragged, seed)
        if not cases:
            raise ValueError(f"no default case of {', '.join(shape or [])} is ragged; give --size.")
        if selectors and any(case.shape in LATENT_SHAPES for case in cases):
            raise ValueError("steps over latents are not sparse: leave out --selector.")
        stopwatch = Stopwatch(runner.find_device(device))
        runner.require_choice(stopwatch.device, size not in (None, list(SPARSE_SIZES)), "--size 1x1k, or less")
        bench = runner.BenchRun[checked.Row]("decode", stopwatch.device, folder)
    sparse = [Choice(name, shares) for name in selectors]
    copy = copy_bandwidth(stopwatch)
    out.print(f"Copy bandwidth measured now: {copy:.3g} TB/s.", highlight=False)
    stopwatch.burst_ms = min(stopwatch.burst_ms, BURST_MS)
    how = Conditions(stopwatch, backend, seed, seconds)
    bench.each(
        cases,
        lambda case, tell: run_case(case, widths, how._replace(tell=tell), copy, sparse),
        print_case,
        options={**given, "widths": widths, "sparse": [asdict(choice) for choice in sparse]},
        copy_tb_s=copy,
    )
    if stopwatch.device.type != "cuda":
        out.print("On a CPU: by the wall clock, without graphs. It says nothing of a GPU.", style="dim")
    bench.finish(json_line, checked.untimed(bench.rows))


def print_case(case: Case, rows: Sequence[checked.Row]) -> None:
    """The table of one case."""
    heads = case.heads
    title = f"{case.shape} ({heads.query}/{heads.kv} heads of {heads.dim}), {case}, {case.outputs} outputs"
    columns = {"us": ".1f", "eager us": ".0f", "TB/s": ".3g", "of copy": ".0%"}
    checked.print_rows(title, "keys, values", rows, columns)
