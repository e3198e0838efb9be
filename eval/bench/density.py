"""`turbo-hf bench density`: how many key tiles a mass rule would read of a long prompt, and the mass it would drop."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from turbo_hf.config.prompt_sparsity import PromptSparsity
from turbo_hf.console import Device, GgufFile, Json, err, load, mistakes_end_the_command, show_table
from turbo_hf.eval.bench.captured_layers import Captured, capture, token_ids
from turbo_hf.eval.bench.options import Folder, Seed, prepare_folder
from turbo_hf.eval.bench.runner import BenchRun
from turbo_hf.eval.bench.shapes import parse_tokens
from turbo_hf.eval.bench.tile_choice import density, dropped_mass
from turbo_hf.eval.output import write_png
from turbo_hf.layout import PROMPT_TILE as TILE
from turbo_hf.ops.prefill.reference_tiles import first_of_tail, reference_choose_tiles

MASSES = (0.9, 0.95, 0.98)
ROWS = 4
"""Rows of each tile of queries whose dropped mass is computed, drawn at random after the choice."""


@dataclass(frozen=True, slots=True)
class DensityRow:
    """One layer under one rule, over its query heads and the checked rows outside of the tail.

    density: share of the causal tiles that are read.
    dropped_mean, dropped_p95, dropped_max: exact share of the softmax on tiles that are not read.
    heads, heads_over: query heads, and those whose mean is above 2 (1 - mass).
    density_repaired: as `density`, where those heads read every tile.
    """

    layer: int
    tokens: int
    mass: float
    peak: float
    density: float
    dropped_mean: float
    dropped_p95: float
    dropped_max: float
    heads: int
    heads_over: int
    density_repaired: float


def layer_density(layer: Captured, rule: PromptSparsity, seed: int) -> DensityRow:
    """What `rule` reads and drops of one layer's heads."""
    q, k, tokens = layer.q[0], layer.k[0], layer.q.shape[2]
    about: dict[str, Any] = {name: layer.about.get(name) for name in ("scaling", "softcap", "sinks")}
    kept = reference_choose_tiles(q, k, rule.rule, **about)
    # the tail drops nothing, and would flatter
    tiles = first_of_tail(tokens, rule.rule)
    generator = torch.Generator().manual_seed(seed)
    places = torch.randint(TILE, (tiles, ROWS), generator=generator) + torch.arange(tiles)[:, None] * TILE
    dropped = dropped_mass(q, k, kept, places.flatten().to(q.device), **about)
    read, over = density(kept), dropped.mean(-1) > rule.bound
    return DensityRow(
        layer.index,
        tokens,
        rule.mass,
        rule.peak,
        read.mean().item(),
        dropped.mean().item(),
        dropped.flatten().quantile(0.95).item(),
        dropped.max().item(),
        len(read),
        int(over.sum()),
        torch.where(over, 1.0, read).mean().item(),
    )


