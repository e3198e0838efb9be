"""What a calibration is kept in, and how `patch` uses it."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from all_pairs import in_one_test
from calibration_support import MIXED, lab, reversed_heads, same
from models import LAB_MODEL, lab_model, prompts, tiny_llama

import turbo_hf
from turbo_hf import Calibration, TurboCache
from turbo_hf.calibration import artifacts
from turbo_hf.calibration.artifacts import FACTS, TENSORS, find, fingerprint
from turbo_hf.calibration.checkpoint import checkpoint_of
from turbo_hf.config.turbo_config import HEAD_METRICS
from turbo_hf.config.whole_files import facts_hash
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


def spoil(folder: Path, how: str) -> None:
    facts = json.loads((folder / FACTS).read_text())
    if how == "json":
        (folder / FACTS).write_text("{")
    elif how == "format":
        (folder / FACTS).write_text("[]")
    elif how == "bytes":
        content = bytearray((folder / TENSORS).read_bytes())
        content[-1] ^= 1
        (folder / TENSORS).write_bytes(bytes(content))
    elif how == "number":
        (folder / FACTS).write_text(json.dumps(facts | {"tokens": facts["tokens"] + 1}))
    elif how == "cut":
        (folder / TENSORS).write_bytes((folder / TENSORS).read_bytes()[:100])
    else:
        layer = {"index": 0, "note": "", "quality": {}}
        key, value = {
            "schema": ("schema", 1),
            "layers": ("layers", [{}]),
            "fingerprint": ("fingerprint", [1]),
            "note": ("layers", [layer | {"note": 3}]),
            "quality": ("layers", [layer | {"quality": None}]),
        }[how]
        facts[key] = value
        (folder / FACTS).write_text(json.dumps(facts | {"facts_sha256": facts_hash(facts, "facts_sha256")}))


@in_one_test(
    ("how", "message"),
    [
        ("json", f"damaged: {FACTS} is no JSON"),
        ("format", "does not say that it is a turbo_hf calibration"),
        ("bytes", f"{TENSORS} is not the file that {FACTS} was written with"),
        ("cut", f"{TENSORS} is not the file that {FACTS} was written with"),
        ("schema", "has schema 1; this version reads 3"),
        ("number", f"{FACTS} is not as it was written"),
        ("layers", r"damaged: layers\.0 lacks 'index', and should hold"),
        ("fingerprint", "damaged: fingerprint is .*, and should be a dict"),
        ("note", r"damaged: layers\.0\.note is 3, and should be a str"),
        ("quality", r"damaged: layers\.0\.quality is None, and should be a dict"),
    ],
)
def test_damaged_artifacts_are_refused(how: str, message: str, tmp_path: Path) -> None:
    lab().save_pretrained(tmp_path)
    spoil(tmp_path, how)
    with pytest.raises(ValueError, match=message):
        Calibration.from_pretrained(tmp_path)


@in_one_test(
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


def test_numbers_that_are_none_are_refused(tmp_path: Path) -> None:
    found = lab()
    layer = replace(found.layers[0], scores={name: x * torch.nan for name, x in found.layers[0].scores.items()})
    replace(found, layers=(layer,)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"layers\.0\.scores\.\w+ is float32 .*, and should be .* of finite numbers"):
        Calibration.from_pretrained(tmp_path)


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


def test_a_repository_in_the_hubs_cache_is_found_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    commit = "a" * 40
    repo = tmp_path / "models--me--mine"
    lab().save_pretrained(repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    model = copy.deepcopy(lab_model()[0])
    model.config._name_or_path = "me/mine"
    found = find(checkpoint_of(model))
    assert found is not None
    assert found.source == "me/mine"
    with turbo_hf.patch(model, MIXED) as handle:
        assert "by calibration over 768 tokens (me/mine)" in str(handle.report())
    model.config._name_or_path = "me/another"
    assert find(checkpoint_of(model)) is None


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
    spoil(tmp_path, "bytes")
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


def test_another_revision_is_told() -> None:
    model = copy.deepcopy(lab_model()[0])
    model.config._commit_hash = "b" * 40
    found = lab()
    found = replace(found, fingerprint={**found.fingerprint, "revision": "a" * 40})
    with turbo_hf.patch(model, MIXED, calibration=found) as handle:
        assert handle.report().warnings == (
            "the calibration was made for revision aaaaaaaaaaaa of the checkpoint; this model is of bbbbbbbbbbbb.",
        )


def test_a_cache_refuses_an_order_that_is_none() -> None:
    model = tiny_llama()
    with pytest.raises(ValueError, match=r"head_orders names layers \[5\]"):
        TurboCache(model.config, MIXED, head_orders={5: (0, 1)})
    cache = TurboCache(model.config, MIXED, head_orders={0: (1, 1)})
    with pytest.raises(ValueError, match=r"must name each of its 2 KV heads once; got \[1, 1\]"):
        model(prompts(1, 4), **{CACHE: cache})
