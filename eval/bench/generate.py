"""`turbo-hf bench generate`: tokens per second, first token and peak memory of `generate`, patched and unpatched.

Beside the unpatched model with its DynamicCache stand the fastest ways of Transformers itself: a static cache, for
which `generate` compiles, and its quantized caches.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer
from rich.box import SIMPLE

from turbo_hf.config.turbo_config import ATTENTION_MODES, DEFAULT_PRESET, TurboConfig
from turbo_hf.console import Device, Json, err, mistakes_end_the_command, processes, remark, show_table
from turbo_hf.eval.bench import runner
from turbo_hf.eval.bench.checked import print_notes
from turbo_hf.eval.bench.random_models import KINDS, bench_model, require_one_model
from turbo_hf.eval.bench.runner import figure
from turbo_hf.eval.bench.shapes import parse_tokens, tokens_label
from turbo_hf.eval.bench.timing import Clock, attempt, clocked, free_memory, random_prompts, speed
from turbo_hf.eval.methods import BACKENDS, installed, method_named
from turbo_hf.patching.patch_model import patch
from turbo_hf.ranks import ranks_of

SDPA, STATIC = "SDPA", "static"

OFF = 1.0
"""Relative error of a row's first logits from which they are wrong. Those that have nothing to do with the right ones
are off by 1.4; random weights keep less of their signal in 4 bit than trained ones do (8B shape: an error of 0.59)."""


@dataclass(frozen=True, slots=True)
class GenerateMethod:
    """One way to call `generate`.

    config: what the model is patched with; None: it is not.
    options: further ones of `generate`.
    missing: why it cannot run here; "" if it can.
    """

    name: str
    config: TurboConfig | None = None
    options: dict[str, Any] = field(default_factory=dict)
    missing: str = ""


@dataclass(frozen=True, slots=True)
class GenerateRow:
    """One method, shape and size; figures are None where it did not run, and `note` says why.

    context: tokens of each prompt.
    batch: prompts.
    new: tokens generated in each row.
    tokens_s, first_ms, first_spread, step_ms: as `timing.speed` says.
    peak_bytes: the most memory allocated, weights included; None where it is not counted.
    speedup: tokens_s over that of SDPA at the same context, each at its own batch.
    patched: whether the model was.
    error: relative distance of the first logits from the unpatched model's, in one pass without a cache.
    best: tokens_s, first_ms and step_ms as times as fast as the best unpatched row of the same context.
    """

    shape: str
    method: str
    context: int
    batch: int
    new: int
    tokens_s: float | None = None
    first_ms: float | None = None
    step_ms: float | None = None
    peak_bytes: int | None = None
    speedup: float | None = None
    note: str = ""
    patched: bool = False
    first_spread: float | None = None
    error: float | None = None
    best: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Work:
    """What is generated: `new` tokens after `context` random ones, in `rounds` timed rounds."""

    context: int
    new: int
    rounds: int
    seed: int


def methods(configs: dict[str, TurboConfig]) -> list[GenerateMethod]:
    """SDPA with its DynamicCache, a static cache, the configs, and 4 bit of Transformers' QuantizedCache."""
    quantized = [
        GenerateMethod(
            f"{name} 4 bit",
            options={"cache_implementation": "quantized", "cache_config": {"backend": name, "nbits": 4, **axes}},
            missing="" if installed(package) else f"{package} is not installed",
        )
        for name, (package, _, axes) in BACKENDS.items()
    ]
    static = GenerateMethod(STATIC, options={"cache_implementation": "static"})
    return [GenerateMethod(SDPA), static, *(GenerateMethod(*own) for own in configs.items()), *quantized]


def compare(
    model: Any,
    shape: str,
    chosen: Sequence[GenerateMethod],
    work: Work,
    batch: int,
    tell: Callable[[str], None] = lambda step: None,
) -> list[GenerateRow]:
    """A row per method, at one context and batch."""
    rows = []
    for method in chosen:
        tell(f"{shape}, {work.context} tokens: {method.name}")
        row = GenerateRow(shape, method.name, work.context, batch, work.new)
        row = replace(row, patched=method.config is not None)
        missing = method.missing or _unable(model, method)
        if missing:
            rows.append(replace(row, note=missing))
            continue
        try:
            found = attempt(partial(_timed, model, row, method, work))
            rows.append(found or replace(row, note="does not fit the memory"))
        except Exception as error:  # a failing method must not cost the others their figures
            rows.append(replace(row, note=f"failed: {type(error).__name__}: {str(error).strip()}"))
        free_memory()
    return [_compared(row, rows) for row in rows]


