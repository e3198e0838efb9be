"""`turbo-hf fidelity`: what it prints and writes, and what it says of wrong input."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from cli_support import check_refused, last_json, run
from models import LAB_MODEL
from transformers import AutoTokenizer

from turbo_hf.patching.divergence import BOUNDS, NEVER

LAB = str(LAB_MODEL)


def fidelity(*words: str) -> Any:
    """What it prints last, its JSON."""
    return last_json(run("fidelity", *words, "--device", "cpu", "--json"))


def test_the_table_of_the_carried_model(tmp_path: Path) -> None:
    few = ("--lengths", "96", "--count", "2", "--tail", "17", "--generate", "16", "--grid", "--map")
    result = run("fidelity", LAB, *few, "--methods", "int8,turbo4,fp16", "--out", str(tmp_path), "--json")
    said, found = " ".join(result.output.split()), last_json(result)
    assert "lab-llama-4m, 2 texts, 96 tokens, chunk" in said
    assert found["suggestion"] in said
    cases = {(row["tokens"], row["path"]) for row in found["table"]}
    assert cases == {(96, "steps"), (96, "chunk")}
    assert [row["method"] for row in found["table"]][:4] == ["16 bit again", "16-bit pages", "int8", "turbo4"]
    assert {row["path"] for row in found["answers"]} == {"answer"}
    assert len(found["grid"]) == 16
    assert len(found["map"]) == 2 * found["layers"] == 12
    assert all(row["verdict"] in {*(words for _, words in BOUNDS), NEVER, "noise"} for row in found["table"])
    written = {path.name for path in tmp_path.iterdir()}
    pictures = {f"fidelity-{part}.png" for part in ("table", "answers", "grid", "map")}
    assert written == {"fidelity.json", "report.md", "report.html", *pictures}
    assert json.loads((tmp_path / "fidelity.json").read_text()) == found
    assert "| 99.9 % |" in (tmp_path / "report.md").read_text()


def test_texts_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("The quick brown fox jumps over the lazy dog. " * 200)
    found = fidelity(LAB, "--texts", str(tmp_path), "--lengths", "64", "--tail", "17", "--methods", "int8")
    assert found["source"] == str(tmp_path)


def test_a_model_without_keys_and_values_is_refused_by_what_was_asked_for(tmp_path: Path) -> None:
    model = transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=3072, hidden_size=16, num_hidden_layers=1)
    )
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(LAB_MODEL).save_pretrained(tmp_path)
    words = ("fidelity", str(tmp_path), "--lengths", "80", "--tail", "17", "--methods", "turbo4")
    check_refused("error: turbo4: Unsupported: no layer of MambaForCausalLM (mamba) can be compressed", *words)


def test_a_short_run_takes_what_is_given() -> None:
    found = fidelity(LAB, "--quick", "--lengths", "64", "--methods", "int8")
    assert {row["tokens"] for row in found["table"]} == {64}
    assert (found["texts"], found["tail"]) == (2, 64)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--methods", "fp16"), "error: --methods names none"),
        (("--lengths", "much"), "error: expected a number of tokens like 4096 or 4k; got 'much'"),
        (("--lengths", "1M"), "this model has positions for 32768. Pass shorter --lengths."),
        (("--texts", "nowhere"), "error: texts: there is no file or folder 'nowhere'"),
        (("--map-bits", "5"), "error: --map-bits must be one of"),
        (("--map-bits", "2"), "error: --map-bits 2 is for --map"),
        (("--methods", "turbo4", "--lengths", "32"), "error: turbo4: a prompt of 32 tokens shows nothing of it"),
        (("--methods", "saap"), "error: saap: "),
    ],
)
def test_wrong_input_is_one_sentence(words: tuple[str, ...], message: str) -> None:
    check_refused(message, "fidelity", LAB, *words, "--device", "cpu")


def test_short_texts_are_told(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Too short.")
    message = "the texts are too short for two windows of 1153 tokens. Pass --texts with longer ones"
    check_refused(message, "fidelity", LAB, "--texts", str(tmp_path), "--device", "cpu")


def test_a_checkpoint_without_a_tokenizer_is_told(tmp_path: Path) -> None:
    for file in LAB_MODEL.iterdir():
        if not file.name.startswith("tokenizer"):
            (tmp_path / file.name).symlink_to(file)
    check_refused("its tokenizer", "fidelity", str(tmp_path), "--device", "cpu")
