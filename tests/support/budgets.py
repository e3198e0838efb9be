"""What an op may miss, and the checks that hold it to that.

What kernels and caches may miss against the oracle is derived, not typed: from what plain low-precision attention
misses on the same numbers (`float_budget`), and, where P is rounded, from the size of its rounding steps (`p_budget`),
and where queries are folded with spans, from theirs (`fold_budget`).
Tests that compare other things (two implementations, a trained model, a whole run) type their bounds, and say why.
"""

from collections.abc import Sequence
from typing import Any

import torch
from oracle import Codes, Exact, KeyValue, oracle
from torch import Tensor

from turbo_hf.layout import AttentionOutput

SLACK = 3
"""How many times the error of plain low-precision attention an op may have."""

INT8_MAX = 127
"""Largest INT8 code of P and of a prompt's query."""

QUERY_MAX = 127 << 8
"""Largest code of a query of a decode step."""


def largest(x: Tensor) -> float:
    """max|x|, infinities left out; 0 of nothing."""
    x = x.detach().double().abs()
    return float(x[x.isfinite()].max()) if bool(x.isfinite().any()) else 0.0


def float_budget(want: Tensor, eager: Tensor, magnitude: float, dtype: torch.dtype) -> float:
    """SLACK times: what eager attention in `dtype` misses, and one rounding of a number of this magnitude."""
    assert bool((eager.isfinite() == want.isfinite()).all()), "eager overflows here: no budget"
    error = largest(torch.where(want.isfinite(), eager.double() - want, 0.0))
    return SLACK * (error + torch.finfo(dtype).eps * magnitude)


def check(name: str, got: Tensor, want: Tensor, budget: float | Tensor) -> None:
    """Assert |got - want| <= budget, element by element, and the same infinities in the same places."""
    got = got.detach().to("cpu", torch.float64)
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    infinite = want.isinf()
    assert bool((got[infinite] == want[infinite]).all()), f"{name}: an infinity is missing"
    error = torch.where(infinite, 0.0, got - want).abs()
    worst = (error - budget).max() if error.numel() else torch.tensor(0.0)
    # not (<=): a NaN must fail
    assert bool((error <= budget).all()), f"{name}: error {float(error.max()):.3e} exceeds its budget by {worst:.3e}"


def check_same(got: AttentionOutput, want: AttentionOutput, values: float) -> None:
    """Assert that two results are equal but for the order in which float32 sums are taken. values: the largest one."""
    eps = torch.finfo(torch.float32).eps
    # scores are sums too, and move P by as much as they are off
    scores = SLACK * eps * (1 + largest(want.lse))
    check("out", got.out, want.out.double().cpu(), scores * values)
    check("lse", got.lse, want.lse.double().cpu(), scores)


def score_size(q: Tensor, rows: Sequence[KeyValue], scaling: float) -> float:
    """Size of the numbers that are summed to a score: a bound of |q| . |k| * scaling."""
    k_norm = max((largest(k.double().norm(dim=-1)) for k, _ in rows), default=0.0)
    return largest(q.detach().double().norm(dim=-1)) * k_norm * scaling


def score_noise(want: "Exact", rows: Sequence[KeyValue], size: float) -> Tensor:
    """What float32's rounding of scores of this size may do to out [B, Hq, M, D].

    Scores that are off by d at most move each P by a factor of e^2d at most, and out within the hull of the values
    (and of 0, which is a sink's).
    """
    off = torch.tensor(SLACK * torch.finfo(torch.float32).eps * size, dtype=torch.float64)
    noise = torch.zeros_like(want.out, dtype=torch.float64)
    for i, (probs, (_, v)) in enumerate(zip(want.probs, rows, strict=True)):
        m = probs.shape[1]
        if m and v.shape[1]:
            noise[i, :, -m:] = _moved(probs.double(), v.double().cpu(), want.out[i, :, -m:].double(), off)
    return noise


