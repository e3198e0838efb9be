"""Pictures: of `turbo-hf fidelity`, KL by method, by widths and by layer; of a run, needles and what accuracy costs."""

import math
from pathlib import Path
from typing import Any

from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from turbo_hf.eval.fidelity import Fidelity
from turbo_hf.eval.methods import BASELINE
from turbo_hf.eval.output import write_png
from turbo_hf.eval.scorers import Cells, worst
from turbo_hf.patching.divergence import BOUNDS

LEAST = 1e-5
"""KL in nats that is drawn for less, on a scale of logarithms."""


def draw(rows: dict[str, list[Fidelity]], title: str, folder: Path) -> list[Path]:
    """Write a PNG for each part that was measured; their paths."""
    makers = {"table": _methods, "answers": _methods, "grid": _grid, "map": _map}
    paths = []
    for part in makers:
        # of an earlier run, which the report beside it does not tell of
        (folder / f"fidelity-{part}.png").unlink(missing_ok=True)
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


def needle_map(base: Cells, other: Cells, name: str, path: Path) -> None:
    """Write a PNG of three heat maps with one colour bar: the baseline, a method, and their difference."""
    lengths, depths = sorted({length for length, _ in base}), sorted({depth for _, depth in base})
    panels = {BASELINE: base, name: other, f"{name} - {BASELINE}": {cell: other[cell] - base[cell] for cell in base}}
    figure = Figure(figsize=(13, 4), layout="constrained")
    axes = figure.subplots(1, 3, sharey=True)
    for axis, (title, cells) in zip(axes, panels.items(), strict=True):
        grid = [[cells.get((length, depth), float("nan")) for length in lengths] for depth in depths]
        # one bar for all three: a share cannot leave -1 to 1, and 0 is white
        image = axis.imshow(grid, vmin=-1, vmax=1, cmap="RdBu", aspect="auto")
        axis.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=45)
        axis.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
        (length, depth), share = worst(cells)
        mean = sum(cells.values()) / len(cells)
        axis.set_title(f"{title}\nmean {mean:.3f}; worst {share:.2f} at {length:,}, {depth:.0%}", fontsize="small")
    axes[0].set_ylabel("depth of the needle")
    figure.supxlabel("tokens of the prompt, at most", fontsize="small")
    figure.colorbar(image, ax=axes, label="share found")
    write_png(path, figure)


MARKERS = "os^D"
"""Of ten methods each, which have a colour of their own."""


def accuracy_plot(found: dict[str, Any], title: str, path: Path) -> bool:
    """Write a PNG of mean accuracy against KV bytes per token, one point per method; False: nothing to draw."""
    sized = {label: own["kv_bytes_per_token"] for label, own in found["serving"].items()}
    if not found["means"] or any(size is None for size in sized.values()):
        return False
    methods = found["means"][0]["methods"]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axis = figure.subplots()
    for colour, (label, size) in enumerate(sized.items()):
        own = methods[label]
        simulated = found["serving"][label]["simulated"]
        axis.errorbar(
            size,
            100 * own["accuracy"],
            None if own["stderr"] is None else 100 * own["stderr"],
            # hollow: of a simulation, at bytes that are computed
            fmt=MARKERS[colour // 10 % len(MARKERS)],
            markerfacecolor="white" if simulated else None,
            capsize=3,
            color=f"C{colour % 10}",
            label=label + (" (simulated)" if simulated else ""),
        )
    axis.set(
        xlabel="KV bytes per token, measured (hollow: computed)",
        ylabel="% right, mean of tasks ± standard error",
        xlim=(0, None),
    )
    axis.set_title(title, fontsize="small")
    low, high = axis.get_ylim()
    axis.set_ylim(max(low, -1), min(high, 101))
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
    write_png(path, figure)
    return True
