"""One method's decode step in `bench decode`: its row, its check against float64, and what is timed."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from turbo_hf.eval.bench.check import Check, judge, poisoned
from turbo_hf.eval.bench.checked_rows import CheckedRow, checked
from turbo_hf.eval.bench.decode_cases import Case
from turbo_hf.eval.bench.graph_rotation import Rotation
from turbo_hf.eval.bench.timing import Call
from turbo_hf.layout import AttentionOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRow(CheckedRow):
    """One method on one step; its oracle reads the same packed cache.

    all_tokens: of all rows.
    ragged: whether rows have different lengths.
    outputs: rows times KV heads.
    us: microseconds of a launch, median of the rounds.
    eager_us: the same without a graph, by the wall clock.
    bytes: of keys and values read, packed as they lie.
    tb_s: 10^12 of them per second.
    copy_share: tb_s over the measured copy bandwidth.
    """

    all_tokens: int
    ragged: bool
    outputs: int
    us: float | None = None
    eager_us: float | None = None
    bytes: int = 0
    tb_s: float | None = None
    copy_share: float | None = None


Found = tuple[DecodeRow, Rotation | None]
"""A method's row, and what to time for it."""

Prepared = tuple[list[Callable[[], AttentionOutput]], Callable[[AttentionOutput], Check]]
"""Calls to time, each over a cache of its own, and the check of the first one's result."""


def new_row(case: Case, method: str, ours: bool, size: int, note: str = "") -> DecodeRow:
    """A row without figures. size: bytes of keys and values read."""
    lengths = case.lengths
    return DecodeRow(
        shape=case.shape,
        batch=len(lengths),
        tokens=max(lengths),
        all_tokens=sum(lengths),
        ragged=case.ragged,
        outputs=case.outputs,
        method=method,
        ours=ours,
        bytes=size,
        note=note,
    )


def our_step(
    case: Case,
    method: str,
    size: int,
    device: torch.device,
    prepare: Callable[[], Prepared],
) -> Found:
    """The row of one of our methods with its check, and what to time if the result is right.

    size: bytes of keys and values read. prepare: makes the caches.
    """

    def check_first() -> tuple[Check, Callable[[], Rotation]]:
        calls, check = prepare()
        with poisoned():
            got = calls[0]()
        return check(got), lambda: Rotation(list[Call](calls), device)

    return checked(new_row(case, method, True, size), check_first)


def check_heads(
    case: Case,
    q: torch.Tensor,
    got: AttentionOutput,
    attended: Callable[[int, int, torch.Tensor], tuple[AttentionOutput, AttentionOutput]],
) -> Check:
    """Check the first KV head of the first row and the last one of the last row against float64.

    The budget is the error of the reference, with the same roundings, on the same heads.

    Args:
        q: [B, Hq, 1, D].
        attended: of a row, a KV head and its queries [1, G, 1, D], what the reference returns and float64's [G, 1, D].
    """
    group, last = case.heads.query // case.heads.kv, len(case.lengths) - 1
    found: list[tuple[AttentionOutput, AttentionOutput, AttentionOutput]] = []
    for row, head in {(0, 0): None, (last, case.heads.kv - 1): None}:
        own = slice(head * group, (head + 1) * group)
        model, exact = attended(row, head, q[row : row + 1, own])
        sampled = AttentionOutput(got.out[row, own], got.lse[row, own])
        found.append((sampled, AttentionOutput(model.out[0], model.lse[0]), exact))
    stacked = (AttentionOutput(*(torch.stack(x) for x in zip(*part, strict=True))) for part in zip(*found, strict=True))
    return judge(got, *stacked)
