"""What all benches share around their measurement: errors, the headline, the result file, the exit status."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import typer

from turbo_hf.config.whole_files import write_whole
from turbo_hf.console import err, out, print_error
from turbo_hf.eval.bench.environment import facts, headline
from turbo_hf.eval.bench.options import as_json
from turbo_hf.eval.bench.timing import free_memory

AnyCase = TypeVar("AnyCase")
AnyRow = TypeVar("AnyRow")


class BenchRun(Generic[AnyRow]):
    """One run of a bench. Its headline is printed at once.

    rows: what was measured so far.
    result: the content of `folder/NAME.json`: bench, facts (machine and versions), options, what else was measured,
        rows.
    """

    def __init__(self, name: str, device: torch.device, folder: Path | None) -> None:
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
