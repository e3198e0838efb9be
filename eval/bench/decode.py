"""`turbo-hf bench decode`: speed of `ops.decode` over compressed caches beside FP16 attention.

Every result is checked first, then all methods are timed in the same rounds.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer

from turbo_hf.config.turbo_config import BACKENDS
from turbo_hf.console import Device, Json, mistakes_end_the_command, out
from turbo_hf.eval.bench.check import Check, judge, poisoned
from turbo_hf.eval.bench.checked_rows import CheckedRow, checked, timed
from turbo_hf.eval.bench.decode_cases import DECODE_SHAPES, LATENT_SHAPES, WIDTHS, Case, choose_cases, groups_of
from turbo_hf.eval.bench.graph_rotation import Rotation, cold_copies
from turbo_hf.eval.bench.latent import LATENT_WIDTHS, latent_bytes, latent_call, latent_name, torch_calls
from turbo_hf.eval.bench.options import Backend, Folder, Seed, find_device, one_of, prepare_folder, require_choice
from turbo_hf.eval.bench.oracle import attend
from turbo_hf.eval.bench.random_cache import draw, one_head, packed_stores
from turbo_hf.eval.bench.rivals import CUDNN, FLASH, MATH, Rival, sdpa_rivals
from turbo_hf.eval.bench.runner import BenchRun
from turbo_hf.eval.bench.shapes import tokens_label
from turbo_hf.eval.bench.tables import print_rows, untimed
from turbo_hf.eval.bench.timing import Call, Conditions, Stopwatch, ceilings, side_by_side
from turbo_hf.eval.output import write_png
from turbo_hf.layout import AttentionOutput, KVStore, Scoring, in_words
from turbo_hf.ops.decode import contract as op
from turbo_hf.ops.decode.reference import reference_decode
from turbo_hf.ops.store.quantize import dequantize

BURST_MS = 40.0
"""For how long one method is replayed per turn. Decode is bound by memory, whose clock does not depend on power."""

PADDED = "rows padded to the longest, without a mask"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRow(CheckedRow):
    """One method on one step; its oracle reads the same packed cache.

    all_tokens: of all rows.
    ragged: whether rows have different lengths.
    outputs: rows times KV heads.
    us: microseconds of a launch, median of the rounds.
    eager_us: the same without a graph, by the wall clock.
    bytes: of keys and values read, packed as they lie.
    tb_s: 10^12 of them per second.
    copy_share: tb_s over the measured copy bandwidth.
    """

    all_tokens: int
    ragged: bool
    outputs: int
    us: float | None = None
    eager_us: float | None = None
    bytes: int = 0
    tb_s: float | None = None
    copy_share: float | None = None


Found = tuple[DecodeRow, Rotation | None]
"""A method's row, and what to time for it."""


def run_case(case: Case, widths: list[str], how: Conditions, copy: float) -> list[DecodeRow]:
    """Check, then time decode at every width and every rival on one case, over tokens that are N(0, 1).

    widths: of WIDTHS. copy: measured bandwidth, 10^12 bytes per second. Returns the rivals' rows, then one row per
    width. A method that is wrong, cannot run or does not fit has a note and no time.
    """
    if case.shape in LATENT_SHAPES:
        return _time_all(case, _latent_steps(case, widths, how), how, copy)
    generator = torch.Generator(how.device).manual_seed(how.seed)
    q = draw(generator, len(case.lengths), case.heads.query, 1, case.heads.dim)
    found = []
    for width in widths:
        how.tell(f"{case}: {width} bit")
        found.append(dense_step(case, width, q, how))
    return beside_fp16(case, q, generator, found, how, copy)


def beside_fp16(
    case: Case, q: torch.Tensor, generator: torch.Generator, ours: list[Found], how: Conditions, copy: float
) -> list[DecodeRow]:
    """The rows of FP16, whose keys and values `generator` draws, then `ours`; all timed in the same rounds."""
    how.tell(f"{case}: FP16")
    return _time_all(case, _theirs(case, q, generator) + ours, how, copy)


