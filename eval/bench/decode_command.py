"""`turbo-hf bench decode`: the tables, the JSON and the plot."""

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from turbo_hf.config.turbo_config import BACKENDS
from turbo_hf.console import Device, Json, err, fail, out
from turbo_hf.eval.bench.decode import BURST_MS, DecodeRow, run_case
from turbo_hf.eval.bench.decode_cases import DECODE_SHAPES, WIDTHS, Case, choose_cases
from turbo_hf.eval.bench.ending import finish, keep, print_rows, untimed
from turbo_hf.eval.bench.facts import facts, headline
from turbo_hf.eval.bench.options import Backend, Folder, Seed, find_device, one_of, require_choice
from turbo_hf.eval.bench.plot import plot_decode, require_matplotlib
from turbo_hf.eval.bench.timing import Stopwatch, ceilings, free_memory


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

    Default: 40 cases at 4 bit. Times are of CUDA graphs that rotate over more caches than fit in L2; a launch without a
    graph is shown separately. Exits with 1 if a result is wrong, which is then not timed, or a launch fails.
    """
    try:
        widths = [one_of("width", name, WIDTHS) for name in width or ("4",)]
        one_of("backend", backend, BACKENDS)
        cases = choose_cases(shape or [], size or [], ragged, seed, occupancy)
        if not cases:
            raise ValueError(f"no default case of {', '.join(shape or [])} is ragged; give --size.")
        stopwatch = Stopwatch(find_device(device))
        require_choice(stopwatch.device, bool(size), "--size 1x1k, or less")
        if folder is not None:
            require_matplotlib()
            folder.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as mistake:
        raise fail(str(mistake)) from mistake
    about = facts(stopwatch.device)
    out.print(headline(about), style="bold", highlight=False)
    copy = ceilings(stopwatch).copy
    out.print(f"Copy bandwidth measured now: {copy:.3g} TB/s.", highlight=False)
    stopwatch.burst_ms = min(stopwatch.burst_ms, BURST_MS)
    chosen: dict[str, Any] = {"backend": backend, "seed": seed, "seconds": seconds}
    options = {**chosen, "widths": widths}
    result: dict[str, Any] = {"bench": "decode", "facts": about, "options": options, "copy_tb_s": copy, "rows": []}
    rows: list[DecodeRow] = []
    for case in cases:
        with err.status(f"{case.shape}, {case}") as status:
            own = run_case(case, widths, stopwatch=stopwatch, copy=copy, tell=status.update, **chosen)
        print_case(case, own)
        rows += own
        keep(result, own, folder)
        free_memory()
    if folder is not None:  # once: a plot takes longer than a case
        plot_decode(rows, headline(about), folder / "decode.png")
    _print_steps(rows)
    if stopwatch.device.type != "cuda":
        out.print("On a CPU: by the wall clock, without graphs. It says nothing of a GPU.", style="dim")
    finish(result, json_line, untimed(rows))


def print_case(case: Case, rows: list[DecodeRow]) -> None:
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


def _print_steps(rows: list[DecodeRow]) -> None:
    """How time grows with outputs of one length: in step with the work, or in stairs, one a wave of the SMs."""
    for line in steps(rows):
        out.print(line, highlight=False)


def steps(rows: list[DecodeRow]) -> Iterator[str]:
    """A line for each method that ran three or more batch sizes at one length, each relative to the smallest."""
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
