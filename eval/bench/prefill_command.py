"""`turbo-hf bench prefill`: the tables, the JSON and the plot."""

from dataclasses import asdict
from typing import Annotated, Any

import torch
import typer

from turbo_hf.config.turbo_config import ATTENTION_MODES, BACKENDS, V_SCALES
from turbo_hf.console import Device, Json, err, fail, out
from turbo_hf.eval.bench.environment import facts, headline
from turbo_hf.eval.bench.options import (
    DTYPES,
    Backend,
    Block,
    Folder,
    Hadamard,
    Modes,
    Seed,
    SmoothK,
    find_device,
    one_of,
    require_choice,
)
from turbo_hf.eval.bench.plot import plot, require_matplotlib
from turbo_hf.eval.bench.prefill import PrefillRow, run_case
from turbo_hf.eval.bench.shapes import SHAPES, SIZES, Case, find_shape, parse_size
from turbo_hf.eval.bench.tables import finish, keep, print_rows, untimed
from turbo_hf.eval.bench.timing import Ceilings, Stopwatch, ceilings

DEFAULT_MODES = ("turbo", "int8", "half", "fp8")
HALVES = ("float16", "bfloat16")
"""What the other methods have kernels for."""


def prefill_command(
    mode: Modes = None,
    shape: Annotated[list[str] | None, typer.Option(help=f"{', '.join(SHAPES)}; may be repeated.")] = None,
    size: Annotated[list[str] | None, typer.Option(help="Rows x tokens, such as 4x16k; may be repeated.")] = None,
    causal: Annotated[bool | None, typer.Option("--causal/--full", help="One mask only; default: both.")] = None,
    block: Block = 128,
    v_scale: Annotated[str, typer.Option(help=f"Scales of V: per {', '.join(V_SCALES)}.")] = "block",
    smooth_k: SmoothK = False,
    hadamard: Hadamard = False,
    backend: Backend = "auto",
    dtype: Annotated[str, typer.Option(help=f"Dtype of the inputs: {', '.join(HALVES)}.")] = "float16",
    seconds: Annotated[float, typer.Option(min=0, help="Approximate seconds per case, in 5 to 100 rounds.")] = 3.0,
    seed: Seed = 0,
    folder: Folder = None,
    device: Device = "auto",
    json_line: Json = False,
) -> None:
    """Attention of a prompt against cuDNN, FlashAttention-2 and SageAttention: checked first, then timed in turn.

    Default: every shape and size, causal and full, in the modes that quantize. Exits with 1 if a result is wrong, which
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
        require_choice(stopwatch.device, bool(size), "--size 1x1k, or less")
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
        keep(result, own, folder)
        if folder is not None:
            plot(rows, headline(about), folder / "prefill.png")
    finish(result, json_line, untimed(rows))


def _print_ceilings(limits: Ceilings) -> None:
    rates = {"bf16": limits.bf16, "int8": limits.int8, "fp8": limits.fp8}
    shown = [f"{name} {'none' if rate is None else f'{rate:.4g}'}" for name, rate in rates.items()]
    products = f"products of {limits.size} cubed, {', '.join(shown)} TFLOP/s"
    out.print(f"Ceilings measured now: {products}; copy {limits.copy:.3g} TB/s.", highlight=False)


def _print_case(case: Case, rows: list[PrefillRow], device: torch.device) -> None:
    heads = case.heads
    title = f"{case.shape} ({heads.query}/{heads.kv} heads of {heads.dim}), {case}"
    columns = {
        "ms": ("ms", ".4g"),
        "quantize ms": ("quantize_ms", ".3g"),
        "TFLOP/s": ("tflops", ".4g"),
        "roofline": ("roofline", ".0%"),
    }
    print_rows(title, "method", rows, columns)
    if device.type != "cuda":
        out.print("On a CPU: plain torch by the wall clock. It says nothing of a GPU.", style="dim")
