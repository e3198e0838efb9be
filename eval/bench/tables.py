"""How a bench ends: the table of a case with its notes, the file, one line of JSON, exit 1 on a failure."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from turbo_hf.calibration.files import write_whole
from turbo_hf.console import out, print_error
from turbo_hf.eval.bench.checked_rows import Row
from turbo_hf.eval.bench.generate import Row as GenerateRow
from turbo_hf.eval.bench.options import as_json, figure
from turbo_hf.eval.bench.rivals import BASELINES


def print_rows(title: str, first: str, rows: Sequence[Row], columns: dict[str, tuple[str, str]]) -> None:
    """A table of one case: methods, `columns`, speedups and errors; below it the notes, and how far rounds lie apart.

    Args:
        first: heading of the methods.
        columns: by heading, the field of a row and its format.
    """
    baselines = [name for name in BASELINES if any(row.method == name for row in rows)]
    table = Table(title=title)
    table.add_column(first)
    for heading in [*columns, *(f"x {name}" for name in baselines), "error"]:
        table.add_column(heading, justify="right")
    for row in rows:
        cells = [figure(getattr(row, field), form) for field, form in columns.values()]
        ratios = [figure((row.speedup or {}).get(name), ".2f") for name in baselines]
        table.add_row(row.method, *cells, *ratios, figure(row.error, ".2%"))
    out.print(table)
    print_notes(rows)
    spreads = [row.spread for row in rows if row.spread is not None]
    if spreads:
        rounds = max(row.rounds for row in rows)
        out.print(f"Medians of {rounds} rounds; quartiles lie up to {max(spreads):.1%} apart.", style="dim")


def print_notes(rows: Sequence[Row | GenerateRow]) -> None:
    """A line for each row that has something to say."""
    for row in rows:
        if row.note:
            out.print(f"{row.method}: {row.note}", style="dim", markup=False, highlight=False)


def keep(result: dict[str, Any], rows: Sequence[Any], folder: Path | None) -> None:
    """Add the rows of a case to the result, and save all of it: an interrupted run keeps what it has."""
    result["rows"] += [asdict(row) for row in rows]
    if folder is not None:
        write_whole(folder / f"{result['bench']}.json", as_json(result, indent=1) + "\n")


def untimed(rows: Sequence[Row]) -> list[str]:
    """Those of our own that were refused, failed or are wrong, a sentence each."""
    return [
        f"{row.method} on {row.shape}, {row.batch} x {row.tokens}, is not timed; {row.note}"
        for row in rows
        if row.ours and not row.rounds
    ]


def finish(result: dict[str, Any], json_line: bool, failures: Sequence[str] = ()) -> None:
    """Print what failed, print the JSON if requested, and exit with status 1 if anything failed."""
    for failure in failures:
        print_error(failure)
    if json_line:
        print(as_json(result))  # noqa: T201
    if failures:
        raise typer.Exit(1)
