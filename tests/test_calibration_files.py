"""What a calibration is kept in, also while it is written; and how `patch` uses it."""

import copy
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from calibration_support import HEADS, MIXED, SMALL, lab, reversed_heads, same
from models import LAB_MODEL, lab_model, prompts, tiny_llama
from saved_support import written
from transformers import AutoModelForCausalLM

import turbo_hf
from turbo_hf import Calibration, TurboCache, TurboConfig
from turbo_hf.cache.saved_files import read
from turbo_hf.calibration import artifacts
from turbo_hf.calibration.artifacts import FILE, KIND, LayerCalibration
from turbo_hf.calibration.checkpoint import Checkpoint, checkpoint_of
from turbo_hf.config.turbo_config import HEAD_METRICS, with_options
from turbo_hf.errors import Unsupported
from turbo_hf.models.versions import CACHE

# --- artifacts ---------------------------------------------------------------------------------------------------


def test_round_trip(tmp_path: Path, indexed: Calibration) -> None:
    indexed.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {FILE}
    found = Calibration.from_pretrained(tmp_path)
    assert same(found, indexed)
    assert found.source == str(tmp_path)
    for metric in HEAD_METRICS:
        assert found.head_orders(metric) == indexed.head_orders(metric)
    with pytest.raises(ValueError, match="metric must be one of"):
        found.head_orders("size")


CHANGES: list[tuple[str, Any, str]] = [
    ("schema", 1, "has schema 1; this version reads 4"),
    ("layers", [{}], r"damaged: layers\.0 lacks 'index', and should hold"),
    ("fingerprint", [1], "damaged: fingerprint is .*, and should be a dict"),
    ("layers", [{"index": 0, "note": "", "quality": None}], r"damaged: layers\.0\.quality is None, and should be a d"),
    ("fingerprint", {"num_hidden_layers": "x"}, r"damaged: fingerprint\.num_hidden_layers is 'x'"),
    ("layers", [{"index": 0, "note": 3, "quality": {}}], r"damaged: layers\.0\.note is 3, and should be a str"),
    ("settings", {"local": []}, r"damaged: settings\.local is \[\], and should be a whole number"),
    ("format", "turbo_hf cache", "does not say that it is a turbo_hf calibration"),
    ("sums", {"layers.0.scores.entropy": 1}, r"damaged: sums\.layers\.0\.scores\.entropy is "),
]


@pytest.mark.parametrize(("key", "value", "message"), CHANGES)
def test_facts_of_another_kind_are_damaged(key: str, value: Any, message: str, tmp_path: Path) -> None:
    lab().save_pretrained(tmp_path)
    facts, tensors = read(tmp_path, KIND, "")
    facts[key] = {**facts[key], **value} if isinstance(value, dict) else value
    written(tmp_path, KIND, facts, {name: x.clone() for name, x in tensors.items()})
    with pytest.raises(ValueError, match=message):
        Calibration.from_pretrained(tmp_path)


