"""The answers of one method, kept as they come: a run that was killed goes on at its next unanswered item. The identity
of a run: what must be equal in all parts of a table."""

import hashlib
import json
import math
import os
import platform
import sys
from dataclasses import asdict, dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

from lm_eval.api.model import CachingLM, hash_args

from turbo_hf.cache.saved_cache import weights_digest
from turbo_hf.config.whole_files import append_line, read_lines
from turbo_hf.eval.bench.runner import facts
from turbo_hf.models.versions import version_of
from turbo_hf.ranks import ranks_of

Answer = str | float | tuple[float, bool]
"""A reply, the log-likelihood of a text, or that of a continuation and whether greedy decoding gives it."""

KINDS: dict[str, Any] = {"generate_until": str, "loglikelihood": tuple, "loglikelihood_rolling": float | int}
"""What answers each kind of request."""

NAMED = 5
"""Differences between two runs that an error names."""

REMEDY = "Delete it, and the same command asks its items anew; do not use one whose origin you do not know."


@dataclass(frozen=True, slots=True)
class Batch:
    """What one call of `generate` took.

    rows: number of prompts.
    new_tokens: generated tokens, without those after a row's end token.
    seconds: of the whole call.
    kv_bytes: of the cache when it returned; computed for a simulated one.
    kv_tokens: what the cache holds, padding included only for a dense cache, which stores it.
    keys: since the batch before, the keys that decode steps of sparse layers could have read, those among them that
        are always read, and those that were read; None without sparse layers.
    """

    rows: int
    new_tokens: int
    seconds: float
    kv_bytes: int
    kv_tokens: int
    keys: tuple[int, int, int] | None = None


class Answers(dict[str, Answer]):
    """Answers by the hash of their request, and the batches of `generate` that gave them.

    Lines of JSON: first the identity of what they are of, then each answer and batch, written as soon as it is there.

    Args:
        path: of the file; made if missing.
        about: from `identity`, and what is the method's own.

    Raises:
        ValueError: the file is of another model, version, data or choice, and the message names what differs; or it
            holds anything but answers and batches.
        OSError: a line cannot be written; the message names the file.
    """

    def __init__(self, path: Path, about: dict[str, Any]):
        super().__init__()
        self.path, self.batches = path, list[Batch]()
        lines, about = read_lines(path, REMEDY), json.loads(json.dumps(about))
        if not lines:
            path.parent.mkdir(parents=True, exist_ok=True)
            append_line(path, {"identity": about})
        elif not isinstance(was := lines[0].get("identity"), dict):
            raise ValueError(
                f"{str(path)!r} does not begin with what its answers are of: another version wrote it, or it was "
                "changed. Choose another --out."
            )
        elif changed := differences(was, about):
            more = [f"and {len(changed) - NAMED} more"] if len(changed) > NAMED else []
            raise ValueError(
                f"{str(path)!r} is of a run that cannot be continued by this one: "
                f"{'; '.join([*changed[:NAMED], *more])}. Results of different runs "
                "are not merged: choose another --out, or restore what it was."
            )
        for line in lines[1:]:
            match line:
                case {"key": str() as key, "answer": answer} if len(line) == 2 and _is_answer(answer):
                    super().__setitem__(key, tuple(answer) if isinstance(answer, list) else answer)
                case {"batch": own} if len(line) == 1 and (batch := _batch(own)) is not None:
                    self.batches.append(batch)
                case _:
                    raise self.damaged(line)

    def damaged(self, what: object) -> ValueError:
        """The error of a file that holds `what` in an answer's place."""
        return ValueError(f"{str(self.path)!r} was changed: {repr(what)[:80]} is no answer. {REMEDY}")

    def __setitem__(self, key: str, answer: Answer) -> None:
        # the harness sets each one when it comes, and again at the end of its call
        if key not in self or self[key] != answer:
            append_line(self.path, {"key": key, "answer": answer})
            super().__setitem__(key, answer)

    def keep(self, batch: Batch) -> None:
        """Keep what a call of `generate` took."""
        append_line(self.path, {"batch": asdict(batch)})
        self.batches.append(batch)

    def commit(self) -> None:
        """Nothing: the harness asks for it, and all is written."""


