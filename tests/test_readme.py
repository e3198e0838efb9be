"""The README and docs/ tell the truth: their code runs, its commands exist, its tree is the real one."""

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
from models import prompts, tiny_llama
from typer.testing import CliRunner

import turbo_hf
from turbo_hf import TurboConfig
from turbo_hf.cli.main import app
from turbo_hf.config.turbo_config import Expert
from turbo_hf.patches.families import FAMILIES

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [README, *(page.read_text() for page in sorted((ROOT / "docs").glob("*.md")))]
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", "\n".join(PAGES), re.DOTALL)


def blocks(language: str) -> list[str]:
    """The code in this language in the README, then in the pages of docs/."""
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
    elif words[0] == "turbo-hf":
        parse(words[1:])
        if words[1] == "plan":
            # what takes longer runs in tests of its own, `doctor` on this model too
            assert CliRunner().invoke(app, words[1:]).exit_code == 0
    elif words[0] == "python":
        assert (ROOT / words[1]).is_file()
    else:
        assert words[:2] == ["pip", "install"]


def parse(words: list[str]) -> None:
    """Raise for a command or an option that does not exist, or a value of the wrong type."""
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands"):
        # also those that are imported when they are called
        _, command, words = command.resolve_command(
            command.make_context(command.name, [], resilient_parsing=True), words
        )
    command.make_context(command.name, words)


def test_every_family_preset_and_public_name_is_named() -> None:
    for family in FAMILIES:
        assert family.name in README
    text = "\n".join(PAGES)
    for name in (*turbo_hf.PRESETS, *turbo_hf.__all__):
        assert f"`{name}" in text or f"turbo_hf.{name}" in text, name


def test_the_tree_is_the_real_one() -> None:
    tree = blocks("text")[0]
    named = {line.split()[0].rstrip("/") for line in tree.splitlines() if line.strip()}
    for name in named:
        assert (ROOT / name).exists(), name
    tracked = {"turbo_hf", "patches", "eval", "tests", "examples", "docs"}
    assert tracked <= {name.split("/")[0] for name in named}


def test_the_readme_is_for_five_minutes_and_a_terminal() -> None:
    assert len(README.split()) <= 1100
    assert all(len(line) <= 100 for line in README.splitlines() if line.startswith("|"))


def test_the_pages_stay_short() -> None:
    assert sum(len(page.split()) for page in PAGES) < 9000
    limits = (ROOT / "docs" / "limits.md").read_text()
    assert len(limits.split()) <= 1500
    bullets = limits.partition("## Non-goals")[2].splitlines()
    assert all(line.startswith(("- ", "## ")) and len(line) <= 120 for line in bullets if line), "a limit is one line"


LAUNCHED, CAPTURED = 7300, 4700
"""Lines of the files that a decode step passes: no more than these."""


def listed(way: str) -> tuple[str, set[str]]:
    """The section on these files, and those that it lists."""
    part = (ROOT / "docs" / "architecture.md").read_text().partition("### Files that a decode step passes")[2]
    table = part.partition(f"\n| {way}")[2].partition("\n\n")[0]
    return part, set(re.findall(r"`(\S+\.py)`", table))


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are traced in the interpreter")
def test_a_launched_step_passes_the_files_listed() -> None:
    passed: set[str] = set()

    def note(frame: Any, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT / "turbo_hf"):
            passed.add(path.relative_to(ROOT / "turbo_hf").as_posix())

    def watch(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        # the third step: the first one allocates
        sys.setprofile(note if ids.shape[1] == 202 else None)
        return scores

    model, config = tiny_llama(), TurboConfig(cuda_graphs=False, compile=False, expert=Expert(backend="triton"))
    with turbo_hf.patch(model, config):
        watched: Any = {"logits_processor": [watch]}
        model.generate(prompts(1, 200), max_new_tokens=4, do_sample=False, **watched)
    _, files = listed("launched")
    assert passed == files


@pytest.mark.parametrize(("way", "most"), [("launched", LAUNCHED), ("captured", CAPTURED)])
def test_the_files_of_a_decode_step_are_those_listed(way: str, most: int) -> None:
    part, files = listed(way)
    stated: Any = re.search(rf"{way.capitalize()}: (\d+) files, ([\d,]+) lines", part)
    lines = sum(len((ROOT / "turbo_hf" / name).read_text().splitlines()) for name in files)
    counted = f"{way.capitalize()}: {len(files)} files, {lines:,} lines"
    assert len(files) == int(stated[1]), counted
    assert lines == pytest.approx(int(stated[2].replace(",", "")), rel=0.1), counted
    assert lines <= most


def test_links_lead_somewhere() -> None:
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"