def _moved(probs: Tensor, v: Tensor, out: Tensor, off: Tensor) -> Tensor:
    """How far out [Hq, m, D] moves if scores are off by at most this: as in `score_noise`."""
    values = v.repeat_interleave(probs.shape[0] // v.shape[0], 0)
    # the mean distance from the mean is at most the deviation
    square = probs @ values**2 - out**2
    hull = torch.maximum(values.amax(1, keepdim=True) - out, out - values.amin(1, keepdim=True)).clamp(min=0)
    share = torch.expm1(2 * off.clamp(max=100))
    return torch.minimum(share * square.clamp(min=0).sqrt(), hull + out.abs())


def fold_budget(q: Tensor, probs: Tensor, row: Codes, out: Tensor, scaling: float) -> tuple[Tensor, Tensor, Tensor]:
    """What rounding queries times spans may do (`Codes.fold`): to scores [Hq, m, 1]; to out [Hq, m, D] at most, and in
    the expected mean square, as errors of tokens are independent."""
    assert row.fold is not None
    group = probs.shape[0] // row.v.shape[0]
    unit = q.abs().amax(-1, keepdim=True) / QUERY_MAX * scaling
    most, mean = (unit * x[:, None] for x in row.fold.repeat_interleave(group, 0).unbind(-1))
    off = most.amax(-1, keepdim=True)
    bound = _moved(probs, row.values()[1], out, off)
    values = row.values()[1].repeat_interleave(group, 0)
    weight = (probs * mean) ** 2
    square = weight @ values**2 - 2 * out * (weight @ values) + weight.sum(-1, keepdim=True) * out**2
    return off, bound, torch.minimum(square.clamp(min=0), bound**2)


def check_padding(got: AttentionOutput, want: Exact) -> None:
    """Assert that out is 0, not merely small, where a row has no token."""
    assert not got.out.cpu()[want.lse.isneginf()].any(), "out: not 0 where a row has no token"


def check_exact(
    got: AttentionOutput,
    q: Tensor,
    rows: Sequence[KeyValue],
    *,
    starts: Sequence[int] | None = None,
    units: float = 0.0,
    unpacked: bool = False,
    **options: Any,
) -> None:
    """Assert that an op in mode "native" is attention of q over these keys and values, to eager's own precision.

    units: largest |log2| of a scale of the values, which an op may carry as its log2 in float32.
    unpacked: some keys and values are numbers of pages, which are float32 for q of any dtype.
    """
    assert got.out.dtype == q.dtype
    assert got.lse.dtype == torch.float32
    want = oracle(q, rows, starts=starts, **options)
    eager = oracle(q, rows, starts=starts, dtype=q.dtype, **options)
    if q.dtype == torch.float64:
        # the oracle's own precision: channels summed in another order show its error
        eager = oracle(q.flip(-1), [(k.flip(-1), v) for k, v in rows], starts=starts, **options)
    values = max((largest(v) for _, v in rows), default=0.0)
    scores = score_size(q, rows, options["scaling"]) + largest(want.lse)
    wide = q.dtype == torch.float32 or (q.dtype == torch.float64 and unpacked)
    noise = score_noise(want, rows, scores) if wide else torch.zeros(())
    carried = SLACK * torch.finfo(torch.float32).eps * (units * want.out.double().abs() + unpacked * values)
    check("out", got.out, want.out, float_budget(want.out, eager.out, values, q.dtype) + noise + carried)
    check_padding(got, want)
    # lse is float32 even where the rest is float64
    narrow = torch.float32 if q.dtype == torch.float64 else q.dtype
    check("lse", got.lse, want.lse, float_budget(want.lse, eager.lse, scores, narrow))


def p_error(weight: Tensor, least: Tensor, p_type: str) -> tuple[Tensor, Tensor]:
    """How far rounding moves each weight of a tile: at most, and in the mean square."""
    peak = torch.maximum(weight.amax(-1, keepdim=True), least)
    seen = (weight > 0).double()
    if p_type == "int8":
        step = peak / INT8_MAX * seen
        return step / 2, step**2 / 12
    # half the distance of two neighbours, and of the smallest numbers there are (a share of the tile's largest)
    share, smallest = {"fp8": (2.0**-4, 2.0**-18), "float16": (2.0**-11, 2.0**-25), "bfloat16": (2.0**-8, 0.0)}[p_type]
    bound = (weight * share + peak * smallest) * seen
    return bound, bound**2 / 3


def p_budget(probs: Tensor, row: Codes, p_type: str = "int8", depth: float = 0.0) -> tuple[Tensor, Tensor]:
    """What rounding P may do to out [Hq, m, D]: the largest error, and the expected mean square.

    A tile's P (times the scale of V) is rounded to steps of its maximum / 127, so each of its values is off by half a
    step at most, and by step**2 / 12 in the mean square. depth: a tile's P is scaled by no less than this share of the
    largest P of its row.
    """
    group = probs.shape[0] // row.v.shape[0]
    v, v_scale = row.v.repeat_interleave(group, 0), row.v_scale.repeat_interleave(group, 0)
    bound = torch.zeros(*probs.shape[:2], v.shape[-1], dtype=torch.float64)
    square = bound.clone()
    top = probs.amax(-1, keepdim=True)
    for tile in row.tile.unique():
        inside = row.tile == tile
        scale = v_scale[:, None, inside]
        most, mean_square = p_error(probs[..., inside] * scale, depth * top * scale.amax(-1, keepdim=True), p_type)
        bound += most @ v[:, inside].abs()
        square += mean_square @ v[:, inside] ** 2
    return bound, square


def check_rounded(
    got: AttentionOutput,
    q: Tensor,
    dtype: torch.dtype,
    rows: Sequence[Codes],
    p_type: str = "int8",
    *,
    starts: Sequence[int] | None = None,
    depth: float = 0.0,
    **options: Any,
) -> None:
    """Assert that an op is attention of q (float64, fake-quantized) over `rows`, with P rounded to `p_type`.

    The only errors left are P's rounding, that of folded queries, float32 arithmetic, and the rounding of the output to
    `dtype`. Where there are enough outputs for a mean, their mean square must be that of these roundings too, which is
    far below its bound.
    """
    assert got.out.dtype == dtype
    assert got.lse.dtype == torch.float32
    values = [row.values() for row in rows]
    want = oracle(q, values, starts=starts, **options)
    eager = oracle(q, values, starts=starts, dtype=torch.float32, **options)
    size = max((largest(v) for _, v in values), default=0.0)
    scores = score_size(q, values, options["scaling"]) + largest(want.lse)
    noise = float_budget(want.out, eager.out, size, torch.float32) + score_noise(want, values, scores)
    bound, square = torch.zeros_like(want.out), torch.zeros_like(want.out)
    folded, off = torch.zeros_like(want.out), torch.zeros_like(want.lse)
    for i, (probs, row) in enumerate(zip(want.probs, rows, strict=True)):
        if probs.shape[1]:
            m = probs.shape[1]
            bound[i, :, -m:], square[i, :, -m:] = p_budget(probs, row, p_type, depth)
            if row.fold is not None and row.fold.any():
                own = q[i, :, -m:], probs, row, want.out[i, :, -m:], options["scaling"]
                scores_off, folded[i, :, -m:], of_fold = fold_budget(*own)
                off[i, :, -m:] = scores_off[..., 0]
                square[i, :, -m:] += of_fold
                # P's steps are those of P as it has become
                bound[i, :, -m:] *= torch.exp(2 * scores_off.clamp(max=100))
    # in FP8 the sum of P may be that of the rounded P, which is off by their largest relative error at most
    of_sum = 2.0**-4 if p_type == "fp8" else 0.0
    bound = bound + of_sum * want.out.abs()
    rounding = torch.finfo(dtype).eps * (want.out.abs() + bound)
    lse_budget = float_budget(want.lse, eager.lse, scores, torch.float32)
    # where P has a least scale, scores that are off by float32's rounding move it by as much as the lse, and may move
    # it over one more step
    moved = lse_budget if depth else 0.0
    check("out", got.out, want.out, bound * (1 + moved) + folded + noise + rounding)
    check_padding(got, want)
    if want.out.numel() >= 512:
        error = (got.out.detach().to("cpu", torch.float64) - want.out).square().mean().sqrt()
        # all values of a tile at half a step, the worst case, are sqrt(3) times the mean square of a uniform error
        expected = 2 * square.mean().sqrt() + noise.max() + rounding.max()
        expected += of_sum / 2 * want.out.square().mean().sqrt()
        assert bool(error <= expected), f"out: rms error {error:.3e} exceeds {expected:.3e}"
    check("lse", got.lse, want.lse, lse_budget + of_sum + off)


def check_turbo(got: AttentionOutput, q: Tensor, dtype: torch.dtype, rows: Sequence[Codes], **options: Any) -> None:
    """`check_rounded` of mode "turbo" over a cache: P in INT8, each tile's in steps of its own largest."""
    check_rounded(got, q, dtype, rows, **options)
