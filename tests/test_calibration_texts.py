"""Calibration: what texts may be, how they become windows, and the tokenizer that reads them."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from calibration_support import HEADS, PROSE, TEXTS, lab
from models import LAB_MODEL, lab_model
from transformers import AutoTokenizer

from turbo_hf.calibration.run import calibrate
from turbo_hf.calibration.texts import token_windows


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (None, "texts must be a .txt file, a folder .* or .* strings, .*; got NoneType"),
        (3, "texts must be .*; got int"),
        ([1], "texts must hold strings; number 0 is int"),
        ([PROSE[:200], Path("book.txt")], "texts must hold strings; number 1 is Posix"),
        (PROSE, r"a string names a .txt file.*characters. Pass a text as \[text\]"),
        ("two\nlines", r"this one has 9 characters. Pass a text as \[text\]"),
        (
            [str(LAB_MODEL.parents[1] / "eval" / "haystack.txt")],
            "number 0, .*haystack.txt', names a file. Strings are te",
        ),
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
    "utf16be.txt": (b"\xfe\xff" + PROSE[:1000].encode("utf-16-be"), "is no UTF-8 text: it has the byte 0xfe"),
    "utf32.txt": (PROSE[:1000].encode("utf-32"), "is no UTF-8 text: it has the byte 0xff"),
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
