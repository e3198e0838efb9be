"""A calibration's files are replaced as one: for readers meanwhile, after a kill, on a full disk, by several."""

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from calibration_support import HEADS, PROSE, command, lab, same
from models import lab_model

from turbo_hf import Calibration
from turbo_hf.calibration import artifacts
from turbo_hf.calibration.artifacts import CARD, FACTS, TENSORS, LayerCalibration
from turbo_hf.calibration.run import calibrate
from turbo_hf.calibration.unfinished import LOCK, PART
from turbo_hf.config.whole_files import InUse, one_writer, write_whole

NAMES = {FACTS, TENSORS, CARD}
METRICS = ("priority", "entropy", "min_max", "variation")


def made(number: int) -> Calibration:
    """A small calibration, whose tensors differ by number."""
    layer = LayerCalibration(0, {metric: torch.full((2,), float(number)) for metric in METRICS})
    return Calibration({"num_hidden_layers": 1, "num_key_value_heads": 2, "head_dim": 16}, {}, (layer,), number)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_readers_find_one_calibration_whoever_writes(tmp_path: Path) -> None:
    errors: list[Exception] = []
    made(0).save_pretrained(tmp_path)

    def write(first: int) -> None:
        try:
            for number in range(first, first + 15):
                made(number).save_pretrained(tmp_path)
        except OSError as error:
            errors.append(error)

    writers = [threading.Thread(target=write, args=(first,)) for first in (100, 200)]
    for writer in writers:
        writer.start()
    found: set[int] = set()
    while any(writer.is_alive() for writer in writers):
        read = Calibration.from_pretrained(tmp_path)
        assert same(read, made(read.tokens))
        found.add(read.tokens)
    assert not errors
    assert found <= {0, *range(100, 115), *range(200, 215)}
    assert names(tmp_path) == NAMES


@pytest.mark.parametrize("times", [1, 5])
def test_a_reader_between_two_files_of_a_writer_begins_again(
    times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(0).save_pretrained(tmp_path)
    read, numbers = artifacts._read_tensors, iter(range(1, times + 1))

    def overtaken(*args: Any) -> bytes:
        for number in numbers:
            made(number).save_pretrained(tmp_path)
            break
        return read(*args)

    monkeypatch.setattr(artifacts, "_read_tensors", overtaken)
    assert same(Calibration.from_pretrained(tmp_path), made(times))


def killed(*_: Any) -> NoReturn:
    raise KeyboardInterrupt


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_kill_leaves_the_former_or_the_new_one(after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(0).save_pretrained(tmp_path)
    left = iter(range(after))

    def dies(path: Path, content: bytes) -> None:
        if next(left, None) is None:
            killed()
        write_whole(path, content)

    with monkeypatch.context() as patched:
        patched.setattr(artifacts, "write_whole", dies)
        # a process that is killed puts nothing in order
        patched.setattr(artifacts, "_settle", lambda _: None)
        with pytest.raises(KeyboardInterrupt):
            made(1).save_pretrained(tmp_path)
    want = 1 if after == 2 else 0
    assert same(Calibration.from_pretrained(tmp_path), made(want))
    # not even the same one written again breaks what is there, and what was left is tidied up
    with monkeypatch.context() as patched:
        patched.setattr(artifacts, "write_whole", killed)
        with pytest.raises(KeyboardInterrupt):
            made(1).save_pretrained(tmp_path)
    assert same(Calibration.from_pretrained(tmp_path), made(want))
    assert names(tmp_path) == NAMES
    made(2).save_pretrained(tmp_path)
    assert same(Calibration.from_pretrained(tmp_path), made(2))


def full_after(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many writes fit on the disk."""
    left: Iterator[int] = iter(range(count))
    sync = os.fsync

    def fsync(file: int) -> None:
        if next(left, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(file)

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.mark.parametrize(("fits", "name"), [(0, "turbo_calibration.safetensors"), (1, FACTS), (2, CARD)])
def test_a_full_disk_leaves_no_part_and_names_the_file(
    fits: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(0).save_pretrained(tmp_path)
    with monkeypatch.context() as patched:
        full_after(fits, patched)
        with pytest.raises(OSError, match=f"No space left on device: .*{name}"):
            made(1).save_pretrained(tmp_path)
    assert names(tmp_path) == NAMES
    assert same(Calibration.from_pretrained(tmp_path), made(1 if name == CARD else 0))


def test_a_full_disk_leaves_nothing_in_a_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        full_after(1, patched)
        with pytest.raises(OSError, match="No space left on device"):
            made(1).save_pretrained(tmp_path / "new")
    assert not names(tmp_path / "new")
    with pytest.raises(OSError, match="there is no calibration"):
        Calibration.from_pretrained(tmp_path / "new")


def test_a_writer_that_waits_too_long_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "WAIT", 0.0)
    with one_writer(tmp_path, artifacts.LOCK), pytest.raises(InUse, match="is in use: another process is writing"):
        made(0).save_pretrained(tmp_path)


def test_both_files_from_the_hub_are_of_one_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = tmp_path / ("a" * 40), tmp_path / ("b" * 40)
    made(1).save_pretrained(old)
    made(2).save_pretrained(new)
    # between the two requests someone pushes
    monkeypatch.setattr(
        artifacts,
        "cached_file",
        lambda _, part, revision, **options: (old if part == FACTS else tmp_path / (revision or new.name)) / part,
    )
    assert same(Calibration.from_pretrained("someone/something"), made(1))


# --- runs ------------------------------------------------------------------------------------------------------------


def test_a_second_run_in_a_folder_is_told(tmp_path: Path) -> None:
    met: list[Exception] = []

    def second(word: str, share: float) -> None:
        if not met:
            with pytest.raises(InUse, match="is in use") as caught:
                lab(out=tmp_path)
            met.append(caught.value)
            # also one that looked before the first began
            (tmp_path / PART).mkdir(exist_ok=True)
            with pytest.raises(InUse, match="is in use"):
                lab(out=tmp_path, resume=True)

    first = lab(out=tmp_path, progress=second)
    assert met
    assert same(Calibration.from_pretrained(tmp_path), first)
    assert names(tmp_path) == NAMES


def test_a_run_that_ended_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    class Late:
        """Texts that are read while another run ends."""

        def __iter__(self) -> Iterator[str]:
            made(0).save_pretrained(tmp_path)
            yield PROSE

    with pytest.raises(ValueError, match="holds a calibration already"):
        calibrate(*lab_model(), Late(), settings=HEADS, out=tmp_path)
    assert same(Calibration.from_pretrained(tmp_path), made(0))


def test_the_command_says_its_estimate_in_one_line(tmp_path: Path) -> None:
    printed = command(tmp_path, "--heads-only", "--window", "256", "--windows", "3")
    lines = [line for line in printed.splitlines() if line.startswith("estimate: ")]
    assert len(lines) == 1
    assert "3 windows of 256 tokens, groups of layers: 1; " in lines[0]
    assert not (tmp_path / "out" / LOCK).exists()
