"""`turbo-hf bench prefill`: speed of `ops.prefill` against existing kernels. Every result is checked first, every
figure includes quantization."""

import operator
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import torch
import typer

from turbo_hf.config.turbo_config import ATTENTION_MODES, BACKENDS
from turbo_hf.console import Device, Json, mistakes_end_the_command, out
from turbo_hf.eval.bench import checked, runner
from turbo_hf.eval.bench.random_cache import draw
from turbo_hf.eval.bench.rivals import sdpa_rivals
from turbo_hf.eval.bench.shapes import SHAPES, SIZES, PromptCase, find_shape, parse_size
from turbo_hf.eval.bench.timing import Call, Conditions, Stopwatch, side_by_side
from turbo_hf.layout import QUANTIZED_MODES, Rounding, Scoring
from turbo_hf.ops.layer_ops import LayerOps
from turbo_hf.ops.prefill.reference import reference_quantize_operands


def run_case(case: PromptCase, modes: list[str], how: Conditions) -> list[checked.Row]:
    """Check, then time every mode and every rival on one case, in float16.

    Args:
        modes: of `ops.prefill`.
        how: its seed is that of the inputs, N(0, 1), and of the sample that is checked.

    Returns:
        The rivals' rows, then the modes'. A method that is wrong or cannot run has a note and no time.
    """
    seed = how.seed
    q, k, v = inputs(case, how.device, seed)
    ops = how.ops(q, ((4, case.heads.kv),))
    scaling = case.heads.dim**-0.5
    how.tell(f"{case}: oracle")
    sample = checked.Sample(q, k, v, scaling=scaling, seed=seed)
    rows: list[checked.Row] = []
    calls: dict[str, Call] = {}
    for rival in sdpa_rivals(q, k, v, scaling=scaling, causal=True):
        row = checked.new_row(case, rival.name, False, note=rival.note)
        if rival.call is not None:
            out: Any = rival.call()
            row, calls[rival.name] = replace(row, error=sample.error(out)), rival.call
        rows.append(row)
    for mode in modes:
        how.tell(f"{case}: checking {mode}")
        rounding = Rounding(mode)
        given: dict[str, Any] = {"scoring": Scoring(scaling), "rounding": rounding}

        def prepare(given: dict[str, Any] = given) -> checked.Prepared:
            calls = [partial(ops.prefill, q, k, v, **given)]
            return calls, partial(checked.verify, sample=sample, options=given)

        row, call = checked.first_checked(checked.new_row(case, mode, True), prepare, operator.itemgetter(0))
        rows.append(row)
        if call is not None:
            calls[mode] = call
            if mode != "native":
                calls[_apart(mode)] = partial(_quantized(ops, mode), k, v, rounding, None)
    how.tell(f"{case}: timing")
    times = side_by_side(calls, how.stopwatch, how.seconds) if calls else {}
    return [_timed(row, case, times) for row in rows]


def _quantized(ops: LayerOps, mode: str) -> Callable[..., object]:
    """What quantizes keys and values of a prompt, which `prefill` does first."""
    if not ops.prompt_kernels(mode):
        return reference_quantize_operands
    from turbo_hf.ops.prefill.launch import launch_quantize_operands  # noqa: PLC0415 - needs Triton

    return launch_quantize_operands


def inputs(case: PromptCase, device: torch.device, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Seeded N(0, 1): q [B, Hq, N, D]; k, v [B, Hkv, N, D]."""
    generator, heads = torch.Generator(device).manual_seed(seed), case.heads
    counts = (heads.query, heads.kv, heads.kv)
    q, k, v = (draw(generator, case.batch, count, case.tokens, heads.dim) for count in counts)
    return q, k, v


def _apart(mode: str) -> str:
    return f"{mode}: quantization"


def _timed(row: checked.Row, case: PromptCase, times: dict[str, list[float]]) -> checked.Row:
    if row.method not in times:
        return row
    ms, apart = statistics.median(times[row.method]), times.get(_apart(row.method))
    quantize_ms = None if apart is None else statistics.median(apart)
    return checked.timed(row, times, {"ms": ms, "quantize ms": quantize_ms, "TFLOP/s": case.flops / ms / 1e9})


def prefill_command(
    mode: Annotated[list[str] | None, typer.Option(help=f"{', '.join(ATTENTION_MODES)}; may be repeated.")] = None,
    shape: Annotated[list[str] | None, typer.Option(help=f"{', '.join(SHAPES)}; may be repeated.")] = None,
    size: Annotated[list[str] | None, typer.Option(help="Rows x tokens, such as 4x16k; may be repeated.")] = None,
    backend: runner.Backend = "auto",
    seconds: Annotated[float, typer.Option(min=0, help="Approximate seconds per case, in 5 to 100 rounds.")] = 3.0,
    seed: runner.Seed = 0,
    folder: runner.Folder = None,
    device: Device = "auto",
    json_line: Json = False,
) -> None:
    """Attention of a prompt against cuDNN and FlashAttention-2: checked first, then timed in turn.

    Default: every shape and size, in the modes that quantize. Exits with 1 if a result is wrong, which
    is then not timed, or a mode refuses.
    """
    given = dict(locals())
    with mistakes_end_the_command():
        modes = [runner.one_of("mode", name, ATTENTION_MODES) for name in mode or QUANTIZED_MODES]
        runner.one_of("backend", backend, BACKENDS)
        heads = {name: find_shape(name) for name in shape or SHAPES}
        sizes = [parse_size(text) for text in size or SIZES]
        stopwatch = Stopwatch(runner.find_device(device))
        runner.require_choice(stopwatch.device, bool(size), "--size 1x1k, or less")
        bench = runner.BenchRun[checked.Row]("prefill", stopwatch.device, folder)
    cases = [PromptCase(name, heads[name], *at) for name in heads for at in sizes]
    how = Conditions(stopwatch, backend, seed, seconds)

    bench.each(
        cases,
        lambda case, tell: run_case(case, modes, how._replace(tell=tell)),
        partial(_print_case, device=stopwatch.device),
        options=given,
    )
    bench.finish(json_line, checked.untimed(bench.rows))


def _print_case(case: PromptCase, rows: Sequence[checked.Row], device: torch.device) -> None:
    heads = case.heads
    title = f"{case.shape} ({heads.query}/{heads.kv} heads of {heads.dim}), {case}"
    columns = {"ms": ".4g", "quantize ms": ".3g", "TFLOP/s": ".4g"}
    checked.print_rows(title, "method", rows, columns)
    if device.type != "cuda":
        out.print("On a CPU: plain torch by the wall clock. It says nothing of a GPU.", style="dim")
