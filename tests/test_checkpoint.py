"""Calibration and what lies on disk: revisions of a checkpoint, artifacts in part."""

import copy
import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from calibration_support import HEADS, MIXED, SMALL, TEXTS, lab
from models import LAB_MODEL, lab_model
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import turbo_hf
from turbo_hf import Calibration, TurboConfig
from turbo_hf.calibration import run
from turbo_hf.calibration.artifacts import FACTS, TENSORS
from turbo_hf.calibration.checkpoint import CONFIG, MAIN, Checkpoint, checkpoint_of
from turbo_hf.calibration.settings import Settings
from turbo_hf.cli.main import app
from turbo_hf.errors import Unsupported

ONE, TWO = "1" * 40, "2" * 40


# --- revisions ----------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The Hub's cache: two revisions of the carried model, each with a calibration of its own number of tokens."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    repo = tmp_path / "models--me--two"
    (repo / "refs").mkdir(parents=True)
    for name, commit, windows in (("main", ONE, 3), ("v2", TWO, 2)):
        (repo / "refs" / name).write_text(commit)
        shutil.copytree(LAB_MODEL, repo / "snapshots" / commit)
        lab(settings=replace(HEADS, windows=windows)).save_pretrained(repo / "snapshots" / commit)
    return repo


def heads_of(model: Any, **options: Any) -> str:
    with turbo_hf.patch(model, MIXED, **options) as handle:
        return handle.report().heads


def load(revision: str | None) -> Any:
    model = AutoModelForCausalLM.from_pretrained("me/two", revision=revision)
    # transformers up to 5.17 tells the commit, and must not in these tests
    vars(model.config).pop("_commit_hash", None)
    return model


@pytest.mark.usefixtures("hub")
def test_a_revision_has_its_own_calibration() -> None:
    model = load("v2")
    for revision in ("v2", TWO):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert "over 512 tokens (me/two)" in heads_of(model, revision=revision)
    assert checkpoint_of(model, "v2") == Checkpoint("me/two", TWO)
    model.config._commit_hash = TWO
    assert "over 512 tokens (me/two)" in heads_of(model), "where Transformers tells it"
    with pytest.raises(ValueError, match="the model was loaded by revision 222222222222; 'main' is 111111111111"):
        heads_of(model, revision="main")


@pytest.mark.usefixtures("hub")
def test_a_model_of_no_revision_is_taken_for_main() -> None:
    for model in (load(None), load("v2")):
        assert checkpoint_of(model) == Checkpoint("me/two", ONE, MAIN)
        for revision in (None, "main"):
            assert "over 768 tokens (me/two)" in heads_of(model, revision=revision)


def test_a_calibration_of_another_revision_is_told(hub: Path) -> None:
    made = Calibration.from_pretrained("me/two", revision="v2", local_files_only=True)
    found = replace(made, fingerprint={**made.fingerprint, "revision": TWO})
    for revision, assumed in (("main", ""), (None, MAIN)):
        message = "the calibration was made for revision 222222222222 of the checkpoint; this model is of 111111111111."
        message += assumed
        with (
            pytest.warns(UserWarning, match=message),
            turbo_hf.patch(load(None), MIXED, calibration=found, revision=revision) as handle,
        ):
            assert handle.report().warnings == (message,)
    assert found.other_revision(checkpoint_of(load("v2"), "v2")) is None
    model, tokenizer = load("v2"), lab_model()[1]
    assert run.calibrate(model, tokenizer, TEXTS, settings=HEADS, revision="v2").fingerprint["revision"] == TWO
    assert run.calibrate(model, tokenizer, TEXTS, settings=HEADS).fingerprint["revision"] == ONE
    (hub / "snapshots" / TWO / CONFIG).unlink()
    with pytest.raises(ValueError, match=r"revision 'v2' of 'me/two' is not in the Hub's cache, '.*', the only place"):
        turbo_hf.patch(load(None), MIXED, revision="v2")
    with pytest.raises(ValueError, match="revision must be a branch, tag or commit, as text; got 5"):
        turbo_hf.patch(load(None), MIXED, revision=5)  # type: ignore[arg-type]


def test_a_tokenizer_of_another_revision_is_refused(hub: Path) -> None:
    model, tokenizer = load("v2"), lab_model()[1]
    for file in (FACTS, TENSORS):
        (hub / "snapshots" / TWO / file).write_bytes((hub / "snapshots" / ONE / file).read_bytes())
    own = hub / "snapshots" / ONE / "tokenizer.json"
    made = json.loads(own.read_text())
    first, second = list(made["model"]["vocab"])[-2:]
    vocabulary = made["model"]["vocab"]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    own.write_text(json.dumps(made))
    assumed = "it has token .* The model is taken for the branch main: pass revision= if it is of another"
    with pytest.raises(ValueError, match=assumed):
        run.calibrate(model, tokenizer, TEXTS, settings=HEADS)
    found = run.calibrate(model, tokenizer, TEXTS, settings=HEADS, revision="v2")
    with pytest.raises(ValueError, match=r"made for a model with tokenizer .* is taken for the branch main"):
        turbo_hf.patch(model, MIXED, calibration=found)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        turbo_hf.patch(model, MIXED, calibration=found, revision="v2").remove()
        turbo_hf.patch(model, "turbo4").remove()