def _latent_steps(case: Case, widths: list[str], how: Conditions) -> list[Found]:
    """Torch over 16-bit latents and over what they expand to; our kernel at 16 bit, then at the other widths."""
    found: list[Found] = []
    sixteen = latent_bytes(case, "16")
    for name, ready in torch_calls(case, how.device, how.seed).items():
        how.tell(f"{case}: {name}")
        row = new_row(case, name, False, sixteen)
        try:
            found.append((row, ready()))
        except RuntimeError as error:
            found.append((replace(row, note=f"cannot run: {str(error).splitlines()[0]}"), None))
    for width in dict.fromkeys(("16", *widths)):
        how.tell(f"{case}: {width} bit")
        row = new_row(case, latent_name(width), True, latent_bytes(case, width))
        if width not in LATENT_WIDTHS:
            found.append((replace(row, note=f"a latent has 16, 8 or 4 bit here; not {width}"), None))
            continue
        found.append(checked(row, partial(latent_call, case, width, how.backend, how.device, how.seed + 1)))
    return found


def _time_all(case: Case, found: list[Found], how: Conditions, copy: float) -> list[DecodeRow]:
    """The rows, with the times of all methods, taken in the same rounds."""
    calls = {row.method: rotation for row, rotation in found if rotation is not None}
    how.tell(f"{case}: timing")
    eager = {name: rotation.eager_us() for name, rotation in calls.items()}
    watched: dict[str, Call] = dict(calls)
    times = side_by_side(watched, how.stopwatch, how.seconds) if calls else {}
    each = {name: [1e3 * ms / calls[name].launches for ms in own] for name, own in times.items()}
    return [_timed(row, each, eager, copy) for row, _ in found]


def check_decode(case: Case, q: torch.Tensor, store: KVStore, got: AttentionOutput) -> Check:
    """Check a sample against float64 over the same packed cache, as `check_heads` does. q: [B, Hq, 1, D]."""

    def attended(row: int, head: int, query: torch.Tensor) -> tuple[AttentionOutput, AttentionOutput]:
        part, scaling = one_head(store, row, head), case.heads.dim**-0.5
        k, v = (x[0, :, : case.lengths[row]] for x in dequantize(part, torch.float64))
        exact = attend(query[0], k, v, scaling=scaling, causal=False)
        return reference_decode(query, part, Scoring(scaling)), exact

    return check_heads(case, q, got, attended)


def check_heads(
    case: Case,
    q: torch.Tensor,
    got: AttentionOutput,
    attended: Callable[[int, int, torch.Tensor], tuple[AttentionOutput, AttentionOutput]],
) -> Check:
    """Check the first KV head of the first row and the last one of the last row against float64.

    The budget is the error of the reference, with the same roundings, on the same heads.

    Args:
        q: [B, Hq, 1, D].
        attended: of a row, a KV head and its queries [1, G, 1, D], what the reference returns and float64's [G, 1, D].
    """
    group, last = case.heads.query // case.heads.kv, len(case.lengths) - 1
    found: list[tuple[AttentionOutput, AttentionOutput, AttentionOutput]] = []
    for row, head in {(0, 0): None, (last, case.heads.kv - 1): None}:
        own = slice(head * group, (head + 1) * group)
        model, exact = attended(row, head, q[row : row + 1, own])
        sampled = AttentionOutput(got.out[row, own], got.lse[row, own])
        found.append((sampled, AttentionOutput(model.out[0], model.lse[0]), exact))
    stacked = (AttentionOutput(*(torch.stack(x) for x in zip(*part, strict=True))) for part in zip(*found, strict=True))
    return judge(got, *stacked)


def new_row(case: Case, method: str, ours: bool, size: int, note: str = "") -> DecodeRow:
    """A row without figures. size: bytes of keys and values read."""
    lengths = case.lengths
    return DecodeRow(
        shape=case.shape,
        batch=len(lengths),
        tokens=max(lengths),
        all_tokens=sum(lengths),
        ragged=case.ragged,
        outputs=case.outputs,
        method=method,
        ours=ours,
        bytes=size,
        note=note,
    )


def dense_step(case: Case, width: str, q: torch.Tensor, how: Conditions) -> Found:
    """The row of one width with its check, and what to time if the result is right."""
    groups = groups_of(width, case.heads.kv)
    size = case.packed_bytes(groups)
    name = f"{width} bit" if width.isdigit() else width
    if width == "mixed":
        name += " " + "/".join(in_words(each) for each, _ in groups)

    def step(store: KVStore) -> AttentionOutput:
        return op.decode(q, store, Scoring(case.heads.dim**-0.5), backend=how.backend)

    def prepare() -> tuple[Check, Callable[[], Rotation]]:
        # another seed: keys that begin like the query would be the only ones that it sees
        stores = packed_stores(case, groups, cold_copies(size, q.device), q.device, how.seed + 1)
        with poisoned():
            got = step(stores[0])
        check = check_decode(case, q, stores[0], got)
        return check, lambda: Rotation([partial(step, store) for store in stores], q.device)

    return checked(new_row(case, name, True, size), prepare)


