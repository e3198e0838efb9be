"""Calibration: runs from the texts to the result, what is refused before one, which windows judge it; the command;
what texts may be, and how they become windows."""

import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from accelerate import cpu_offload  # type: ignore[import-untyped] # it has no types
from calibration_support import HEADS, MIXED, PROSE, PROSE_FILE, SMALL, TEXTS, lab, same
from cli_support import check_refused, last_json
from cli_support import run as run_command
from families_support import build
from models import LAB_MODEL, lab_model, tiny_llama, tiny_mistral
from transformers import AutoTokenizer, BloomConfig, BloomForCausalLM, T5Config, T5Model

import turbo_hf
from turbo_hf import Calibration
from turbo_hf.calibration import run
from turbo_hf.calibration.index import WAYS, evaluate, train
from turbo_hf.calibration.run import calibrate, make_plan
from turbo_hf.calibration.settings import PRESETS, resolve_settings
from turbo_hf.calibration.texts import token_windows
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


def test_a_classifier_beyond_float16_leaves_no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    def wide(*args: Any) -> Any:
        classifier = train(*args)
        bias = classifier["bias_1"].clone()
        bias[:2] = 1e6
        return classifier | {"bias_1": bias}

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


# --- refusals before anything is read --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": 100, "local": 90}, "too short for the long-range filter: with local=90 and far=16 they need 184"),
        ({"window": 63}, "Settings.window must be a whole number of at least 64; got 63"),
        ({"windows": 1}, "Settings.windows must be a whole number of at least 2; got 1"),
        ({"clusters": 32769}, "Settings.clusters must be at most 32768; got 32769"),
        ({"seed": 1 << 32}, "Settings.seed must be at most 4294967295; got 4294967296"),
        ({"clusters": 1}, "Settings.clusters must be a whole number of at least 2; got 1"),
        ({"seed": -1}, "Settings.seed must be a whole number of at least 0; got -1"),
        ({"learning_rate": 2.0}, "Settings.learning_rate must be a number between 0 and 1; got 2.0"),
        ({"index": 1}, "Settings.index must be True or False; got 1"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **settings)


