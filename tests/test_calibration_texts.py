"""Calibration: what texts may be, how they become windows, and the tokenizer that reads them."""

import copy
import json
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from calibration_support import HEADS, PROSE, TEXTS, lab
from models import LAB_MODEL, lab_model
from transformers import AutoTokenizer

import turbo_hf
from turbo_hf.calibration import texts as texts_of
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
    config = {"bits": 8, "expert": {"low_bits": 4, "low_heads": 0.5}}
    with pytest.warns(UserWarning, match=message) as caught:
        turbo_hf.patch(model, config, calibration=found).remove()
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with turbo_hf.patch(model, config, calibration=found, strict="fallback") as handle:
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


FILES = {
    "surrogate.jsonl": (
        b'{"text": "a"}\n{"text": "cut \\ud83d here"}',
        r"line 2 of .* has half of a character .* at character 4",
    ),
    "deep.jsonl": (b'{"text": ' + b"[" * 200_000, r'line 1 of .* is no JSON object with a "text"'),
    "other.jsonl": (b'\n{"text": "a"}\n{"x": 1}\n', r"line 3 of .* \(it has no 'text'\)"),
    "list.jsonl": (b'["text"]', r'line 1 of .* is no JSON object with a "text"'),
    "number.jsonl": (b'{"text": 3}', r"line 1 of .* \(the text is int\)"),
    "parts.jsonl": (b'{"text": ["a", "b"]}', r"line 1 of .* \(the text is list\)"),
    "none.jsonl": (b'{"text": null}', r"line 1 of .* \(the text is NoneType\)"),
    "cut.jsonl": (b'{"text": "a"}\n{"text": "b', r"line 2 of .* is no JSON object"),
    "latin.jsonl": ('{"text": "caf\u00e9"}'.encode("latin-1"), "is no UTF-8 text: it has the byte 0xe9"),
    "utf16.jsonl": ('{"text": "a"}'.encode("utf-16"), "is UTF-16; only UTF-8 is read. Convert it"),
    "utf16.txt": (PROSE[:1000].encode("utf-16"), "is UTF-16; only UTF-8 is read. Convert it"),
    "utf16be.txt": (b"\xfe\xff" + PROSE[:1000].encode("utf-16-be"), "is UTF-16; only UTF-8 is read"),
    "utf32.txt": (PROSE[:1000].encode("utf-32"), "is UTF-32; only UTF-8 is read"),
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
    (tmp_path / "b.jsonl").write_bytes(json.dumps({"text": PROSE}).encode("utf-8-sig"))
    plain = token_windows([PROSE], tokenizer, 128, 3)
    for name in ("a.txt", "b.jsonl"):
        assert torch.equal(token_windows(tmp_path / name, tokenizer, 128, 3), plain)


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_a_file_without_a_line_end_is_not_read_to_its_end(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, tokenizer = lab_model()
    path = tmp_path / f"endless{suffix}"
    with path.open("wb") as file:
        file.write(b'{"text": "' if suffix == ".jsonl" else b"")
        file.write(PROSE[:30_000].replace("\n", " ").encode())
        # a file of 10 GB that takes no room
        file.truncate(10 << 30)
    monkeypatch.setattr(texts_of, "LONGEST_LINE", 100_000)
    message = r"line 1 of .*endless.jsonl' is longer than 100,000 characters. Split it"
    with pytest.raises(ValueError, match=message if suffix == ".jsonl" else "endless.txt' is binary"):
        token_windows(path, tokenizer, 512, 8)


def test_half_characters_are_told_wherever_texts_come_from() -> None:
    _, tokenizer = lab_model()
    with pytest.raises(ValueError, match=r"texts: number 1 has half of a character .* at character 2: it was cut"):
        token_windows([PROSE[:100], "ab\ud83d"], tokenizer, 128, 4)
