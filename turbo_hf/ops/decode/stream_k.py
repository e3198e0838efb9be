"""The work split of decode attention (stream-K): which CTA computes which tiles. A pure function of lengths,
widths, query rows and the number of SMs.

An *output* is what one row and KV head (and, with many query rows, one part of them) attend to. Its tiles are runs of
sealed blocks, in time order, and one last tile for all open tokens, so the plan changes only when a row gets another
tile, not with each token. The tiles of all outputs are placed end to end, and each CTA takes one contiguous run of
them.

Plans are made on the host, in NumPy: for a few hundred numbers, torch would start its thread pool.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from turbo_hf.layout import power_of_two

Numbers = NDArray[np.int64]


class Plan(NamedTuple):
    """A work split.

    ctas: CTAs that have work.
    outputs: number of outputs.
    steps: tiles of all outputs.
    parts: the most CTAs that share one output.
    words: int32 [4 * ctas + 2 * outputs]. For each CTA: its first output, the tile of that output at which it begins,
        its number of tiles, 0. For each output: the first CTA that has a part of it, and how many CTAs have one.
    """

    ctas: int
    outputs: int
    steps: int
    parts: int
    words: torch.Tensor


def tiles_of(sealed: Sequence[int], blocks: int) -> list[int]:
    """Tiles of each row: one per `blocks` sealed blocks, and one for its open tokens."""
    return [-(-n // blocks) + 1 for n in sealed]


def stream_k(tiles: Numbers, cost: NDArray[np.float64], ctas: int, setup: float = 0.0) -> Plan:
    """Equal contiguous shares of all tiles for `ctas` CTAs, of one output each where that is just as even.

    Args:
        tiles: [outputs], tiles of each output, at least 1.
        cost: [outputs], the cost of one of its tiles, in any unit.
        ctas: CTAs that run at once.
        setup: the cost of starting an output, or of leaving a part of it to be merged, in the same unit.

    Returns:
        Plan; no share exceeds the mean by more than the cost of two tiles and three setups.

    Raises:
        ValueError: an output without tiles, or no CTAs.

    Source: LeanAttention alg. 4.
    """
    if ctas < 1 or int(tiles.min()) < 1:
        raise ValueError(f"a plan needs CTAs, and a tile of each output; got {ctas} CTAs, {int(tiles.min())} tiles.")
    work = tiles * cost
    ends = np.cumsum(work + setup)
    at = ends[-1] * np.arange(1, ctas) / ctas
    output = np.minimum(np.searchsorted(ends, at, side="right"), len(tiles) - 1)
    first = np.cumsum(tiles) - tiles

    each, rest = divmod(ctas, len(tiles))
    if not rest and (-(-tiles // each) * cost).max() <= ends[-1] / ctas + cost.max() + setup:
        # of uneven parts the last is the largest: its last tile, of the open tokens, is mostly the least work
        return from_edges(tiles, (first[:, None] + tiles[:, None] * np.arange(each) // each).ravel())

    below = np.where(output > 0, ends[output - 1], 0.0)
    nearest = np.where(at - below < ends[output] - at, output, output + 1)
    bounds = np.append(0.0, ends)[np.append(nearest, len(tiles))]
    if np.diff(bounds, prepend=0.0).max() <= ends[-1] / ctas + 2 * setup:
        return from_edges(tiles, np.append(first, tiles.sum())[nearest])

    # a boundary falls on a tile's edge; on the output's edge if that is nearer than the cost of a setup
    inside = np.maximum(at - below - setup, 0.0)
    tile = np.minimum(np.ceil(inside / cost[output] - 1e-9).astype(np.int64), tiles[output])
    tile = np.where(inside < setup, 0, np.where(work[output] - inside < setup, tiles[output], tile))
    return from_edges(tiles, first[output] + tile)


def even_rounds(ctas: int, outputs: int, parts: int) -> int:
    """`ctas`, rounded down by less than a tenth to a multiple of `outputs`, so that all shares are alike.

    The CTAs per output are a power of two, up to `parts`, if that too rounds by less than a tenth.
    """
    each = min(parts, 1 << max(0, (ctas // outputs).bit_length() - 1)) * outputs
    fewer, alike = ctas // each * each, ctas // outputs * outputs
    return fewer if fewer > 0.9 * ctas else alike if alike > 0.9 * ctas else ctas


def from_edges(tiles: Numbers, edges: Numbers) -> Plan:
    """The plan whose CTAs begin at tile 0 and at each tile number in `edges` (sorted; repeats are left out)."""
    ends = np.cumsum(tiles)
    steps = int(ends[-1])
    begin = np.unique(np.append(0, edges[(edges > 0) & (edges < steps)]))
    output = np.searchsorted(ends, begin, side="right")
    tile = begin - (ends - tiles)[output]
    count = np.diff(begin, append=steps)
    ctas = np.stack((output, tile, count, np.zeros_like(tile)), 1)
    first = np.searchsorted(begin, ends - tiles, side="right") - 1
    last = np.searchsorted(begin, ends - 1, side="right") - 1
    groups = np.stack((first, last - first + 1), 1)
    words = np.concatenate((ctas.ravel(), groups.ravel())).astype(np.int32)
    return Plan(len(begin), len(tiles), steps, int(groups[:, 1].max()), torch.from_numpy(words))


class LivePlan:
    """The plan of launches that are replayed, kept up to date in memory that keeps its address.

    words: as in `Plan`, for `ctas` CTAs, the last of which may have no tiles. parts: as in `Plan`, rounded up to a
    power of two. A plan that needs more CTAs or parts moves to other memory, and the graph is captured again; one that
    needs fewer stays.

    Args:
        make: the plan for given numbers of sealed blocks of each row.
        sealed: sealed blocks of each row.
        most: maximum number of CTAs of any plan.
        device: device of the words.
        workspace: other memory that the launches use; kept alive with the plan.
        parts: parts for which there is room from the beginning.
        steady: these parts are merged at a time, whatever the plan: it then has `most` CTAs, and never moves.
    """

    def __init__(
        self,
        make: Callable[[tuple[int, ...]], Plan],
        sealed: Sequence[int],
        most: int,
        device: torch.device,
        workspace: Any = None,
        parts: int = 1,
        steady: bool = False,
    ):
        self.workspace, self.ctas, self.parts, self._steady = workspace, 0, parts, steady
        self._make, self._most, self._device = make, most, device
        self._plan: Plan | None = None
        self.update(sealed)

    def update(self, sealed: Sequence[int]) -> None:
        """The plan for other numbers of sealed blocks. Waits for nothing."""
        plan = self._make(tuple(sealed))
        if plan is self._plan:
            return
        self._plan, parts, ctas = plan, max(self.parts, power_of_two(plan.parts)), plan.ctas
        if self._steady:
            parts, ctas = self.parts, self._most
        if ctas > self.ctas or parts > self.parts:
            # with room for as many parts of each output, so that rows that grow do not soon need it
            room = max(power_of_two(ctas), plan.outputs * parts)
            self.ctas, self.parts = max(self.ctas, min(room, self._most)), parts
            with torch.inference_mode(False):  # written again in any mode
                self.words = torch.empty(4 * self.ctas + 2 * plan.outputs, dtype=torch.int32, device=self._device)
        idle = plan.words.new_zeros(4 * (self.ctas - plan.ctas))
        split = 4 * plan.ctas
        self.words.copy_(torch.cat((plan.words[:split], idle, plan.words[split:])), non_blocking=True)


class SteadyPlans(dict[Any, LivePlan]):
    """`KVStore.plans` whose plans never move: launches that read them need not be captured again when rows grow."""


class KeptWorkspace:
    """In place of a `LivePlan`, for launches whose work the device splits: keeps their memory alive."""

    def __init__(self, words: Any):
        self.words = words

    def update(self, sealed: Sequence[int]) -> None:
        """Nothing depends on the lengths."""
