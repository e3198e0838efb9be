"""The checkpoint that a model was loaded from: its commit, its tokenizer, other files. Nothing is downloaded."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils.hub import cached_file

CONFIG, TOKENIZER = "config.json", "tokenizer_config.json"
WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")


class Checkpoint(NamedTuple):
    """Where a model was loaded from.

    name: a folder or a Hub id; "" if the model knows none.
    commit: the Hub commit, 40 hex digits; None for a folder, and for anything not in the Hub cache.
    """

    name: str
    commit: str | None = None

    def file(self, name: str) -> str | None:
        """The path of one of its files; None: no file of that name is available here."""
        if not self.name:
            return None
        if os.path.isdir(self.name):
            path = Path(self.name) / name
            return str(path) if path.is_file() else None
        return _in_cache(self.name, name, self.commit)


def checkpoint_of(model: PreTrainedModel, revision: str | None = None) -> Checkpoint:
    """Where a model was loaded from. Transformers up to 5.17 records the commit, 5.23 does not.

    revision: the branch, tag or commit that it was loaded from; None: the one Transformers records, else main.

    Raises:
        ValueError: a revision for a model that is not from the Hub, one that is not in the Hub cache, or one that
            differs from the one Transformers records.
    """
    name = str(getattr(model.config, "_name_or_path", "") or "")
    held = getattr(model.config, "_commit_hash", None)
    of_hub = bool(name) and not os.path.isdir(name) and not names_a_folder(name)
    if revision is None:
        return Checkpoint(name, held) if held or not of_hub else Checkpoint(name, _commit(name, None))
    if not isinstance(revision, str):
        raise ValueError(f"revision must be a branch, tag or commit, as text; got {revision!r}.")
    if not of_hub:
        raise ValueError(
            f"revision is of a model from the Hub; this one is from {repr(name) if name else 'no checkpoint'}. Leave "
            f"revision={revision!r} out."
        )
    found = _commit(name, revision)
    if found is None:
        raise ValueError(
            f"revision {revision!r} of {name!r} is not in the Hub's cache, {constants.HF_HUB_CACHE!r}, the only "
            "place that is searched. Pass the one by which the model was loaded, or leave it out."
        )
    if held not in (None, found):
        raise ValueError(f"the model was loaded by revision {held[:12]}; {revision!r} is {found[:12]}.")
    return Checkpoint(name, found)


def _commit(name: str, revision: str | None) -> str | None:
    found = _in_cache(name, CONFIG, revision)
    return None if found is None else Path(found).parent.name


def _in_cache(name: str, file: str, revision: str | None) -> str | None:
    """None also for a name that no repository can have."""
    return None if names_a_folder(name) else hub_file(name, file, revision)


def hub_file(name: str, file: str, revision: str | None = None, *, fetch: bool = False) -> str | None:
    """The path of a file of a Hub repository; None: there is none. fetch: it may be downloaded."""
    found: str | None = cached_file(
        name,
        file,
        revision=revision,
        local_files_only=not fetch,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        _raise_exceptions_for_gated_repo=False,
    )
    return found


def names_a_folder(name: str) -> bool:
    """Whether it cannot be a Hub repository."""
    try:
        try_to_load_from_cache(name, CONFIG)
    except HFValidationError:
        return True
    return False


def own_tokenizer(checkpoint: Checkpoint, tell: Callable[[str], None]) -> Any:
    """The tokenizer stored with a checkpoint; None: there is none, or it cannot be read, which `tell` reports."""
    if checkpoint.file(TOKENIZER) is None:
        return None
    try:
        return AutoTokenizer.from_pretrained(checkpoint.name, revision=checkpoint.commit, local_files_only=True)
    except Exception as error:  # whatever its files, or a package that they need, make of it
        message = f"the tokenizer beside {checkpoint.name!r} cannot be read, so that none is compared with it: {error}"
        tell(message)
        return None


def other_tokenizer(tokenizer: Any, own: Any) -> str | None:
    """Why `tokenizer` is not a model's `own`, to which tokens may have been added; None: it is."""
    known = tokenizer.get_vocab()
    for token, number in own.get_vocab().items():
        if known.get(token) != number:
            return f"it has token {token!r} as {known.get(token)}, and the one beside the checkpoint as {number}"
    return None
