"""The command line in tests: commands are run, and what they print is read."""

import json
from typing import Any

from typer.testing import CliRunner

from turbo_hf.cli.main import app


def run(*words: str, code: int = 0, typed: str | bytes = "") -> Any:
    """The result of `turbo-hf WORDS`, which ends with status `code`; an error that it lets through is raised."""
    result = CliRunner().invoke(app, list(words), input=typed)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def output_of(*words: str, code: int = 0) -> str:
    """All that a command prints, with single spaces."""
    return " ".join(run(*words, code=code).output.split())


def last_json(result: Any) -> Any:
    """What the last line says."""
    return json.loads(result.stdout.strip().splitlines()[-1])


def check_refused(message: str, *words: str) -> None:
    """A mistake gets one sentence and status 1."""
    text = output_of(*words, code=1)
    assert message in text, text
    assert "Traceback" not in text
