"""The identity of a run: what must be equal in all parts of a table."""

import hashlib
import json
import os
import platform
from importlib import resources
from pathlib import Path
from typing import Any

from turbo_hf.cache.saved_cache import weights_digest
from turbo_hf.eval.bench.runner import facts
from turbo_hf.models.versions import version_of
from turbo_hf.ranks import ranks_of

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
