"""The pictures of a run, one line per method: TFLOP/s of prompts by length, microseconds of decode by case."""

from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from turbo_hf.eval.bench.shapes import tokens_label
from turbo_hf.eval.output import write_png

if TYPE_CHECKING:
    from turbo_hf.eval.bench.decode import DecodeRow
    from turbo_hf.eval.bench.prefill import PrefillRow


def plot(rows: "list[PrefillRow]", title: str, path: Path) -> None:
    """Write a PNG with a panel for each model shape (down) and mask (across); rows without a time are left out."""
    from matplotlib.figure import Figure  # noqa: PLC0415  an extra: only drawing needs it

    timed = [row for row in rows if row.tflops is not None]
    if not timed:
        return
    shapes, masks, methods = (
        list(dict.fromkeys(getattr(row, field) for row in timed)) for field in ("shape", "causal", "method")
    )
    figure = Figure(figsize=(1.5 + 4.5 * len(masks), 0.5 + 3.5 * len(shapes)), layout="constrained")
    figure.suptitle(title, fontsize="small")
    panels = figure.subplots(len(shapes), len(masks), squeeze=False, sharey=True)
    for axis, (shape, causal) in zip(panels.flat, product(shapes, masks), strict=True):
        here = [row for row in timed if (row.shape, row.causal) == (shape, causal)]
        sizes = sorted({(row.tokens, row.batch) for row in here})
        for colour, method in enumerate(methods):
            own = {(row.tokens, row.batch): row.tflops for row in here if row.method == method}
            at = [i for i, size in enumerate(sizes) if size in own]
            axis.plot(at, [own[sizes[i]] for i in at], marker="o", color=f"C{colour}", label=method)
        axis.set_xticks(range(len(sizes)), [f"{batch}x{tokens_label(tokens)}" for tokens, batch in sizes])
        axis.set_title(f"{shape}, {'causal' if causal else 'full'}")
        axis.grid(alpha=0.3)
    # the axes share their range: fixed once all lines are drawn
    panels[0, 0].set_ylim(bottom=0)
    figure.supxlabel("rows x tokens")
    figure.supylabel("TFLOP/s, quantization included")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside right upper")
    write_png(path, figure)


def plot_decode(rows: "list[DecodeRow]", title: str, path: Path) -> None:
    """Write a PNG with a panel for each model shape, microseconds by case; rows without a time are left out."""
    from matplotlib.figure import Figure  # noqa: PLC0415  an extra: only drawing needs it

    timed = [row for row in rows if row.us is not None]
    if not timed:
        return
    shapes, methods = (list(dict.fromkeys(getattr(row, field) for row in timed)) for field in ("shape", "method"))
    figure = Figure(figsize=(9, 0.5 + 3.5 * len(shapes)), layout="constrained")
    figure.suptitle(title, fontsize="small")
    panels = figure.subplots(len(shapes), 1, squeeze=False)
    for axis, shape in zip(panels.flat, shapes, strict=True):
        here = [row for row in timed if row.shape == shape]
        sizes = sorted({(row.all_tokens, row.batch, row.tokens, row.ragged) for row in here})
        for colour, method in enumerate(methods):
            own = {(row.all_tokens, row.batch, row.tokens, row.ragged): row.us for row in here if row.method == method}
            at = [i for i, size in enumerate(sizes) if size in own]
            # also a method without a line here, so that every panel has the same legend
            axis.plot(at, [own[sizes[i]] for i in at], marker="o", color=f"C{colour}", label=method)
        labels = [f"{batch}x{tokens_label(n)}{' ragged' if ragged else ''}" for _, batch, n, ragged in sizes]
        axis.set_xticks(range(len(sizes)), labels, rotation=45, ha="right")
        axis.set_yscale("log")
        axis.set_title(shape)
        axis.grid(alpha=0.3)
    figure.supxlabel("rows x tokens, by tokens in all")
    figure.supylabel("microseconds of a launch")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside right upper")
    write_png(path, figure)
