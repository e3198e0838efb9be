"""The answers of one method, kept as they come: a run that was killed goes on at its next unanswered item."""

import json
import math
import sqlite3
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.model import hash_args

from turbo_hf.config.whole_files import open_file

Answer = str | float | tuple[float, bool]
"""A reply, the log-likelihood of a text, or that of a continuation and whether greedy decoding gives it."""

TABLE = "unnamed"
MAKE = f'CREATE TABLE "{TABLE}" (key TEXT PRIMARY KEY, value BLOB)'
"""File and table are those of the harness's own cache, `CachingLM`, which keeps pickles there: unpickling runs code."""
SCHEMA = [("index", f"sqlite_autoindex_{TABLE}_1", None), ("table", TABLE, MAKE)]

REMEDY = "Delete it, and the same command asks its items anew; do not use one whose origin you do not know."


class Answers:
    """Answers by the hash of their request, in an SQLite file as JSON.

    Raises:
        ValueError: the file is torn, or holds anything but such answers; the message names it.
    """

    def __init__(self, path: Path):
        self.path = path
        self._known: dict[str, Answer] = {}
        if path.exists():
            # a pipe or a device is none
            open_file(path).close()
        try:
            self._file = sqlite3.connect(path, isolation_level=None)
        except sqlite3.Error as error:
            raise OSError(f"{str(path)!r}, the answers so far, cannot be opened: {error}.") from error
        try:
            self._open()
        except (sqlite3.Error, ValueError, RecursionError) as error:
            self._file.close()
            raise ValueError(f"{str(path)!r}, the answers so far, is torn or was changed: {error}. {REMEDY}") from error

    def _open(self) -> None:
        # a file from elsewhere may bring triggers and views along
        self._file.execute("PRAGMA trusted_schema = OFF")
        # a process that ends leaves whole answers; a power loss may leave a torn file
        self._file.execute("PRAGMA synchronous = OFF")
        self._file.execute("PRAGMA cell_size_check = ON")
        asked = "SELECT type, name, sql FROM sqlite_master ORDER BY type"
        if not self._file.execute(asked).fetchall():
            self._file.execute(MAKE)
        if self._file.execute(asked).fetchall() != SCHEMA:
            raise ValueError(f"it has other tables than {TABLE!r}")
        for key, value in self._file.execute(f'SELECT key, value FROM "{TABLE}"'):
            self._known[key] = _answer(key, value)

    def __contains__(self, key: str) -> bool:
        return key in self._known

    def __getitem__(self, key: str) -> Answer:
        return self._known[key]

    def add(self, key: str, answer: Answer) -> None:
        """Keep an answer. OSError: it cannot be written; the message names the file."""
        try:
            self._file.execute(f'REPLACE INTO "{TABLE}" VALUES (?, ?)', (key, json.dumps(answer)))
        except sqlite3.Error as error:
            raise OSError(
                f"{str(self.path)!r}, the answers so far, cannot be written: {error}. What is there stays; the same "
                "command goes on with the rest."
            ) from error
        self._known[key] = answer

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _answer(key: object, value: object) -> Answer:
    if isinstance(value, bytes):
        raise ValueError("it holds pickles, as those of earlier versions, which are not read because they can run code")
    if not isinstance(key, str) or not isinstance(value, str):
        raise ValueError(f"it holds {type(value).__name__} by {type(key).__name__}, and should hold JSON by text")
    try:
        found = json.loads(value)
    except ValueError as error:
        raise ValueError(f"an answer is no JSON ({error})") from error
    match found:
        case str():
            return found
        case float() | int() if not isinstance(found, bool) and _is_number(found):
            return found
        case [float() as score, bool() as greedy] if _is_number(score):
            return score, greedy
    raise ValueError(f"it holds {value[:60]!r}, which is no answer")


def _is_number(score: float) -> bool:
    """Whether it is one that a log-likelihood can be: not NaN, nor too large for a float."""
    return -sys.float_info.max <= score <= sys.float_info.max or score == -math.inf


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
