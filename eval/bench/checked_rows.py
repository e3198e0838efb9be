"""A method's row in the tables of `bench prefill`, `decode` and `sparse`: checked against the oracle, then timed."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from turbo_hf.eval.bench.check import Check
from turbo_hf.eval.bench.rivals import BASELINES
from turbo_hf.eval.bench.timing import Call, speedup, spread


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRow:
    """One method on one case; figures are None where it did not run, and `note` says why.

    shape, batch: those of the case.
    tokens: tokens of its longest row.
    method, ours: what ran, and whether it is ours.
    spread: interquartile range of the rounds over their median.
    rounds: how often it was timed.
    speedup: times as fast as each baseline, median over the rounds.
    error: |o - oracle| / |oracle| on the sample.
    check: the check of a method of ours.
    note: why figures are missing, or a remark.
    """

    shape: str
    batch: int
    tokens: int
    method: str
    ours: bool
    spread: float | None = None
    rounds: int = 0
    speedup: dict[str, float] | None = None
    error: float | None = None
    check: Check | None = None
    note: str = ""


AnyRow = TypeVar("AnyRow", bound=CheckedRow)
AnyCall = TypeVar("AnyCall", bound=Call)


def checked(row: AnyRow, prepare: Callable[[], tuple[Check, Callable[[], AnyCall]]]) -> tuple[AnyRow, AnyCall | None]:
    """The row with its check, and what to time if the result is right; else the note says what is wrong.

    prepare: computes and judges the result; beside the check it returns what makes the call that is timed.
    """
    try:
        check, ready = prepare()
        row = replace(row, error=check.error, check=check)
        if check.problem:
            return replace(row, note=f"wrong: {check.problem}"), None
        return row, ready()
    except ValueError as error:
        return replace(row, note=f"refused: {error}"), None
    except Exception as error:  # a failing method must not cost the others their figures
        return replace(row, note=f"failed: {type(error).__name__}: {error}"), None


def timed(row: AnyRow, times: dict[str, list[float]], **figures: Any) -> AnyRow:
    """The row with `figures`, and the spread and speedups that follow from the times of all methods, round by round."""
    own = times[row.method]
    others = [name for name in BASELINES if name in times and name != row.method]
    ratios = {name: speedup(own, times[name]) for name in others}
    return replace(row, spread=spread(own), rounds=len(own), speedup=ratios, **figures)