def test_bad_input() -> None:
    model, tokenizer = lab_model()
    with pytest.raises(ValueError, match="one of the presets fast, full; got 'slow'"):
        resolve_settings("slow")
    assert resolve_settings("fast", 6000).window == 6000
    with pytest.raises(ValueError, match="longer than the 100 positions"):
        resolve_settings(SMALL, 100)
    with pytest.raises(TypeError, match=r"must be a transformers.PreTrainedModel; got str"):
        calibrate("model", tokenizer, TEXTS)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="too few for two windows of 256"):
        calibrate(model, tokenizer, ["A short text."], settings=HEADS)
    with pytest.raises(ValueError, match="no file or folder 'nowhere'"):
        calibrate(model, tokenizer, "nowhere", settings=HEADS)
    begun: list[float] = []
    with pytest.raises(ValueError, match="too few for 4000 clusters"):
        lab(settings=replace(SMALL, clusters=4000), progress=lambda _, share: begun.append(share))
    assert not begun, "told before the first pass"
    with pytest.raises(ValueError, match="it belongs to another model"):
        calibrate(tiny_llama(), tokenizer, TEXTS, settings=HEADS)
    with pytest.raises(ValueError, match=r"no layer of LlamaForCausalLM can be calibrated: .*24"):
        make_plan(build("llama", head_dim=24), SMALL)
    with pytest.raises(ValueError, match=r"in training mode, .* Call model.eval\(\)"):
        make_plan(tiny_llama().train(), SMALL)
    small: dict[str, Any] = {"vocab_size": 100, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    with pytest.raises(ValueError, match="T5Model is an encoder-decoder; only decoder-only models can be calibrated"):
        make_plan(T5Model(T5Config(**small)).eval(), SMALL)
    bloom = BloomForCausalLM(BloomConfig(vocab_size=100, hidden_size=16, n_layer=1, n_head=2)).eval()
    with pytest.raises(ValueError, match="no layer of BloomForCausalLM can be calibrated: it has no attention module"):
        make_plan(bloom, SMALL)


# --- which windows and keys an index is made from, and which windows judge it ----------------------------------------


@pytest.mark.parametrize(("windows", "learned"), [(3, 2), (14, 12)])
def test_an_index_is_judged_on_windows_it_has_not_seen(
    windows: int, learned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clustered, trained, judged = Mock(wraps=run._centroids), Mock(wraps=train), Mock(wraps=evaluate)
    monkeypatch.setattr(run, "_centroids", clustered)
    monkeypatch.setattr(run, "train", trained)
    monkeypatch.setattr(run, "evaluate", judged)
    found = lab(settings=replace(SMALL, windows=windows, queries=16, steps=1))
    assert {call.args[3] for call in trained.call_args_list} == {learned}
    assert [list(call.args[5]) for call in judged.call_args_list] == [list(range(learned, windows))] * len(found.layers)
    by_layers = [call.args[0] for call in clustered.call_args_list]
    for number, call in enumerate(trained.call_args_list):
        for name, own in zip(("pre_rotary_keys", "keys"), by_layers[2 * number : 2 * number + 2], strict=True):
            for layer, used in zip(call.args[0], own, strict=True):
                held = getattr(layer, name)
                assert (len(held), len(used)) == (windows, learned)
                assert all(map(torch.equal, used, held[:learned]))


def test_sinks_take_no_part_in_the_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    heads, windows, length, dim = 2, 3, 50, 4
    k_means = Mock(return_value=torch.zeros(2 * heads, 8, dim))
    monkeypatch.setattr(run, "k_means", k_means)
    number = torch.arange(2 * windows * heads * length).view(2, windows, heads, length)
    layers = [[keys[..., None].expand(-1, -1, dim).float() for keys in layer] for layer in number]
    run._centroids(layers, 8, SMALL, 0, torch.device("cpu"))
    # by layer and head, all keys of all windows but the first of each
    want = number[..., 1:].transpose(1, 2).reshape(2 * heads, windows * (length - 1))
    assert torch.equal(k_means.call_args_list[0].args[0][..., 0].long(), want)


# --- `turbo-hf calibrate` --------------------------------------------------------------------------------------------

CALIBRATE = ("calibrate", str(LAB_MODEL), "--texts", str(PROSE_FILE), "--device", "cpu")


def test_the_command_writes_what_patch_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "fast", replace(SMALL, steps=4))
    result = run_command(*CALIBRATE, "--out", str(tmp_path / "out"), "--window", "256", "--json")
    facts = last_json(result)
    assert facts["tokens"] == 768
    assert len(facts["layers"]) == 6
    found = Calibration.from_pretrained(tmp_path / "out")
    assert found.layers[0].centroids is not None
    assert "recall: long-range attention mass in 4 % of the keys" in " ".join(result.output.split())
    with turbo_hf.patch(lab_model()[0], MIXED, calibration=tmp_path / "out") as handle:
        assert "by calibration" in handle.report().heads


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--preset", "slow"], "one of the presets fast, full; got 'slow'"),
        (["--heads-only", "--window", "20"], "Settings.window must be a whole number of at least 64; got 20"),
    ],
)
def test_mistakes_get_one_sentence(words: list[str], message: str, tmp_path: Path) -> None:
    check_refused(message, *CALIBRATE, "--out", str(tmp_path / "out"), *words)


