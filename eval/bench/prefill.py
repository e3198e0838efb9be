"""Speed of `ops.prefill` against existing kernels: every result is checked first, every figure includes
quantization."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from turbo_hf.eval.bench.check import Check, Sample, poisoned, verify
from turbo_hf.eval.bench.rivals import BASELINES, Rival, rivals
from turbo_hf.eval.bench.rows import Row, checked, timed
from turbo_hf.eval.bench.shapes import Case
from turbo_hf.eval.bench.timing import Call, Ceilings, Stopwatch, side_by_side
from turbo_hf.layout import AttentionOutput, Rounding, Scoring
from turbo_hf.ops.prefill import contract as op
from turbo_hf.ops.prefill import operands

BITS = {"turbo": (8, 8), "int8": (8, 8), "half": (8, 16), "fp8": (8, 8), "fp16": (16, 16)}
"""Width of the operands of Q K^T and of P V in each mode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRow(Row):
    """One method on one prompt pass.

    ms: median of the rounds, quantization included. quantize_ms: of K and V apart (Q is quantized inside the
    attention). tflops: 10^12 operations a second, counted as `Case.flops`. floor_ms: from the ceilings; roofline:
    floor over time.
    """

    causal: bool
    ms: float | None = None
    quantize_ms: float | None = None
    tflops: float | None = None
    floor_ms: float | None = None
    roofline: float | None = None


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
) -> list[PrefillRow]:
    """Check, then time every mode and every rival on one case.

    Args:
        modes: of `ops.prefill`. options: its block, v_scale, smooth_k and hadamard. backend: which one runs.
        seed: of the inputs, N(0, 1), and of the sample that is checked.
        seconds: approximate timing duration.
        tell: called at each step.

    Returns:
        The rivals' rows, then the modes'. A method that is wrong or cannot run has a note and no time.
    """
    q, k, v = inputs(case, dtype, stopwatch.device, seed)
    scaling = case.heads.dim**-0.5
    tell(f"{case}: oracle")
    sample = Sample(q, k, v, scaling=scaling, causal=case.causal, seed=seed)
    rows: list[PrefillRow] = []
    calls: dict[str, Call] = {}
    for rival in rivals(q, k, v, scaling=scaling, causal=case.causal):
        row = _row(case, rival.name, rival.note)
        if rival.call is not None:
            row, calls[rival.name] = replace(row, error=_error(rival, sample)), rival.call
        rows.append(row)
    for mode in modes:
        tell(f"{case}: checking {mode}")
        rounding = Rounding(mode, **options_of(mode, options))
        given = {"scoring": Scoring(scaling), "rounding": rounding, "causal": case.causal}
        row, call = _checked(_row(case, mode), q, k, v, sample, given, backend)
        rows.append(row)
        if call is not None:
            calls[mode] = call
            if mode != "fp16":
                calls[_apart(mode)] = partial(operands.quantize_operands, k, v, rounding, backend=backend)
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


def _row(case: Case, method: str, note: str = "") -> PrefillRow:
    return PrefillRow(
        shape=case.shape,
        batch=case.batch,
        tokens=case.tokens,
        causal=case.causal,
        method=method,
        ours=method in BITS,
        note=note,
    )


def _error(rival: Rival, sample: Sample) -> float:
    out: Any = rival.call() if rival.call is not None else None
    return sample.error(out)


def _checked(
    row: PrefillRow,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sample: Sample,
    given: dict[str, Any],
    backend: str,
) -> tuple[PrefillRow, Call | None]:
    """The row of one mode with its check, and the call to time if the result is right."""

    def call() -> AttentionOutput:
        return op.prefill(q, k, v, backend=backend, **given)

    def prepare() -> tuple[Check, Callable[[], Call]]:
        with poisoned():
            got = call()
        return verify(got, sample, given), lambda: call

    return checked(row, prepare)


def _apart(mode: str) -> str:
    return f"{mode}: quantization"


def _timed(row: PrefillRow, case: Case, times: dict[str, list[float]], limits: Ceilings, itemsize: int) -> PrefillRow:
    if row.method not in times:
        return row
    ms = statistics.median(times[row.method])
    bits = BITS.get(row.method) or ((16, 16) if row.method in BASELINES else (8, 16))
    floor = limits.floor_ms(case.flops, bits, case.bytes_moved(itemsize))
    apart = times.get(_apart(row.method))
    return timed(
        row,
        times,
        ms=ms,
        quantize_ms=None if apart is None else statistics.median(apart),
        tflops=case.flops / ms / 1e9,
        floor_ms=floor,
        roofline=floor / ms,
    )
