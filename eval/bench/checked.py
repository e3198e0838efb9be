"""Methods of `bench prefill` and `bench decode`: checked against the float64 oracle, timed, in a table.

A sample of a result is right within what the mode itself costs.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from turbo_hf.console import remark, show_table
from turbo_hf.eval.bench.oracle import attend
from turbo_hf.eval.bench.random_cache import one_head
from turbo_hf.eval.bench.rivals import BASELINES
from turbo_hf.eval.bench.runner import figure
from turbo_hf.eval.bench.shapes import Case, PromptCase
from turbo_hf.eval.bench.timing import Call, Rotation, speedup, spread
from turbo_hf.layout import AttentionOutput, KVStore
from turbo_hf.ops.prefill.reference import reference_prefill
from turbo_hf.ops.store.quantize import dequantize

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

    def __init__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scaling: float, seed: int) -> None:
        batch, heads, tokens, _ = q.shape
        group = heads // k.shape[1]
        self.heads = [(0, 0), (batch - 1, heads - 1)]
        self.rows = _rows(tokens, seed).to(q.device)
        self.scaling = scaling
        self.inputs = [[x[b, h : h + 1] for x, h in ((q, h), (k, h // group), (v, h // group))] for b, h in self.heads]
        exact = [
            attend(query[:, self.rows], key, value, scaling=scaling, causal=True, places=self.rows)
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


@dataclass(frozen=True, slots=True)
class Row:
    """One method on one case; `figures` are none where it did not run, and `note` says why.

    shape, case: of the model, and the rows and tokens; batch, tokens: rows, and tokens of the longest one.
    method, ours: what ran, and whether it is ours.
    bytes: of keys and values that a decode step reads, packed as they lie; its oracle reads the same cache.
    figures: medians of the rounds, by their heading in the table.
    spread: interquartile range of the rounds over their median.
    rounds: how often it was timed.
    speedup: times as fast as each baseline, median over the rounds.
    error: |o - oracle| / |oracle| on the sample.
    check: the check of a method of ours.
    note: why figures are missing, or a remark.
    """

    shape: str
    case: str
    batch: int
    tokens: int
    method: str
    ours: bool
    bytes: int = 0
    figures: dict[str, float | None] = field(default_factory=dict)
    spread: float | None = None
    rounds: int = 0
    speedup: dict[str, float] | None = None
    error: float | None = None
    check: Check | None = None
    note: str = ""


AnyCall = TypeVar("AnyCall", bound=Call)


Prepared = tuple[Sequence[Callable[[], AttentionOutput]], Callable[[AttentionOutput], Check]]
"""Calls to time, each over inputs of its own, and the check of the first one's result."""


def first_checked(
    row: Row, prepare: Callable[[], Prepared], ready: Callable[[list[Call]], AnyCall]
) -> tuple[Row, AnyCall | None]:
    """The row with its check, and what to time if the result is right; else the note says what is wrong.

    prepare: makes the inputs. ready: makes what is timed of the calls.
    """
    try:
        calls, check = prepare()
        with poisoned():
            got = calls[0]()
        found = check(got)
        row = replace(row, error=found.error, check=found)
        if found.problem:
            return replace(row, note=f"wrong: {found.problem}"), None
        return row, ready(list(calls))
    except ValueError as error:
        return replace(row, note=f"refused: {error}"), None
    except Exception as error:  # a failing method must not cost the others their figures
        return replace(row, note=f"failed: {type(error).__name__}: {error}"), None


def timed(row: Row, times: dict[str, list[float]], figures: dict[str, float | None]) -> Row:
    """The row with `figures`, and the spread and speedups that follow from the times of all methods, round by round."""
    own = times[row.method]
    others = [name for name in BASELINES if name in times and name != row.method]
    ratios = {name: speedup(own, times[name]) for name in others}
    return replace(row, spread=spread(own), rounds=len(own), speedup=ratios, figures=figures)


