"""What tests of `turbo-hf bench` share: running a command, and reading what it printed."""

import json
from typing import Any

import torch
from typer.testing import CliRunner

from turbo_hf.cli.main import app

CPU = torch.device("cpu")


def run(*words: str, code: int = 0) -> Any:
    """The result of `turbo-hf bench WORDS`, which ends with status `code`."""
    result = CliRunner().invoke(app, ["bench", *words])
    assert result.exit_code == code, result.output or repr(result.exception)
    return result


def last_json(result: Any) -> Any:
    """What the last line says."""
    return json.loads(result.stdout.strip().splitlines()[-1])


def complaint(result: Any) -> str:
    """What stands on stderr, its lines joined."""
    return " ".join(result.stderr.split())


def check_refused(message: str, *words: str) -> None:
    """A mistake gets one sentence and status 1."""
    result = run(*words, code=1)
    assert "Traceback" not in result.output
    assert message in complaint(result)


def check_not_timed(message: str, figure: str, *words: str) -> None:
    """What is wrong with ours is told, and it has no figure; the baseline keeps its own."""
    result = run(*words, "--json", code=1)
    baseline, ours = last_json(result)["rows"]
    assert ours["figures"] == {}
    assert message in ours["note"]
    assert message in complaint(result)
    assert baseline["figures"][figure] > 0
