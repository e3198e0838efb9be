"""Config files on the command line: wherever a preset can be named, and in a run that is continued."""

import json
from pathlib import Path
from typing import Any

import pytest
from models import LAB_MODEL
from typer.testing import CliRunner

from turbo_hf import TurboConfig
from turbo_hf.cli.main import app


def command(*words: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, [*words, "--device", "cpu", "--json"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout.splitlines()[-1]) if code == 0 else " ".join(result.output.split())


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text("preset: turbo2\ndense_layers: [0]\nattention: fp16\n")
    return path


def test_demo(mine: Path) -> None:
    found = command("demo", "--prompts", "2", "--longest", "300", "--config", str(mine), "--method", "turbo2")
    by_file, by_name = found["rows"][1], found["rows"][2]
    assert by_file["method"] == str(mine)
    # a layer in full precision
    assert by_file["kv_bytes_per_token"] > by_name["kv_bytes_per_token"]


def test_benches(mine: Path) -> None:
    words = ("--layers", "2", "--tiny", "--config", str(mine), "--rounds", "1", "--decoding", "greedy")
    found = command("bench", "generate", *words, "--context", "40", "--new", "2")
    options = TurboConfig(bits=2, dense_layers=(0,), attention="fp16").to_dict()
    assert found["options"]["configs"] == {str(mine): options}
    assert str(mine) in {row["method"] for row in found["rows"]}
    mine.write_text("bits: 2\nattention: fp16\n")
    # the first token alone, in the file's attention
    found = command("bench", "generate", *words, "--context", "64", "--new", "1")
    assert found["options"]["configs"] == {str(mine): TurboConfig(bits=2, attention="fp16").to_dict()}


@pytest.mark.parametrize(
    "words",
    [
        ("demo", "--method"),
        ("eval", str(LAB_MODEL), "--methods"),
        ("bench", "generate", "--tiny", "--preset"),
        ("generate", str(LAB_MODEL), "hello", "--preset"),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_files_that_are_wrong_get_one_sentence(words: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason='matplotlib is not installed: pip install -e ".[eval]"')
    path = tmp_path / "mine.json"
    told = command(*words, str(path), code=1)
    assert f"error: there is no config file {path}." in told
    path.write_text('{"bit": 4}')
    told = command(*words, str(path), code=1)
    assert f"error: the config file {path}: TurboConfig has no option bit; options are preset, bits, " in told
    assert "Traceback" not in told


def test_a_run_of_a_file_is_of_what_the_file_said(mine: Path, tmp_path: Path) -> None:
    for package in ("lm_eval", "datasets", "matplotlib"):
        pytest.importorskip(package, reason=f'{package} is not installed: pip install -e ".[eval]"')
    words = ["eval", str(LAB_MODEL), "--task", "prose", "--limit", "1", "--longest", "512"]
    words += ["--out", str(tmp_path / "out"), "--methods", str(mine)]
    found = command(*words)
    assert set(found["serving"]) == {"fp16", "fp16 again", str(mine)}
    want = TurboConfig(bits=2, dense_layers=(0,), attention="fp16").to_dict()
    assert found["meta"]["configs"] == {str(mine): want}
    # the same options in other words, and another method beside it
    mine.write_text("bits: 2\nattention: fp16\ndense_layers: [0]\n")
    again = command(*words[:-1], f"{mine},turbo4")["perplexity"][0]["methods"]
    assert again.items() > found["perplexity"][0]["methods"].items()
    mine.write_text("bits: 3\nattention: fp16\ndense_layers: [0]\n")
    told = command(*words, code=1)
    assert "config.bits was 2, now 3." in told
