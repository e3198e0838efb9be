"""The checkpoint that a model was loaded from: its tokenizer, other files. Nothing is downloaded."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils.hub import cached_file

CONFIG, TOKENIZER = "config.json", "tokenizer_config.json"
WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")


class Checkpoint(NamedTuple):
    """Where a model was loaded from.

    name: a folder or a Hub id; "" if the model knows none.
    commit: the Hub commit, where Transformers records it (up to 5.17); None: the branch main, or a folder.
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
        return None if names_a_folder(self.name) else hub_file(self.name, name, self.commit)


def checkpoint_of(model: PreTrainedModel) -> Checkpoint:
    """Where a model was loaded from."""
    name = str(getattr(model.config, "_name_or_path", "") or "")
    return Checkpoint(name, getattr(model.config, "_commit_hash", None))


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
