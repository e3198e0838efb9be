"""`turbo-hf bench sparse`: the tables and the JSON."""

from dataclasses import asdict
from typing import Annotated, Any

import typer

from turbo_hf.config.turbo_config import BACKENDS
from turbo_hf.console import Device, Json, err, fail, out
from turbo_hf.eval.bench.decode import BURST_MS, DecodeRow
from turbo_hf.eval.bench.decode_cases import DECODE_SHAPES, WIDTHS, make_case
from turbo_hf.eval.bench.decode_command import print_case
from turbo_hf.eval.bench.environment import facts, headline
from turbo_hf.eval.bench.options import Backend, Folder, Seed, find_device, one_of, require_choice
from turbo_hf.eval.bench.sparse import NO_INDEX, SELECTORS, Choice, run_case
from turbo_hf.eval.bench.tables import finish, keep, untimed
from turbo_hf.eval.bench.timing import Stopwatch, ceilings, free_memory

SIZES = ("1x32k", "1x131k", "1x524k")
SHARES = (0.01, 0.02, 0.04, 0.08)


def sparse_command(
    shape: Annotated[str, typer.Option(help=f"Heads of {', '.join(DECODE_SHAPES)}.")] = "llama3-8b",
    size: Annotated[list[str] | None, typer.Option(help="Rows x tokens, such as 1x131k; may be repeated.")] = None,
    width: Annotated[str, typer.Option(help=f"Bits: {', '.join(WIDTHS)}.")] = "4",
    share: Annotated[
        list[float] | None, typer.Option(help="Share of the buckets that are visited, 0 to 1; may be repeated.")
    ] = None,
    selector: Annotated[str, typer.Option(help=f"One of {', '.join(SELECTORS)}.")] = "saap",
    buckets: Annotated[int, typer.Option(min=2, max=8192, help="Buckets per KV head.")] = 1024,
    hidden: Annotated[int, typer.Option(min=1, help="Units of the query classifier.")] = 1024,
    window: Annotated[int, typer.Option(min=1, help="Newest tokens, which are always read.")] = 2047,
    backend: Backend = "auto",
    seconds: Annotated[float, typer.Option(min=0, help="Approximate seconds per case, in 5 to 100 rounds.")] = 1.0,
    seed: Seed = 0,
    folder: Folder = None,
    device: Device = "auto",
    json_line: Json = False,
) -> None:
    """One sparse decode step against a dense one and FP16: index, selection and attention, checked first, then timed.

    Keys are assigned to buckets at random, and stored in bucket order as those of a prompt are. Exits with 1 if a
    result is wrong, which is then not timed.
    """
    try:
        one_of("width", width, WIDTHS)
        one_of("selector", selector, SELECTORS)
        one_of("backend", backend, BACKENDS)
        shares = share or list(SHARES)
        if not all(0 < x <= 1 for x in shares):
            raise ValueError(f"a share must be above 0 and at most 1; got {shares}.")
        cases = [make_case(shape, name, False, seed) for name in size or SIZES]
        stopwatch = Stopwatch(find_device(device))
        require_choice(stopwatch.device, bool(size), "--size 1x4k, or less")
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as mistake:
        raise fail(str(mistake)) from mistake
    about, choice = facts(stopwatch.device), Choice(buckets, hidden, 1, window, selector)
    out.print(headline(about), style="bold", highlight=False)
    copy = ceilings(stopwatch).copy
    out.print(f"Copy bandwidth measured now: {copy:.3g} TB/s.", highlight=False)
    stopwatch.burst_ms = min(stopwatch.burst_ms, BURST_MS)
    chosen: dict[str, Any] = {"backend": backend, "seed": seed, "seconds": seconds}
    options = {**chosen, "width": width, "shares": shares, **asdict(choice)}
    result: dict[str, Any] = {"bench": "sparse", "facts": about, "options": options, "copy_tb_s": copy, "rows": []}
    rows: list[DecodeRow] = []
    for case in cases:
        with err.status(f"{case.shape}, {case}") as status:
            own = run_case(case, width, shares, choice, stopwatch=stopwatch, copy=copy, tell=status.update, **chosen)
        print_case(case, own)
        for line in index_shares(own):
            out.print(line, highlight=False)
        rows += own
        keep(result, own, folder)
        free_memory()
    if stopwatch.device.type != "cuda":
        out.print("On a CPU: by the wall clock, without graphs. It says nothing of a GPU.", style="dim")
    finish(result, json_line, untimed(rows))


def index_shares(rows: list[DecodeRow]) -> list[str]:
    """The share of each sparse step that finding the bucket of the new token takes."""
    us = {row.method: row.us for row in rows}
    lines = []
    for method, whole in us.items():
        without = us.get(method + NO_INDEX)
        if whole and without:
            lines.append(f"{method}: indexing the new token is {1 - without / whole:.1%} of the step.")
    return lines
