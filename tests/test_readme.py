"""The README tells the truth: its code runs, its commands exist, its tree is the real one."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

import turbo_hf
from turbo_hf.cli import app
from turbo_hf.patches import FAMILIES

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)


def blocks(language: str) -> list[str]:
    return [code for name, code in BLOCKS if name == language]


@pytest.mark.parametrize("code", blocks("python"), ids=lambda code: code.strip().splitlines()[0][:40])
def test_python_blocks_run(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    exec(compile(code, "README.md", "exec"), {})


COMMANDS = [line for code in blocks("bash") for line in code.splitlines() if line and not line.startswith("#")]


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_exist(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(line, comments=True)
    monkeypatch.chdir(ROOT)
    if words[0] == "bash":
        assert (ROOT / words[1]).is_file()
    elif words[0] == "turbo-hf" and words[1] == "demo":
        # the demo itself runs in test_cli
        assert CliRunner().invoke(app, ["demo", "--help"]).exit_code == 0
    elif words[0] == "turbo-hf" and words[1] == "bench":
        # as above, in test_bench
        assert CliRunner().invoke(app, [*words[1:3], "--help"]).exit_code == 0
    elif words[0] == "turbo-hf" and words[1] == "eval":
        # as above, in test_evaluation
        assert CliRunner().invoke(app, ["eval", "--help"]).exit_code == 0
    elif words[:2] == ["python", "-m"]:
        assert importlib.util.find_spec(words[2]) is not None
    elif words[0] == "turbo-hf" and words[1] == "calibrate":
        # as above, in test_calibration
        assert CliRunner().invoke(app, ["calibrate", "--help"]).exit_code == 0
    elif words[0] == "turbo-hf":
        assert CliRunner().invoke(app, words[1:]).exit_code == 0
    else:
        assert words[:2] == ["pip", "install"]


def test_every_family_preset_and_public_name_is_named() -> None:
    for family in FAMILIES:
        assert family.name in README
    for name in (*turbo_hf.PRESETS, *turbo_hf.__all__):
        assert f"`{name}" in README or f"turbo_hf.{name}" in README, name


def test_the_tree_is_the_real_one() -> None:
    (tree,) = blocks("text")
    named = {line.split()[0].rstrip("/") for line in tree.splitlines() if line.strip()}
    for name in named:
        assert (ROOT / name).exists(), name
    tracked = {"turbo_hf", "patches", "eval", "tests", "examples"}
    assert tracked <= {name.split("/")[0] for name in named}


def test_length() -> None:
    assert len(README.splitlines()) <= 250
