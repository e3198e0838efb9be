"""A tree of plain values and tensors as JSON and one safetensors file, written whole or not at all.

The tensors' file has a name of its own for each content, and the JSON names it: the JSON is replaced last, and counts.
"""

import json
import math
import os
import reprlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import torch

from turbo_hf.config.expected import Each, OneOf, Whole, require
from turbo_hf.config.whole_files import (
    MOST_JSON,
    PARTIAL,
    FactsFile,
    checked_facts,
    facts_hash,
    one_writer,
    open_file,
    read_file,
    write_whole,
)
from turbo_hf.errors import Unsupported

FORMAT, SCHEMA = "turbo_hf cache", 3
FACTS, TENSORS = "turbo_cache.json", "turbo_cache.{}.safetensors"
LOCK, WAIT = f"{FACTS}.lock", 60.0
"""Held while the files are replaced, and how many seconds another process waits for that."""
AGAIN = " Compute the prompt again, and save it anew."
SAVED = FactsFile(FACTS, FORMAT, SCHEMA, "sha256", AGAIN, AGAIN)
LINE = 4096
"""Bytes that `checksum` adds up before it weighs their sum by its place."""
READERS, CHUNK = 8, 8 << 20
"""Threads that read for a GPU, and the bytes that are sent to it at a time."""
NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}
"""Types as safetensors names them."""
TYPES = {name: dtype for dtype, name in NAMES.items()}
MOST_DIMENSIONS, MOST_NUMBERS = 8, 2**56
"""The most of a tensor; 0 in a shape counts as 1. Beyond them torch itself counts wrong."""
LISTED = [str, OneOf(tuple(TYPES)), Each(Whole(0, 2**40)), int]
"""A tensor in the JSON: name, type, shape, checksum."""


class Picked(NamedTuple):
    """The rows `rows` of x, int64 on its device, which are copied only when they are written."""

    x: torch.Tensor
    rows: torch.Tensor

    def whole(self) -> torch.Tensor:
        """The rows."""
        return self.x.index_select(0, self.rows)


Tensors = dict[str, torch.Tensor | Picked]


def _whole(x: torch.Tensor | Picked) -> torch.Tensor:
    return x.whole() if isinstance(x, Picked) else x


