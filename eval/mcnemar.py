"""Right and wrong answers of two methods on the same items, side by side."""

from dataclasses import dataclass
from math import comb


@dataclass(frozen=True, slots=True)
class Paired:
    """Items of two methods.

    kept: right with both.
    lost: right with the baseline only.
    gained: right with the other only.
    neither: wrong with both.
    p: exact two-sided McNemar probability that lost and gained differ this much by chance.
    """

    kept: int
    lost: int
    gained: int
    neither: int
    p: float


def paired(baseline: list[bool], other: list[bool]) -> Paired:
    """Compare two methods item by item.

    Raises:
        ValueError: lists of different length.
    """
    if len(baseline) != len(other):
        raise ValueError(f"paired wants two lists of one length; got {len(baseline)} and {len(other)}.")
    both = list(zip(baseline, other, strict=True))
    kept, lost = both.count((True, True)), both.count((True, False))
    gained, neither = both.count((False, True)), both.count((False, False))
    changed = lost + gained
    tail = sum(comb(changed, i) for i in range(min(lost, gained) + 1)) / 2**changed
    return Paired(kept, lost, gained, neither, min(1.0, 2 * tail))