def _theirs(case: Case, q: torch.Tensor, generator: torch.Generator) -> list[Found]:
    """FP16 attention of the same heads and lengths; what does not fit the memory is left out, and its row says so."""
    size, device = case.dense_bytes(q.element_size()), q.device
    note = PADDED if case.ragged else ""
    shape = (2, len(case.lengths), case.heads.kv, max(case.lengths), case.heads.dim)
    names = (CUDNN, FLASH) if device.type == "cuda" else (MATH,)
    theirs: list[Found] = []
    try:
        copies = [draw(generator, *shape) for _ in range(cold_copies(size, device))]
        found = [sdpa_rivals(q, k, v, scaling=case.heads.dim**-0.5, causal=False) for k, v in copies]
        for each in zip(*found, strict=True):
            rotation, problem = _rotation(each, device)
            notes = "; ".join(text for text in (note, problem) if text)
            theirs.append((new_row(case, each[0].name, False, size, notes), rotation))
    except torch.OutOfMemoryError:
        gone = f"left out: {size / 1e9:.3g} GB of FP16 keys and values do not fit beside the rest"
        return [(new_row(case, name, False, size, gone), None) for name in names]
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


def _timed(row: DecodeRow, times: dict[str, list[float]], eager: dict[str, float], copy: float) -> DecodeRow:
    if row.method not in times:
        return row
    us = statistics.median(times[row.method])
    rate = row.bytes / us / 1e6
    return timed(row, times, us=us, eager_us=eager[row.method], tb_s=rate, copy_share=rate / copy)


def decode_command(
    shape: Annotated[list[str] | None, typer.Option(help=f"{', '.join(DECODE_SHAPES)}; may be repeated.")] = None,
    size: Annotated[list[str] | None, typer.Option(help="Rows x tokens, such as 16x4k or 1x1M; may be repeated.")] = (
        None
    ),
    width: Annotated[list[str] | None, typer.Option(help=f"Bits: {', '.join(WIDTHS)}; may be repeated.")] = None,
    ragged: Annotated[bool, typer.Option("--ragged", help="Rows with 1/8 to all of the tokens.")] = False,
    occupancy: Annotated[bool, typer.Option("--occupancy", help="Only batches around a full wave of SMs.")] = False,
    backend: Backend = "auto",
    seconds: Annotated[float, typer.Option(min=0, help="Approximate seconds per case, in 5 to 100 rounds.")] = 1.0,
    seed: Seed = 0,
    folder: Folder = None,
    device: Device = "auto",
    json_line: Json = False,
) -> None:
    """One decode step over a compressed cache, against cuDNN and FlashAttention-2 over FP16: checked first, then timed.

    Default: 44 cases at 4 bit. Times are of CUDA graphs that rotate over more caches than fit in L2; a launch without a
    graph is shown separately. Exits with 1 if a result is wrong, which is then not timed, or a launch fails.
    """
    with mistakes_end_the_command():
        widths = [one_of("width", name, WIDTHS) for name in width or ("4",)]
        one_of("backend", backend, BACKENDS)
        cases = choose_cases(shape or [], size or [], ragged, seed, occupancy)
        if not cases:
            raise ValueError(f"no default case of {', '.join(shape or [])} is ragged; give --size.")
        stopwatch = Stopwatch(find_device(device))
        require_choice(stopwatch.device, bool(size), "--size 1x1k, or less")
        prepare_folder(folder, plot=True)
    bench, copy = begin_decode("decode", stopwatch, folder)
    how = Conditions(stopwatch, backend, seed, seconds)
    bench.each(
        cases,
        lambda case, tell: run_case(case, widths, how._replace(tell=tell), copy),
        print_case,
        options={**how.given, "widths": widths},
        copy_tb_s=copy,
    )
    if folder is not None:  # once: a plot takes longer than a case
        plot_decode(bench.rows, bench.headline, folder / "decode.png")
    for line in steps(bench.rows):
        out.print(line, highlight=False)
    end_decode(bench, stopwatch, json_line)


