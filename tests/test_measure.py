"""`turbo-hf doctor --measure`: tiles that are right, which of them are kept, and what becomes of the file."""

import json
from pathlib import Path

import pytest
import torch
from cli_support import check_refused

from turbo_hf.eval.bench import measure
from turbo_hf.eval.bench.checked import Row
from turbo_hf.eval.bench.shapes import make_case
from turbo_hf.eval.bench.timing import Conditions, Stopwatch
from turbo_hf.ops.tuning import (
    DecodeTiles,
    decode_tiles,
    keep_tiles,
    measured_tiles,
    read_tiles,
    tile_kind,
    tiles_file,
    using,
)

CPU = torch.device("cpu")
NARROW = 64 * 128
"""Numbers of K in a block of 64 tokens of 128 channels."""


@pytest.mark.parametrize(("shape", "size"), [("qwen2.5-0.5b", "1x130"), ("gemma3-8-1", "2x70")])
def test_every_tile_is_right(shape: str, size: str) -> None:
    pytest.importorskip("triton")
    case = make_case(shape, size, False, 0)
    kind, rows = measure.measured_case(case, "4", Conditions(Stopwatch(CPU), "triton", 0, 0.0))
    assert kind == ("few narrow 8" if case.heads.dim <= 128 else "many wide 8")
    ours = [row for row in rows if row.ours]
    assert len(ours) > 4
    assert len({row.method for row in ours}) == len(ours)
    assert not [row.note for row in ours if row.note]
    assert all((row.figures["us"] or 0) > 0 for row in ours)


def row(tiles: tuple[int, ...], us: float | None, note: str = "") -> Row:
    figures: dict[str, float | None] = {} if us is None else {"us": us}
    return Row("a", "1x1", 1, 1, "/".join(map(str, tiles)), True, figures=figures, note=note)


def test_the_fastest_of_all_cases_is_chosen() -> None:
    table, other, third, theirs = (4, 2, 3, 4), (2, 4, 3, 2), (4, 1, 2, 4), Row("a", "1x1", 1, 1, "cuDNN", False)
    slower = [[theirs, row(table, 10.0), row(other, 9.8)], [row(table, 10.0), row(other, 9.8)]]
    wrong = [
        [row(table, 10.0), row(other, 8.0), row(third, 1.0)],
        [row(table, 10.0), row(other, 9.0), row(third, None)],
    ]
    gone = [[row(table, None, "wrong"), row(other, 1.0)]]
    found = measure.fastest({"slower": slower, "wrong": wrong, "gone": gone})
    assert found == {"wrong": DecodeTiles(*other)}


def test_kept_tiles_are_taken_where_they_fit(tmp_path: Path) -> None:
    path, kind = tmp_path / "folder" / "tiles.json", tile_kind(NARROW, (4, 4), many=False)
    assert read_tiles(path) == {}
    keep_tiles(path, {kind: DecodeTiles(2, 4, 3, 2)})
    kept = read_tiles(path)
    assert decode_tiles(NARROW, (4, 4), False, measured=kept) == DecodeTiles(2, 4, 3, 2)
    assert decode_tiles(NARROW, (8, 8), False, measured=kept) == decode_tiles(NARROW, (8, 8), False)
    assert decode_tiles(NARROW, (16, 16), False, measured=kept) == decode_tiles(NARROW, (16, 16), False)
    small = decode_tiles(NARROW, (4, 4), False, shared=40 << 10)
    assert decode_tiles(NARROW, (4, 4), False, measured=kept, shared=40 << 10) == small


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "no JSON"),
        ('{"tiles": []}', "tiles is"),
        ('{"tiles": {"few narrow 8": [3, 1, 2, 4]}}', "few narrow 8"),
        ('{"tiles": {"few narrow 8": [4, 1, 2]}}', "has 3 entries, and should have 4"),
    ],
)
def test_another_file_is_refused(content: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "tiles.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"tiles\.json") as refused:
        read_tiles(path)
    assert said in str(refused.value)
    assert str(refused.value).endswith("Delete it, or measure again: turbo-hf doctor --measure.")


def test_a_file_that_cannot_be_read_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "tiles.json"
    path.write_text("{}")

    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.open", denied)
    with pytest.raises(
        ValueError, match=r"tiles\.json' cannot be read: Permission denied\. Delete it, or measure again"
    ):
        read_tiles(path)


def test_files_are_of_one_gpu_and_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    here = tiles_file("NVIDIA H200")
    assert here.parent == tmp_path / ".cache" / "turbo_hf"
    assert here.name.startswith("tiles-NVIDIA-H200-triton-")
    assert tiles_file("NVIDIA H100") != here
    assert measured_tiles(CPU) == {}
    with using(CPU, {"few narrow 8": DecodeTiles(1, 1, 1, 1)}):
        assert measured_tiles(CPU)
    assert measured_tiles(CPU) == {}


def test_mistakes_are_one_sentence() -> None:
    check_refused("--measure times kernels: it needs a GPU", "doctor", "--measure", "--device", "cpu")
    check_refused("--measure is of the machine alone", "doctor", "somewhere", "--measure")
    check_refused("--out is for the figures of --measure", "doctor", "--out", "x")


def test_without_a_home_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(path: object) -> str:
        return str(path)

    monkeypatch.setattr("os.path.expanduser", nobody)
    assert read_tiles(tiles_file("NVIDIA H200")) == {}


@pytest.mark.gpu
def test_on_a_gpu_all_is_measured_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(measure, "PROMPTS", (("llama3-8b", 1, 256),))
    monkeypatch.setattr(measure, "WORTH", 10.0)
    measure.measure(device, tmp_path, ("llama3-8b 1x2k 4", "qwen3.5-24 1x2k 4"))
    kept = read_tiles(tiles_file(torch.cuda.get_device_name(device)))
    assert set(kept) == {"few narrow 8", "few wide 8"}
    assert json.loads((tmp_path / "measure.json").read_text())["tiles"]