def _unable(model: Any, method: GenerateMethod) -> str:
    """Why Transformers cannot decode so; "" if it can."""
    if method.name == STATIC and ranks_of(model):
        return "its compiled steps are not run under tensor parallel"
    if method.name == STATIC and model.device.type != "cuda":
        return "generate compiles for a static cache on a GPU only"
    return ""


def _compared(row: GenerateRow, rows: list[GenerateRow]) -> GenerateRow:
    """The row with its ratios to `rows`."""
    unpatched = [other for other in rows if not other.patched and other.tokens_s]
    base = next((other.tokens_s for other in unpatched if other.method == SDPA), None)
    best: dict[str, float] = {}
    if row.tokens_s:
        if unpatched:
            best["tokens_s"] = row.tokens_s / max(other.tokens_s or 0 for other in unpatched)
        for name in ("first_ms", "step_ms"):
            own, theirs = getattr(row, name), [getattr(other, name) for other in unpatched]
            if own and theirs and None not in theirs:
                best[name] = min(theirs) / own
    return replace(row, speedup=row.tokens_s / base if base and row.tokens_s else None, best=best)


@contextmanager
def _cache_of(model: Any, method: GenerateMethod) -> Iterator[None]:
    try:
        with nullcontext() if method.config is None else patch(model, method.config), torch.inference_mode():
            yield
    finally:
        if vars(model).pop("_compiled_call", None) is not None:
            # what was compiled for the static cache, or the next method would start at its limit of recompilations
            torch._dynamo.reset()


def _timed(model: Any, row: GenerateRow, method: GenerateMethod, work: Work) -> GenerateRow:
    """The row with its figures, or with what is wrong with its first logits."""
    cuda = model.device.type == "cuda"
    with _cache_of(model, method):
        # compilation, the allocator's first blocks, and the plan that cuDNN makes for each length
        warm, tokens = _generate(model, method, row.batch, work, record=True)
        if cuda:
            torch.cuda.reset_peak_memory_stats(model.device)
        rounds = [_generate(model, method, row.batch, work) for _ in range(work.rounds)]
        peak = torch.cuda.max_memory_allocated(model.device) if cuda else None
    row = _checked(model, row, warm)
    if row.note:
        return row
    same = all(torch.equal(again, tokens) for _, again in rounds)
    return replace(
        row,
        **speed([clock for clock, _ in rounds], row.batch, work.new),
        peak_bytes=peak,
        note="" if same else "its tokens differ from round to round",
    )


@torch.inference_mode()
def _checked(model: Any, row: GenerateRow, clock: Clock) -> GenerateRow:
    """The row with the error of its first logits; a note if they are not the unpatched model's, which `model` is."""
    recorded = clock.first_logits
    ids = recorded[-1][0]
    reference = model(ids, use_cache=False, logits_to_keep=len(recorded)).logits.float()
    ends = model.generation_config.eos_token_id
    judged = torch.ones(reference.shape[-1], dtype=torch.bool, device=reference.device)
    judged[[] if ends is None else ends] = False  # min_new_tokens makes them impossible
    logits = torch.cat([logits for _, logits in recorded])[None]
    # a constant added to all logits of a position changes no probability
    got, want = (x[..., judged] - x[..., judged].mean(-1, keepdim=True) for x in (logits, reference))
    error = ((got - want).norm() / want.norm()).item()
    if error < OFF:  # false for NaN, too
        return replace(row, error=error)
    return replace(row, error=error, note=f"failed: its logits are off by {error:.0%}")


def _generate(
    model: Any, method: GenerateMethod, batch: int, work: Work, record: bool = False
) -> tuple[Clock, torch.Tensor]:
    """One `generate`: its clock, and the tokens [batch, context + new]."""
    ids = random_prompts(model, batch, work.context, work.seed)
    clock, made = clocked(model, ids, torch.ones_like(ids), work.new, record=record, **method.options)
    return clock, made.sequences


