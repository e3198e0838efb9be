"""The checkpoint that a model was loaded from: its commit, its tokenizer, other files. Nothing is downloaded."""

import hashlib
import json
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils.hub import cached_file

CONFIG, TOKENIZER = "config.json", "tokenizer_config.json"


class Checkpoint(NamedTuple):
    """name: a folder, or an id of the Hub; "" where the model knows none. commit: of the Hub's, 40 hex digits; None for
    a folder, and for what is not in the Hub's cache. told: the commit is known; else it is that of the branch main,
    which is loaded where nobody asks for another."""

    name: str
    commit: str | None = None
    told: bool = True

    def file(self, name: str) -> str | None:
        """The path of one of its files; None: it has none of that name here."""
        if not self.name:
            return None
        if Path(self.name).is_dir():
            return str(Path(self.name) / name) if (Path(self.name) / name).is_file() else None
        return None if names_a_folder(self.name) else _in_cache(self.name, name, self.commit)

    def doubt(self, file: str) -> str | None:
        """A sentence where it matters for `file` that the commit is not told: other revisions have another, or none."""
        held = None if self.told or self.commit is None else _in_cache(self.name, CONFIG, self.commit)
        if held is None:
            return None
        own = Path(held).parent
        others = [each for each in own.parent.iterdir() if each != own and (each / CONFIG).is_file()]
        if all(_content(each / file) == _content(own / file) for each in others):
            return None
        return (
            f"the Hub's cache holds revisions of {self.name!r} that differ in {file}, and Transformers does not say "
            "which of them this model is: it is taken for main. Pass revision= to say so, or to name another."
        )


def checkpoint_of(model: PreTrainedModel, revision: str | None = None) -> Checkpoint:
    """Where a model was loaded from. Transformers up to 5.17 tells the commit, 5.23 does not.

    revision: the branch, tag or commit that it was loaded by; None: what Transformers says, else main.

    Raises:
        ValueError: a revision of a model that is not of the Hub, that is not in the Hub's cache, or that is not the one
            that Transformers tells.
    """
    name = str(getattr(model.config, "_name_or_path", "") or "")
    held = getattr(model.config, "_commit_hash", None)
    of_hub = bool(name) and not Path(name).is_dir() and not names_a_folder(name)
    if revision is None:
        return Checkpoint(name, held) if held or not of_hub else Checkpoint(name, _commit(name, None), False)
    if not of_hub:
        raise ValueError(
            f"revision names one of a repository of the Hub; this model is of {repr(name) if name else 'no checkpoint'}"
            f", and {revision!r} says nothing of it. Leave it out."
        )
    found = _commit(name, revision)
    if found is None:
        raise ValueError(
            f"revision {revision!r} of {name!r} is not in the Hub's cache. Pass the one by which the model was loaded."
        )
    if held not in (None, found):
        raise ValueError(f"the model was loaded by revision {held[:12]}; {revision!r} is {found[:12]}.")
    return Checkpoint(name, found)


def _commit(name: str, revision: str | None) -> str | None:
    found = _in_cache(name, CONFIG, revision)
    return None if found is None else Path(found).parent.name


def _in_cache(name: str, file: str, revision: str | None) -> str | None:
    found: str | None = cached_file(
        name,
        file,
        revision=revision,
        local_files_only=True,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        _raise_exceptions_for_gated_repo=False,
    )
    return found


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def names_a_folder(name: str) -> bool:
    """Whether it cannot be a repository of the Hub."""
    return name.count("/") > 1 or name.startswith((".", "/", "~"))


def own_tokenizer(checkpoint: Checkpoint) -> Any:
    """The tokenizer beside a checkpoint; None: there is none, or, with a warning, it cannot be read."""
    if checkpoint.file(TOKENIZER) is None:
        return None
    try:
        return AutoTokenizer.from_pretrained(checkpoint.name, revision=checkpoint.commit, local_files_only=True)
    except Exception as error:  # whatever its files, or a package that they need, make of it
        message = f"the tokenizer beside {checkpoint.name!r} cannot be read, so that none is compared with it: {error}"
        warnings.warn(message, stacklevel=2)
        return None


def other_tokenizer(tokenizer: Any, own: Any) -> str | None:
    """Why `tokenizer` is not a model's `own`, to which tokens may have been added; None: it is."""
    known = tokenizer.get_vocab()
    for token, number in own.get_vocab().items():
        if known.get(token) != number:
            return f"it has token {token!r} as {known.get(token)}, and the one beside the checkpoint as {number}"
    return None


def tokenizer_hash(tokenizer: Any) -> str:
    """SHA-256 of a tokenizer's vocabulary."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=True)
    return hashlib.sha256(vocabulary.encode()).hexdigest()
