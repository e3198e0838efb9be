"""What counts as right: the harness's stock scorers by name, with corrected ones alongside.

A corrected scorer reads the reply that the stock one read, for the baseline and for every method alike. Stock ones stay
because published figures are made with them. What is wrong with them, measured on lm-eval 0.4.13: GSM8K's strict match
takes "The answer is 18" without a full stop for 1 and fails on "$18."; BBH's takes "(B)" without a full stop for "(B".
"""

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from turbo_hf.eval.long_answers import right_rows

Sample = dict[str, Any]
"""One item as the harness logs it: doc, target, resps, filter, and its metrics."""

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
STATED = re.compile(r"the answer is\s*:?\s*(.+?)(?:\.(?:\s|$)|\n|$)", re.IGNORECASE)
CHOICE = re.compile(r"\(([a-e])\)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Scorer:
    """One way to judge a task's items. `filter` and `metric`: the harness's own verdict; `judge`: ours, instead of it.

    parts: verdicts of the parts of an item, which then count one by one. headline: the one that means are made of.
    """

    name: str
    filter: str = "none"
    metric: str = "right"
    judge: Callable[[Sample], bool] | None = None
    parts: Callable[[Sample], list[bool]] | None = None
    headline: bool = False

    @property
    def stock(self) -> bool:
        """Whether it is the harness's own."""
        return self.judge is None and self.parts is None

    def verdicts(self, samples: list[Sample]) -> dict[int, bool]:
        """Right or wrong, by item, of a task's logged samples (an item is logged once a filter)."""
        if self.parts is not None:
            # no item has a thousand parts
            return {1000 * s["doc_id"] + i: right for s in samples for i, right in enumerate(self.parts(s))}
        if self.judge is not None:
            return {sample["doc_id"]: self.judge(sample) for sample in samples}
        kept = [sample for sample in samples if sample["filter"] == self.filter]
        return {sample["doc_id"]: bool(sample[self.metric]) for sample in kept}


def reply_of(sample: Sample) -> str:
    """What the model wrote, before any filter."""
    return str(sample["resps"][0][0])


def right_number(sample: Sample) -> bool:
    """GSM8K: the number that the reply states as its answer, or else its last one, equals the target's."""
    target = NUMBER.findall(str(sample["target"]).rsplit("####", maxsplit=1)[-1])
    reply = reply_of(sample)
    stated = STATED.search(reply)
    # "$18.50" ends no sentence after 18: a number is looked for in the text, not in what the full stop leaves
    found = NUMBER.findall(reply[stated.start(1) :] if stated else "")[:1] or NUMBER.findall(reply)[-1:]
    return bool(target and found) and _value(found[0]) == _value(target[-1])


def _value(number: str) -> float:
    return float(number.replace(",", ""))


def right_statement(sample: Sample) -> bool:
    """BBH: what follows "the answer is", up to the end of its sentence or line, is the target; with or without stop."""
    stated = STATED.search(reply_of(sample))
    return stated is not None and _bare(stated.group(1)) == _bare(str(sample["target"]))


def _bare(text: str) -> str:
    return text.strip().rstrip(".").strip().casefold()


def right_choice(sample: Sample) -> bool:
    """AQuA: the letter of the first "answer is (x)", or else the last letter in brackets, is the target's."""
    reply = reply_of(sample)
    stated = re.search(r"answer is\s*:?\s*\(?([a-e])\b", reply, re.IGNORECASE)
    found = stated.group(1) if stated else (CHOICE.findall(reply) or [""])[-1]
    return bool(found) and found.casefold() == str(sample["target"]).strip("() ").casefold()


OWN = (Scorer("right", headline=True),)
"""Of tasks made here: their own verdict."""

LONG = (
    Scorer("every row", judge=lambda s: all(right_rows(s["doc"]["rows"], reply_of(s))), headline=True),
    Scorer("rows", parts=lambda s: right_rows(s["doc"]["rows"], reply_of(s))),
)
"""A long answer is right if each of its rows is; "rows", row by row."""

GSM8K = (
    Scorer("flexible", "flexible-extract", "exact_match", headline=True),
    Scorer("strict", "strict-match", "exact_match"),
    Scorer("corrected", judge=right_number),
)
BBH = (
    Scorer("stock", "get-answer", "exact_match", headline=True),
    Scorer("corrected", judge=right_statement),
)
CHOICES = (Scorer("acc", "none", "acc", headline=True), Scorer("acc_norm", "none", "acc_norm"))

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
