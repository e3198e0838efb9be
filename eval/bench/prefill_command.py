"""`turbo-hf bench prefill`: the tables, the JSON and the plot."""

from dataclasses import asdict
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from turbo_hf.config import ATTENTION_MODES, BACKENDS, V_SCALES
from turbo_hf.console import Device, Json, err, fail, out
from turbo_hf.eval.bench.facts import facts, headline
from turbo_hf.eval.bench.options import (
    DTYPES,
    Backend,
    Block,
    Folder,
    Hadamard,
    Modes,
    Seed,
    SmoothK,
    as_json,
    figure,
    find_device,
    one_of,
)
from turbo_hf.eval.bench.plot import plot, require_matplotlib
from turbo_hf.eval.bench.prefill import PrefillRow, run_case
from turbo_hf.eval.bench.rivals import BASELINES
from turbo_hf.eval.bench.shapes import SHAPES, SIZES, Case, find_shape, parse_size
from turbo_hf.eval.bench.timing import Ceilings, Stopwatch, ceilings

DEFAULT_MODES = ("turbo", "int8", "half", "fp8")
HALVES = ("float16", "bfloat16")
"""What the rivals have kernels for."""


def prefill_command(
    mode: Modes = None,
    shape: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(SHAPES)}; may be repeated.")] = None,
    size: Annotated[list[str] | None, typer.Option(help="Rows x tokens, such as 4x16k; may be repeated.")] = None,
    causal: Annotated[bool | None, typer.Option("--causal/--full", help="One mask only; default: both.")] = None,
    block: Block = 128,
    v_scale: Annotated[str, typer.Option(help=f"Scales of V: by {', '.join(V_SCALES)}.")] = "block",
    smooth_k: SmoothK = False,
    hadamard: Hadamard = False,
    backend: Backend = "auto",
    dtype: Annotated[str, typer.Option(help=f"Of the inputs: {', '.join(HALVES)}.")] = "float16",
    seconds: Annotated[float, typer.Option(min=0, help="About how long a case is timed, in 5 to 100 rounds.")] = 3.0,
    seed: Seed = 0,
    folder: Folder = None,
    device: Device = "auto",
    json_line: Json = False,
) -> None:
    """Attention of a prompt beside cuDNN, FlashAttention-2 and SageAttention: checked first, then timed in turn.

    Default: every shape and size, causal and full, in the modes that quantize. Exit 1 where a result is wrong, which
    is then not timed, or a mode refuses.
    """
    try:
        modes = [one_of("mode", name, ATTENTION_MODES) for name in mode or DEFAULT_MODES]
        one_of("dtype", dtype, HALVES)
        one_of("backend", backend, BACKENDS)
        one_of("v-scale", v_scale, V_SCALES)
        heads = {name: find_shape(name) for name in shape or SHAPES}
        sizes = [parse_size(text) for text in size or SIZES]
        stopwatch = Stopwatch(find_device(device))
        if folder is not None:
            require_matplotlib()
            folder.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as mistake:
        raise fail(str(mistake)) from mistake
    masks = (True, False) if causal is None else (causal,)
    cases = [Case(name, heads[name], *at, mask) for name in heads for mask in masks for at in sizes]
    about = facts(stopwatch.device)
    out.print(headline(about), style="bold", highlight=False)
    limits = ceilings(stopwatch)
    _print_ceilings(limits)
    options = {"block": block, "v_scale": v_scale, "smooth_k": smooth_k, "hadamard": hadamard}
    chosen: dict[str, Any] = {"backend": backend, "seed": seed, "seconds": seconds}
    result: dict[str, Any] = {
        "bench": "prefill",
        "facts": about,
        "options": {**options, **chosen, "dtype": dtype},
        "ceilings": asdict(limits),
        "rows": [],
    }
    rows: list[PrefillRow] = []
    for case in cases:
        with err.status(str(case)) as status:
            own = run_case(
                case,
                modes,
                options,
                dtype=DTYPES[dtype],
                stopwatch=stopwatch,
                limits=limits,
                tell=status.update,
                **chosen,
            )
        _print_case(case, own, stopwatch.device)
        rows += own
        result["rows"] += [asdict(row) for row in own]
        if folder is not None:  # after each case: a run that is cut short keeps what it has
            (folder / "prefill.json").write_text(as_json(result, indent=1) + "\n")
            plot(rows, headline(about), folder / "prefill.png")
    missing = [row for row in rows if row.ours and row.ms is None]
    for row in missing:
        fail(f"{row.method} on {row.shape}, {row.batch} x {row.tokens}, is not timed; {row.note}")
    if json_line:
        print(as_json(result))  # noqa: T201
    if missing:
        raise typer.Exit(1)


def _print_ceilings(limits: Ceilings) -> None:
    rates = {"bf16": limits.bf16, "int8": limits.int8, "fp8": limits.fp8}
    shown = [f"{name} {'none' if rate is None else f'{rate:.4g}'}" for name, rate in rates.items()]
    products = f"products of {limits.size} cubed, {', '.join(shown)} TFLOP/s"
    out.print(f"Ceilings measured now: {products}; copy {limits.copy:.3g} TB/s.", highlight=False)


def _print_case(case: Case, rows: list[PrefillRow], device: torch.device) -> None:
    heads = case.heads
    table = Table(title=f"{case.shape} ({heads.query}/{heads.kv} heads of {heads.dim}), {case}")
    baselines = [name for name in BASELINES if any(row.method == name for row in rows)]
    headings = ["method", "ms", "quantize ms", "TFLOP/s", "roofline", *(f"x {name}" for name in baselines), "error"]
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for row in rows:
        ratios = [None if row.speedup is None else row.speedup.get(name) for name in baselines]
        table.add_row(
            row.method,
            figure(row.ms, ".4g"),
            figure(row.quantize_ms, ".3g"),
            figure(row.tflops, ".4g"),
            figure(row.roofline, ".0%"),
            *(figure(ratio, ".2f") for ratio in ratios),
            figure(row.error, ".2%"),
        )
    out.print(table)
    for row in rows:
        if row.note:
            out.print(f"{row.method}: {row.note}", style="dim", markup=False, highlight=False)
    spreads = [row.spread for row in rows if row.spread is not None]
    if spreads:
        rounds = max(row.rounds for row in rows)
        out.print(f"Medians of {rounds} rounds; quartiles lie up to {max(spreads):.1%} apart.", style="dim")
    if device.type != "cuda":
        out.print("On a CPU: plain torch by the wall clock. It says nothing of a GPU.", style="dim")