def flatten(value: Any, name: str, tensors: Tensors) -> Any:
    """A tree for JSON. Its tensors are put into `tensors`, under names that begin with `name`.

    Raises:
        Unsupported: it holds something else than plain values, dtypes, devices and tensors.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor | Picked):
        x = value if isinstance(value, torch.Tensor) else value.x
        if x.dtype in NAMES and type(x) is torch.Tensor:
            tensors[name] = value
            return {"tensor": name}
    if isinstance(value, torch.dtype) and value in NAMES:
        return {"dtype": NAMES[value]}
    if isinstance(value, torch.device):
        # of the tensors, wherever they will be
        return {"device": None}
    if isinstance(value, Mapping):
        return {"map": [[key, flatten(x, f"{name}.{key}", tensors)] for key, x in value.items()]}
    if isinstance(value, list | tuple):
        return [flatten(x, f"{name}.{n}", tensors) for n, x in enumerate(value)]
    raise Unsupported(f"{name} of this cache is a {type(value).__name__}, which no file can hold: it is not saved.")


def unflatten(value: Any, device: torch.device, take: Callable[[str, torch.device], torch.Tensor]) -> Any:
    """The tree that `flatten` was given; its tensors are what `take` returns for their names, on `device`.

    Raises:
        ValueError: `flatten` makes no such tree.
    """
    if isinstance(value, list):
        return [unflatten(x, device, take) for x in value]
    match value:
        case {"map": list(pairs), **more} if not more:
            require(pairs, Each([OneOf((str, int)), object]), "a map")
            if len({key for key, _ in pairs}) < len(pairs):
                raise ValueError("a map names an entry twice")
            return {key: unflatten(x, device, take) for key, x in pairs}
        case {"tensor": str(name), **more} if not more:
            return take(name, device)
        case {"dtype": str(name), **more} if not more and name in TYPES:
            return TYPES[name]
        case {"device": None, **more} if not more:
            return device
    require(value, OneOf((type(None), bool, int, float, str)), "an entry")
    return value


def checksum(x: torch.Tensor) -> torch.Tensor:
    """int64 [] on x's device: changes with any byte of x, and where lines of it change places. Exact on each device."""
    flat = x.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % 8:
        flat = flat.clone()
    whole = flat.numel() // LINE * LINE
    rest = torch.nn.functional.pad(flat[whole:], (0, LINE - flat.numel() + whole)).view(torch.int64)
    sums = torch.cat((flat[:whole].view(torch.int64).view(-1, LINE // 8).sum(1), rest.sum().view(1)))
    return (sums * torch.arange(1, 2 * len(sums), 2, device=x.device)).sum()


def checksums(tensors: Iterable[torch.Tensor]) -> list[int]:
    """`checksum` of each; one read from each device."""
    found = [checksum(x) for x in tensors]
    read: dict[int, int] = {}
    for device in {x.device for x in found}:
        here = [n for n, x in enumerate(found) if x.device == device]
        read |= zip(here, torch.stack([found[n] for n in here]).tolist(), strict=True)
    return [read[n] for n in range(len(found))]


def _head(listed: Sequence[Any]) -> bytes:
    """The beginning of a safetensors file that holds [name, type, shape, ...] in this order."""
    head, end = {}, 0
    for name, kind, shape, *_ in listed:
        begin, end = end, end + math.prod(shape) * TYPES[kind].itemsize
        head[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(head).encode()
    # data begin at a multiple of 8 bytes
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes(x: torch.Tensor) -> Any:
    return x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def write(folder: Path, facts: Mapping[str, Any], tensors: Tensors) -> None:
    """Write both files, tensor by tensor; what the folder held of such files before is replaced as a whole.

    Raises:
        ValueError: `folder` is a file.
        OSError: it cannot be written, or another process writes there; the message names the file.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"folder must be a folder, or the name of a new one; {str(folder)!r} is a file.")
    found = {name: _whole(x) for name, x in tensors.items() if not isinstance(x, Picked)}
    sums = dict(zip(found, checksums(found.values()), strict=True))
    listed = []
    for name, x in tensors.items():
        shape = list(x.shape) if isinstance(x, torch.Tensor) else [len(x.rows), *x.x.shape[1:]]
        dtype = x.dtype if isinstance(x, torch.Tensor) else x.x.dtype
        total = sums[name] if name in sums else checksums([_whole(x)])[0]
        listed.append([name, NAMES[dtype], shape, total])
    whole = {"format": FORMAT, "schema": SCHEMA, **facts, "tensors": listed}
    digest = facts_hash(whole, SAVED.digest)
    path = folder / TENSORS.format(digest[:16])
    with one_writer(folder, LOCK, WAIT):
        try:
            write_whole(path, _content(listed, tensors))
            write_whole(folder / FACTS, json.dumps({**whole, "sha256": digest}) + "\n")
        finally:
            _settle(folder)


def _content(listed: Sequence[Any], tensors: Tensors) -> Iterator[Any]:
    yield _head(listed)
    for x in tensors.values():
        yield _bytes(_whole(x))


def _settle(folder: Path) -> None:
    """Remove the tensors that no JSON names; only for the one that holds the lock."""
    try:
        named = str(json.loads((folder / FACTS).read_bytes())["sha256"])[:16]
    except (OSError, ValueError, TypeError, KeyError):
        named = ""
    keep = TENSORS.format(named)
    # as `write` names them: a user's own files may have similar names
    own = TENSORS.format("[0-9a-f]" * 16)
    for pattern in (own, f"{own}.*{PARTIAL}", f"{FACTS}.*{PARTIAL}"):
        for left in folder.glob(pattern):
            if left.name != keep:
                left.unlink()


class Read(NamedTuple):
    """What a folder holds. file: of the tensors, to be closed; from `begin` on it has those of `facts["tensors"]`."""

    facts: dict[str, Any]
    file: FileIO
    begin: int
    damaged: str

    def take(self, trees: Iterable[tuple[Any, torch.device]]) -> tuple[list[Any], dict[str, torch.Tensor]]:
        """These parts of the facts, each with tensors of a device, not yet filled; and those tensors by name.

        Raises:
            ValueError: they do not name each tensor once.
        """
        listed = {name: (TYPES[kind], shape) for name, kind, shape, _ in self.facts["tensors"]}
        taken: dict[str, torch.Tensor] = {}

        def take(name: str, device: torch.device) -> torch.Tensor:
            if name in taken or name not in listed:
                raise ValueError(f"the tensor {reprlib.repr(name)} is named twice, or is not there")
            dtype, shape = listed[name]
            if len(shape) > MOST_DIMENSIONS or math.prod(size or 1 for size in shape) > MOST_NUMBERS:
                raise ValueError(f"the tensor {name!r} has the shape {reprlib.repr(shape)}")
            taken[name] = torch.empty(shape, dtype=dtype, device=device)
            return taken[name]

        found = [unflatten(tree, device, take) for tree, device in trees]
        if len(taken) != len(self.facts["tensors"]):
            raise ValueError(f"it has {len(self.facts['tensors'])} tensors, and its layers name {len(taken)}")
        return found, taken

    def fill(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Read the tensors of these names. ValueError: they are not as they were written."""
        at, lanes, wanted = self.begin, dict[torch.device, _Lane](), []
        try:
            for name, kind, shape, total in self.facts["tensors"]:
                target = targets[name].reshape(-1).view(torch.uint8)
                if target.is_cuda and target.device not in lanes:
                    lanes[target.device] = _Lane(self.file, target.device)
                if target.is_cuda:
                    lanes[target.device].send(at, target)
                else:
                    _read_into(self.file, at, target)
                at += math.prod(shape) * TYPES[kind].itemsize
                wanted.append(total)
        finally:
            for lane in lanes.values():
                lane.finish()
        if checksums(targets[name] for name, *_ in self.facts["tensors"]) != wanted:
            raise ValueError("its tensors are not as they were written")


def _read_into(file: FileIO, at: int, target: torch.Tensor) -> None:
    """Bytes from `at` on into `target`, uint8 [n] of the host. What the file lacks stays, and its checksum differs."""
    data: Any = target.numpy()
    left = memoryview(data)
    while left:
        count = os.preadv(file.fileno(), [left], at)
        if not count:
            return
        left, at = left[count:], at + count


class _Lane:
    """A file's bytes on their way to a GPU: threads read them to pinned memory, from where they are sent in turn.

    One thread alone is slower than the way to the GPU, and so is memory that is mapped, for its page faults.
    """

    def __init__(self, file: FileIO, device: torch.device):
        self._file, self._device, self._count = file, device, 0
        self._threads = ThreadPoolExecutor(READERS)
        self._pinned = torch.empty(2 * READERS, CHUNK, dtype=torch.uint8, pin_memory=True)
        self._sent = [torch.cuda.Event() for _ in self._pinned]
        self._coming: deque[tuple[Future[None], int, torch.Tensor]] = deque()

    def send(self, at: int, target: torch.Tensor) -> None:
        """The bytes from `at` on to `target`, uint8 [n]; done after `finish`."""
        for place in target.split(CHUNK):
            if len(self._coming) == READERS:
                self._pass_on()
            slot, self._count = self._count % len(self._sent), self._count + 1
            self._sent[slot].synchronize()
            read = self._threads.submit(_read_into, self._file, at, self._pinned[slot, : len(place)])
            self._coming.append((read, slot, place))
            at += len(place)

    def _pass_on(self) -> None:
        read, slot, place = self._coming.popleft()
        read.result()
        with torch.cuda.device(self._device):
            place.copy_(self._pinned[slot, : len(place)], non_blocking=True)
            self._sent[slot].record()

    def finish(self) -> None:
        """Send what is left."""
        try:
            while self._coming:
                self._pass_on()
        finally:
            self._threads.shutdown()


def read(folder: Path) -> Read:
    """The files of a folder, which another process may be replacing. Tensors are not read yet.

    Raises:
        OSError: there are none.
        ValueError: they are damaged, or of another version.
    """
    while True:
        try:
            content = read_file(folder / FACTS, MOST_JSON)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise OSError(f"there is no saved cache in {str(folder)!r}: the folder has no {FACTS}.") from error
        try:
            return _read(folder, content)
        except (ValueError, FileNotFoundError):
            # unless it has been replaced in between
            if content == read_file(folder / FACTS, MOST_JSON):
                raise


def _read(folder: Path, content: bytes) -> Read:
    saved = f"the cache saved in {str(folder)!r}"
    damaged, facts = f"{saved} is damaged: ", checked_facts(content, saved, SAVED)
    listed: Any = facts.get("tensors")
    try:
        require(listed, Each(LISTED), "tensors")
    except ValueError as error:
        raise ValueError(f"{damaged}{error}.{AGAIN}") from error
    name, head = TENSORS.format(facts["sha256"][:16]), _head(listed)
    size = len(head) + sum(math.prod(shape) * TYPES[kind].itemsize for _, kind, shape, _ in listed)
    try:
        file = open_file(folder / name)
    except FileNotFoundError as error:
        raise ValueError(f"{damaged}the folder has no {name}.{AGAIN}") from error
    own = os.fstat(file.fileno()).st_size
    if own == size and file.read(len(head)) == head:
        return Read(facts, file, len(head), damaged)
    file.close()
    raise ValueError(
        f"{damaged}{name} has {own:,} bytes, and should have {size:,}, which begin with the tensors that {FACTS} "
        f"names.{AGAIN}"
    )