def _is_answer(found: object) -> bool:
    """A score is not NaN, nor too large for a float."""
    match found:
        case str():
            return True
        case [float() as score, bool()] | (float() | int() as score) if not isinstance(score, bool):
            return -sys.float_info.max <= score <= sys.float_info.max or score == -math.inf
    return False


def _batch(own: Any) -> Batch | None:
    """None: no batch."""
    if not isinstance(own, dict) or set(own) != {field.name for field in fields(Batch)}:
        return None
    keys = own["keys"]
    if keys is not None and not (isinstance(keys, list) and len(keys) == 3):
        return None
    counts = [*(own[name] for name in ("rows", "new_tokens", "kv_bytes", "kv_tokens")), *(keys or ())]
    right = all(type(count) is int and 0 <= count < 1 << 62 for count in counts) and own["rows"]
    timed = type(own["seconds"]) is float and 0 <= own["seconds"] < math.inf
    return Batch(**{**own, "keys": keys and tuple(keys)}) if right and timed else None


class AnsweredLM(CachingLM):  # type: ignore[misc]
    """The harness's own cache around a model, over `Answers`: its own file holds pickles, and unpickling runs code."""

    def __init__(self, lm: Any, answers: Answers):
        # not the harness's, which opens that file
        self.lm, self.dbdict, self.cache_db = lm, answers, str(answers.path)
        lm.set_cache_hook(self.get_cache_hook())

    def __getattr__(self, attr: str) -> Any:
        answer = super().__getattr__(attr)
        if attr not in KINDS:
            return answer

        def checked(requests: list[Any]) -> Any:
            for request in requests:
                kept = self.dbdict.get(hash_args(attr, request.args))
                if not isinstance(kept, KINDS[attr] | None):
                    raise self.dbdict.damaged(kept)
            return answer(requests)

        return checked


PACKAGES = ("turbo_hf", "torch", "transformers", "lm_eval", "datasets", "triton", "numpy")


def _digest(what: Any) -> str:
    return hashlib.sha256(json.dumps(what, ensure_ascii=False).encode()).hexdigest()[:16]


def _items(task: Any) -> str:
    """Fingerprint of a task's prompts, settings and targets, in order; its requests have been built."""
    return _digest([(r.doc_id, *map(str, r.args), str(task.doc_to_target(r.doc))) for r in task.instances])


def _source() -> str:
    """Fingerprint of the package's own code, which its version number does not tell apart."""
    root = Path(str(resources.files("turbo_hf")))
    # os.walk follows the links that a checkout has for patches/ and eval/
    files = [Path(at) / name for at, _, names in os.walk(root, followlinks=True) for name in names]
    return _digest(sorted((str(x.relative_to(root)), x.read_text("utf-8")) for x in files if x.suffix == ".py"))


def identity(model: Any, tokenizer: Any, tasks: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Model, data, versions and `options`, for JSON; of a model that processes share, as the first one sees it."""
    about = facts(model.device)
    found = {
        **options,
        "model": Path(str(model.config._name_or_path)).name,
        "model_fingerprint": weights_digest(model)[:16],
        "tokenizer": _digest(sorted(tokenizer.get_vocab().items())),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": about["gpu"] or model.device.type,
        "versions": {name: version_of(name) for name in PACKAGES} | {"python": platform.python_version()},
        "source": _source(),
        "tasks": {name: _items(task) for name, task in sorted(tasks.items())},
    }
    plain: dict[str, Any] = json.loads(ranks_of(model).texts(json.dumps(found))[0])
    return plain


def differences(before: dict[str, Any], now: dict[str, Any], under: str = "") -> list[str]:
    """What differs between two identities, each a short text."""
    found = []
    for key in sorted({*before, *now}):
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            found += differences(old, new, f"{under}{key}.")
        elif old != new:
            # of a file that anyone may have written: no escape sequence reaches the terminal
            name = _short(f"{under}{key}").strip("'\"")
            found.append(f"{name} was {_short(old)}, now {_short(new)}")
    return found


def _short(what: object) -> str:
    text = repr(what)
    return text if len(text) <= 200 else f"{text[:200]} [...]"
