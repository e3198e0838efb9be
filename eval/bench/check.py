"""Whether a result is right: a sample of it against the float64 oracle, within what the mode itself costs."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from turbo_hf.eval.bench.oracle import attend
from turbo_hf.layout import AttentionOutput
from turbo_hf.ops.prefill.reference import reference_prefill

ROWS = 64
"""Queries checked per head: the first ones, the last, some at the edges of tiles, the others at random."""

SLACK = 2
"""Factor on the reference's error plus the rounding of the output: what a row may be off by. Rounding in another order
changes errors by less; a wrong key, scale or mask causes an error of the size of the row itself."""


@dataclass(frozen=True, slots=True)
class Check:
    """A sample of a result against the oracle.

    error: |o - oracle| / |oracle| over the sample.
    worst: the same of the worst query.
    budget: what `worst` may be.
    lse_worst, lse_budget: absolute, natural log units.
    problem: what is wrong; "" if nothing is.
    """

    error: float
    worst: float
    budget: float
    lse_worst: float
    lse_budget: float
    problem: str


class Sample:
    """The oracle's result for ROWS queries of the first head of the first row and the last head of the last row."""

    def __init__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scaling: float, causal: bool, seed: int
    ) -> None:
        batch, heads, tokens, _ = q.shape
        group = heads // k.shape[1]
        self.heads = [(0, 0), (batch - 1, heads - 1)]
        self.rows = _rows(tokens, seed).to(q.device)
        self.scaling = scaling
        self.inputs = [[x[b, h : h + 1] for x, h in ((q, h), (k, h // group), (v, h // group))] for b, h in self.heads]
        exact = [
            attend(query[:, self.rows], key, value, scaling=scaling, causal=causal, places=self.rows)
            for query, key, value in self.inputs
        ]
        self.out, self.lse = torch.cat([x.out for x in exact]), torch.cat([x.lse for x in exact])

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """The sample's part of [B, Hq, M, ...], float64 [2, ROWS, ...]."""
        return torch.stack([x[b, h, self.rows] for b, h in self.heads]).double()

    def error(self, out: torch.Tensor) -> float:
        """|o - oracle| / |oracle| of out [B, Hq, M, D] over the sample."""
        return float((self.of(out) - self.out).norm() / self.out.norm())


def _rows(tokens: int, seed: int) -> torch.Tensor:
    edges = [*range(16), 63, 64, 127, 128, tokens // 2, tokens - 65, tokens - 64, tokens - 2, tokens - 1]
    chosen = {row for row in edges if 0 <= row < tokens}
    generator = torch.Generator().manual_seed(seed)
    for row in torch.randperm(tokens, generator=generator)[:ROWS].tolist():
        if len(chosen) < ROWS:
            chosen.add(row)
    return torch.tensor(sorted(chosen))


def verify(got: AttentionOutput, sample: Sample, options: dict[str, Any]) -> Check:
    """Check `got`, [B, Hq, M, D] and lse [B, Hq, M], against the oracle, within the reference's own distance from it.

    The budget is SLACK times the error of the same mode in plain torch on the same heads, plus one rounding of the
    output; `options` are those of `turbo_hf.ops.prefill.prefill` without the backend.
    """
    exact = AttentionOutput(sample.out, sample.lse)
    # the same heads: a query that sees one key has an lse with one rounding error, which no average makes typical
    models = [reference_prefill(q[None], k[None], v[None], **options) for q, k, v in sample.inputs]
    model = AttentionOutput(*(torch.stack([x[0, 0, sample.rows] for x in part]) for part in zip(*models, strict=True)))
    sampled = AttentionOutput(sample.of(got.out), sample.of(got.lse))
    return judge(got, sampled, model, exact)


def judge(got: AttentionOutput, sampled: AttentionOutput, model: AttentionOutput, exact: AttentionOutput) -> Check:
    """Check a sample of `got` against `exact`, within the error of `model`, the same mode in plain torch.

    got: the whole result, of which every element must be finite. sampled, model, exact: out [..., D] and lse [...] of
    the same queries; exact in float64.
    """
    eps = torch.finfo(got.out.dtype).eps
    budget = SLACK * (_worst(model.out.double(), exact.out) + eps)
    # a relative rounding of the exponentials is an absolute one of their logarithm
    lse_off = float((model.lse.double() - exact.lse).abs().max())
    lse_budget = SLACK * (lse_off + eps * max(1.0, float(exact.lse.abs().max())))
    out = sampled.out.double()
    worst = _worst(out, exact.out)
    lse_worst = float((sampled.lse.double() - exact.lse).abs().max())
    problem = ""
    if not (bool(got.out.isfinite().all()) and bool(got.lse.isfinite().all())):
        problem = "the result has elements that are NaN or infinite, or that nothing wrote"
    elif not worst <= budget:
        problem = f"a query is off by {worst:.2%} of its size; {budget:.2%} is what the mode may cost"
    elif not lse_worst <= lse_budget:
        problem = f"an lse is off by {lse_worst:.2g}; {lse_budget:.2g} is what the mode may cost"
    return Check(float((out - exact.out).norm() / exact.out.norm()), worst, budget, lse_worst, lse_budget, problem)


def _worst(out: torch.Tensor, want: torch.Tensor) -> float:
    return float(((out - want).norm(dim=-1) / want.norm(dim=-1)).max())


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill what `torch.empty` returns with NaN, as torch's deterministic mode does, so that unwritten output shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about other requirements of that mode
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
