"""What all benches share around their measurement: options, the machine, errors, the result file, the exit status."""

import json
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import torch
import typer

from turbo_hf.config.turbo_config import BACKENDS
from turbo_hf.config.whole_files import require_writable, write_whole
from turbo_hf.console import choose_device, err, out, print_error
from turbo_hf.eval.bench.timing import free_memory
from turbo_hf.patching.doctor import machine

Backend = Annotated[str, typer.Option(help=f"One of {', '.join(BACKENDS)}.")]
Seed = Annotated[int, typer.Option(help="Random seed of the inputs.")]
ModelPlace = Annotated[
    str | None, typer.Option("--model", help="A folder or a Hub id, with its own weights, instead of --shape.")
]
Tiny = Annotated[bool, typer.Option("--tiny", help="Tiny models: tests the command, measures nothing.")]
Folder = Annotated[Path | None, typer.Option("--out", help="A folder for the JSON; created if missing.")]


def one_of(what: str, value: str, allowed: Iterable[str]) -> str:
    """`value`, or ValueError with the list of what is allowed."""
    if value not in allowed:
        raise ValueError(f"unknown {what} {value}; choose from {', '.join(allowed)}.")
    return value


def figure(value: float | None, form: str) -> str:
    """`value` as a table cell, "-" if there is none."""
    return "-" if value is None else format(value, form)


def find_device(name: str) -> torch.device:
    """The device of that name, checked to work. ValueError if there is none."""
    try:
        return torch.zeros((), device=choose_device(name)).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"no device {name!r}: {str(error).splitlines()[0]}") from error


def require_choice(device: torch.device, chosen: bool, options: str) -> None:
    """ValueError if a CPU would run the defaults, which are meant for a GPU."""
    if device.type == "cpu" and not chosen:
        raise ValueError(f"the defaults are sized for a GPU, and this is a CPU. Choose what it shall run: {options}.")


def as_json(result: Any, indent: int | None = None) -> str:
    """JSON of dicts, lists, numbers and paths; non-finite numbers, which JSON cannot represent, become null."""

    def finite(x: Any) -> Any:
        if isinstance(x, dict):
            return {key: finite(value) for key, value in x.items()}
        if isinstance(x, list):
            return [finite(value) for value in x]
        return None if isinstance(x, float) and not abs(x) < float("inf") else x

    return json.dumps(finite(result), indent=indent, default=str)


SHOWN = ("torch", "triton", "transformers", "driver")


def facts(device: torch.device) -> dict[str, Any]:
    """Device, versions (None: not there) and commit (None: no checkout), ready for JSON."""
    gpu: Any = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    versions: dict[str, Any] = dict(machine().versions)
    if gpu is not None:
        versions |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "driver": _driver()}
    return {
        "device": str(device),
        "gpu": None if gpu is None else gpu.name,
        "sms": None if gpu is None else gpu.multi_processor_count,
        "versions": versions,
        "commit": _commit(),
    }


def headline(found: dict[str, Any]) -> str:
    """One human-readable line."""
    versions = [f"{name} {found['versions'][name]}" for name in SHOWN if found["versions"].get(name)]
    commit = f", commit {found['commit']}" if found["commit"] else ""
    return f"{found['gpu'] or 'CPU'}; {', '.join(versions)}{commit}"


def _driver() -> str | None:
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    lines = _output(asked).splitlines()
    return lines[0].strip() if lines else None


def _commit() -> str | None:
    root = Path(__file__).resolve().parents[2]
    # a package that is installed below somebody else's checkout has no commit of its own
    if not (root / ".git").exists():
        return None
    commit = _output(["git", "-C", str(root), "describe", "--always", "--dirty"]).strip()
    return commit or None


def _output(words: list[str]) -> str:
    if shutil.which(words[0]) is None:
        return ""
    return subprocess.run(words, check=False, capture_output=True, text=True, timeout=30).stdout


AnyCase = TypeVar("AnyCase")
AnyRow = TypeVar("AnyRow")


class BenchRun(Generic[AnyRow]):
    """One run of a bench. Its headline is printed at once. OSError: the folder of --out cannot be made or written.

    rows: what was measured so far.
    result: the content of `folder/NAME.json`: bench, facts (machine and versions), options, what else was measured,
        rows.
    """

    def __init__(self, name: str, device: torch.device, folder: Path | None) -> None:
        if folder is not None:
            require_writable(folder)
        about = facts(device)
        self.headline, self._folder = headline(about), folder
        out.print(self.headline, style="bold", highlight=False)
        self.rows: list[AnyRow] = []
        self.result: dict[str, Any] = {"bench": name, "facts": about}

    def each(
        self,
        cases: Iterable[AnyCase],
        measure: Callable[[AnyCase, Callable[[str], None]], Sequence[AnyRow]],
        show: Callable[[AnyCase, Sequence[AnyRow]], None],
        **given: Any,
    ) -> None:
        """Measure, show and keep case by case. given: further fields of the result, before its rows.

        measure: of a case, and of what is to be called with a line at each step.
        """
        self.result |= given
        for case in cases:
            with err.status(str(case)) as status:
                own = measure(case, status.update)
            show(case, own)
            self.keep(own)
            free_memory()

    def keep(self, rows: Iterable[AnyRow], **given: Any) -> None:
        """Add rows to the result, and save all of it: an interrupted run keeps what it has."""
        own = list(rows)
        self.rows += own
        self.result |= given
        self.result["rows"] = [*self.result.get("rows", []), *(asdict(row) for row in own)]  # type: ignore[call-overload]
        if self._folder is not None:
            write_whole(self._folder / f"{self.result['bench']}.json", as_json(self.result, indent=1) + "\n")

    def finish(self, json_line: bool, failures: Sequence[str] = ()) -> None:
        """Print what failed, print the JSON if requested, and exit with status 1 if anything failed."""
        for failure in failures:
            print_error(failure)
        if json_line:
            print(as_json(self.result))  # noqa: T201
        if failures:
            raise typer.Exit(1)