def begin_decode(name: str, stopwatch: Stopwatch, folder: Path | None) -> tuple[BenchRun[DecodeRow], float]:
    """The beginning of `bench decode` and `bench sparse`; the second is the copy bandwidth, 10^12 bytes per second."""
    bench = BenchRun[DecodeRow](name, stopwatch.device, folder)
    copy = ceilings(stopwatch).copy
    out.print(f"Copy bandwidth measured now: {copy:.3g} TB/s.", highlight=False)
    stopwatch.burst_ms = min(stopwatch.burst_ms, BURST_MS)
    return bench, copy


def end_decode(bench: BenchRun[DecodeRow], stopwatch: Stopwatch, json_line: bool) -> None:
    """The end of `bench decode` and `bench sparse`."""
    if stopwatch.device.type != "cuda":
        out.print("On a CPU: by the wall clock, without graphs. It says nothing of a GPU.", style="dim")
    bench.finish(json_line, untimed(bench.rows))


def print_case(case: Case, rows: Sequence[DecodeRow]) -> None:
    """The table of one case."""
    heads = case.heads
    title = f"{case.shape} ({heads.query}/{heads.kv} heads of {heads.dim}), {case}, {case.outputs} outputs"
    columns = {
        "us": ("us", ".1f"),
        "eager us": ("eager_us", ".0f"),
        "TB/s": ("tb_s", ".3g"),
        "of copy": ("copy_share", ".0%"),
    }
    print_rows(title, "keys, values", rows, columns)


def steps(rows: Sequence[DecodeRow]) -> Iterator[str]:
    """How time grows with outputs of one length: in step with the work, or in stairs, one per wave of the SMs.

    A line for each method that ran three or more batch sizes at one length, each relative to the smallest.
    """
    groups: dict[tuple[str, int, str], list[DecodeRow]] = {}
    for row in rows:
        if row.us is not None and not row.ragged:
            groups.setdefault((row.shape, row.tokens, row.method), []).append(row)
    for (shape, tokens, method), own in groups.items():
        least, *more = sorted(own, key=lambda row: row.outputs)
        if len(more) < 2 or least.us is None:
            continue
        parts = [
            f"{row.outputs} {row.us / least.us:.2f} x for {row.outputs / least.outputs:.2f} x the work"
            for row in more
            if row.us is not None
        ]
        yield f"{shape}, {tokens} tokens, {method}: {least.outputs} outputs {least.us:.1f} us; {'; '.join(parts)}"


def plot_decode(rows: list[DecodeRow], title: str, path: Path) -> None:
    """Write a PNG with a panel for each model shape, microseconds by case; rows without a time are left out."""
    from matplotlib.figure import Figure  # noqa: PLC0415  an extra: only drawing needs it

    timed = [row for row in rows if row.us is not None]
    if not timed:
        return
    shapes, methods = (list(dict.fromkeys(getattr(row, field) for row in timed)) for field in ("shape", "method"))
    figure = Figure(figsize=(9, 0.5 + 3.5 * len(shapes)), layout="constrained")
    figure.suptitle(title, fontsize="small")
    panels = figure.subplots(len(shapes), 1, squeeze=False)
    for axis, shape in zip(panels.flat, shapes, strict=True):
        here = [row for row in timed if row.shape == shape]
        sizes = sorted({(row.all_tokens, row.batch, row.tokens, row.ragged) for row in here})
        for colour, method in enumerate(methods):
            own = {(row.all_tokens, row.batch, row.tokens, row.ragged): row.us for row in here if row.method == method}
            at = [i for i, size in enumerate(sizes) if size in own]
            # also a method without a line here, so that every panel has the same legend
            axis.plot(at, [own[sizes[i]] for i in at], marker="o", color=f"C{colour}", label=method)
        labels = [f"{batch}x{tokens_label(n)}{' ragged' if ragged else ''}" for _, batch, n, ragged in sizes]
        axis.set_xticks(range(len(sizes)), labels, rotation=45, ha="right")
        axis.set_yscale("log")
        axis.set_title(shape)
        axis.grid(alpha=0.3)
    figure.supxlabel("rows x tokens, by tokens in all")
    figure.supylabel("microseconds of a launch")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside right upper")
    write_png(path, figure)