def density_command(
    model: Annotated[str, typer.Option(help="A folder or a Hub id: its queries and keys are judged.")],
    gguf_file: GgufFile = None,
    length: Annotated[list[str] | None, typer.Option(help="Tokens, such as 8k; may be repeated. Default: 4k.")] = None,
    mass: Annotated[list[float] | None, typer.Option(help="May be repeated. Default: 0.9, 0.95, 0.98.")] = None,
    peak: Annotated[float, typer.Option(help="A tile that one row gives this share is read.")] = PromptSparsity().peak,
    most_density: Annotated[
        float, typer.Option(help="A tile of queries that would read more of the earlier key tiles reads all; 1: off.")
    ] = PromptSparsity().most_density,
    tail: Annotated[int, typer.Option(help="The last queries, which read every key.")] = PromptSparsity().tail_tokens,
    text: Annotated[Path | None, typer.Option(help="What the model reads; default: the included prose.")] = None,
    seed: Seed = 0,
    folder: Folder = None,
    device: Device = "auto",
    json_line: Json = False,
) -> None:
    """How sparse a long prompt could be: tiles of 128 keys that a mass rule reads, and the softmax that it drops.

    Layer by layer on a model's own queries and keys; layers with a window are left out. It says what
    `TurboConfig.sparse_prompt` would read and drop of this model, before a head that dropped too much is made dense.
    """
    with mistakes_end_the_command():
        shape: dict[str, Any] = {"peak": peak, "most_density": most_density, "tail_tokens": tail}
        shape["from_tokens"] = max(16384, tail + 1024)
        rules = [PromptSparsity(mass=each, **shape) for each in mass or MASSES]
        lengths = [parse_tokens(word) for word in length or ("4k",)]
        if min(lengths) < tail + 2 * TILE:
            raise ValueError(f"--length must be at least --tail + {2 * TILE} = {tail + 2 * TILE}; got {min(lengths)}.")
        if text is not None and not text.is_file():
            raise ValueError(f"there is no file {text}.")
        prepare_folder(folder, plot=True)
        loaded, tokenizer = load(model, device, gguf_file=gguf_file)
        rows = [row for n in lengths for row in _of_model(loaded, token_ids(tokenizer, text, n), rules, seed)]
        if not rows:
            raise ValueError("every layer of this model has a window: its prompts are short already.")
    bench = BenchRun[DensityRow]("density", loaded.device, folder)
    _print(rows)
    given: dict[str, Any] = {"model": Path(model).name, "text": text and text.name, "tail": tail, "seed": seed}
    given["most_density"] = most_density
    bench.keep(rows, options=given)
    if folder is not None:
        plot_density(rows, bench.headline, folder / "density.png")
    bench.finish(json_line)


def _of_model(model: Any, ids: torch.Tensor, rules: list[PromptSparsity], seed: int) -> Iterator[DensityRow]:
    for layer in capture(model, ids):
        if layer.about["window"] is None:
            yield from (layer_density(layer, rule, seed) for rule in rules)
            err.print(f"layer {layer.index}, {ids.shape[1]} tokens: done", highlight=False)


def _print(rows: list[DensityRow]) -> None:
    for tokens, mass in dict.fromkeys((row.tokens, row.mass) for row in rows):
        own = [row for row in rows if (row.tokens, row.mass) == (tokens, mass)]
        cells = []
        for row in own:
            shares = (row.density, row.dropped_mean, row.dropped_p95, row.dropped_max, row.density_repaired)
            *figures, repaired = (f"{100 * share:.3g}" for share in shares)
            cells.append([str(row.layer), *figures, f"{row.heads_over} of {row.heads}", repaired])
        headings = ("layer", "density %", "dropped %: mean", "p95", "max", "heads over", "density, these dense")
        show_table(f"{tokens} tokens, mass {mass}, peak {own[0].peak}", headings, cells)


def plot_density(rows: list[DensityRow], title: str, path: Path) -> None:
    """Density and dropped shares by layer: one panel a length, one colour a mass."""
    from matplotlib.figure import Figure  # noqa: PLC0415  an extra: only drawing needs it

    lengths, masses = (list(dict.fromkeys(getattr(row, name) for row in rows)) for name in ("tokens", "mass"))
    figure = Figure(figsize=(1.5 + 4.5 * len(lengths), 6), layout="constrained")
    figure.suptitle(title, fontsize="small")
    panels = figure.subplots(2, len(lengths), squeeze=False, sharex="col", sharey="row")
    for column, tokens in enumerate(lengths):
        panels[0, column].set_title(f"{tokens:,} tokens", fontsize="small")
        for colour, mass in enumerate(masses):
            own = [row for row in rows if (row.tokens, row.mass) == (tokens, mass)]
            layers = [row.layer for row in own]
            read, dropped = panels[:, column]
            read.plot(layers, [row.density for row in own], marker="o", color=f"C{colour}", label=f"mass {mass:g}")
            dropped.plot(layers, [row.dropped_mean for row in own], marker="o", color=f"C{colour}")
            dropped.plot(layers, [row.dropped_p95 for row in own], linestyle=":", color=f"C{colour}")
    panels[0, 0].set_ylabel("share of key tiles read")
    panels[1, 0].set_ylabel("softmax dropped: mean, 95 % below (dotted)")
    figure.supxlabel("layer")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside right upper")
    write_png(path, figure)
