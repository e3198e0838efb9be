"""`turbo-hf calibrate`, and the datasets that it reads."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from all_pairs import in_one_test
from calibration_support import MIXED, PROSE, SHORT, command
from models import LAB_MODEL, lab_model
from typer.testing import CliRunner

import turbo_hf
from turbo_hf import Calibration
from turbo_hf.calibration.texts import token_windows
from turbo_hf.cli.main import app


def test_the_command_writes_what_patch_reads(tmp_path: Path) -> None:
    printed = command(tmp_path, *SHORT, "--json")
    facts = json.loads(printed.strip().splitlines()[-1])
    assert facts["tokens"] == 768
    assert len(facts["layers"]) == 6
    found = Calibration.from_pretrained(tmp_path / "out")
    assert found.layers[0].centroids is not None
    assert "recall: long-range attention mass in 4 % of the keys" in " ".join(printed.split())
    with turbo_hf.patch(lab_model()[0], MIXED, calibration=tmp_path / "out") as handle:
        assert "by calibration" in handle.report().heads


@in_one_test(
    ("words", "message"),
    [
        (["--preset", "slow"], "unknown preset 'slow'; presets are fast, full"),
        (["--texts", "nowhere"], "no file or folder 'nowhere'"),
        (["--window", "1000"], "too short for the long-range filter"),
        (["--heads-only", "--window", "100000"], "longer than the 32768 positions"),
        (["--heads-only", "--window", "20000"], "too few for two windows of 20000"),
        (["--heads-only", "--window", "20"], "Settings.window must be a whole number of at least 64; got 20"),
        ([*SHORT, "--clusters", "4000"], "too few for 4000 clusters"),
        (
            ["--heads-only", *SHORT],
            "no index: --clusters, --steps, --local, --far. Leave that out",
        ),
        (["--heads-only", "--window", "256", "--revision", "v2"], "Leave revision='v2' out"),
    ],
)
def test_mistakes_get_one_sentence(words: list[str], message: str, tmp_path: Path) -> None:
    printed = " ".join(command(tmp_path, *words, code=1).split())
    assert message in printed
    assert "Traceback" not in printed


# --- datasets of the Hub --------------------------------------------------------------------------------------------


class FakeHub:
    """In place of the package datasets: one dataset, and what was asked for."""

    def __init__(self, rows: list[dict[str, Any]]):
        self.rows, self.read = rows, 0
        self.asked: tuple[Any, ...] = ()

    def load_dataset(self, *args: Any, **options: Any) -> Any:
        self.asked = (*args, options)
        for row in self.rows:
            self.read += 1
            yield row


def test_a_dataset_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    _, tokenizer = lab_model()
    hub = FakeHub([{"text": PROSE}] * 50)
    monkeypatch.setitem(sys.modules, "datasets", hub)
    found = token_windows("someone/books:long", tokenizer, 256, 3)
    assert torch.equal(found, token_windows([PROSE] * 50, tokenizer, 256, 3))
    assert hub.asked == ("someone/books", "long", {"split": "train", "streaming": True})
    assert hub.read < 50, "what is not needed is not fetched"


def test_a_dataset_that_cannot_be_read_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, tokenizer = lab_model()
    start = "texts: there is no file or folder 'someone/books', and "
    monkeypatch.setitem(sys.modules, "datasets", FakeHub([{"content": PROSE}]))
    with pytest.raises(ValueError, match=start + "the dataset of that name cannot be read: rows have no column"):
        token_windows("someone/books", tokenizer, 256, 3)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=start + "to stream a dataset of that name the package datasets is needed"):
        token_windows("someone/books", tokenizer, 256, 3)
    words = ["calibrate", str(LAB_MODEL), "--texts", "someone/books", "--out", str(tmp_path), "--device", "cpu"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1
    assert "the package datasets is needed" in " ".join(result.output.split())


def test_a_real_dataset_without_a_network_says_why() -> None:
    pytest.importorskip("datasets")
    _, tokenizer = lab_model()
    with pytest.raises(ValueError, match="the dataset of that name cannot be read"):
        token_windows("no-one-at-all/nothing-at-all", tokenizer, 256, 3)
