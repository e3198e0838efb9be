"""`turbo-hf calibrate`: calibration from the command line."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE

from turbo_hf.calibration.artifacts import Calibration
from turbo_hf.calibration.index import SELECTIVITY, WAYS
from turbo_hf.calibration.run import calibrate, refuse_folder
from turbo_hf.calibration.settings import Settings, resolve_settings
from turbo_hf.console import (
    Device,
    GgufFile,
    Json,
    counting,
    load,
    mistakes_end_the_command,
    out,
    processes,
    remark,
    show_table,
)
from turbo_hf.eval.widths import COUNT, PROMPT, SAMPLES, calibrate_widths, required_settings


def calibrate_command(
    model: Annotated[str, typer.Argument(help="A folder or a Hub id.")],
    out_folder: Annotated[
        Path, typer.Option("--out", help="Folder for the result; patch looks in the checkpoint's own folder.")
    ],
    texts: Annotated[
        str | None,
        typer.Option(
            help="A .txt file, or a folder of them; preferably long texts, such as books. With --budget four books by "
            "default."
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Choose the widths of keys and values of each layer instead: bytes per token and KV head (104), bits "
            "per number ('3.25 bit'), or 'like 16 bit'."
        ),
    ] = None,
    preset: Annotated[str, typer.Option(help="fast or full.")] = "fast",
    heads_only: Annotated[
        bool, typer.Option("--heads-only", help="Head priorities alone, without an index: takes seconds.")
    ] = False,
    window: Annotated[int | None, typer.Option(help="Tokens per window, instead of the preset's.")] = None,
    windows: Annotated[int | None, typer.Option(help="Maximum number of windows, instead of the preset's.")] = None,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Replace the calibration in --out at the end: with --budget its widths alone, else all but these.",
        ),
    ] = False,
    gguf_file: GgufFile = None,
    device: Device = "auto",
    json_line: Json = False,
) -> None:
    """Learn from a model's own keys and queries which heads need their bits, and build an index for sparse decoding.

    With --budget learn instead which widths of keys and values lose least within so many bytes or bits.
    """
    with mistakes_end_the_command():
        if budget is not None:
            unused = {"--preset": preset != "fast", "--heads-only": heads_only}
            if any(unused.values()):
                named = ", ".join(name for name, given in unused.items() if given)
                raise ValueError(f"no effect beside --budget, which chooses widths alone: {named}. Leave that out.")
            sizes = {"count": COUNT if windows is None else windows, "tokens": PROMPT if window is None else window}
            required_settings(budget, **sizes)
            loaded, tokenizer = load(model, device, gguf_file)
            facts = _widths(loaded, tokenizer, budget, texts, **sizes, out=out_folder, overwrite=overwrite)
            if json_line:
                print(json.dumps(facts))  # noqa: T201
            return
        if texts is None:
            raise ValueError("--texts names what to calibrate with; only --budget has texts of its own. Pass it.")
        own = (("window", window), ("windows", windows))
        given: dict[str, Any] = {name: size for name, size in own if size is not None}
        given["index"] = not heads_only
        replace(resolve_settings(preset), **given)
        # before the model is loaded
        if processes()[0] == 0:
            refuse_folder(out_folder, overwrite)
        loaded, tokenizer = load(model, device, gguf_file)
        positions = getattr(loaded.config.get_text_config(decoder=True), "max_position_embeddings", None)
        # a preset's windows are cut to what the model was made for
        chosen = replace(resolve_settings(preset, positions), **given)
        facts = _run(loaded, tokenizer, chosen, texts, out_folder, overwrite)
    if json_line:
        print(json.dumps(facts))  # noqa: T201


def _widths(model: Any, tokenizer: Any, budget: str, texts: str | None, **options: Any) -> dict[str, Any]:
    begun = time.perf_counter()
    with counting("draws of next tokens", SAMPLES) as advance:
        found, measured, rows = calibrate_widths(model, tokenizer, budget, texts, **options, advance=advance)
    widths, seconds = found.widths, time.perf_counter() - begun
    assert widths is not None
    cells = []
    for keys, values in zip(measured.parts[::2], measured.parts[1::2], strict=True):
        each = [f"{1e3 * part.costs[bits]:.3f}" for part in (keys, values) for bits in (4, 3, 2)]
        cells.append([str(keys.layer), "/".join(map(str, widths.layers[keys.layer])), *each])
    title = f"{found.fingerprint['model']}: {widths.tokens:,} tokens in {seconds:.0f} s"
    headings = ("layer", "K/V", *(f"{side} {bits}" for side in ("keys", "values") for bits in (4, 3, 2)))
    show_table(title, headings, cells, words=2, box=SIMPLE)
    remark("Keys and values of one layer alone at 4, 3 and 2 bit: mean KL to 16 bit, thousandths of a nat.")
    held = {row.method: row.figures.kl for row in rows if row.figures is not None}
    kl = " and ".join(f"{name} {x:.5f}" for name, x in held.items())
    said = f"{widths.bits_per_number:.3f} bits per number; predicted KL {widths.kl:.5f} nats; on texts held out: {kl}."
    out.print(said, markup=False, highlight=False)
    folder = options["out"]
    out.print(f"Written to {folder}. turbo_hf.patch(model, calibration={str(folder)!r}) uses it.", markup=False)
    parts = [
        {"layer": part.layer, "side": ("keys", "values")[part.side], "costs": part.costs} for part in measured.parts
    ]
    return {"out": str(folder), "seconds": round(seconds, 1), **widths.facts(), "held_out": held, "parts": parts}


def _run(model: Any, tokenizer: Any, settings: Settings, texts: str, folder: Path, overwrite: bool) -> dict[str, Any]:
    begun = time.perf_counter()
    with counting("reading texts", 100) as advance:
        found = calibrate(
            model,
            tokenizer,
            texts,
            settings=settings,
            out=folder,
            overwrite=overwrite,
            progress=lambda word, share: advance(100 * share, word),
        )
    seconds = time.perf_counter() - begun
    _print(found, seconds, folder)
    facts: dict[str, Any] = {"out": str(folder), "tokens": found.tokens, "seconds": round(seconds, 1)}
    return facts | {"settings": dict(found.settings), "layers": [layer.facts() for layer in found.layers]}


def _print(found: Calibration, seconds: float, folder: Path) -> None:
    orders, cells = found.head_orders("priority"), []
    for layer in found.layers:
        order = " ".join(map(str, orders.get(layer.index, ()))) or "-"
        figures = ["-"] * (1 + len(WAYS))
        if layer.quality and layer.centroids is not None:
            at, rows = SELECTIVITY.index(0.04), layer.quality["recall"].values()
            figures = [str(layer.centroids.shape[1]), *(f"{row[at]:.1%}" if row else "-" for row in rows)]
        cells.append((str(layer.index), order, *figures))
    title = f"{found.fingerprint['model']}: {found.tokens:,} tokens in {seconds:.0f} s"
    headings = ("layer", "heads by need of bits", "C", "saap", "kmeans", "rotated", "random")
    show_table(title, headings, cells, words=2, box=SIMPLE)
    if any(layer.quality for layer in found.layers):
        remark(
            "Of C buckets; recall: long-range attention mass in 4 % of the keys, on text held out, by what chooses "
            "them: the selectors saap, kmeans and kmeans-rotated, and chance (random)."
        )
    if found.widths is not None:
        out.print(f"Kept the widths that were there: {found.widths}.", markup=False, highlight=False)
    for layer in found.layers:
        if layer.note:
            out.print(f"Layer {layer.index}: {layer.note}", markup=False, highlight=False)
    out.print(f"Written to {folder}. turbo_hf.patch(model, ..., calibration={str(folder)!r}) uses it.", markup=False)
