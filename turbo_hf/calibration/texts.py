"""Texts to windows of tokens, read one file, or one row of a dataset, at a time."""

import importlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

import torch

SUFFIXES = (".txt", ".jsonl")
DATASET = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(:[\w.-]+)?")
"""A Hub dataset: owner/name, or owner/name:configuration."""
WANTED = "a .txt or .jsonl file, a folder of them, a dataset of the Hub (owner/name), or (from Python) strings"
LONGEST_NAME = 4096
CHARACTERS = 16
"""Characters read per token wanted; what is not needed is not tokenized."""


def files_of(source: str | Path | Iterable[str]) -> list[Path]:
    """The file that `source` is, or the .txt and .jsonl files of that folder; [] for strings and the name of a dataset.

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
    there = os.path.exists(path)
    if not there and isinstance(source, str) and DATASET.fullmatch(source):
        return []
    if not there:
        raise ValueError(f"texts: there is no file or folder {str(path)!r}. Pass {WANTED}.")
    if path.is_file() and path.suffix not in SUFFIXES:
        raise ValueError(
            f"texts: {str(path)!r} is no {' or '.join(SUFFIXES)} file. Rename it if it is plain text; of another kind "
            "pass the texts that it holds, from Python."
        )
    files = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file()) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"texts: the folder {str(path)!r} holds no {' or '.join(SUFFIXES)} file.")
    return files


def _stream(name: str) -> Iterator[str]:
    """The texts of a Hub dataset, one row at a time; only what is read is downloaded."""
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError as error:
        raise ValueError(
            f"texts: there is no file or folder {name!r}, and to stream a dataset of that name the package datasets is "
            'needed. Install it with pip install "turbo_hf[eval]", or pass a path.'
        ) from error
    path, _, configuration = name.partition(":")
    try:
        rows = datasets.load_dataset(path, configuration or None, split="train", streaming=True)
        for row in rows:
            if not isinstance(row.get("text"), str):
                raise ValueError(f'rows have no column "text" of strings, but {", ".join(row)}.')
            yield row["text"]
    except (OSError, ValueError) as error:
        raise ValueError(
            f"texts: there is no file or folder {name!r}, and the dataset of that name cannot be read: {error}"
        ) from error


def _given(texts: Iterable[object]) -> Iterator[str]:
    """The strings that were passed, each checked when it is requested."""
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f"texts must hold strings; number {number} is {type(text).__name__}.")
        if text.endswith(SUFFIXES) and os.path.exists(text):
            raise ValueError(
                f"texts: number {number}, {text!r}, names a file. Strings are texts themselves: pass its "
                "folder, or what it holds."
            )
        # half of a character, which JSON can hold, is a ValueError: no tokenizer reads it
        text.encode()
        yield text


def _read(file: Path, characters: int) -> str:
    """About that many characters from the beginning of a file; no more of it is kept.

    Raises:
        ValueError: no UTF-8 text, or a line of a .jsonl file that is no text; the message names the file.
    """
    name = repr(str(file))
    try:
        # without the mark that some editors put before UTF-8
        with file.open(encoding="utf-8-sig") as opened:
            found = _rows(opened, name, characters) if file.suffix == ".jsonl" else opened.read(characters)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"texts: {name} is no UTF-8 text: it has the byte 0x{error.object[error.start]:02x} where that cannot be. "
            "Convert it if it is text in another encoding, as by iconv -t UTF-8; binary files have no text."
        ) from error
    if file.suffix != ".jsonl" and "\0" in found:
        raise ValueError(
            f"texts: {name} is binary, or UTF-16 or UTF-32 text without a mark: it has zero bytes. Convert it if it is "
            "text, as by iconv -f UTF-16LE -t UTF-8."
        )
    return found


def _rows(opened: TextIO, name: str, characters: int) -> str:
    """The texts of the first lines of a .jsonl file, about that many characters in all."""
    texts, left, number = [], characters, 0
    while left > 0 and (line := opened.readline()):
        number += 1
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
            if not isinstance(text, str):
                raise TypeError(f"the text is {type(text).__name__}")
            # half of a character, which JSON can hold, and no tokenizer reads
            text.encode()
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            why = f"it has no {error}" if isinstance(error, KeyError) else error
            raise ValueError(f'texts: line {number} of {name} is no JSON object with a "text" ({why}).') from error
        texts.append(text)
        left -= len(text)
    return "\n\n".join(texts)


def token_windows(source: str | Path | Iterable[str], tokenizer: Any, window: int, windows: int) -> torch.Tensor:
    """int64 [W, window]: at most `windows` windows of tokens, each begun as the tokenizer begins a text.

    source: a file, a folder of .txt and .jsonl files, a dataset, or strings. A line of a .jsonl file is an object with
    a "text". A dataset is named as on the Hub ("owner/name", or "owner/name:configuration"); the column "text" of its
    split "train" is streamed. Files give equal shares, so that the last windows (which are held out) come from another
    text than the first.

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
    if not files and not isinstance(source, Path):
        texts = _stream(source) if isinstance(source, str) else _given(source)
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
