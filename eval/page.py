"""A run as one HTML page that needs nothing beside it: tables, pictures, and what it was."""

import base64
import html
import json
from pathlib import Path
from typing import Any

from turbo_hf.eval.report import noise, stamps, tables

STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;margin:.5rem 0 1.5rem;display:block;overflow-x:auto}"
    "th,td{border:1px solid #ccc;padding:.25rem .6rem;text-align:right}"
    "th:first-child,td:first-child{text-align:left}"
    ".limited{color:#b00;font-weight:bold}img{max-width:100%}pre{background:#f4f4f4;padding:1rem;overflow-x:auto}"
)


def page(found: dict[str, Any], meta: dict[str, Any], notes: list[str], pictures: list[Path]) -> str:
    """The page. Text is escaped; pictures (PNG) are inside it.

    Args:
        found: from `report`. meta: from `open_run`. notes: what was left out.
        pictures: files that exist.
    """
    about = meta["identity"]
    title = html.escape(f"turbo-hf eval: {about['model']}, suite {about['suite']}")
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
        f"<style>{STYLE}</style></head><body><h1>{title}</h1>",
    ]
    for line in stamps(about):
        limited = ' class="limited"' if line.startswith("LIMITED") else ""
        parts.append(f"<p{limited}>{html.escape(line)}</p>")
    for heading, columns, rows in tables(found):
        head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
        body = "".join("<tr>" + "".join(f"<td>{_cell(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        parts.append(f"<h2>{html.escape(heading)}</h2><table><tr>{head}</tr>{body}</table>")
    parts.append("<ul>" + "".join(f"<li>{html.escape(note)}</li>" for note in [noise(found), *notes]) + "</ul>")
    for picture in pictures:
        data = base64.b64encode(picture.read_bytes()).decode()
        parts.append(f'<p><img alt="{html.escape(picture.stem)}" src="data:image/png;base64,{data}"></p>')
    parts.append(f"<h2>Run</h2><pre>{html.escape(json.dumps(meta, indent=1))}</pre></body></html>")
    return "\n".join(parts) + "\n"


def _cell(cell: str) -> str:
    return html.escape(cell).replace("; ", "<br>")
