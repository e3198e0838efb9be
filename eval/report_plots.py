"""Pictures of a run: where needles are found, and what accuracy costs in bytes."""

from collections import defaultdict
from pathlib import Path
from typing import Any

from turbo_hf.eval.methods import BASELINE
from turbo_hf.eval.output import write_png

Cells = dict[tuple[int, float], float]
"""Share of needles found, by (length asked for, depth)."""


def needle_cells(samples: list[dict[str, Any]]) -> Cells:
    """The cells of a heat map from the logged samples of the task `needle`."""
    found = defaultdict(list)
    for sample in samples:
        found[sample["doc"]["length"], sample["doc"]["depth"]].append(float(sample["right"]))
    return {cell: sum(right) / len(right) for cell, right in sorted(found.items())}


def worst(cells: Cells) -> tuple[tuple[int, float], float]:
    """The cell with the smallest share, the shortest and shallowest of several."""
    return min(cells.items(), key=lambda pair: (pair[1], pair[0]))


def needle_map(base: Cells, other: Cells, name: str, path: Path) -> None:
    """Write a PNG of three heat maps with one colour bar: the baseline, a method, and their difference."""
    from matplotlib.figure import Figure  # noqa: PLC0415  an extra: only drawing needs it

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
    from matplotlib.figure import Figure  # noqa: PLC0415  as above

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
