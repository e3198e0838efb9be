"""A calibration's files while they are written: readers meanwhile, a full disk, several writers."""

import errno
import os
import threading
from pathlib import Path

import pytest
import torch
from calibration_support import lab, same

from turbo_hf import Calibration
from turbo_hf.calibration import artifacts
from turbo_hf.calibration.artifacts import CARD, FACTS, TENSORS, LayerCalibration
from turbo_hf.config.whole_files import InUse, one_writer

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


def test_a_reader_between_two_files_of_a_writer_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(0).save_pretrained(tmp_path)
    new, waited = made(1)._files(), list[float]()
    (tmp_path / TENSORS).write_bytes(new[TENSORS])

    def goes_on(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            (tmp_path / FACTS).write_bytes(new[FACTS])

    monkeypatch.setattr("time.sleep", goes_on)
    assert same(Calibration.from_pretrained(tmp_path), made(1))
    # one that never goes on was killed
    (tmp_path / TENSORS).write_bytes(made(2)._files()[TENSORS])
    with pytest.raises(ValueError, match=f"{TENSORS} is not the file that {FACTS} was written with"):
        Calibration.from_pretrained(tmp_path)


@pytest.mark.parametrize(("fits", "name"), [(0, TENSORS), (1, FACTS), (2, CARD)])
def test_a_full_disk_leaves_no_part_and_names_the_file(
    fits: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(0).save_pretrained(tmp_path)
    left, replace = iter(range(fits)), Path.replace

    def full(path: Path, to: Path) -> Path:
        if next(left, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return replace(path, to)

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match=f"No space left on device: .*{name}"):
        made(1).save_pretrained(tmp_path)
    assert names(tmp_path) == NAMES


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

    first = lab(out=tmp_path, progress=second)
    assert met
    assert same(Calibration.from_pretrained(tmp_path), first)
    assert names(tmp_path) == NAMES
