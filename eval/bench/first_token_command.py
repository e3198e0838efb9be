"""`turbo-hf bench first-token`: the table and the JSON."""

from dataclasses import replace
from typing import Annotated, Any, cast

import typer
from rich.table import Table

from turbo_hf.config.turbo_config import ATTENTION_MODES, DEFAULT_PRESET, resolve_config
from turbo_hf.console import Device, Json, err, fail, out
from turbo_hf.eval.bench.environment import facts, headline
from turbo_hf.eval.bench.first_token import Row, first_token
from turbo_hf.eval.bench.options import Folder, find_device, one_of, require_choice
from turbo_hf.eval.bench.random_models import random_model
from turbo_hf.eval.bench.shapes import parse_tokens, tokens_label
from turbo_hf.eval.bench.tables import finish, keep
from turbo_hf.eval.bench.timing import Stopwatch


def first_token_command(
    mode: Annotated[list[str] | None, typer.Option("--mode", help="auto or a prefill mode; may be repeated.")] = None,
    length: Annotated[str, typer.Option(help="Tokens of the prompt, such as 32k.")] = "32k",
    batch: Annotated[int, typer.Option(min=1, help="Prompts.")] = 1,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers of the model; default: 32, those of 8B.")] = None,
    preset: Annotated[
        str, typer.Option("--preset", "--config", help="What stores the cache: a preset, or a JSON or YAML file.")
    ] = DEFAULT_PRESET,
    tiny: Annotated[bool, typer.Option("--tiny", help="A tiny model: tests the command, measures nothing.")] = False,
    seconds: Annotated[float, typer.Option(min=0.0, help="Approximate seconds of timing.")] = 5.0,
    folder: Folder = None,
    device: Device = "auto",
    json_line: Json = False,
) -> None:
    """Time to first token of a model of Llama-3-8B's shape with random weights, against the unpatched model."""
    try:
        stored = resolve_config(preset)
        names = [one_of("mode", name, ("auto", *ATTENTION_MODES)) for name in mode or (stored.attention,)]
        # checked above: one of the names that the field allows
        methods = {name: replace(stored, attention=cast(Any, name)) for name in names}
        tokens, where = parse_tokens(length), find_device(device)
        require_choice(where, tiny or layers is not None, "--layers 1 --length 1k, or --tiny to try the command")
        layers = layers or 32
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        with err.status(f"{layers} layers, {tokens_label(tokens)} tokens"):
            model = random_model("llama3-8b", layers, where, tiny=tiny)
            rows = first_token(model, tokens, batch, methods, Stopwatch(where), seconds)
    except (ValueError, OSError) as mistake:
        raise fail(str(mistake)) from mistake
    about = facts(where)
    out.print(headline(about), style="bold", highlight=False)
    _print(rows, f"{batch} x {tokens_label(tokens)} tokens, {layers} layers, {preset}")
    given = {"batch": batch, "tokens": tokens, "layers": layers, "preset": preset, "tiny": tiny}
    given["config"] = stored.to_dict()
    result = {"bench": "first-token", "facts": about, "options": given, "rows": []}
    keep(result, rows, folder)
    finish(result, json_line)


def _print(rows: list[Row], title: str) -> None:
    table = Table(title=title)
    for heading in ("prompt attention", "ms", "spread", "x SDPA", "peak GB"):
        table.add_column(heading, justify="right")
    for row in rows:
        peak = f"{row.peak_bytes / 1e9:.2f}" if row.peak_bytes else "-"
        table.add_row(row.method, f"{row.ms:.1f}", f"{row.spread:.1%}", f"{row.speedup:.2f}", peak)
    out.print(table)
