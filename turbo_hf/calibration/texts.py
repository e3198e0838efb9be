"""Texts to windows of tokens, read one file at a time."""

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch

SUFFIX = ".txt"
WANTED = "a .txt file, a folder of them, or (from Python) strings, such as the rows of a dataset"
LONGEST_NAME = 4096
CHARACTERS = 16
"""Characters read per token wanted; what is not needed is not tokenized."""


def files_of(source: str | Path | Iterable[str]) -> list[Path]:
    """The file that `source` is, or the .txt files of that folder; [] for strings.

    Raises:
        ValueError: no such file or folder, a file of another kind, a folder without texts, or none of all these.
    """
    if not isinstance(source, str | Path):
        if not isinstance(source, Iterable) or isinstance(source, Mapping | bytes):
            raise ValueError(f"texts must be {WANTED}; got {type(source).__name__}.")
        return []
    if isinstance(source, str) and (not source or len(source) > LONGEST_NAME or "\n" in source):
        raise ValueError(
            f"texts: a string names {WANTED}; this one has {len(source)} characters. Pass a text as [text]."
        )
    path = Path(source)
    # of a name too long for the system, too
    if not os.path.exists(path):
        raise ValueError(f"texts: there is no file or folder {str(path)!r}. Pass {WANTED}.")
    if path.is_file() and path.suffix != SUFFIX:
        raise ValueError(
            f"texts: {str(path)!r} is no {SUFFIX} file. Rename it if it is plain text; of another kind pass the texts "
            "that it holds, from Python."
        )
    files = sorted(p for p in path.rglob(f"*{SUFFIX}") if p.is_file()) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"texts: the folder {str(path)!r} holds no {SUFFIX} file.")
    return files


def _given(texts: Iterable[object]) -> Iterator[str]:
    """The strings that were passed, each checked when it is requested."""
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f"texts must hold strings; number {number} is {type(text).__name__}.")
        if text.endswith(SUFFIX) and os.path.exists(text):
            raise ValueError(
                f"texts: number {number}, {text!r}, names a file. Strings are texts themselves: pass its "
                "folder, or what it holds."
            )
        # half of a character is a ValueError: no tokenizer reads it
        text.encode()
        yield text


def _read(file: Path, characters: int) -> str:
    """About that many characters from the beginning of a file; no more of it is kept.

    Raises:
        ValueError: no UTF-8 text; the message names the file.
    """
    name = repr(str(file))
    try:
        # without the mark that some editors put before UTF-8
        with file.open(encoding="utf-8-sig") as opened:
            found = opened.read(characters)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"texts: {name} is no UTF-8 text: it has the byte 0x{error.object[error.start]:02x} where that cannot be. "
            "Convert it if it is text in another encoding, as by iconv -t UTF-8; binary files have no text."
        ) from error
    if "\0" in found:
        raise ValueError(
            f"texts: {name} is binary, or UTF-16 or UTF-32 text without a mark: it has zero bytes. Convert it if it is "
            "text, as by iconv -f UTF-16LE -t UTF-8."
        )
    return found


def token_windows(source: str | Path | Iterable[str], tokenizer: Any, window: int, windows: int) -> torch.Tensor:
    """int64 [W, window]: at most `windows` windows of tokens, each begun as the tokenizer begins a text.

    source: a .txt file, a folder of them, or strings, of which no more are taken than are needed. Files give equal
    shares, so that the last windows (which are held out) come from another text than the first.

    Raises:
        ValueError: no texts, files that are none (the message names them), or too few tokens for two windows.
    """
    files = files_of(source)
    prefix = list(tokenizer("")["input_ids"])
    body = window - len(prefix)
    # a tokenizer may end a text too: only what precedes it belongs at the start of a window
    if prefix and prefix[-1] == tokenizer.eos_token_id != tokenizer.bos_token_id:
        prefix, body = prefix[:-1], body + 1
    wanted = windows * body
    share = math.ceil(windows / len(files)) * body if files else wanted
    texts: Iterable[str] = (_read(file, share * CHARACTERS) for file in files)
    if not files and not isinstance(source, Path | str):
        texts = _given(source)
    found, short = [], []
    for text in texts:
        ids = tokenizer(text[: share * CHARACTERS], add_special_tokens=False, verbose=False)["input_ids"]
        whole = min(len(ids), share) // body * body
        found.append(ids[:whole])
        short.append(ids[whole : min(len(ids), share)])
        if sum(map(len, found)) + sum(map(len, short)) >= wanted and not files:
            break
    # the tails of texts together make the last windows
    stream = list(chain(*found, *short))[:wanted]
    rows = len(stream) // body
    if rows < 2:
        raise ValueError(
            f"the texts hold {len(stream)} tokens, too few for two windows of {window} (one to learn from, one held "
            "out). Give more text, or shorter windows (--window)."
        )
    ids = torch.tensor(stream[: rows * body]).view(rows, body)
    return torch.cat((torch.tensor(prefix, dtype=torch.int64).expand(rows, -1), ids), 1)