def generate_command(
    shape: Annotated[list[str] | None, typer.Option(help=f"{', '.join(KINDS)}; may be repeated.")] = None,
    model_place: runner.ModelPlace = None,
    context: Annotated[list[str] | None, typer.Option(help="Tokens of the prompts, such as 1k; may be repeated.")] = (
        None
    ),
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Prompts; default 1; may be repeated.")] = None,
    new: Annotated[int, typer.Option(min=1, help="Tokens to generate; 1: only the first token's time.")] = 128,
    preset: Annotated[
        list[str] | None,
        typer.Option(
            "--preset", "--config", help="Of the patch: int8, turbo4+compile=True, a JSON or YAML file; repeatable."
        ),
    ] = None,
    mode: Annotated[
        list[str] | None,
        typer.Option(help="Attention of prompts, auto or a mode, instead of the preset's; may be repeated."),
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers; default: as many as the model has.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds; the table shows their medians.")] = 3,
    tiny: runner.Tiny = False,
    seed: runner.Seed = 0,
    folder: runner.Folder = None,
    device: Device = "auto",
    json_line: Json = False,
) -> None:
    """Tokens per second, first token and peak memory of random weights or --model: patched, and as fast as unpatched.

    Default: Llama-3-8B's shape, 1k prompts, batch 1. Ratios are to SDPA, and to the best unpatched row. Exits with 1 if
    a patched model, or the unpatched one, fails or is wrong; what does not fit or is not installed gets a line.
    """
    given = dict(locals())
    with mistakes_end_the_command():
        shapes = [runner.one_of("shape", name, KINDS) for name in shape or ("llama3-8b",)]
        contexts = [parse_tokens(text) for text in context or ("1k",)]
        works = [Work(tokens, new, rounds, seed) for tokens in contexts]
        modes = [runner.one_of("mode", name, ("auto", *ATTENTION_MODES)) for name in mode or ()]
        where = runner.find_device(device)
        configs = _configs(preset or [DEFAULT_PRESET], modes)
        require_one_model(shape, model_place, layers, tiny, where)
        together = processes()
        if together[1] > 1:
            # the first process writes; all of them draw the same weights
            folder = folder if together[0] == 0 else None
            torch.manual_seed(seed)
        bench = runner.BenchRun[GenerateRow]("generate", where, folder)
    given |= {"ranks": together[1], "configs": {name: config.to_dict() for name, config in configs.items()}}
    for name in shapes if model_place is None else [Path(model_place).name]:
        with err.status(f"making {name}"):
            model = bench_model(name, model_place, layers, where, tiny=tiny)
        measure = partial(compare, model, name, methods(configs))
        bench.each(
            [(work, rows) for work in works for rows in batch or [1]],
            lambda case, tell, measure=measure: measure(*case, tell),  # type: ignore[misc]
            partial(_print, model.config.get_text_config(decoder=True).num_hidden_layers),
            options=given,
        )
        del model, measure
        free_memory()
    failures = [
        f"{row.method} on {row.shape}, {row.context} tokens: {row.note}"
        for row in bench.rows
        if row.note.startswith("failed") and (row.patched or row.method == SDPA)
    ]
    bench.finish(json_line, failures)


def _configs(presets: Sequence[str], modes: Sequence[str]) -> dict[str, TurboConfig]:
    """Configs by the name of their row. ValueError: an unknown preset."""
    found = {name: _config(name) for name in presets}
    if not modes:
        return found
    # checked before: names that the field allows
    asked = cast(Any, modes)
    return {f"{name}/{mode}": replace(config, attention=mode) for name, config in found.items() for mode in asked}


def _config(name: str) -> TurboConfig:
    config = method_named(name).config
    if config is None:
        raise ValueError(f"--preset names what a patch takes, a preset or a file; {name} is none")
    return config


def _print(layers: int, case: object, rows: Sequence[GenerateRow]) -> None:
    first = rows[0]
    size = f"{first.batch} x {tokens_label(first.context)} tokens"
    title = f"{first.shape}, {layers} layers, {size} and {first.new} new"
    cells = []
    # of the others there are notes
    for row in (row for row in rows if row.tokens_s):
        rate = figure(row.tokens_s, ".1f"), figure(row.best.get("tokens_s"), ".2f")
        first_ms = figure(row.first_ms, ".1f"), figure(row.best.get("first_ms"), ".2f")
        step_ms = figure(row.step_ms, ".2f"), figure(row.best.get("step_ms"), ".2f")
        peak = figure(row.peak_bytes and row.peak_bytes / 1e9, ".2f")
        cells.append([row.method, *rate, *first_ms, *step_ms, peak])
    headings = ("", "tokens/s", "x best", "first", "x best", "step", "x best", "GB")
    show_table(title, headings, cells, whole=len(headings), box=SIMPLE)
    spreads = [row.first_spread for row in rows if row.first_spread is not None]
    spread = f"; rounds of the first token lie up to {max(spreads):.1%} apart" if spreads else ""
    remark(f"first, step: ms. x best: times as fast as the best unpatched row{spread}. GB: the most allocated.")
    print_notes((row.method, row.note) for row in rows)
