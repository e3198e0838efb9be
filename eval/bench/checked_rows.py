"""A method's row of `bench prefill` and `bench decode`: checked against the oracle, timed, in a table, in a plot."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from turbo_hf.console import remark, show_table
from turbo_hf.eval.bench.check import Check
from turbo_hf.eval.bench.rivals import BASELINES
from turbo_hf.eval.bench.runner import figure
from turbo_hf.eval.bench.timing import Call, speedup, spread
from turbo_hf.eval.output import write_png


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRow:
    """One method on one case; figures are None where it did not run, and `note` says why.

    shape, batch: those of the case.
    tokens: tokens of its longest row.
    method, ours: what ran, and whether it is ours.
    spread: interquartile range of the rounds over their median.
    rounds: how often it was timed.
    speedup: times as fast as each baseline, median over the rounds.
    error: |o - oracle| / |oracle| on the sample.
    check: the check of a method of ours.
    note: why figures are missing, or a remark.
    """

    shape: str
    batch: int
    tokens: int
    method: str
    ours: bool
    spread: float | None = None
    rounds: int = 0
    speedup: dict[str, float] | None = None
    error: float | None = None
    check: Check | None = None
    note: str = ""


AnyRow = TypeVar("AnyRow", bound=CheckedRow)
AnyCall = TypeVar("AnyCall", bound=Call)


def checked(row: AnyRow, prepare: Callable[[], tuple[Check, Callable[[], AnyCall]]]) -> tuple[AnyRow, AnyCall | None]:
    """The row with its check, and what to time if the result is right; else the note says what is wrong.

    prepare: computes and judges the result; beside the check it returns what makes the call that is timed.
    """
    try:
        check, ready = prepare()
        row = replace(row, error=check.error, check=check)
        if check.problem:
            return replace(row, note=f"wrong: {check.problem}"), None
        return row, ready()
    except ValueError as error:
        return replace(row, note=f"refused: {error}"), None
    except Exception as error:  # a failing method must not cost the others their figures
        return replace(row, note=f"failed: {type(error).__name__}: {error}"), None


def timed(row: AnyRow, times: dict[str, list[float]], **figures: Any) -> AnyRow:
    """The row with `figures`, and the spread and speedups that follow from the times of all methods, round by round."""
    own = times[row.method]
    others = [name for name in BASELINES if name in times and name != row.method]
    ratios = {name: speedup(own, times[name]) for name in others}
    return replace(row, spread=spread(own), rounds=len(own), speedup=ratios, **figures)


def print_rows(title: str, first: str, rows: Sequence[CheckedRow], columns: dict[str, tuple[str, str]]) -> None:
    """A table of one case: methods, `columns`, speedups and errors; below it the notes, and how far rounds lie apart.

    Args:
        first: heading of the methods.
        columns: by heading, the field of a row and its format.
    """
    baselines = [name for name in BASELINES if any(row.method == name for row in rows)]
    cells = []
    for row in rows:
        own = [figure(getattr(row, field), form) for field, form in columns.values()]
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


def untimed(rows: Sequence[CheckedRow]) -> list[str]:
    """Those of our own that were refused, failed or are wrong, a sentence each."""
    return [
        f"{row.method} on {row.shape}, {row.batch} x {row.tokens}, is not timed; {row.note}"
        for row in rows
        if row.ours and not row.rounds
    ]


def plot_rows(
    rows: Sequence[AnyRow],
    field: str,
    title: str,
    path: Path,
    labels: tuple[str, str],
    *,
    panel: Callable[[AnyRow], str],
    case: Callable[[AnyRow], tuple[Any, str]],
    log: bool = False,
) -> None:
    """Write a PNG of a field: a panel below the other, a line for each method; rows without a time are left out.

    Args:
        labels: of the axes, x and y.
        panel: the title of a row's panel. case: where a row stands on the x axis: what it is sorted by, and its name.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415  an extra: only drawing needs it

    timed = [row for row in rows if row.rounds]
    if not timed:
        return
    titles, methods = dict.fromkeys(map(panel, timed)), dict.fromkeys(row.method for row in timed)
    figure = Figure(figsize=(9, 0.5 + 3.5 * len(titles)), layout="constrained")
    figure.suptitle(title, fontsize="small")
    axes = figure.subplots(len(titles), 1, squeeze=False)[:, 0]
    for axis, name in zip(axes, titles, strict=True):
        here = [row for row in timed if panel(row) == name]
        cases = sorted(set(map(case, here)))
        for colour, method in enumerate(methods):
            own = {case(row): getattr(row, field) for row in here if row.method == method}
            at = [i for i, each in enumerate(cases) if each in own]
            # also a method without a line here, so that every panel has the same legend
            axis.plot(at, [own[cases[i]] for i in at], marker="o", color=f"C{colour}", label=method)
        axis.set_xticks(range(len(cases)), [text for _, text in cases], rotation=45, ha="right")
        axis.set_title(name)
        axis.grid(alpha=0.3)
        if log:
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
    figure.supxlabel(labels[0])
    figure.supylabel(labels[1])
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper")
    write_png(path, figure)