# --- texts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (None, "texts must be a .txt file, a folder .* or .* strings, .*; got NoneType"),
        (3, "texts must be .*; got int"),
        ([1], "texts must hold strings; number 0 is int"),
        ([PROSE[:200], Path("book.txt")], "texts must hold strings; number 1 is Posix"),
        (PROSE, r"a string names a .txt file.*characters. Pass a text as \[text\]"),
        ("two\nlines", r"this one has 9 characters. Pass a text as \[text\]"),
        ([str(LAB_MODEL.parents[1] / "eval" / "haystack.txt")], "number 0, .*haystack.txt', names a file"),
        ({"a": PROSE}, "texts must be .*; got dict"),
        (b"text", "texts must be .*; got bytes"),
        ("", r"this one has 0 characters. Pass a text as \[text\]"),
        ("x" * 300, "there is no file or folder 'xxx"),
        (__file__, f"{Path(__file__).name}' is no .txt file. Rename it if it is plain text"),
    ],
)
def test_texts_that_are_none(texts: Any, message: str) -> None:
    model, tokenizer = lab_model()
    with pytest.raises(ValueError, match=message):
        calibrate(model, tokenizer, texts, settings=HEADS)


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    model, tokenizer = lab_model()
    tokenizer.save_pretrained(tmp_path)
    made = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary = made["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    other = AutoTokenizer.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"the tokenizer is not the model's own: it has token .* as"):
        calibrate(model, other, TEXTS, settings=HEADS)
    with pytest.raises(ValueError, match="tokenizer must be the model's own, as of AutoTokenizer; got NoneType"):
        calibrate(model, None, TEXTS, settings=HEADS)
    more = copy.deepcopy(tokenizer)
    more.add_special_tokens({"pad_token": "<mine>"})
    found = calibrate(model, more, TEXTS, settings=HEADS)
    assert found.fingerprint == lab().fingerprint


def test_short_texts_of_any_length_are_texts() -> None:
    _, tokenizer = lab_model()
    rows = [".", "tests", PROSE[:300].replace("\n", " "), PROSE[300:4000].replace("\n", " ")]
    assert token_windows(rows * 3, tokenizer, 128, 6).shape == (6, 128)


def test_windows_of_texts(tmp_path: Path) -> None:
    _, tokenizer = lab_model()
    (tmp_path / "a.txt").write_text(PROSE)
    (tmp_path / "b.txt").write_text(PROSE[100:])
    windows = token_windows(tmp_path, tokenizer, 128, 6)
    assert windows.shape == (6, 128)
    start = tokenizer(PROSE[:2000])["input_ids"][:128]
    assert windows[0].tolist() == start
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"holds no .txt file"):
        token_windows(tmp_path / "empty", tokenizer, 128, 6)


FILES = {
    "utf16.txt": (PROSE[:1000].encode("utf-16"), "is no UTF-8 text: it has the byte 0xff"),
    "unmarked.txt": (PROSE[:1000].encode("utf-16-le"), "is binary, or UTF-16 or UTF-32 text without a mark"),
    "latin.txt": ("caf\u00e9 noir".encode("latin-1"), "is no UTF-8 text: it has the byte 0xe9"),
    "half.txt": ("caf\u00e9".encode()[:-1], "is no UTF-8 text: it has the byte 0xc3"),
    "binary.txt": (bytes(range(256)) * 40, "is no UTF-8 text: it has the byte 0x80"),
    "zeros.txt": (PROSE[:1000].encode() + b"\0", "is binary"),
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_no_texts_are_named(name: str, tmp_path: Path) -> None:
    content, message = FILES[name]
    (tmp_path / "a.txt").write_text(PROSE)
    (tmp_path / name).write_bytes(content)
    _, tokenizer = lab_model()
    with pytest.raises(ValueError, match=f"^texts: .*{name}.*") as caught:
        token_windows(tmp_path, tokenizer, 128, 4)
    assert re.search(message, str(caught.value))


def test_a_mark_before_utf_8_is_no_text(tmp_path: Path) -> None:
    _, tokenizer = lab_model()
    (tmp_path / "a.txt").write_bytes(PROSE.encode("utf-8-sig"))
    plain = token_windows([PROSE], tokenizer, 128, 3)
    assert torch.equal(token_windows(tmp_path / "a.txt", tokenizer, 128, 3), plain)


def test_half_characters_are_told_wherever_texts_come_from() -> None:
    _, tokenizer = lab_model()
    with pytest.raises(ValueError, match="in position 2: surrogates not allowed"):
        token_windows([PROSE[:100], "ab\ud83d"], tokenizer, 128, 4)
