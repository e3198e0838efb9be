"""What a calibration is kept in, also while it is written, and how `patch` uses it."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from calibration_support import MIXED, lab, reversed_heads, same
from models import LAB_MODEL, lab_model, prompts, tiny_llama

import turbo_hf
from turbo_hf import Calibration, TurboCache
from turbo_hf.calibration import artifacts
from turbo_hf.calibration.artifacts import CARD, FACTS, TENSORS, LayerCalibration, fingerprint
from turbo_hf.calibration.checkpoint import checkpoint_of
from turbo_hf.config.turbo_config import HEAD_METRICS
from turbo_hf.config.whole_files import InUse, facts_hash, one_writer
from turbo_hf.errors import Unsupported
from turbo_hf.models.versions import CACHE

# --- artifacts ---------------------------------------------------------------------------------------------------


def test_round_trip(tmp_path: Path, indexed: Calibration) -> None:
    indexed.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {FACTS, TENSORS, artifacts.CARD}
    found = Calibration.from_pretrained(tmp_path)
    assert same(found, indexed)
    assert found.source == str(tmp_path)
    for metric in HEAD_METRICS:
        assert found.head_orders(metric) == indexed.head_orders(metric)
    with pytest.raises(ValueError, match="metric must be one of"):
        found.head_orders("size")


FACTS_CHANGES: list[tuple[str, Any, str]] = [
    ("schema", 1, "has schema 1; this version reads 2"),
    ("layers", [{}], r"damaged: layers\.0 lacks 'index', and should hold"),
    ("fingerprint", [1], "damaged: fingerprint is .*, and should be a dict"),
    ("fingerprint", {"num_hidden_layers": "x"}, r"damaged: fingerprint\.num_hidden_layers is 'x'"),
    ("layers", [{"index": 0, "note": 3, "quality": {}}], r"damaged: layers\.0\.note is 3, and should be a str"),
    ("layers", [{"index": 0, "note": "", "quality": None}], r"damaged: layers\.0\.quality is None, and should be a d"),
    ("settings", {"local": []}, r"damaged: settings\.local is \[\], and should be a whole number"),
]


@pytest.mark.parametrize(("key", "value", "message"), FACTS_CHANGES)
def test_facts_of_another_kind_are_damaged(key: str, value: Any, message: str, tmp_path: Path) -> None:
    lab().save_pretrained(tmp_path)
    facts = json.loads((tmp_path / FACTS).read_text())
    facts[key] = {**facts[key], **value} if isinstance(value, dict) else value
    (tmp_path / FACTS).write_text(json.dumps(facts | {"facts_sha256": facts_hash(facts, "facts_sha256")}))
    with pytest.raises(ValueError, match=message):
        Calibration.from_pretrained(tmp_path)


def spoil(folder: Path) -> None:
    """Another last byte of the tensors."""
    content = bytearray((folder / TENSORS).read_bytes())
    content[-1] ^= 1
    (folder / TENSORS).write_bytes(bytes(content))


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    lab().save_pretrained(tmp_path)
    spoil(tmp_path)
    for cut in (None, 100):
        (tmp_path / TENSORS).write_bytes((tmp_path / TENSORS).read_bytes()[:cut])
        with pytest.raises(ValueError, match=f"{TENSORS} is not the file that {FACTS} was written with"):
            Calibration.from_pretrained(tmp_path)
    facts = json.loads((tmp_path / FACTS).read_text())
    for text, message in (
        (json.dumps(facts | {"tokens": facts["tokens"] + 1}), f"{FACTS} is not as it was written"),
        ("{", f"damaged: {FACTS} is no JSON"),
        ("[" * 100_000, f"damaged: {FACTS} is no JSON"),
        ("[]", "does not say that it is a turbo_hf calibration"),
    ):
        (tmp_path / FACTS).write_text(text)
        with pytest.raises(ValueError, match=message):
            Calibration.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: None, "it lacks 'layers.0.scores.entropy'"),
        (lambda x: x[:, None], r"is float32 \[2, 1\].*, and should be floating point \[2\]"),
        (lambda x: x.to(torch.float8_e4m3fn), "is float8_e4m3fn"),
        (lambda x: x * torch.nan, r"layers\.0\.scores\.entropy is float32 .*, and should be .* of finite numbers"),
    ],
)
def test_scores_that_are_none_are_refused(change: Any, message: str, tmp_path: Path) -> None:
    found = lab()
    scores = {**found.layers[0].scores, "entropy": change(found.layers[0].scores["entropy"])}
    layer = replace(found.layers[0], scores={name: x for name, x in scores.items() if x is not None})
    replace(found, layers=(layer,)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        Calibration.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("weight_2", None, "lacks 'layers.[0-9].weight_2'"),
        ("centroids", None, "lacks 'layers.[0-9].centroids'"),
        ("rotated_centroids", None, "lacks 'layers.[0-9].rotated_centroids'"),
        ("classifier", None, "lacks 'layers.[0-9].bias_1'"),
        ("centroids", lambda x: x[:, 0], r"centroids is float16 \[2, 64\]"),
        (
            "weight_2",
            lambda x: x[..., 1:],
            r"weight_2 is float16 \[2, 32, 15\].*, and should be floating point \[2, 32, 16\]",
        ),
        ("rotated_centroids", lambda x: x[..., 1:], r"rotated_centroids is .*, and should be"),
        (
            "centroids",
            lambda x: x[1:],
            r"centroids is float16 \[1, 16, 64\].*, and should be floating point \[2, 16, 64\]",
        ),
        ("centroids", lambda x: x.to(torch.int8), "centroids is int8"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    name: str, change: Any, message: str, tmp_path: Path, indexed: Calibration
) -> None:
    layer = next(layer for layer in indexed.layers if layer.centroids is not None)
    if name == "weight_2":
        parts = dict(layer.classifier)
        held = parts.pop(name)
        layer = replace(layer, classifier=parts if change is None else parts | {name: change(held)})
    else:
        empty: Any = {} if name == "classifier" else None
        own: dict[str, Any] = {name: empty if change is None else change(getattr(layer, name))}
        layer = replace(layer, **own)
    replace(indexed, layers=(layer,)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"damaged: .*{message}"):
        Calibration.from_pretrained(tmp_path)


def test_a_classifier_of_an_architecture_that_is_gone_is_refused(tmp_path: Path, indexed: Calibration) -> None:
    before = dict(indexed.settings) | {"architecture": "mlp", "long_range": False}  # as earlier versions wrote
    replace(indexed, settings=before).save_pretrained(tmp_path / "mlp")
    assert same(Calibration.from_pretrained(tmp_path / "mlp"), replace(indexed, settings=before))
    replace(indexed, settings=before | {"architecture": "residual"}).save_pretrained(tmp_path / "residual")
    with pytest.raises(ValueError, match=r"architecture 'residual'; this version has the MLP alone\. Calibrate again"):
        Calibration.from_pretrained(tmp_path / "residual")


def test_layers_that_are_missing_are_told() -> None:
    model, _ = lab_model()
    found = lab()
    part = replace(found, layers=found.layers[:2])
    with pytest.raises(ValueError, match="it holds 2 of the 6 layers of its model"):
        turbo_hf.patch(model, "turbo-mixed", calibration=part)


def test_a_missing_artifact_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=f"the folder has no {FACTS}"):
        Calibration.from_pretrained(tmp_path)
    with pytest.raises(OSError, match="there is no such folder"):
        Calibration.from_pretrained(tmp_path / "gone")
    with pytest.raises(OSError, match="no-such"):
        Calibration.from_pretrained("nobody/no-such", local_files_only=True)


def test_fingerprints_tell_models_apart() -> None:
    model, tokenizer = lab_model()
    found = lab()
    assert found.mismatch(model, tokenizer) is None
    assert found.mismatch(tiny_llama()) == "it was made for a model with vocab_size 3072, and this one has 100"
    other = copy.deepcopy(tokenizer)
    other.add_tokens(["<another>"])
    assert "made for a model with tokenizer" in str(found.mismatch(model, other))
    assert fingerprint(model, checkpoint_of(model))["model"] == LAB_MODEL.name


def test_push_to_hub_uploads_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: dict[str, bytes] = {}

    class Hub:
        def __init__(self, token: str | None) -> None:
            sent["token"] = str(token).encode()

        def create_repo(self, repo_id: str, **options: Any) -> None:
            sent["repo"] = repo_id.encode()

        def create_commit(self, repo_id: str, operations: Any, commit_message: str) -> Any:
            for each in operations:
                sent[each.path_in_repo] = each.path_or_fileobj
            return type("Commit", (), {"commit_url": f"https://{repo_id}/{commit_message}"})

    monkeypatch.setattr(artifacts, "HfApi", Hub)
    found = lab()
    url = found.push_to_hub("me/mine", token="t")
    assert url.startswith("https://me/mine/")
    assert {name: sent[name] for name in found._files()} == found._files()
    assert (sent["repo"], sent["token"]) == (b"me/mine", b"t")


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
    config = replace(MIXED, head_metric=metric)
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
        assert "first 32 tokens (no calibration beside the checkpoint)" in str(handle.report())
    found = reversed_heads(lab())
    found.save_pretrained(tmp_path)
    for calibration in ("auto", tmp_path, str(tmp_path)):
        with turbo_hf.patch(model, MIXED, calibration=calibration) as handle:
            assert handle.report().heads == f"3-bit heads: by calibration over 768 tokens ({tmp_path})"
            assert orders(handle, model)[3] == [list(found.head_orders("priority")[3])] * 2
    with turbo_hf.patch(model, MIXED, calibration=None) as handle:
        assert handle.report().heads == "3-bit heads: chosen by each row's first 32 tokens"
    with turbo_hf.patch(model) as handle:
        assert handle.report().heads == ""
    with turbo_hf.patch(model, calibration=tmp_path) as handle:
        assert handle.report().heads.startswith("calibration: not used, for all heads")


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
    assert handle.report().heads == "3-bit heads: chosen by each row's first 32 tokens"
    handle.remove()
    with pytest.raises(ValueError, match="damaged"):
        turbo_hf.patch(model, MIXED, strict="warn", calibration=tmp_path)
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


# --- files while they are written: readers meanwhile, a full disk, several writers ------------------------------------

NAMES = {FACTS, TENSORS, CARD}


def made(number: int) -> Calibration:
    """A small calibration, whose tensors differ by number."""
    layer = LayerCalibration(0, {metric: torch.full((2,), float(number)) for metric in HEAD_METRICS})
    return Calibration({"num_hidden_layers": 1, "num_key_value_heads": 2, "head_dim": 16}, {}, (layer,), number)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


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