@pytest.mark.parametrize("name", ["my model", "run--1", "gone/", "C:\\models\\foo", "ä/ü", "x" * 5000, "o/n.git", ""])
def test_names_of_no_repository_are_folders_that_are_gone(name: str) -> None:
    model = copy.deepcopy(lab_model()[0])
    model.config._name_or_path = name
    assert checkpoint_of(model) == Checkpoint(name)
    turbo_hf.patch(model).remove()
    assert "no calibration beside the checkpoint" in heads_of(model)
    assert run.calibrate(model, lab_model()[1], TEXTS, settings=HEADS).fingerprint["revision"] is None


@pytest.mark.usefixtures("hub")
def test_the_command_takes_a_revision(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXTS[0])
    words = ["calibrate", "me/two", "--texts", str(tmp_path / "text.txt"), "--out", str(tmp_path / "out")]
    words += ["--heads-only", "--window", "256", "--windows", "2", "--device", "cpu", "--revision", "v2"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert Calibration.from_pretrained(tmp_path / "out").fingerprint["revision"] == TWO


def test_a_revision_of_a_folder_is_refused() -> None:
    with pytest.raises(ValueError, match=r"this one is from '.*lab-llama-4m'. Leave revision='v2' out"):
        turbo_hf.patch(lab_model()[0], revision="v2")


# --- where a run writes --------------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_made_is_told_before_the_first_pass(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    begun: list[float] = []
    for out, kind, message in (
        ("file", ValueError, "out must be a folder, or the name of a new one; .* is a file"),
        ("file/inside", OSError, "cannot be made, or not be written: Not a directory: '.*file/inside'"),
    ):
        with pytest.raises(kind, match=message):
            lab(out=tmp_path / out, progress=lambda _, share: begun.append(share))
    assert not begun
    with pytest.raises(ValueError, match=r"folder must be a folder, or the name of a new one; .*file' is a file"):
        lab().save_pretrained(tmp_path / "file")


# --- artifacts in part ---------------------------------------------------------------------------------------------


def test_a_calibration_without_its_tensors_is_damaged(tmp_path: Path, hub: Path) -> None:
    lab().save_pretrained(tmp_path / "own")
    (tmp_path / "own" / TENSORS).unlink()
    with pytest.raises(ValueError, match=f"is damaged: the folder has no {TENSORS}. Calibrate again"):
        Calibration.from_pretrained(tmp_path / "own")
    (hub / "snapshots" / ONE / TENSORS).unlink()
    with pytest.raises(OSError, match=f"there is no {TENSORS} beside the {FACTS} in 'me/two'"):
        Calibration.from_pretrained("me/two", local_files_only=True)
    with pytest.raises(Unsupported, match=rf"(?s)there is no {TENSORS} .*To go without it, pass calibration=None"):
        turbo_hf.patch(load(None), MIXED, revision="main")


def test_a_refused_calibration_is_not_called_missing(tmp_path: Path) -> None:
    model = copy.deepcopy(lab_model()[0])
    model.config._name_or_path = str(tmp_path)
    lab().save_pretrained(tmp_path)
    (tmp_path / TENSORS).unlink()
    message = "needs a calibration of this model, and the one beside the checkpoint is refused: .* is damaged: the fold"
    with pytest.raises(ValueError, match=message), pytest.warns(UserWarning, match="damaged"):
        turbo_hf.patch(model, "saap", strict="warn")


def test_a_narrower_window_than_the_calibrations_is_told() -> None:
    model, _ = lab_model()
    found = lab(settings=replace(SMALL, steps=1))
    for window, told in ((30, True), (31, False)):
        config = TurboConfig(sparse=turbo_hf.SparseConfig(probes=4, window_tokens=window))
        with turbo_hf.patch(model, config, calibration=found) as handle:
            notes = handle.report().warnings
        assert any(f"was not trained on keys {window} to 31 tokens back" in note for note in notes) == told


def test_no_loss_is_told_where_nothing_was_judged() -> None:
    # the best key of no query is so far away
    found = lab(settings=Settings(**{**SMALL.as_dict(), "far": 120, "steps": 1, "queries": 4}))
    layers = [layer.quality for layer in found.layers if layer.quality]
    assert any(not sum(each["queries"]) for each in layers)
    assert all((each["loss"] is None) == (not sum(each["queries"])) for each in layers)


def test_each_layer_tells_its_own_training_loss() -> None:
    told = [layer.quality["training_loss"] for layer in lab(settings=SMALL).layers]
    assert len(set(told)) == len(told)
