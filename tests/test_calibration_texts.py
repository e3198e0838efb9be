"""Calibration: what texts may be, how they become windows, and the tokenizer that reads them."""

import copy
import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from calibration_support import HEADS, PROSE, TEXTS, lab
from models import LAB_MODEL, lab_model
from transformers import AutoTokenizer

import turbo_hf
from turbo_hf.calibration.checkpoint import tokenizer_hash
from turbo_hf.calibration.run import calibrate
from turbo_hf.calibration.texts import token_windows


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (None, "texts must be a .txt or .jsonl file, a folder .* strings; got NoneType"),
        (3, "texts must be .*; got int"),
        ([1], "texts must hold strings; number 0 is int"),
        ([PROSE[:200], Path("book.txt")], "texts must hold strings; number 1 is Posix"),
        (PROSE, r"a string names a .txt or .jsonl file.*characters. Pass a text as \[text\]"),
        ("two\nlines", r"this one has 9 characters. Pass a text as \[text\]"),
        (
            [str(LAB_MODEL.parents[1] / "eval" / "haystack.txt")],
            "number 0, .*haystack.txt', names a file. Strings are te",
        ),
        ({"a": PROSE}, "texts must be .*; got dict"),
        (b"text", "texts must be .*; got bytes"),
        ("", r"this one has 0 characters. Pass a text as \[text\]"),
        ("x" * 300, "there is no file or folder 'xxx"),
        (__file__, f"{Path(__file__).name}' is no .txt or .jsonl file. Rename it if it is plain text"),
    ],
    ids=range(12),
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
    elsewhere = replace(found, fingerprint={**found.fingerprint, "tokenizer": tokenizer_hash(other)})
    with pytest.raises(ValueError, match="it was made for a model with tokenizer"):
        turbo_hf.patch(model, "turbo-mixed", calibration=elsewhere)
    with turbo_hf.patch(model, "turbo-mixed", calibration=found):
        pass


def test_a_tokenizer_that_cannot_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = lab_model()
    found = lab()
    monkeypatch.setattr(model.config, "_name_or_path", str(tmp_path))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_text("{")
    message = "cannot be read, so that none is compared with it"
    with pytest.warns(UserWarning, match=message) as caught:
        turbo_hf.patch(model, "turbo-mixed", calibration=found).remove()
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with turbo_hf.patch(model, "turbo-mixed", calibration=found, strict="fallback") as handle:
            assert message in "".join(handle.report().warnings)


def test_no_more_of_a_file_is_read_than_is_wanted(tmp_path: Path) -> None:
    _, tokenizer = lab_model()
    lines = [json.dumps({"text": PROSE})] * 20
    (tmp_path / "long.jsonl").write_text("\n".join([*lines, "no JSON"]))
    assert token_windows(tmp_path, tokenizer, 128, 4).shape == (4, 128)


def test_short_texts_of_any_length_are_texts() -> None:
    _, tokenizer = lab_model()
    rows = [".", "tests", PROSE[:300].replace("\n", " "), PROSE[300:4000].replace("\n", " ")]
    assert token_windows(rows * 3, tokenizer, 128, 6).shape == (6, 128)


def test_windows_of_texts(tmp_path: Path) -> None:
    _, tokenizer = lab_model()
    (tmp_path / "a.txt").write_text(PROSE)
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps({"text": PROSE[k::1]}) for k in (100, 200)))
    windows = token_windows(tmp_path, tokenizer, 128, 6)
    assert windows.shape == (6, 128)
    start = tokenizer(PROSE[:2000])["input_ids"][:128]
    assert windows[0].tolist() == start
    (tmp_path / "b.jsonl").write_text('{"words": 1}')
    with pytest.raises(ValueError, match='no JSON object with a "text"'):
        token_windows(tmp_path, tokenizer, 128, 6)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"holds no .txt or .jsonl file"):
        token_windows(tmp_path / "empty", tokenizer, 128, 6)
