"""`turbo-hf bench generate`: the table and the JSON."""

from typing import Annotated, Any

import typer
from rich.table import Table

from turbo_hf.config.turbo_config import DEFAULT_PRESET, resolve_config
from turbo_hf.console import Device, Json, err, fail, out
from turbo_hf.eval.bench.environment import facts, headline
from turbo_hf.eval.bench.generate import SDPA, Row, Work, compare, methods
from turbo_hf.eval.bench.options import Folder, Seed, figure, find_device, one_of, require_choice
from turbo_hf.eval.bench.random_models import KINDS, random_model
from turbo_hf.eval.bench.shapes import parse_tokens, tokens_label
from turbo_hf.eval.bench.tables import finish, keep, print_notes
from turbo_hf.eval.bench.timing import free_memory

LARGEST = "largest"

PAPER = ("1k", LARGEST, 125)
"""Context, batch and new tokens of TurboAttention's maximum-throughput experiment."""


def generate_command(
    shape: Annotated[list[str] | None, typer.Option(help=f"{', '.join(KINDS)}; may be repeated.")] = None,
    context: Annotated[list[str] | None, typer.Option(help="Tokens of the prompts, such as 1k; may be repeated.")] = (
        None
    ),
    batch: Annotated[
        list[str] | None, typer.Option(help=f"Prompts, or {LARGEST}: about all that fit; may be repeated.")
    ] = None,
    new: Annotated[int | None, typer.Option(min=2, help="Tokens to generate; default 128.")] = None,
    preset: Annotated[
        list[str] | None,
        typer.Option("--preset", "--config", help="Of the patch: a preset, or a JSON or YAML file; may be repeated."),
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers; default: as many as the model has.")] = None,
    chunk: Annotated[
        int | None, typer.Option("--prefill-chunk", min=1, help="Prompt tokens per pass; default: all.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds; the table shows their medians.")] = 3,
    most: Annotated[int, typer.Option(min=1, help=f"Largest batch tried under {LARGEST}.")] = 4096,
    paper: Annotated[
        bool, typer.Option("--paper", help="1k prompts, 125 new tokens, about the largest batch that fits.")
    ] = False,
    cuda_graphs: Annotated[bool, typer.Option(help="Replay patched decode steps as CUDA graphs, where possible.")] = (
        True
    ),
    tiny: Annotated[bool, typer.Option("--tiny", help="Tiny models: tests the command, measures nothing.")] = False,
    seed: Seed = 0,
    folder: Folder = None,
    device: Device = "auto",
    json_line: Json = False,
) -> None:
    """Tokens per second and peak memory of models with random weights: patched, unpatched, and Hugging Face's caches.

    Default: Llama-3-8B's shape, 1k prompts, batch 1. Exits with 1 if a patched model, or the unpatched one, fails;
    methods that do not fit in memory, or are not installed, get a line in the table.
    """
    try:
        if paper and (context or batch or new):
            raise ValueError("--paper sets --context, --batch and --new; omit them.")
        own = PAPER if paper else ("1k", "1", 128)
        shapes = [one_of("shape", name, KINDS) for name in shape or ("llama3-8b",)]
        contexts = [parse_tokens(text) for text in context or (own[0],)]
        batches = [_parse_batch(text) for text in batch or (own[1],)]
        works = [Work(tokens, new or own[2], rounds, chunk, seed) for tokens in contexts]
        presets = preset or [DEFAULT_PRESET]
        chosen, where = methods(presets, cuda_graphs), find_device(device)
        configs = {name: resolve_config(name).to_dict() for name in presets}
        if None in batches and where.type != "cuda" and not tiny:
            raise ValueError(f"--batch {LARGEST} needs a GPU: on a CPU the system, not an error, says what fits.")
        require_choice(where, tiny or layers is not None, "--layers 1, or --tiny to try the command")
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as mistake:
        raise fail(str(mistake)) from mistake
    about = facts(where)
    out.print(headline(about), style="bold", highlight=False)
    given: dict[str, Any] = {"layers": layers, "chunk": chunk, "rounds": rounds, "most": most, "seed": seed}
    given |= {"cuda_graphs": cuda_graphs, "configs": configs}
    result: dict[str, Any] = {"bench": "generate", "facts": about, "options": {**given, "tiny": tiny}, "rows": []}
    rows: list[Row] = []
    for name in shapes:
        with err.status(f"making {name}"):
            model = random_model(name, layers, where, tiny=tiny)
        for work in works:
            for rows_at_once in batches:
                with err.status(name) as status:
                    found = compare(model, name, chosen, work, rows_at_once, most, status.update)
                _print(found, model.config.num_hidden_layers)
                rows += found
                keep(result, found, folder)
        del model
        free_memory()
    failed = [row for row in rows if row.method in (SDPA, *presets) and row.note.startswith("failed")]
    failures = [f"{row.method} on {row.shape}, {row.context} tokens: {row.note}" for row in failed]
    finish(result, json_line, failures)


def _parse_batch(text: str) -> int | None:
    """Rows, or None for the largest that fits. ValueError shows the form."""
    if text == LARGEST:
        return None
    if not (text.isdecimal() and int(text)):
        raise ValueError(f"expected a batch like 8, or {LARGEST}; got {text!r}.")
    return int(text)


def _print(rows: list[Row], layers: int) -> None:
    first = rows[0]
    title = f"{first.shape}, {layers} layers, {tokens_label(first.context)} tokens and {first.new} new"
    table = Table(title=title + (", largest batch each" if first.largest else ""))
    for heading in ("cache", "batch", "tokens/s", "x SDPA", "first ms", "step ms", "peak GB"):
        table.add_column(heading, justify="left" if heading == "cache" else "right")
    for row in rows:
        table.add_row(
            row.method,
            str(row.batch or "-"),
            figure(row.tokens_s, ".1f"),
            figure(row.speedup, ".2f"),
            figure(row.first_ms, ".1f"),
            figure(row.step_ms, ".2f"),
            figure(None if row.peak_bytes is None else row.peak_bytes / 1e9, ".2f"),
        )
    out.print(table)
    print_notes(rows)