def spoil(folder: Path) -> None:
    """Another last byte of the tensors."""
    content = bytearray((folder / FILE).read_bytes())
    content[-1] ^= 1
    (folder / FILE).write_bytes(bytes(content))


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    lab().save_pretrained(tmp_path)
    spoil(tmp_path)
    with pytest.raises(ValueError, match=r"is damaged: sums\.layers\..*Calibrate again"):
        Calibration.from_pretrained(tmp_path)
    (tmp_path / FILE).write_bytes((tmp_path / FILE).read_bytes()[:100])
    with pytest.raises(ValueError, match=f"is damaged: {FILE} cannot be read"):
        Calibration.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("part", "name", "change", "message"),
    [
        ("scores", "entropy", None, "it lacks 'layers.[0-9].scores.entropy'"),
        ("scores", "entropy", lambda x: x[:, None], r"is float32 \[2, 1\].*, and should be floating point \[2\]"),
        ("scores", "entropy", lambda x: x.to(torch.float8_e4m3fn), "is float8_e4m3fn"),
        ("scores", "entropy", lambda x: x * torch.nan, r"scores\.entropy is float32 .* of finite num"),
        ("classifier", "bias_1", None, "lacks 'layers.[0-9].bias_1'"),
        ("classifier", "weight_2", lambda x: x[..., 1:], r"weight_2 is .*\[2, 32, 15\].* \[2, 32, 16\]"),
        ("", "centroids", None, "lacks 'layers.[0-9].centroids'"),
        ("", "rotated_centroids", None, "lacks 'layers.[0-9].rotated_centroids'"),
        ("", "rotated_centroids", lambda x: x[..., 1:], r"rotated_centroids is .*, and should be"),
        ("", "centroids", lambda x: x[1:], r"centroids is float16 \[1, 16, 64\].* floating point \[2, 16, 64\]"),
        ("", "centroids", lambda x: x.to(torch.int8), "centroids is int8"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    part: str, name: str, change: Any, message: str, tmp_path: Path, indexed: Calibration
) -> None:
    layer = next(layer for layer in indexed.layers if layer.centroids is not None)
    held = dict(getattr(layer, part)) if part else {name: getattr(layer, name)}
    before = held.pop(name)
    held |= {} if change is None and part else {name: change and change(before)}
    changed: dict[str, Any] = {part: held} if part else held
    replace(indexed, layers=(replace(layer, **changed),)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"damaged: .*{message}"):
        Calibration.from_pretrained(tmp_path)


def test_layers_that_are_missing_are_told() -> None:
    model, _ = lab_model()
    found = lab()
    part = replace(found, layers=found.layers[:2])
    with pytest.raises(ValueError, match="it holds 2 of the 6 layers of its model"):
        turbo_hf.patch(model, "turbo-mixed", calibration=part)


def test_a_missing_artifact_is_an_os_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match=f"the folder has no {FILE}"):
        Calibration.from_pretrained(tmp_path)
    (tmp_path / "part").mkdir()
    monkeypatch.chdir(tmp_path)
    # the second could name a repository of the Hub
    for file in (tmp_path / FILE, Path("part") / FILE):
        file.write_text("{}")
        with pytest.raises(OSError, match=rf"a calibration is a folder, and .* is a file. Name '{file.parent}'"):
            Calibration.from_pretrained(file)
    with pytest.raises(OSError, match="there is no such folder"):
        Calibration.from_pretrained(tmp_path / "gone")
    with pytest.raises(OSError, match="no-such"):
        Calibration.from_pretrained("nobody/no-such", local_files_only=True)


def test_push_to_hub_uploads_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub, found = Mock(), lab()

    def upload(**options: Any) -> Any:
        shutil.copy(options["path_or_fileobj"], tmp_path / options["path_in_repo"])
        return Mock(commit_url=f"https://{options['repo_id']}/1")

    hub.return_value.upload_file = upload
    monkeypatch.setattr(artifacts, "HfApi", hub)
    assert found.push_to_hub("me/mine", token="t") == "https://me/mine/1"
    hub.assert_called_once_with(token="t")
    hub.return_value.create_repo.assert_called_once_with("me/mine", private=None, exist_ok=True)
    assert same(Calibration.from_pretrained(tmp_path), found)


# --- patch -------------------------------------------------------------------------------------------------------


def orders(handle: turbo_hf.Handle, model: Any) -> list[list[list[int]]]:
    """Order of heads by layer and row after a prompt of two rows."""
    cache = handle.new_cache()
    with torch.no_grad():
        model(prompts(2, 130), **{CACHE: cache})
    return [layer.order.tolist() for layer in cache.turbo_layers()]


@pytest.mark.parametrize("metric", HEAD_METRICS)
def test_patch_takes_the_heads_from_a_calibration(metric: Any) -> None:
    model, _ = lab_model()
    found = lab()
    config = with_options(MIXED, head_metric=metric)
    for calibration in (found, reversed_heads(found)):
        with turbo_hf.patch(model, config, calibration=calibration) as handle:
            want = calibration.head_orders(metric)
            assert orders(handle, model) == [[list(want[i])] * 2 for i in range(6)]
            assert "3-bit heads: by calibration over 768 tokens (this process)" in str(handle.report())
    assert reversed_heads(found).head_orders(metric) != found.head_orders(metric)


