"""Which bits keys and values of each layer get within a budget, from what each of them was measured to cost."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from turbo_hf.config.expected import Each, OneOf, Whole
from turbo_hf.layout import BITS

PAIR = [OneOf(BITS), OneOf(BITS)]
WRITTEN = {"layers": Each(PAIR), **dict.fromkeys(("bits_per_number", "kl"), float), "tokens": Whole(0, 2**63)}
WRITTEN |= {"held_out": OneOf((None, float))}
"""What a file holds of `Widths`."""
MOST_KL = 1e6
"""Nats; one that is not finite is more."""


@dataclass(frozen=True, slots=True)
class Widths:
    """The widths that a calibration has chosen.

    Args:
        layers: bits of keys and of values of each layer, first to last, for `TurboConfig.layer_bits`; 8 of layers that
            are not compressed.
        bits_per_number: mean bits of a stored number, sizes and ranges included.
        kl: predicted mean KL to 16 bit, in nats.
        tokens: number of tokens that were run.
        held_out: mean KL to 16 bit on texts held out, in nats; None: it was not measured.

    Raises:
        ValueError: figures that are not finite, or below 0; more than 16 bits per number.
    """

    layers: tuple[tuple[int, int], ...]
    bits_per_number: float
    kl: float
    tokens: int
    held_out: float | None = None

    def __post_init__(self) -> None:
        for name, most in (("bits_per_number", 16), ("kl", MOST_KL), ("held_out", MOST_KL)):
            found = getattr(self, name)
            if not (found is None or 0 <= found <= most):
                raise ValueError(f"widths.{name} is {found}, and should be a number from 0 to {most:g}")

    def __str__(self) -> str:
        held = "" if self.held_out is None else f", {self.held_out:.4f} on texts held out"
        return f"{self.bits_per_number:.2f} bits per number, predicted KL {self.kl:.4f} nats to 16 bit{held}"

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"layers": [list(pair) for pair in self.layers]}


def widths_from(facts: Mapping[str, Any]) -> Widths:
    """The widths that `Widths.facts` describes."""
    return Widths(**{**facts, "layers": tuple((keys, values) for keys, values in facts["layers"])})


class ChosenWidths(NamedTuple):
    """size, cost: sums of those of all parts. widths: the bits of each part."""

    size: int
    cost: float
    widths: tuple[int, ...]


def choices(costs: Sequence[Mapping[int, float]], sizes: Sequence[Mapping[int, int]]) -> list[ChosenWidths]:
    """Every choice of widths that no other one of its size, or of less, undercuts: larger sizes, smaller costs.

    It is exact (dynamic programming over sizes).

    Args:
        costs: of each part (keys or values of a layer), by width.
        sizes: the same in bytes, for the same widths.
    """
    # widths are linked: (of the last part, those before it)
    best: list[tuple[int, float, Any]] = [(0, 0.0, None)]
    for cost, size in zip(costs, sizes, strict=True):
        grown = [(at + size[w], sum_ + cost[w], (w, linked)) for at, sum_, linked in best for w in cost]
        best = []
        for each in sorted(grown, key=lambda x: x[:2]):
            if not best or each[1] < best[-1][1]:
                best.append(each)
    return [ChosenWidths(size, cost, _unlinked(linked)) for size, cost, linked in best]


def _unlinked(linked: Any) -> tuple[int, ...]:
    widths = []
    while linked is not None:
        width, linked = linked
        widths.append(width)
    return tuple(reversed(widths))