def print_rows(title: str, first: str, rows: Sequence[Row], columns: dict[str, str]) -> None:
    """A table of one case: methods, `columns`, speedups and errors; below it the notes, and how far rounds lie apart.

    Args:
        first: heading of the methods.
        columns: formats of figures, by heading.
    """
    baselines = [name for name in BASELINES if any(row.method == name for row in rows)]
    cells = []
    for row in rows:
        own = [figure(row.figures.get(heading), form) for heading, form in columns.items()]
        ratios = [figure((row.speedup or {}).get(name), ".2f") for name in baselines]
        cells.append([row.method, *own, *ratios, figure(row.error, ".2%")])
    show_table(title, [first, *columns, *(f"x {name}" for name in baselines), "error"], cells)
    print_notes((row.method, row.note) for row in rows)
    spreads = [row.spread for row in rows if row.spread is not None]
    if spreads:
        rounds = max(row.rounds for row in rows)
        remark(f"Medians of {rounds} rounds; quartiles lie up to {max(spreads):.1%} apart.")


def print_notes(notes: Iterable[tuple[str, str]]) -> None:
    """A line for each method that has something to say: (method, note)."""
    for method, text in notes:
        if text:
            remark(f"{method}: {text}")


def untimed(rows: Sequence[Row]) -> list[str]:
    """Those of our own that were refused, failed or are wrong, a sentence each."""
    return [
        f"{row.method} on {row.shape}, {row.case}, is not timed; {row.note}"
        for row in rows
        if row.ours and not row.rounds
    ]


Found = tuple[Row, Rotation | None]
"""A method's row, and what to time for it."""


def new_row(case: Case | PromptCase, method: str, ours: bool, size: int = 0, note: str = "") -> Row:
    """A row without figures. size: bytes of keys and values read."""
    return Row(case.shape, str(case), case.batch, case.tokens, method, ours, size, note=note)


def our_step(case: Case, method: str, size: int, device: torch.device, prepare: Callable[[], Prepared]) -> Found:
    """The row of one of our methods with its check, and what to time if the result is right.

    size: bytes of keys and values read. prepare: makes the caches.
    """
    return first_checked(new_row(case, method, True, size), prepare, lambda calls: Rotation(calls, device))


def check_heads(
    case: Case,
    q: torch.Tensor,
    store: KVStore,
    got: AttentionOutput,
    reference: Callable[[torch.Tensor, KVStore, int, int], AttentionOutput],
    kept: Callable[[int, int], torch.Tensor] | None = None,
) -> Check:
    """Check the first KV head of the first row and the last one of the last row against float64 over the same cache.

    Args:
        q: [B, Hq, 1, D]. store: the cache.
        reference: of a head's queries [1, G, 1, D], its cache alone, its row and its number: what plain torch returns,
            with the same roundings. Its error is the budget.
        kept: bool [tokens] of a row and a head, the keys that are read; None: all.
    """
    group, last = case.heads.query // case.heads.kv, len(case.lengths) - 1
    found: list[tuple[AttentionOutput, AttentionOutput, AttentionOutput]] = []
    for row, head in {(0, 0): None, (last, case.heads.kv - 1): None}:
        own, length, part = slice(head * group, (head + 1) * group), case.lengths[row], one_head(store, row, head)
        model = reference(q[row : row + 1, own], part, row, head)
        read = slice(None) if kept is None else kept(row, head)
        k, v = (x[0, :, :length][:, read] for x in dequantize(part, torch.float64))
        exact = attend(q[row, own], k, v, scaling=case.heads.dim**-0.5, causal=False)
        sampled = AttentionOutput(got.out[row, own], got.lse[row, own])
        found.append((sampled, AttentionOutput(model.out[0], model.lse[0]), exact))
    stacked = (AttentionOutput(*(torch.stack(x) for x in zip(*part, strict=True))) for part in zip(*found, strict=True))
    return judge(got, *stacked)