def test_the_order_stays_through_reset_crop_and_copies() -> None:
    model, _ = lab_model()
    found = reversed_heads(lab())
    want = [[list(order)] * 2 for order in found.head_orders("priority").values()]
    with turbo_hf.patch(model, MIXED, calibration=found) as handle:
        cache = handle.new_cache()
        with torch.no_grad():
            for tokens in (70, 100):
                model(prompts(2, tokens), **{CACHE: cache})
                cache.crop(-tokens + 1)
                model(prompts(2, 64), **{CACHE: cache})
                assert [layer.order.tolist() for layer in cache.turbo_layers()] == want
                cache.reset()
        twin = copy.deepcopy(model)
        out = twin.generate(prompts(1, 80), max_new_tokens=2, do_sample=False, return_dict_in_generate=True)
        assert [layer.order.tolist() for layer in out[CACHE].turbo_layers()] == [row[:1] for row in want]


def test_auto_looks_beside_the_checkpoint(tmp_path: Path) -> None:
    model = copy.deepcopy(lab_model()[0])
    model.config._name_or_path = str(tmp_path)
    with turbo_hf.patch(model, MIXED) as handle:
        assert "the last of each layer, for want of a calibration (there is none beside the che" in str(handle.report())
        assert "layers 0, 1, 2, 3, 4, 5: no calibration ranks the heads" in handle.report().warnings[0]
    found = reversed_heads(lab())
    found.save_pretrained(tmp_path)
    for calibration in ("auto", tmp_path, str(tmp_path)):
        with turbo_hf.patch(model, MIXED, calibration=calibration) as handle:
            assert handle.report().heads == f"3-bit heads: by calibration over 768 tokens ({tmp_path})"
            assert orders(handle, model)[3] == [list(found.head_orders("priority")[3])] * 2
    with turbo_hf.patch(model, MIXED, calibration=None) as handle:
        want = "3-bit heads: the last of each layer, for want of a calibration (calibration=None was passed)"
        assert handle.report().heads == want
        assert orders(handle, model)[3] == [[0, 1]] * 2
    with turbo_hf.patch(model) as handle:
        assert handle.report().heads == ""
    with turbo_hf.patch(model, calibration=tmp_path) as handle:
        assert handle.report().heads.startswith("calibration: not used, for all heads")


def test_layers_without_a_ranking_are_named() -> None:
    model, found = lab_model()[0], lab()
    bare = replace(
        found, layers=tuple(LayerCalibration(n, {}) if n in (1, 3) else x for n, x in enumerate(found.layers))
    )
    with pytest.warns(UserWarning, match="^layers 1, 3: no calibration ranks the heads, so that the last ones"):
        turbo_hf.patch(model, MIXED, calibration=bare).remove()
    with turbo_hf.patch(model, with_options(MIXED, low_heads=1), calibration=None) as handle:
        assert handle.report().warnings == (), "all heads have one width"


def test_auto_says_what_is_wrong_with_what_it_finds(tmp_path: Path) -> None:
    model = copy.deepcopy(lab_model()[0])
    model.config._name_or_path = str(tmp_path)
    lab().save_pretrained(tmp_path)
    spoil(tmp_path)
    with pytest.raises(Unsupported, match=r"damaged.* To go without it, pass calibration=None"):
        turbo_hf.patch(model, MIXED)
    with pytest.warns(UserWarning, match="damaged"):
        handle = turbo_hf.patch(model, MIXED, strict="warn")
    assert "damaged" in handle.report().warnings[0]
    assert "the last of each layer, for want of a calibration (the one beside" in handle.report().heads
    handle.remove()
    with pytest.raises(ValueError, match="damaged"):
        turbo_hf.patch(model, MIXED, strict="warn", calibration=tmp_path)
    # it is not called missing
    message = "needs a calibration of this model, and the one beside the checkpoint is refused: .* is damaged: sums"
    with pytest.raises(ValueError, match=message), pytest.warns(UserWarning, match="damaged"):
        turbo_hf.patch(model, "saap", strict="warn")
    assert model.config._attn_implementation == "eager"


