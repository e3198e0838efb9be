"""A tree of plain values and tensors as one safetensors file, written whole or not at all; metadata hold the tree."""

import errno
import hashlib
import json
import math
import reprlib
from collections.abc import Callable, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from turbo_hf.config.expected import FLOATS, Each, OneOf, require
from turbo_hf.config.whole_files import MOST_JSON, open_file, write_whole
from turbo_hf.errors import Unsupported
from turbo_hf.ops.maths import checksum

ENTRY = "turbo_hf"
"""Of the file's metadata: the tree and what it says of the file, as JSON."""
TYPES = {str(x): x for x in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *FLOATS)}
MOST_DIMENSIONS, MOST_NUMBERS = 8, 2**56
"""Of a tensor; 0 in a shape counts as 1. Beyond it torch itself counts wrong."""
Tensors = dict[str, torch.Tensor]


class Kind(NamedTuple):
    """A kind of file.

    what: in words. file: its name. schema: the one that is written and read. remedy: ends errors about a file.
    """

    what: str
    file: str
    schema: int
    remedy: str


CACHE = Kind("cache", "turbo_cache.safetensors", 6, " Compute the prompt again, and save it anew.")


def flatten(value: Any, name: str, tensors: Tensors) -> Any:
    """A tree for JSON. Copies of its tensors are put into `tensors`, on the CPU, under names that begin with `name`.

    Raises:
        Unsupported: it holds something else than plain values, dtypes and tensors.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is torch.Tensor and value.dtype in TYPES.values():
        tensors[name] = value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        return {"tensor": name}
    if value in TYPES.values():
        return {"dtype": str(value)}
    if isinstance(value, Mapping):
        return {"map": [[key, flatten(x, f"{name}.{key}", tensors)] for key, x in value.items()]}
    if isinstance(value, list | tuple):
        return [flatten(x, f"{name}.{n}", tensors) for n, x in enumerate(value)]
    raise Unsupported(f"{name} of this cache is a {type(value).__name__}, which no file can hold: it is not saved.")


def unflatten(value: Any, take: Callable[[str], torch.Tensor]) -> Any:
    """The tree that `flatten` was given; its tensors are what `take` returns for their names.

    Raises:
        ValueError: `flatten` makes no such tree.
    """
    if isinstance(value, list):
        return [unflatten(x, take) for x in value]
    match value:
        case {"map": list(pairs), **more} if not more:
            require(pairs, Each([OneOf((str, int)), object]), "a map")
            if len({key for key, _ in pairs}) < len(pairs):
                raise ValueError("a map names an entry twice")
            return {key: unflatten(x, take) for key, x in pairs}
        case {"tensor": str(name), **more} if not more:
            return take(name)
        case {"dtype": str(name), **more} if not more and name in TYPES:
            return TYPES[name]
    require(value, OneOf((type(None), bool, int, float, str)), "an entry")
    return value


def facts_hash(facts: Mapping[str, Any]) -> str:
    """SHA-256 of all facts but the entry "sha256"."""
    hashed = {name: value for name, value in facts.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()


def signed(kind: Kind, facts: Mapping[str, Any], tensors: Tensors) -> dict[str, Any]:
    """The facts with what identifies a file of them: its kind, sums of its tensors, and a hash of all of it."""
    sums = {name: int(checksum(x)) for name, x in tensors.items()}
    whole = {"format": f"turbo_hf {kind.what}", "schema": kind.schema, **facts, "sums": sums}
    return {**whole, "sha256": facts_hash(whole)}


def write(folder: Path, kind: Kind, facts: Mapping[str, Any], tensors: Tensors) -> None:
    """Write the file, in place of a former one.

    Raises:
        ValueError: `folder` is a file.
        OSError: it cannot be written; the message names the file.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"folder must be a folder, or the name of a new one; {str(folder)!r} is a file.")
    metadata = {ENTRY: json.dumps(signed(kind, facts, tensors))}

    def save_to(path: Path) -> None:
        try:
            save_file(tensors, path, metadata)
        except SafetensorError as error:
            raise OSError(errno.EIO, str(error)) from error

    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / kind.file, save_to)


def read(folder: Path, kind: Kind, source: str) -> tuple[dict[str, Any], Tensors]:
    """The facts that `write` was given, and its tensors: views of the file, of which nothing is in memory yet. Whoever
    takes one compares its `checksum` with `facts["sums"]`.

    source: what errors call the folder.

    Raises:
        OSError: there is none.
        ValueError: it is damaged, or of another version.
    """
    path, saved = folder / kind.file, f"the {kind.what} saved in {source!r}"
    try:
        with BufferedReader(open_file(path)) as file:
            head = int.from_bytes(file.read(8), "little")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise OSError(f"there is no saved {kind.what} in {source!r}: the folder has no {kind.file}.") from error
    if head > MOST_JSON:
        raise ValueError(
            f"{saved} is damaged: {kind.file} begins with {head:,} bytes of JSON; {MOST_JSON:,} are read.{kind.remedy}"
        )
    tensors = {}
    try:
        with safe_open(path, "pt") as whole:
            content = (whole.metadata() or {}).get(ENTRY, "null")
            for name in whole.keys():  # noqa: SIM118 # no mapping
                shape = whole.get_slice(name).get_shape()
                if len(shape) > MOST_DIMENSIONS or math.prod(size or 1 for size in shape) > MOST_NUMBERS:
                    raise RuntimeError(f"the tensor {reprlib.repr(name)} has the shape {reprlib.repr(shape)}")
                tensors[name] = whole.get_tensor(name)
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(f"{saved} is damaged: {kind.file} cannot be read: {error}.{kind.remedy}") from error
    try:
        facts = json.loads(content)
        digest = facts_hash(facts) if isinstance(facts, dict) else None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{saved} is damaged: {kind.file} holds no JSON.{kind.remedy}") from error
    if digest is None or facts.get("format") != f"turbo_hf {kind.what}":
        raise ValueError(
            f"{saved} is damaged or old: {kind.file} does not say that it is a turbo_hf {kind.what}.{kind.remedy}"
        )
    if facts.get("schema") != kind.schema:
        schema = reprlib.repr(facts.get("schema"))
        raise ValueError(f"{saved} has schema {schema}; this version reads {kind.schema}.{kind.remedy}")
    if facts.get("sha256") != digest:
        raise ValueError(f"{saved} is damaged: {kind.file} is not as it was written.{kind.remedy}")
    return facts, tensors
