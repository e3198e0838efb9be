"""Pictures of `turbo-hf fidelity`: KL by method, by widths of keys and values, and by layer."""

import math
from pathlib import Path
from typing import Any

from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from turbo_hf.eval.fidelity import Fidelity
from turbo_hf.eval.output import write_png
from turbo_hf.patching.divergence import BOUNDS

LEAST = 1e-5
"""KL in nats that is drawn for less, on a scale of logarithms."""


def draw(rows: dict[str, list[Fidelity]], title: str, folder: Path) -> list[Path]:
    """Write a PNG for each part that was measured; their paths."""
    makers = {"table": _methods, "answers": _methods, "grid": _grid, "map": _map}
    paths = []
    for part, own in rows.items():
        found = [row for row in own if row.figures is not None]
        if found:
            paths.append(folder / f"fidelity-{part}.png")
            figure = Figure(figsize=(9, 5), layout="constrained")
            makers[part](figure, found)
            figure.suptitle(f"{title}; {part}", fontsize="small")
            write_png(paths[-1], figure)
    return paths


def _kl(row: Fidelity) -> float:
    """What is drawn; NaN, which is not, for what is not finite."""
    kl = math.nan if row.figures is None else row.figures.kl
    return max(LEAST, kl) if math.isfinite(kl) else math.nan


def _methods(figure: Any, rows: list[Fidelity]) -> None:
    axis = figure.subplots()
    names = list(dict.fromkeys(row.method for row in rows))
    for case in dict.fromkeys(row.case for row in rows):
        own = [row for row in rows if row.case == case]
        at = [names.index(row.method) for row in own]
        axis.plot([_kl(row) for row in own], at, "o", label=f"{case.tokens} tokens, {case.path}", alpha=0.8)
    for bound, words in BOUNDS:
        axis.axvline(bound, color="gray", linewidth=0.8)
        axis.text(bound, len(names) - 0.4, f"{words} <", ha="right", fontsize="x-small")
    axis.set(xscale="log", xlabel="mean KL to 16 bit, nats", ylim=(-0.6, len(names)))
    axis.set_yticks(range(len(names)), names)
    axis.grid(axis="y", alpha=0.3)
    axis.legend(fontsize="small")


def _grid(figure: Any, rows: list[Fidelity]) -> None:
    axis = figure.subplots()
    cells = {tuple(row.method.split()): _kl(row) for row in rows}
    keys, values = (list(dict.fromkeys(name[side] for name in cells)) for side in (0, 1))
    image = axis.imshow(
        [[cells.get((key, value), float("nan")) for value in values] for key in keys], norm=LogNorm(), cmap="viridis_r"
    )
    for (key, value), kl in cells.items():
        axis.text(values.index(value), keys.index(key), f"{kl:.4f}", ha="center", va="center", color="black")
    axis.set_xticks(range(len(values)), values)
    axis.set_yticks(range(len(keys)), keys)
    axis.set(xlabel="bits of values", ylabel="bits of keys")
    figure.colorbar(image, ax=axis, label="mean KL to 16 bit, nats")


def _map(figure: Any, rows: list[Fidelity]) -> None:
    axis = figure.subplots()
    for side in dict.fromkeys(row.method.split()[2] for row in rows):
        own = [(int(row.method.split()[1]), _kl(row)) for row in rows if row.method.endswith(side)]
        axis.plot(*zip(*own, strict=True), "o-", label=side, markersize=4)
    axis.set(xlabel="layer that is rounded; all others in 16 bit", ylabel="mean KL to 16 bit, nats", yscale="log")
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
