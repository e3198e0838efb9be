"""`turbo-hf eval`: the run, the tables, the files."""

import atexit
import importlib.util
import json
import shutil
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from turbo_hf.calibration.artifacts import Calibration, find
from turbo_hf.calibration.checkpoint import checkpoint_of
from turbo_hf.calibration.choice import uses_calibration
from turbo_hf.config.turbo_config import DEFAULT_PRESET
from turbo_hf.config.whole_files import one_writer, write_whole
from turbo_hf.console import Device, GgufFile, Json, choose_device, err, fail, load, out
from turbo_hf.eval import methods as known
from turbo_hf.eval.bench.runner import as_json, facts
from turbo_hf.eval.output import EvalReport, show, write_report
from turbo_hf.eval.suites import SUITES, Limits, build
from turbo_hf.ranks import Ranks, ranks_of

LONGEST = {"smoke": 1024, "core": 4096, "reasoning": 4096}
"""Tokens of the longest prompt for suites that do not go to 16384."""

SMOKE_ITEMS = 8
"""Items per task of the suite smoke, which is meant to be quick."""

SIMULATION = (
    "Simulated methods are there for accuracy only: plain torch rounds keys and values as they do, attention on them "
    "is in full precision, bytes are computed, a prompt reads itself unrounded."
)

LOCK = "run.lock"

REPLY_ROOM = 4096
"""Tokens beyond the longest prompt: long answers, few-shot tasks' replies, prompts that cannot be chosen shorter."""


def _explain(wanted: bool) -> None:
    if not wanted:
        return
    for title, lines in (("suite", SUITES.items()), ("method", known.EXPLAINED)):
        table = Table(box=None, padding=(0, 2, 0, 0))
        table.add_column(title)
        table.add_column("")
        for name, what in lines:
            table.add_row(name, what)
        out.print(table, "")
    raise typer.Exit


def eval_command(
    model: Annotated[str, typer.Argument(help="A folder or a Hub id.")],
    suite: Annotated[str, typer.Option(help=f"{', '.join(SUITES)}; --list explains them.")] = "smoke",
    methods: Annotated[
        list[str] | None,
        typer.Option(help=f"Comma-separated or repeated; --list explains them: {known.method_names()}."),
    ] = None,
    listed: Annotated[
        bool,
        typer.Option("--list", callback=_explain, is_eager=True, help="Explain suites and methods, and exit."),
    ] = False,
    data: Annotated[Path | None, typer.Option(help="A folder of local datasets; default: the Hub.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Items per task; marks the table as not a result.")] = None,
    longest: Annotated[int | None, typer.Option(min=64, help="Tokens of the longest prompt.")] = None,
    shortest: Annotated[int, typer.Option(min=0, help="Tokens of the shortest, where a task has several lengths.")] = 0,
    task: Annotated[list[str] | None, typer.Option(help="Only this task of the suite; may be repeated.")] = None,
    calibration: Annotated[
        str, typer.Option(help="For methods that need one: a folder or Hub id; auto: beside the checkpoint.")
    ] = "auto",
    batch: Annotated[int | None, typer.Option(min=1, help="Maximum rows per batch; default: 8, on a GPU 512.")] = None,
    batch_tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens per batch with replies; default: none, on a GPU 262144.")
    ] = None,
    folder: Annotated[Path | None, typer.Option("--out", help="Folder for samples, JSON, Markdown, plots.")] = None,
    gguf_file: GgufFile = None,
    device: Device = "auto",
    json_line: Json = False,
) -> None:
    """Accuracy, perplexity, KV bytes and speed of each method, paired item by item with the unpatched model.

    Tasks run through lm-evaluation-harness. Repeating the command resumes a killed run where it stopped; the folder of
    another model, version, or option is refused.
    """
    for package in ("lm_eval", "datasets", "matplotlib"):
        if importlib.util.find_spec(package) is None:
            raise fail(f'turbo-hf eval needs {package}: pip install "turbo_hf[eval]".')
    chosen = folder or Path("eval-results") / f"{Path(gguf_file or model).name.replace(':', '-')}-{suite}"
    named = [name for words in methods or [DEFAULT_PRESET] for name in words.split(",")]
    wanted = [name for name in dict.fromkeys(named) if name not in ("", known.BASELINE)]
    try:
        if not wanted:
            raise ValueError(f"--methods names none; {known.known_methods()}.")
        chosen_methods = list(map(known.method_named, wanted))
        if suite not in SUITES:
            raise ValueError(f"unknown suite {suite}; suites are {', '.join(SUITES)}.")
        items = limit or (SMOKE_ITEMS if suite == "smoke" else None)
        sizes = _batch_sizes(batch, batch_tokens, device)
        most = longest or LONGEST.get(suite, 16384)
        if shortest > most:
            raise ValueError(f"--shortest {shortest} is above the longest prompt, {most}.")
        asked = Limits(0, most, items, shortest, tuple(sorted(set(task or ()))))
        found = _run(model, suite, chosen_methods, data, asked, sizes, calibration, chosen, device, gguf_file)
    except (ValueError, OSError) as mistake:
        raise fail(str(mistake)) from mistake
    except KeyboardInterrupt as stop:
        raise _interrupted(chosen) from stop
    if json_line:
        print(as_json(found))  # noqa: T201


