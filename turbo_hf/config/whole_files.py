"""Files that are replaced as a whole, JSON whose faults are named, and one writer at a time in a folder."""

import contextlib
import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any
from uuid import uuid4

from filelock import FileLock, Timeout

PARTIAL = ".partial"
"""End of the name of a file that is being written; one that stays is from a process that was killed."""
MOST_JSON, MOST_LINES = 1 << 24, 1 << 28
"""Bytes of a JSON file, and of one that holds an object in each line, that are read at most."""


class InUse(OSError):
    """Another process is writing in a folder."""


def open_file(path: Path) -> FileIO:
    """A regular file, to be read.

    Raises:
        OSError: it cannot be opened.
        ValueError: a pipe, a device or a folder, some of which can be read without end.
    """
    # a pipe that nobody writes to is opened at once
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(number).st_mode):
        return FileIO(number)
    os.close(number)
    raise ValueError(f"{str(path)!r} is no regular file, but a pipe, a device or a folder. Put the file itself there.")


def read_file(path: Path, most: int) -> bytes:
    """What a regular file holds. most: of its bytes. Errors as in `open_file`; ValueError: it has more."""
    with BufferedReader(open_file(path)) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise ValueError(
                f"{str(path)!r} has {size:,} bytes; such a file has {most:,} at most. It was changed, or is another."
            )
        # nothing that is appended meanwhile
        return file.read(size)


def write_whole(path: Path, content: str | bytes | Callable[[Path], object]) -> None:
    """Write a file beside its place, and move it there: readers find what was there before, or all of it.

    content: or what writes it to the path that it is given.

    Raises:
        OSError: it cannot be written, on a full disk for example; the message names it. What was there before stays.
    """
    partial = path.with_name(f"{path.name}.{uuid4().hex[:12]}{PARTIAL}")
    try:
        with _named(path):
            if callable(content):
                content(partial)
            else:
                partial.write_bytes(content.encode() if isinstance(content, str) else content)
            partial.replace(path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def append_line(path: Path, row: dict[str, Any]) -> None:
    """Append a line of JSON to a file, after its last whole line: half a line is what a killed process leaves.

    Raises:
        OSError: it cannot be written; the message names it.
    """
    with _named(path), path.open("a+b") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        if file.read(1) not in (b"", b"\n"):
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
        file.write(json.dumps(row).encode() + b"\n")


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """An OSError inside names the file, which a write does not."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"cannot be written: {error.strerror}", str(path)) from error


def read_lines(path: Path, remedy: str) -> list[dict[str, Any]]:
    """The JSON objects of a file that `append_line` writes; []: there is none. Half a line at its end is left out.

    Raises:
        ValueError: a line is no JSON object; the message names file and line and ends with `remedy`.
        OSError: it cannot be read.
    """
    *lines, _ = read_file(path, MOST_LINES).split(b"\n") if path.exists() else [b""]
    return [_parsed(line, f"line {number} of {str(path)!r}", remedy) for number, line in enumerate(lines, 1)]


def read_object(path: Path, remedy: str) -> dict[str, Any]:
    """The JSON object that a file holds.

    Raises:
        ValueError: it holds none; the message names it and ends with `remedy`.
        OSError: it cannot be read.
    """
    return _parsed(read_file(path, MOST_JSON), repr(str(path)), remedy)


def require_writable(folder: Path) -> None:
    """Make a folder, before the run whose result is to be written there.

    Raises:
        OSError: the folder cannot be made or written; the message names it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise OSError(error.errno, f"cannot be made, or not be written: {error.strerror}", str(folder)) from error


@contextlib.contextmanager
def one_writer(folder: Path, name: str) -> Iterator[None]:
    """Keep other processes that write the same thing out of a folder, which is made if it is missing.

    name: of the lock, a file that is there meanwhile. The system gives up the lock of a process that is killed.

    Raises:
        InUse: another process has it.
        OSError: the folder cannot be made or written.
    """
    require_writable(folder)
    lock = FileLock(folder / name)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise InUse(
            f"{str(folder)!r} is in use: another process is writing there. Wait until it is done, or choose another "
            "folder."
        ) from error
    try:
        yield
    finally:
        (folder / name).unlink(missing_ok=True)
        lock.release()


def _parsed(content: bytes, name: str, remedy: str) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is torn, or was changed: it is no JSON ({error}). {remedy}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{name} was changed: it is no JSON object. {remedy}")
    return found