def test_a_calibration_of_another_model_is_refused(tmp_path: Path) -> None:
    model = tiny_llama()
    found = lab()
    message = "does not fit this model: it was made for a model with vocab_size 3072, and this one has 100"
    for strict in ("raise", "warn", "fallback"):
        with pytest.raises(ValueError, match=message):
            turbo_hf.patch(model, calibration=found, strict=strict)
    found.save_pretrained(tmp_path)
    model.config._name_or_path = str(tmp_path)
    with pytest.raises(Unsupported, match=message):
        turbo_hf.patch(model, MIXED)
    with pytest.raises(TypeError, match='or "auto"; got int'):
        turbo_hf.patch(model, calibration=3)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="nowhere"):
        turbo_hf.patch(model, calibration="nowhere")


def test_a_cache_refuses_an_order_that_is_none() -> None:
    model = tiny_llama()
    with pytest.raises(ValueError, match=r"head_orders names layers \[5\]"):
        TurboCache(model.config, MIXED, head_orders={5: (0, 1)})
    cache = TurboCache(model.config, MIXED, head_orders={0: (1, 1)})
    with pytest.raises(ValueError, match=r"must name each of its 2 KV heads once; got \[1, 1\]"):
        model(prompts(1, 4), **{CACHE: cache})


def heads_of(model: Any, **options: Any) -> str:
    with turbo_hf.patch(model, MIXED, **options) as handle:
        return handle.report().heads


def test_the_hubs_cache_is_looked_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    repo = tmp_path / "models--me--two"
    (repo / "refs").mkdir(parents=True)
    for name, commit, windows in (("main", "1" * 40, 3), ("v2", "2" * 40, 2)):
        (repo / "refs" / name).write_text(commit)
        shutil.copytree(LAB_MODEL, repo / "snapshots" / commit)
        lab(settings=replace(HEADS, windows=windows)).save_pretrained(repo / "snapshots" / commit)
    model: Any = AutoModelForCausalLM.from_pretrained("me/two")
    vars(model.config).pop("_commit_hash", None)
    assert "over 768 tokens (me/two)" in heads_of(model)
    other = Calibration.from_pretrained("me/two", revision="v2", local_files_only=True)
    assert "over 512 tokens (me/two)" in heads_of(model, calibration=other)
    model.config._commit_hash = "2" * 40
    assert "over 512 tokens (me/two)" in heads_of(model), "where Transformers tells it"


@pytest.mark.parametrize("name", ["my model", "run--1", "gone/", "C:\\models\\foo", "ä/ü", "x" * 5000, "o/n.git", ""])
def test_names_of_no_repository_are_folders_that_are_gone(name: str) -> None:
    model = copy.deepcopy(lab_model()[0])
    model.config._name_or_path = name
    assert checkpoint_of(model) == Checkpoint(name)
    turbo_hf.patch(model).remove()
    assert "there is none beside the checkpoint" in heads_of(model)


# --- where a run writes --------------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_made_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    begun: list[float] = []
    for out, kind, message in (
        ("file", ValueError, "out must be a folder, or the name of a new one; .* is a file"),
        ("file/inside", OSError, "Not a directory: '.*file/inside'"),
    ):
        with pytest.raises(kind, match=message):
            lab(out=tmp_path / out, progress=lambda _, share: begun.append(share))
    assert not begun
    with pytest.raises(ValueError, match=r"folder must be a folder, or the name of a new one; .*file' is a file"):
        lab().save_pretrained(tmp_path / "file")


def test_a_narrower_window_than_the_calibrations_is_told() -> None:
    model, _ = lab_model()
    found = lab(settings=replace(SMALL, steps=1))
    for window, told in ((30, True), (31, False)):
        config = TurboConfig(sparse=turbo_hf.SparseConfig(probes=4, window_tokens=window))
        with turbo_hf.patch(model, config, calibration=found) as handle:
            notes = handle.report().warnings
        assert any(f"was not trained on keys {window} to 31 tokens back" in note for note in notes) == told


def test_no_recall_is_told_where_nothing_was_judged() -> None:
    # the best key of no query is so far away
    found = lab(settings=replace(SMALL, far=120, steps=1, queries=4))
    layers = [layer.quality for layer in found.layers if layer.quality]
    assert any(not sum(each["queries"]) for each in layers)
    assert all((each["recall"]["random"] is None) == (not sum(each["queries"])) for each in layers)
