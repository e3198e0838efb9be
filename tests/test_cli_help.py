"""The help of the command line, which must not wait for torch."""

import subprocess
import sys
from typing import Any

import pytest
import typer.main
from all_pairs import in_one_test
from typer.testing import CliRunner

from turbo_hf.cli.main import LATER, app, load_command

HEAVY = ("torch", "transformers", "triton", "datasets", "lm_eval", "matplotlib", "turbo_hf.cache.turbo_cache")
SCRIPT = f"""
import sys
from turbo_hf.cli.main import app
sys.argv = ["turbo-hf", *sys.argv[1:]]
try:
    app()
finally:
    print("imported", sorted(set({HEAVY!r}) & set(sys.modules)))
"""


@pytest.mark.parametrize(
    "words",
    [["--help"], ["--version"], [], *([name, "--help"] for name in ("generate", "demo", "plan", "doctor"))],
    ids=" ".join,
)
def test_help_is_there_at_once(words: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, *words], capture_output=True, text=True, check=False)
    assert done.stdout.endswith("imported []\n"), done.stdout + done.stderr
    assert done.returncode == (2 if not words else 0)


def test_a_name_that_is_no_command_is_told_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, "generat"], capture_output=True, text=True, check=False)
    assert "imported []" in done.stdout
    assert "No such command 'generat'" in " ".join(done.stderr.split())


@pytest.mark.parametrize("name", LATER)
def test_commands_that_are_imported_later_are_as_the_help_says(name: str) -> None:
    command: Any = load_command(name)
    first, _, _ = str(command.help).partition("\n\n")
    assert " ".join(first.split()) == LATER[name].help
    result = CliRunner().invoke(app, [name, "--help"])
    assert result.exit_code == 0
    assert f"turbo-hf {name} [OPTIONS]" in result.output or f"root {name} [OPTIONS]" in result.output


def test_the_help_lists_every_command() -> None:
    group: Any = typer.main.get_command(app)
    listed = group.list_commands(group.make_context("turbo-hf", [], resilient_parsing=True))
    assert listed == ["doctor", "plan", "demo", "generate", "calibrate", "fidelity", "eval", "bench"]
    assert set(group.commands) | set(LATER) == set(listed)
    printed = CliRunner().invoke(app, ["--help"]).output
    places = [printed.index(f" {name} ") for name in listed]
    assert places == sorted(places)


@in_one_test("words", [["demo"], ["generate"], ["calibrate"], ["eval"], ["bench", "generate"]])
def test_no_option_is_listed_with_its_contrary(words: list[str]) -> None:
    assert "--no-" not in CliRunner().invoke(app, [*words, "--help"]).output


def test_eval_lists_methods_and_suites_with_what_they_are() -> None:
    told = " ".join(CliRunner().invoke(app, ["eval", "--list"]).output.split())
    for text in (
        "kivi4",
        "KVarN: 4-bit keys",
        "reasoning",
        "decode-heavy, short prompts",
        "turbo4@window:window_tokens=511",
    ):
        assert text in told
    assert "decode-heavy" not in CliRunner().invoke(app, ["eval", "--help"]).output
