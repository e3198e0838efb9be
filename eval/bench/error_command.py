"""`turbo-hf bench error`: the tables and the JSON."""

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from turbo_hf.config.turbo_config import ATTENTION_MODES, BACKENDS
from turbo_hf.console import Device, Json, err, fail, load, out
from turbo_hf.eval.bench.captured_layers import capture, token_ids
from turbo_hf.eval.bench.environment import facts, headline
from turbo_hf.eval.bench.error import DISTRIBUTIONS, METHODS, Method, Row, mean, model_errors, random_errors
from turbo_hf.eval.bench.options import (
    DTYPES,
    Backend,
    Block,
    Dtype,
    Folder,
    Hadamard,
    Modes,
    Seed,
    SmoothK,
    find_device,
    one_of,
)
from turbo_hf.eval.bench.shapes import parse_tokens, tokens_label
from turbo_hf.eval.bench.tables import finish, keep

LENGTHS = ("1k", "2k", "4k", "8k", "16k")
CPU_LENGTHS, MODEL_LENGTHS = LENGTHS[:3], ("2k",)
METRICS = {
    "norm": "|o - ref| / |ref|",
    "mre": "mean |o - ref| / mean |ref|",
    "elementwise": "mean of |o - ref| / |ref| over elements; the smallest |ref| decide it",
}


def error_command(
    mode: Modes = None,
    length: Annotated[
        list[str] | None,
        typer.Option(help="Tokens, such as 4k; may be repeated. Default: 1k to 16k; on a CPU 1k to 4k; of a model 2k."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="A folder or a Hub id: use its queries, keys and values.")] = None,
    text: Annotated[Path | None, typer.Option(help="What the model reads; default: the included prose.")] = None,
    heads: Annotated[
        int, typer.Option(min=1, help="Heads of random numbers. The papers use one, where a few rows decide.")
    ] = 8,
    dim: Annotated[int, typer.Option(min=16, help="Channels of a head of random numbers.")] = 128,
    causal: Annotated[bool, typer.Option("--causal/--full", help="Mask over random numbers; a model's is its own.")] = (
        False
    ),
    block: Block = 128,
    smooth_k: SmoothK = False,
    hadamard: Hadamard = False,
    backend: Backend = "auto",
    dtype: Dtype = "float16",
    seed: Seed = 0,
    folder: Folder = None,
    device: Device = "auto",
    json_line: Json = False,
) -> None:
    """Errors of every mode against float64: on N(0,1) and U(-0.5,0.5), or on the attention inputs of a trained model.

    FlashAttention in FP8 with tensor-level scales, simulated, is shown for comparison. With --model, the tables go
    layer by layer.
    """
    options = {"block": block, "smooth_k": smooth_k, "hadamard": hadamard, "backend": backend}
    try:
        asked = [one_of("mode", name, ATTENTION_MODES) for name in mode or ATTENTION_MODES]
        methods = [method for method in METHODS if method.options["mode"] in asked]
        kind = DTYPES[one_of("dtype", dtype, DTYPES)]
        one_of("backend", backend, BACKENDS)
        if text is not None and (model is None or not text.is_file()):
            raise ValueError("--text needs --model." if model is None else f"there is no file {text}.")
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        if model is None:
            where = find_device(device)
            lengths = _lengths(length or (CPU_LENGTHS if where.type == "cpu" else LENGTHS))
            draw = partial(random_errors, heads=heads, dim=dim, causal=causal, dtype=kind, device=where, seed=seed)
            runs = (draw(name, n, methods, options=options) for name in DISTRIBUTIONS for n in lengths)
            given: dict[str, Any] = {"dtype": dtype, "heads": heads, "dim": dim, "causal": causal, "seed": seed}
        else:
            lengths = _lengths(length or MODEL_LENGTHS)
            loaded, tokenizer = load(model, device)
            where = loaded.device
            runs = (_of_model(loaded, tokenizer, text, n, methods, options) for n in lengths)
            given = {"dtype": str(loaded.dtype), "model": Path(model).name, "text": text and text.name}
        rows = _collect(runs)
    except (ValueError, OSError) as mistake:
        raise fail(str(mistake)) from mistake
    means = mean(rows) if model is not None else []
    about = facts(where)
    out.print(headline(about), style="bold", highlight=False)
    _print_errors(rows, means, given)
    result = {"bench": "error", "facts": about, "options": {**options, **given}, "rows": []}
    keep(result, [*rows, *means], folder)
    finish(result, json_line)


def _lengths(words: Iterable[str]) -> list[int]:
    return [parse_tokens(word) for word in words]


def _of_model(
    model: Any, tokenizer: Any, text: Path | None, tokens: int, methods: list[Method], options: dict[str, Any]
) -> Iterator[Row]:
    return model_errors(capture(model, token_ids(tokenizer, text, tokens)), methods, options=options)


def _collect(runs: Iterator[Iterator[Row]]) -> list[Row]:
    rows: list[Row] = []
    each = groupby((row for run in runs for row in run), key=lambda row: f"{row.source}, {row.tokens} tokens")
    with err.status("attention in float64") as status:
        for name, group in each:
            for row in group:
                status.update(f"{name}: {row.method}")
                rows.append(row)
            err.print(f"{name}: done", highlight=False)
    return rows


def _print_errors(rows: list[Row], means: list[Row], given: dict[str, Any]) -> None:
    """For random numbers: methods by length, one table per metric. For a model: layers by method, then the means."""
    for tokens in dict.fromkeys(row.tokens for row in means):
        layers = [row for row in rows if row.tokens == tokens]
        title = f"{given['model']}, {tokens} tokens"
        _print_table(f"{title}: norm, %", [(row.source, row.method, row.norm) for row in layers])
        own = [row for row in means if row.tokens == tokens]
        cells = [(row.method, metric, getattr(row, metric)) for row in own for metric in METRICS]
        _print_table(f"{title}: mean over the layers, %", cells)
    for source in dict.fromkeys(row.source for row in rows if not means):
        own = [row for row in rows if row.source == source]
        title = f"{source}, d = {given['dim']}, {'causal' if given['causal'] else 'full'}"
        for metric in METRICS:
            cells = [(row.method, tokens_label(row.tokens), getattr(row, metric)) for row in own]
            _print_table(f"{title}: {metric}, %", cells)
    for metric, meaning in METRICS.items():
        out.print(f"{metric}: {meaning}", style="dim", markup=False, highlight=False)


def _print_table(title: str, cells: list[tuple[str, str, float]]) -> None:
    """Cells (line, column, share) in the order in which they come."""
    lines: dict[str, list[str]] = {}
    for line, _, share in cells:
        lines.setdefault(line, []).append(f"{100 * share:.3g}")
    table = Table(title=title)
    table.add_column("", no_wrap=True)
    for column in dict.fromkeys(column for _, column, _ in cells):
        table.add_column(column, justify="right", overflow="fold")
    for line, figures in lines.items():
        table.add_row(line, *figures)
    out.print(table)
