"""The table of one case of `bench prefill`, `decode` and `sparse`, with its notes, and what it says of failures."""

from collections.abc import Iterable, Sequence

from turbo_hf.console import remark, show_table
from turbo_hf.eval.bench.checked_rows import CheckedRow
from turbo_hf.eval.bench.options import figure
from turbo_hf.eval.bench.rivals import BASELINES


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
