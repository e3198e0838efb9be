"""A finished run's tables on the terminal, as Markdown, and as one HTML page with its pictures inside."""

import base64
import html
import io
import json
import re
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

STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:96rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;margin:.5rem 0 1.5rem;display:block;overflow-x:auto}"
    "th,td{border:1px solid #ccc;padding:.25rem .6rem;text-align:right}td{white-space:nowrap}"
    "th:first-child,td:first-child{text-align:left}"
    ".limited{color:#b00;font-weight:bold}img{max-width:100%}pre{background:#f4f4f4;padding:1rem;overflow-x:auto}"
)


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
    meta: what was run, for JSON.
    pictures: PNG files that exist.
    """

    title: str
    lines: Sequence[str]
    tables: Sequence[Table]
    notes: Sequence[str]
    meta: dict[str, Any]
    pictures: Sequence[Path]


def write_report(folder: Path, report: EvalReport) -> None:
    """Write report.md and report.html into `folder`."""
    write_whole(folder / "report.md", markdown(report))
    write_whole(folder / "report.html", page(report))


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
    """The tables with what must be read beside them."""
    parts = [f"# {report.title}", *report.lines]
    for table in report.tables:
        rows = [_row(table.headings), _row(["---"] * len(table.headings)), *map(_row, table.rows)]
        parts.append("\n".join([f"**{table.title}**", "", *rows]))
    parts.append("\n".join(f"- {note}" for note in report.notes))
    return "\n\n".join(parts) + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def page(report: EvalReport) -> str:
    """A self-contained HTML page. Text is escaped; pictures are embedded."""
    named = html.escape(report.title)
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{named}</title>',
        f"<style>{STYLE}</style></head><body><h1>{named}</h1>",
    ]
    for line in report.lines:
        limited = ' class="limited"' if line.startswith(LIMITED) else ""
        parts.append(f"<p{limited}>{html.escape(line)}</p>")
    for table in report.tables:
        head = "".join(f"<th>{_breakable(heading)}</th>" for heading in table.headings)
        body = "".join("<tr>" + "".join(f"<td>{_cell(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
        parts.append(f"<h2>{html.escape(table.title)}</h2><table><tr>{head}</tr>{body}</table>")
    parts.append("<ul>" + "".join(f"<li>{html.escape(note)}</li>" for note in report.notes) + "</ul>")
    for picture in report.pictures:
        data = base64.b64encode(picture.read_bytes()).decode()
        parts.append(f'<p><img alt="{html.escape(picture.stem)}" src="data:image/png;base64,{data}"></p>')
    parts.append(f"<h2>Run</h2><pre>{html.escape(json.dumps(report.meta, indent=1))}</pre></body></html>")
    return "\n".join(parts) + "\n"


def _breakable(heading: str) -> str:
    """A heading whose lines may end inside a method's long name."""
    return re.sub(r"(?<=[+@:/])", "<wbr>", html.escape(heading))


def _cell(cell: str) -> str:
    return html.escape(cell).replace("; ", "<br>")
