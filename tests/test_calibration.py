"""Calibration: runs from the texts to the result."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from accelerate import cpu_offload  # type: ignore[import-untyped] # it has no types
from calibration_support import HEADS, SMALL, TEXTS, lab, same
from models import lab_model, tiny_mistral

from turbo_hf import Calibration
from turbo_hf.calibration import run
from turbo_hf.calibration.quality import WAYS
from turbo_hf.calibration.query_model import train
from turbo_hf.calibration.run import calibrate
from turbo_hf.config.turbo_config import HEAD_METRICS


def test_a_run_makes_all_of_it_and_the_same_for_a_seed(indexed: Calibration) -> None:
    for layer in indexed.layers:
        assert set(layer.scores) == set(HEAD_METRICS)
        assert layer.centroids is not None
        assert layer.centroids.shape == (2, 16, 64)
        assert {name: tuple(x.shape) for name, x in layer.classifier.items()} == {
            "weight_1": (2, 64, 32),
            "bias_1": (2, 32),
            "weight_2": (2, 32, 16),
            "bias_2": (2, 16),
        }
        assert set(layer.quality["recall"]) == set(WAYS)
    assert same(indexed, lab(settings=SMALL))
    assert not same(indexed, lab(settings=replace(SMALL, seed=1)))


def test_an_offloaded_model_gives_the_same(indexed: Calibration) -> None:
    model, tokenizer = lab_model()
    model = copy.deepcopy(model)
    cpu_offload(model, "cpu")
    assert same(calibrate(model, tokenizer, TEXTS, settings=SMALL), indexed)


def test_a_classifier_that_float16_cannot_hold_leaves_its_layer_without_an_index(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wide(*args: Any) -> Any:
        classifier, loss = train(*args)
        bias = classifier["bias_1"].clone()
        bias[:2] = 1e6
        return classifier | {"bias_1": bias}, loss

    monkeypatch.setattr(run, "train", wide)
    first, *others = lab(settings=SMALL).layers
    assert first.note == run.HARDLY_VARY
    assert first.centroids is None
    assert first.scores
    assert others[0].centroids is not None


def test_sliding_layers_get_priorities_alone() -> None:
    _, tokenizer = lab_model()
    model = tiny_mistral(64)
    model.resize_token_embeddings(len(tokenizer))
    found = calibrate(model, tokenizer, TEXTS, settings=SMALL)
    assert [(bool(at.scores), at.centroids, at.note) for at in found.layers] == [
        (True, None, "no index: it has a sliding window")
    ] * 2


def test_an_interrupted_run_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(word: str, share: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lab(out=tmp_path, progress=interrupt)
    assert not list(tmp_path.iterdir())
    shares: list[float] = []
    found = lab(out=tmp_path, progress=lambda word, share: shares.append(share))
    assert sum(shares) == pytest.approx(1.0)
    assert same(Calibration.from_pretrained(tmp_path), found)


def test_a_calibration_is_replaced_only_where_told(tmp_path: Path) -> None:
    first = lab(out=tmp_path)
    with pytest.raises(ValueError, match="holds a calibration already"):
        lab(settings=replace(HEADS, seed=1), out=tmp_path)
    assert same(Calibration.from_pretrained(tmp_path), first)
    found = lab(settings=replace(HEADS, seed=1), out=tmp_path, overwrite=True)
    assert Calibration.from_pretrained(tmp_path).settings == found.settings != first.settings


def test_out_must_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    begun: list[float] = []
    with pytest.raises(ValueError, match=r"out must be a folder, or the name of a new one; .* is a file"):
        lab(out=tmp_path / "file", progress=lambda _, share: begun.append(share))
    assert not begun