def _own_folder(folder: Path, ranks: Ranks) -> Path:
    """Where this process writes: ranks that do not speak go on with a copy of what is there, and leave none of it."""
    own = folder
    with ranks.together():
        if ranks.rank:
            own = Path(tempfile.mkdtemp(prefix="turbo-eval-"))
            atexit.register(shutil.rmtree, own, ignore_errors=True)
            if folder.is_dir():
                shutil.copytree(folder, own, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.lock"))
    there = sorted((str(x.relative_to(own)), x.stat().st_size) for x in own.rglob("*") if x.suffix != ".lock")
    if len(set(ranks.texts(json.dumps([it for it in there if it[0].endswith((".json", ".jsonl"))])))) > 1:
        raise ValueError(
            f"the ranks find different files in {folder}: --out must be a folder that all of them can read."
        )
    return own


def _interrupted(folder: Path) -> typer.Exit:
    """Say what is kept and how to go on; raise the returned exception to end the command."""
    kept = f"what was done is kept in {folder}; the same command goes on with the rest"
    told = kept if any(folder.glob("*/answers.jsonl")) else "nothing was begun, so that nothing is kept"
    err.print(f"interrupted: {told}.", markup=False, highlight=False, soft_wrap=True)
    return typer.Exit(130)


def _batch_sizes(rows: int | None, tokens: int | None, device: str) -> tuple[int, int | None]:
    """What was asked for; by default few rows on a CPU, and on a GPU as many as hold so many tokens."""
    if choose_device(device).startswith("cuda"):
        return rows or 512, tokens or 1 << 18
    return rows or 8, tokens


def _run(
    model: str,
    suite: str,
    wanted: list[known.Method],
    data: Path | None,
    asked: Limits,
    sizes: tuple[int, int | None],
    calibration: str,
    folder: Path,
    device: str,
    gguf_file: str | None,
) -> dict[str, Any]:
    """asked: without the model's context."""
    # the harness takes seconds to import, and is an extra
    from turbo_hf.eval.answers import identity  # noqa: PLC0415
    from turbo_hf.eval.evaluate import SEED, answers_of, load_tasks, quiet, run_method  # noqa: PLC0415
    from turbo_hf.eval.report import report  # noqa: PLC0415

    quiet()
    loaded, tokenizer = load(model, device, gguf_file=gguf_file)
    made, configs = _calibration(loaded, wanted, calibration)
    positions = getattr(loaded.config.get_text_config(decoder=True), "max_position_embeddings", None)
    room = asked.longest + REPLY_ROOM
    limits = replace(asked, context=min(positions or room, room))
    with err.status(f"reading the tasks of {suite}"):
        specs, notes = build(suite, tokenizer, limits, data)
        try:
            tasks, skipped = load_tasks(specs, tokenizer, limits)
        except ValueError as error:
            raise ValueError(" ".join([str(error), *notes])) from error
    notes += skipped
    if str(loaded.device).startswith("cuda"):
        notes.append(known.NO_PLANS)
    if any(method.name in known.SIMULATED for method in wanted):
        notes.append(SIMULATION)
    batch, batch_tokens = sizes
    ranks = ranks_of(loaded)
    options = {"suite": suite, **asdict(limits), "seed": SEED, "batch": batch, "batch_tokens": batch_tokens}
    about = identity(loaded, tokenizer, tasks, {**options, "ranks": ranks.count if ranks else 1})
    digest = None if made is None else made.digest()
    meta = {"identity": about, "commit": facts(loaded.device)["commit"], "argv": sys.argv, "configs": configs}
    meta["calibration"] = digest
    folder = _own_folder(folder, ranks)
    with one_writer(folder, LOCK):
        base = known.method_named(known.BASELINE)
        runs = {known.BASELINE: base, known.AGAIN: base, **{method.name: method for method in wanted}}
        # all of them, so that a run which cannot go on ends before its first method
        answers = {
            label: answers_of(
                label, method, folder, {**about, "calibration": digest if _uses_calibration(method) else None}
            )
            for label, method in runs.items()
        }
        outcomes: dict[str, Any] = {}
        result: dict[str, Any] = {}
        for number, (label, method) in enumerate(runs.items(), 1):
            err.print(f"{label} ({number} of {len(runs)})", style="bold", highlight=False)
            outcomes[label] = run_method(
                label, method, loaded, tokenizer, tasks, folder, answers[label],
                batch=batch, batch_tokens=batch_tokens, limits=limits, calibration=made,
            )  # fmt: skip
            left = list(runs)[number:]
            if left and number < 3:
                continue
            # after each method: an interrupted run leaves a table of what it has so far
            unfinished = [f"UNFINISHED: {', '.join(left)} still to run; the same command goes on."] if left else []
            found = report([spec for spec in specs if spec.name in tasks], outcomes)
            result = {"meta": meta, "notes": [*unfinished, *notes], **found}
            _write(folder, result, {name: outcome.samples for name, outcome in outcomes.items()}, shown=not left)
        out.print(
            f"Kept in {folder}: report.html, report.md, report.json, answers, samples and results by method.",
            style="dim",
        )
        return result


def _uses_calibration(method: known.Method) -> bool:
    return method.config is not None and uses_calibration(method.config)


def _calibration(
    model: Any, wanted: list[known.Method], named: str
) -> tuple[Calibration | None, dict[str, dict[str, Any] | None]]:
    """The calibration, if one is used, and each method's options with what it chooses. It is tried with all methods
    first, so that errors appear early."""
    used = any(map(_uses_calibration, wanted))
    if named != "auto" and not used:
        raise ValueError(f"--calibration {named}: none of these methods takes anything from a calibration.")
    made = None if not used else find(checkpoint_of(model)) if named == "auto" else Calibration.from_pretrained(named)
    configs: dict[str, dict[str, Any] | None] = {}
    for method in wanted:
        try:
            with known.applied(model, method, made) as handle:
                configs[method.name] = None if handle is None else handle.report().config.to_dict()
        except ValueError as error:
            raise ValueError(f"{method.name}: {error}") from error
    return made, configs


def _write(
    folder: Path, result: dict[str, Any], samples: dict[str, dict[str, list[dict[str, Any]]]], *, shown: bool
) -> None:
    from turbo_hf.eval.plots import accuracy_plot, needle_map  # noqa: PLC0415
    from turbo_hf.eval.report import noise, stamps, tables  # noqa: PLC0415  as above
    from turbo_hf.eval.scorers import needle_cells  # noqa: PLC0415

    identity = result["meta"]["identity"]
    write_whole(folder / "report.json", as_json(result, indent=1) + "\n")
    title = f"{identity['model']}, suite {identity['suite']}"
    lines, pictures = stamps(identity), []
    # of an unfinished run the tables alone: pictures of all methods after each would take longer than they are worth
    if shown and accuracy_plot(result, " ".join([title, *lines[1:]]), folder / "accuracy.png"):
        pictures.append(folder / "accuracy.png")
    if shown and "needle" in samples[known.BASELINE]:
        cells = {label: needle_cells(own["needle"]) for label, own in samples.items()}
        for label in list(cells)[2:]:
            pictures.append(folder / f"needle-{known.folder_of(label)}.png")
            needle_map(cells[known.BASELINE], cells[label], label, pictures[-1])
    notes = [noise(result), *result["notes"]]
    whole = EvalReport(f"turbo-hf eval: {title}", lines, tables(result), notes, result["meta"], pictures)
    if shown:
        show(whole)
    write_report(folder, whole)
