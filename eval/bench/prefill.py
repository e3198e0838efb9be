"""Speed of `ops.prefill` beside what users have: every result checked first, every figure with its quantization."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from turbo_hf.eval.bench.check import Check, Sample, poisoned, verify
from turbo_hf.eval.bench.rivals import CUDNN, FLASH, MATH, Rival, rivals
from turbo_hf.eval.bench.shapes import Case
from turbo_hf.eval.bench.timing import Call, Ceilings, Stopwatch, side_by_side, speedup, spread
from turbo_hf.ops import operands
from turbo_hf.ops import prefill as op

BITS = {"turbo": (8, 8), "int8": (8, 8), "half": (8, 16), "fp8": (8, 8), "fp16": (16, 16)}
"""Width of the operands of Q K^T and of P V in each mode."""

BASELINES = (CUDNN, FLASH, MATH)


@dataclass(frozen=True, slots=True)
class Row:
    """One method on one case; figures are None where it did not run, and `note` says why.

    ms: median of the rounds, quantization included; spread: interquartile range over it. quantize_ms: of K and V
    apart (Q is quantized inside the attention). tflops: 10^12 operations a second, counted as `Case.flops`.
    floor_ms: from the ceilings; roofline: floor over time. speedup: times as fast as each baseline, median over the
    rounds. error: |o - oracle| / |oracle| on the sample. check: of our own modes.
    """

    shape: str
    batch: int
    tokens: int
    causal: bool
    method: str
    ours: bool
    ms: float | None = None
    spread: float | None = None
    rounds: int = 0
    quantize_ms: float | None = None
    tflops: float | None = None
    floor_ms: float | None = None
    roofline: float | None = None
    speedup: dict[str, float] | None = None
    error: float | None = None
    check: Check | None = None
    note: str = ""


def run_case(
    case: Case,
    modes: list[str],
    options: dict[str, Any],
    *,
    backend: str,
    dtype: torch.dtype,
    seed: int,
    seconds: float,
    stopwatch: Stopwatch,
    limits: Ceilings,
    tell: Callable[[str], None] = lambda step: None,
) -> list[Row]:
    """Check, then time every mode and every rival on one case.

    Args:
        modes: of `ops.prefill`. options: its block, v_scale, smooth_k and hadamard. backend: which one runs.
        seed: of the inputs, N(0, 1), and of the sample that is checked.
        seconds: about how long the clock runs.
        tell: told each step.

    Returns:
        The rivals' rows, then the modes'. What is wrong or cannot run has a note and no time.
    """
    q, k, v = inputs(case, dtype, stopwatch.device, seed)
    scaling = case.heads.dim**-0.5
    tell(f"{case}: oracle")
    sample = Sample(q, k, v, scaling=scaling, causal=case.causal, seed=seed)
    rows: list[Row] = []
    calls: dict[str, Call] = {}
    for rival in rivals(q, k, v, scaling=scaling, causal=case.causal):
        row = _row(case, rival.name, rival.note)
        if rival.call is not None:
            row, calls[rival.name] = replace(row, error=_error(rival, sample)), rival.call
        rows.append(row)
    for mode in modes:
        tell(f"{case}: checking {mode}")
        chosen = {"mode": mode, **options_of(mode, options)}
        given = {"scaling": scaling, "causal": case.causal, **chosen}
        row, call = _checked(_row(case, mode), q, k, v, sample, given, backend)
        rows.append(row)
        if call is not None:
            calls[mode] = call
            if mode != "fp16":
                calls[_apart(mode)] = partial(operands.quantize_operands, k, v, backend=backend, **chosen)
    tell(f"{case}: timing")
    times = side_by_side(calls, stopwatch, seconds) if calls else {}
    return [_timed(row, case, times, limits, dtype.itemsize) for row in rows]


def options_of(mode: str, options: dict[str, Any]) -> dict[str, Any]:
    """Those of `options` that the mode has: "fp16" rounds nothing, so nothing is prepared for rounding."""
    return {name: x for name, x in options.items() if mode != "fp16" or name not in ("smooth_k", "hadamard")}


def inputs(
    case: Case, dtype: torch.dtype, device: torch.device, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Seeded N(0, 1): q [B, Hq, N, D]; k, v [B, Hkv, N, D]."""
    generator = torch.Generator(device).manual_seed(seed)
    heads = case.heads
    q, k, v = (
        torch.randn(case.batch, count, case.tokens, heads.dim, generator=generator, device=device, dtype=dtype)
        for count in (heads.query, heads.kv, heads.kv)
    )
    return q, k, v


def _row(case: Case, method: str, note: str = "") -> Row:
    return Row(case.shape, case.batch, case.tokens, case.causal, method, method in BITS, note=note)


def _error(rival: Rival, sample: Sample) -> float:
    out: Any = rival.call() if rival.call is not None else None
    return sample.error(out)


def _checked(
    row: Row,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sample: Sample,
    given: dict[str, Any],
    backend: str,
) -> tuple[Row, Call | None]:
    """The row with its check, and the call to time if the result is right."""

    def call() -> object:
        return op.prefill(q, k, v, backend=backend, **given)

    try:
        with poisoned():
            got = op.prefill(q, k, v, backend=backend, **given)
    except ValueError as error:
        return replace(row, note=f"refused: {error}"), None
    except Exception as error:  # one mode that fails must not cost the others their figures
        return replace(row, note=f"failed: {type(error).__name__}: {error}"), None
    check = verify(got, sample, given)
    row = replace(row, error=check.error, check=check)
    return (row, call) if not check.problem else (replace(row, note=f"wrong: {check.problem}"), None)


def _apart(mode: str) -> str:
    return f"{mode}: quantization"


def _timed(row: Row, case: Case, times: dict[str, list[float]], limits: Ceilings, itemsize: int) -> Row:
    if row.method not in times:
        return row
    own = times[row.method]
    ms = statistics.median(own)
    bits = BITS.get(row.method) or ((16, 16) if row.method in BASELINES else (8, 16))
    floor = limits.floor_ms(case.flops, bits, case.bytes_moved(itemsize))
    apart = times.get(_apart(row.method))
    return replace(
        row,
        ms=ms,
        spread=spread(own),
        rounds=len(own),
        quantize_ms=None if apart is None else statistics.median(apart),
        tflops=case.flops / ms / 1e9,
        floor_ms=floor,
        roofline=floor / ms,
        speedup={name: speedup(own, times[name]) for name in BASELINES if name in times and name != row.method},
    )
