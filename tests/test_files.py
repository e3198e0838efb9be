"""Files: whole or not there, torn ones named, and one writer at a time in a folder."""

import errno
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import pytest

from turbo_hf.config.whole_files import (
    InUse,
    append_line,
    one_writer,
    read_lines,
    read_object,
    require_writable,
    write_whole,
)


def full(*_: Any, **__: Any) -> NoReturn:
    """In place of a call that finds the disk full."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_many_writers_of_one_file_each_write_it_whole(tmp_path: Path) -> None:
    path, contents = tmp_path / "file", [letter * 200_000 for letter in "abcd"]
    with ThreadPoolExecutor(4) as pool:
        written = [pool.submit(write_whole, path, content) for content in contents * 20]
        while not all(each.done() for each in written):
            assert not path.exists() or path.read_text() in contents
    assert [each.exception() for each in written] == [None] * len(written)
    assert [found.name for found in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_leaves_what_was_there_and_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_whole(path, b"before")
    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match=f"cannot be written: No space .*: '{re.escape(str(path))}'") as caught:
        write_whole(path, b"after")
    assert caught.value.errno == errno.ENOSPC
    assert path.read_bytes() == b"before"
    assert [found.name for found in tmp_path.iterdir()] == ["file"]


def test_an_interrupt_leaves_no_part_of_a_file(tmp_path: Path) -> None:
    def content(path: Path) -> None:
        path.write_bytes(b"first")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "file", content)
    assert not list(tmp_path.iterdir())


def test_a_line_that_is_no_object_is_named(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    assert read_lines(path, "") == []
    append_line(path, {"a": 1})
    append_line(path, {"a": "ä\u2028"})
    assert read_lines(path, "") == [{"a": 1}, {"a": "ä\u2028"}]
    path.write_bytes(path.read_bytes() + b'{"a": 3')
    assert read_lines(path, "") == [{"a": 1}, {"a": "ä\u2028"}], "what a killed process leaves"
    append_line(path, {"a": 4})
    assert read_lines(path, "")[2:] == [{"a": 4}]
    for other in (b"[1]\n", b"\n", b"\xff\n", b"[" * 100_000 + b"\n"):
        path.write_bytes(b'{"a": 1}\n' + other)
        with pytest.raises(ValueError, match=r"line 2 of '.*log.jsonl' .* Do this\.$"):
            read_lines(path, "Do this.")


@pytest.mark.parametrize("content", [b'{"a":\n', b"", b"\xff\xfe{", b"[1]", b"null", b"[" * 100_000])
def test_a_file_that_is_no_object_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"'.*facts.json' .* Do this\.$"):
        read_object(path, "Do this.")


def take(folder: Path) -> None:
    """Hold the lock for a moment."""
    with one_writer(folder, "lock"):
        pass


def test_a_second_writer_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    told = pytest.raises(InUse, match=r"folder' is in use: another process is writing")
    with ThreadPoolExecutor(1) as pool, one_writer(folder, "lock"), told:
        pool.submit(take, folder).result()
    with one_writer(folder, "lock"), one_writer(folder, "another"):
        pass
    assert not list(folder.iterdir())


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_writable(tmp_path / "new" / "folder")
    assert not list((tmp_path / "new" / "folder").iterdir())

    def denied(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", denied)
    for made in (tmp_path, tmp_path / "another"):
        with pytest.raises(PermissionError, match=f"cannot be made, or not be written: Permission denied: '{made}'"):
            require_writable(made)


def test_a_killed_writer_leaves_the_folder_free(tmp_path: Path) -> None:
    script = f"""
import time
from pathlib import Path
from turbo_hf.config.whole_files import one_writer
with one_writer(Path({str(tmp_path)!r}), "lock"):
    print("taken", flush=True)
    time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "taken\n"
        with pytest.raises(InUse):
            take(tmp_path)
        child.send_signal(signal.SIGKILL)
    assert (tmp_path / "lock").exists()
    take(tmp_path)
    assert not (tmp_path / "lock").exists()
