"""The identity of a run, so that it can be repeated or resumed, and is never mixed with another."""

import contextlib
import hashlib
import json
import os
import platform
import sys
import textwrap
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from turbo_hf.config.expected import require
from turbo_hf.config.whole_files import one_writer, read_object, write_whole
from turbo_hf.eval.bench.environment import facts
from turbo_hf.models.versions import version_of

META, LOCK = "run_meta.json", "run.lock"
RESULTS = ("*/answers.jsonl", "*/results.json")
"""What only a run with a `META` leaves in its folder."""
BY_METHOD = "calibrations"
CONFIGS = "config_files"
"""Fields of an identity with a value for each method that has one: a later command may bring other methods."""
SAMPLED = 64
"""Number of values of each weight that a model's fingerprint reads."""


def fingerprint(model: Any) -> str:
    """Fingerprint of a model's weights: names, shapes, dtypes, and 64 values of each weight, evenly spread."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        # of a tensor parallel model, gathered from all ranks
        flat = (weight.full_tensor() if hasattr(weight, "full_tensor") else weight).detach().reshape(-1)
        # one read from the device a weight; whole tensors would take minutes for a large model
        at = torch.linspace(0, max(0, flat.numel() - 1), min(SAMPLED, flat.numel()), dtype=torch.float64).long()
        digest.update(flat[at.to(flat.device)].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def vocabulary(tokenizer: Any) -> str | None:
    """Fingerprint of a tokenizer's tokens and ids; None without one."""
    if tokenizer is None:
        return None
    return _digest(sorted(tokenizer.get_vocab().items()))


def items_digest(tasks: dict[str, Any]) -> dict[str, str]:
    """Fingerprint of each task's prompts, settings and targets, in order; its requests have been built."""
    return {
        name: _digest([(r.doc_id, *map(str, r.args), str(task.doc_to_target(r.doc))) for r in task.instances])
        for name, task in sorted(tasks.items())
    }


def source_digest() -> str:
    """Fingerprint of the package's own code, which its version number does not tell apart."""
    root = Path(str(resources.files("turbo_hf")))
    # os.walk follows the links that a checkout has for patches/ and eval/
    files = [Path(at) / name for at, _, names in os.walk(root, followlinks=True) for name in names]
    sources = sorted((str(path.relative_to(root)), path.read_text("utf-8")) for path in files if path.suffix == ".py")
    return _digest(sources)


def _digest(what: Any) -> str:
    return hashlib.sha256(json.dumps(what, ensure_ascii=False).encode()).hexdigest()[:16]


def identity(model: Any, tokenizer: Any, tasks: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """What must be equal in all parts of a table, for JSON."""
    about = facts(model.device)
    packages = ("turbo_hf", "torch", "transformers", "lm_eval", "datasets", "triton", "numpy")
    return {
        **options,
        "model": Path(str(model.config._name_or_path)).name,
        "model_fingerprint": fingerprint(model),
        "tokenizer": vocabulary(tokenizer),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": about["gpu"] or model.device.type,
        "versions": {name: version_of(name) for name in packages} | {"python": platform.python_version()},
        "source": source_digest(),
        "tasks": items_digest(tasks),
    }


@contextlib.contextmanager
def only_run(folder: Path, what: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """`open_run`, and no other process in that folder until the end. OSError: there is one."""
    with one_writer(folder, LOCK):
        yield open_run(folder, what)


def open_run(folder: Path, what: dict[str, Any]) -> dict[str, Any]:
    """Begin a run in `folder`, or continue the one that is there.

    Args:
        folder: created if missing.
        what: from `identity`.

    Returns:
        The run's meta: identity, commit, and every command that wrote into the folder.

    Raises:
        ValueError: the folder holds a run of another model, version, data or choice, and the message names what
            differs; or one that does not say what it is of.
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / META
    meta: dict[str, Any] = {"identity": json.loads(json.dumps(what)), "commands": []}
    elsewhere = "It says which model, data and options the answers are of: restore it, or choose another --out."
    if path.exists():
        before = read_object(path, elsewhere)
        try:
            require(before, {**dict.fromkeys(before, object), "identity": dict, "commands": list}, "")
        except ValueError as error:
            raise ValueError(f"{str(path)!r} was changed: {error}. {elsewhere}") from error
        was, now = before["identity"], meta["identity"]
        for field in (BY_METHOD, CONFIGS):
            if isinstance(was.get(field), dict) and field in now:
                # a method that only one of the two has is nothing to differ in
                was[field], now[field] = now[field] | was[field], was[field] | now[field]
        changed = _differences(was, now)
        if changed:
            raise ValueError(
                f"{folder} holds a run that cannot be continued by this one: {'; '.join(changed)}. "
                "Results of different runs are not merged: choose another --out, or restore what it was."
            )
        meta = before
    elif any(any(folder.glob(pattern)) for pattern in RESULTS):
        raise ValueError(f"{str(folder)!r} holds results, but no {META}. {elsewhere}")
    meta["commit"] = facts(torch.device("cpu"))["commit"]
    meta["commands"].append({"argv": sys.argv, "began": datetime.now(UTC).isoformat(timespec="seconds")})
    write_whole(path, json.dumps(meta, indent=1))
    return meta


def _short(value: Any) -> str:
    return textwrap.shorten(str(value), 200, placeholder=" [...]")


def _differences(before: dict[str, Any], now: dict[str, Any], under: str = "") -> list[str]:
    found = []
    for key in sorted({*before, *now}):
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            found += _differences(old, new, f"{under}{key}.")
        elif old != new:
            found.append(f"{under}{key} was {_short(old)}, now {_short(new)}")
    return found
