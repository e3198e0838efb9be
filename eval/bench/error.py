"""`turbo-hf bench error`: error of each mode against exact attention.

On random numbers, as in the papers, and on a trained model's inputs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

from turbo_hf.config.turbo_config import ATTENTION_MODES, BACKENDS
from turbo_hf.console import Device, GgufFile, Json, err, load, mistakes_end_the_command, remark, show_table
from turbo_hf.eval.bench.captured_layers import Captured, capture, token_ids
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
    prepare_folder,
)
from turbo_hf.eval.bench.oracle import Errors, attend, errors, fp8_attention
from turbo_hf.eval.bench.prefill import options_of
from turbo_hf.eval.bench.runner import BenchRun
from turbo_hf.eval.bench.shapes import parse_tokens, tokens_label
from turbo_hf.layout import Rounding, Scoring
from turbo_hf.ops.prefill import contract as op

LENGTHS = ("1k", "2k", "4k", "8k", "16k")
CPU_LENGTHS, MODEL_LENGTHS = LENGTHS[:3], ("2k",)
METRICS = {
    "norm": "|o - ref| / |ref|",
    "mre": "mean |o - ref| / mean |ref|",
    "elementwise": "mean of |o - ref| / |ref| over elements; the smallest |ref| decide it",
}

FP8_TENSOR = "FP8 tensor-level (simulated)"

DISTRIBUTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "N(0,1)": torch.randn,
    "U(-0.5,0.5)": lambda *shape, **how: torch.rand(*shape, **how) - 0.5,
}


class ErrorMethod(NamedTuple):
    """A mode of `ops.prefill` and its options, under the name that the tables show."""

    name: str
    options: dict[str, Any]


METHODS = (
    ErrorMethod("fp16", {"mode": "fp16"}),
    ErrorMethod("half", {"mode": "half"}),
    ErrorMethod("turbo", {"mode": "turbo"}),
    ErrorMethod("int8, V tensor", {"mode": "int8", "v_scale": "tensor"}),
    ErrorMethod("int8, V block", {"mode": "int8", "v_scale": "block"}),
    ErrorMethod("int8, V channel", {"mode": "int8", "v_scale": "channel"}),
    ErrorMethod("fp8", {"mode": "fp8"}),
)
"""What is compared, beside the simulated FP8."""


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """Errors of one method on one input.

    source: a distribution, or "layer 3" of a model.
    tokens: keys and queries.
    norm, mre, elementwise: as in `oracle.Errors`.
    """

    source: str
    tokens: int
    method: str
    norm: float
    mre: float
    elementwise: float


def random_errors(
    distribution: str,
    tokens: int,
    methods: list[ErrorMethod],
    *,
    heads: int,
    dim: int,
    causal: bool,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    options: dict[str, Any],
) -> Iterator[ErrorRow]:
    """Errors on q, k, v [1, heads, tokens, dim] drawn from `distribution` and rounded to `dtype`, method by method.

    `options`: further ones of `ops.prefill`, the same for all methods.
    """
    generator = torch.Generator(device).manual_seed(seed)
    shape = (1, heads, tokens, dim)
    draw = DISTRIBUTIONS[distribution]
    q, k, v = (draw(*shape, generator=generator, device=device).to(dtype) for _ in range(3))
    layer = Captured(0, q, k, v, {"scaling": dim**-0.5})
    return _rows(distribution, layer, methods, causal, options)


def mean(rows: list[ErrorRow]) -> list[ErrorRow]:
    """One row per method and length: the mean over the sources."""
    groups: dict[tuple[int, str], list[ErrorRow]] = {}
    for row in rows:
        groups.setdefault((row.tokens, row.method), []).append(row)
    return [
        ErrorRow(
            "mean", tokens, method, *(sum(figures) / len(own) for figures in zip(*map(_figures, own), strict=True))
        )
        for (tokens, method), own in groups.items()
    ]


def _figures(row: ErrorRow) -> Errors:
    return Errors(row.norm, row.mre, row.elementwise)


def _rows(
    source: str, layer: Captured, methods: list[ErrorMethod], causal: bool, options: dict[str, Any]
) -> Iterator[ErrorRow]:
    q, k, v, about = layer.q, layer.k, layer.v, {**layer.about, "causal": causal}
    exact = attend(q[0], k[0], v[0], **about).out
    scoring = Scoring(about["scaling"], about.get("softcap"), about.get("sinks"))
    tokens = q.shape[2]
    for method in methods:
        given = {**method.options, **options_of(method.options["mode"], options)}
        backend = given.pop("backend", "auto")
        got = op.prefill(
            q, k, v, scoring, Rounding(**given), causal=causal, window=about.get("window"), backend=backend
        )
        yield ErrorRow(source, tokens, method.name, *errors(got.out[0], exact))
    yield ErrorRow(source, tokens, FP8_TENSOR, *errors(fp8_attention(q[0], k[0], v[0], **about), exact))


def error_command(
    mode: Modes = None,
    length: Annotated[
        list[str] | None,
        typer.Option(help="Tokens, such as 4k; may be repeated. Default: 1k to 16k; on a CPU 1k to 4k; of a model 2k."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="A folder or a Hub id: use its queries, keys and values.")] = None,
    gguf_file: GgufFile = None,
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
    with mistakes_end_the_command():
        asked = [one_of("mode", name, ATTENTION_MODES) for name in mode or ATTENTION_MODES]
        methods = [method for method in METHODS if method.options["mode"] in asked]
        kind = DTYPES[one_of("dtype", dtype, DTYPES)]
        one_of("backend", backend, BACKENDS)
        if text is not None and (model is None or not text.is_file()):
            raise ValueError("--text needs --model." if model is None else f"there is no file {text}.")
        if gguf_file is not None and model is None:
            raise ValueError("--gguf-file needs --model.")
        prepare_folder(folder)
        if model is None:
            where = find_device(device)
            lengths = [parse_tokens(word) for word in length or (CPU_LENGTHS if where.type == "cpu" else LENGTHS)]
            draw = partial(random_errors, heads=heads, dim=dim, causal=causal, dtype=kind, device=where, seed=seed)
            runs = (draw(name, n, methods, options=options) for name in DISTRIBUTIONS for n in lengths)
            given: dict[str, Any] = {"dtype": dtype, "heads": heads, "dim": dim, "causal": causal, "seed": seed}
        else:
            lengths = [parse_tokens(word) for word in length or MODEL_LENGTHS]
            loaded, tokenizer = load(model, device, gguf_file=gguf_file)
            where = loaded.device
            runs = (_of_model(loaded, tokenizer, text, n, methods, options) for n in lengths)
            given = {"dtype": str(loaded.dtype), "model": Path(model).name, "text": text and text.name}
        rows = _collect(runs)
    means = mean(rows) if model is not None else []
    bench = BenchRun[ErrorRow]("error", where, folder)
    _print_errors(rows, means, given)
    bench.keep([*rows, *means], options={**options, **given})
    bench.finish(json_line)


def _of_model(
    model: Any, tokenizer: Any, text: Path | None, tokens: int, methods: list[ErrorMethod], options: dict[str, Any]
) -> Iterator[ErrorRow]:
    """Errors on what a model's attention layers were given, layer by layer and method by method."""
    for layer in capture(model, token_ids(tokenizer, text, tokens)):
        yield from _rows(f"layer {layer.index}", layer, methods, True, options)


def _collect(runs: Iterator[Iterator[ErrorRow]]) -> list[ErrorRow]:
    rows: list[ErrorRow] = []
    each = groupby((row for run in runs for row in run), key=lambda row: f"{row.source}, {row.tokens} tokens")
    with err.status("attention in float64") as status:
        for name, group in each:
            for row in group:
                status.update(f"{name}: {row.method}")
                rows.append(row)
            err.print(f"{name}: done", highlight=False)
    return rows


def _print_errors(rows: list[ErrorRow], means: list[ErrorRow], given: dict[str, Any]) -> None:
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
        remark(f"{metric}: {meaning}")


def _print_table(title: str, cells: list[tuple[str, str, float]]) -> None:
    """Cells (line, column, share) in the order in which they come."""
    lines: dict[str, list[str]] = {}
    for line, _, share in cells:
        lines.setdefault(line, []).append(f"{100 * share:.3g}")
    columns = dict.fromkeys(column for _, column, _ in cells)
    show_table(title, ["", *columns], ([line, *figures] for line, figures in lines.items()))
