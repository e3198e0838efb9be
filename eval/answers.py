"""The answers of one method, kept as they come: a run that was killed goes on at its next unanswered item."""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.model import hash_args

from turbo_hf.config.whole_files import append_line, read_lines

Answer = str | float | tuple[float, bool]
"""A reply, the log-likelihood of a text, or that of a continuation and whether greedy decoding gives it."""

REMEDY = "Delete it, and the same command asks its items anew; do not use one whose origin you do not know."


class Answers:
    """Answers by the hash of their request, in a file with a line of JSON each.

    The harness's own cache, `CachingLM`, keeps pickles, and unpickling runs code.

    Raises:
        ValueError: the file holds anything but such answers; the message names it.
    """

    def __init__(self, path: Path):
        self.path = path
        self._known: dict[str, Answer] = {}
        for line in read_lines(path, REMEDY, growing=True):
            match line:
                case {"key": str(key), "answer": str(answer)} if len(line) == 2:
                    self._known[key] = answer
                case {"key": str(key), "answer": float() | int() as answer} if len(line) == 2 and _is_number(answer):
                    self._known[key] = answer
                case {"key": str(key), "answer": [float() as answer, bool(greedy)]} if _is_number(answer):
                    self._known[key] = answer, greedy
                case _:
                    raise ValueError(f"{str(path)!r} was changed: {str(line)[:80]} is no answer. {REMEDY}")

    def __contains__(self, key: str) -> bool:
        return key in self._known

    def __getitem__(self, key: str) -> Answer:
        return self._known[key]

    def add(self, key: str, answer: Answer) -> None:
        """Keep an answer. OSError: it cannot be written; the message names the file."""
        append_line(self.path, {"key": key, "answer": answer})
        self._known[key] = answer


def _is_number(score: float) -> bool:
    """Whether it is one that a log-likelihood can be: not NaN, nor too large for a float."""
    number = not isinstance(score, bool)
    return number and (-sys.float_info.max <= score <= sys.float_info.max or score == -math.inf)


class AnsweredLM:
    """A model of the harness that answers each request once: answers are stored at once, and read from there later.

    Requests that sample are asked each time. Everything else is the model's own.
    """

    def __init__(self, lm: Any, answers: Answers):
        self._lm, self._answers = lm, answers
        # the model calls `add_partial` of this with every answer as it comes
        lm.set_cache_hook(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lm, name)

    def add_partial(self, kind: str, request: Any, answer: Answer) -> None:
        """Keep one answer of a call that is still running. request: the arguments of the request."""
        self._answers.add(hash_args(kind, request), answer)

    def loglikelihood(self, requests: Sequence[Any]) -> list[Answer]:
        """As `LM.loglikelihood`."""
        return self._answered("loglikelihood", requests)

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[Answer]:
        """As `LM.loglikelihood_rolling`."""
        return self._answered("loglikelihood_rolling", requests)

    def generate_until(self, requests: Sequence[Any]) -> list[Answer]:
        """As `LM.generate_until`."""
        return self._answered("generate_until", requests)

    def _answered(self, kind: str, requests: Sequence[Any]) -> list[Answer]:
        keys = [hash_args(kind, request.args) for request in requests]
        sampled = [kind == "generate_until" and bool(r.args[1].get("do_sample")) for r in requests]
        known = [not drawn and key in self._answers for key, drawn in zip(keys, sampled, strict=True)]
        places = [place for place, there in enumerate(known) if not there]
        new = getattr(self._lm, kind)([requests[place] for place in places]) if places else []
        found = dict(zip(places, new, strict=True))
        for place, answer in found.items():
            # most were kept as they came
            if keys[place] not in self._answers:
                self._answers.add(keys[place], answer)
        return [found[place] if place in found else self._answers[key] for place, key in enumerate(keys)]
