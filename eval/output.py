"""A finished run's tables on the terminal, and as Markdown with its pictures."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import rich.table

from turbo_hf.config.whole_files import write_whole
from turbo_hf.console import out

LIMITED = "LIMITED"
"""Start of a line that says: this is not a result."""

WORDS = ("task", "scorer", "over", "method", "metric", "largest loss in")
"""Headings of non-numeric columns."""


class Table(NamedTuple):
    """Texts; "; " in a cell separates lines of it."""

    title: str
    headings: list[str]
    rows: list[list[str]]


def without_dashes(table: Table) -> Table:
    """The table without columns in which every cell is "-": nothing of that kind was measured."""
    kept = [n for n in range(len(table.headings)) if not table.rows or any(row[n] != "-" for row in table.rows)]
    return Table(table.title, [table.headings[n] for n in kept], [[row[n] for n in kept] for row in table.rows])


class EvalReport(NamedTuple):
    """What is shown of a run.

    lines: to be read before the tables.
    notes: to be read after them.
    pictures: PNG files, beside the report.
    """

    title: str
    lines: Sequence[str]
    tables: Sequence[Table]
    notes: Sequence[str]
    pictures: Sequence[Path]


def write_png(path: Path, figure: Any) -> None:
    """Write a figure of matplotlib."""
    picture = io.BytesIO()
    figure.savefig(picture, dpi=120)
    write_whole(path, picture.getvalue())


def show(report: EvalReport) -> None:
    """Print to the terminal."""
    for line in report.lines:
        style = "bold red" if line.startswith(LIMITED) else "bold"
        out.print(line, style=style, highlight=False, markup=False, soft_wrap=True)
    for table in report.tables:
        shown = rich.table.Table(title=table.title)
        for heading in table.headings:
            shown.add_column(heading, justify="left" if heading in WORDS else "right", overflow="fold")
        for row in table.rows:
            # a figure, its pairs and its p below one another: methods are many, and terminals narrow
            shown.add_row(*(cell.replace("; ", "\n") for cell in row))
        out.print(shown)
    for note in report.notes:
        out.print(f"- {note}", style="dim", markup=False, highlight=False, soft_wrap=True)


def markdown(report: EvalReport) -> str:
    """The tables with what must be read beside them, and the pictures."""
    parts = [f"# {report.title}", *report.lines]
    for table in report.tables:
        rows = [_row(table.headings), _row(["---"] * len(table.headings)), *map(_row, table.rows)]
        parts.append("\n".join([f"**{table.title}**", "", *rows]))
    parts.append("\n".join(f"- {note}" for note in report.notes))
    parts += [f"![{picture.stem}]({picture.name})" for picture in report.pictures]
    return "\n\n".join(parts) + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
