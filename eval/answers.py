"""The answers of one method, kept as they come: a run that was killed goes on at its next unanswered item."""

import math
import sys
from pathlib import Path
from typing import Any

from lm_eval.api.model import CachingLM

from turbo_hf.config.whole_files import append_line, read_lines

Answer = str | float | tuple[float, bool]
"""A reply, the log-likelihood of a text, or that of a continuation and whether greedy decoding gives it."""

REMEDY = "Delete it, and the same command asks its items anew; do not use one whose origin you do not know."


class Answers(dict[str, Answer]):
    """Answers by the hash of their request. Each is written as a line of JSON as soon as it is set.

    Raises:
        ValueError: the file holds anything but such answers; the message names it.
        OSError: an answer cannot be written; the message names the file.
    """

    def __init__(self, path: Path):
        super().__init__()
        self.path = path
        for line in read_lines(path, REMEDY, growing=True):
            key, found = line.get("key"), line.get("answer")
            answer: Any = tuple(found) if isinstance(found, list) else found
            if len(line) != 2 or not isinstance(key, str) or not _is_answer(answer):
                raise ValueError(f"{str(path)!r} was changed: {str(line)[:80]} is no answer. {REMEDY}")
            super().__setitem__(key, answer)

    def __setitem__(self, key: str, answer: Answer) -> None:
        # the harness sets each one when it comes, and again at the end of its call
        if key not in self or self[key] != answer:
            append_line(self.path, {"key": key, "answer": answer})
            super().__setitem__(key, answer)

    def commit(self) -> None:
        """Nothing: the harness asks for it, and all is written."""


def _is_answer(found: object) -> bool:
    """A score is not NaN, nor too large for a float."""
    match found:
        case str():
            return True
        case (float() as score, bool()) | (float() | int() as score) if not isinstance(score, bool):
            return -sys.float_info.max <= score <= sys.float_info.max or score == -math.inf
    return False


class AnsweredLM(CachingLM):  # type: ignore[misc]
    """The harness's own cache around a model, over `Answers`: its own file holds pickles, and unpickling runs code."""

    def __init__(self, lm: Any, answers: Answers):
        # not the harness's, which opens that file
        self.lm, self.dbdict, self.cache_db = lm, answers, str(answers.path)
        lm.set_cache_hook(self.get_cache_hook())
