"""`turbo-hf eval --suite serve`: measure, store what is done, print and write."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from turbo_hf.config.expected import Each, OneOf, Whole, require
from turbo_hf.config.whole_files import append_line, read_lines, read_object, write_whole
from turbo_hf.console import counting, err, load
from turbo_hf.eval.bench.options import as_json, figure, find_device
from turbo_hf.eval.bench.random_models import KINDS, random_model
from turbo_hf.eval.bench.timing import free_memory
from turbo_hf.eval.methods import (
    AGAIN,
    BASELINE,
    folder_of,
    is_simulated,
    method_named,
    options_of_files,
    require_options,
)
from turbo_hf.eval.output import EvalReport, Table, show, without_dashes, write_report
from turbo_hf.eval.report_plots import memory_plot
from turbo_hf.eval.run_identity import CONFIGS, identity, only_run
from turbo_hf.eval.serve import Level, Request, chosen, level, percentiles, read_trace, replay, summary
from turbo_hf.eval.without_cudnn_plans import NO_PLANS

RANDOM = "random:"
"""Before a shape's name, in place of a model: its weights are drawn. ":tiny" after it: at a size for tests."""

TRACE = "traces/azure_llm_2023_conv.csv"
"""In the data folder."""

SEED = 0

REMEDY = "Delete it, and the same command measures anew."

COUNT = Whole(1, 2**62)
NUMBER = OneOf((float, Whole(0, 2**62)))
LEVEL: dict[str, Any] = {field.name: OneOf((NUMBER, None)) for field in fields(Level)}
LEVEL |= {"method": str, "context": COUNT, "batch": COUNT, "new": COUNT}
TIMES = dict.fromkeys(percentiles([0.0]), NUMBER)
SUMMARY = {
    **dict.fromkeys(("requests", "new_tokens", "busy_s", "tokens_s", "requests_s"), NUMBER),
    **dict.fromkeys(("first_ms", "done_ms", "latency_ms"), TIMES),
}
"""What lines of levels.jsonl and a summary of replay_METHOD.json hold."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What is measured.

    contexts: tokens per prompt.
    batch: prompts at once, for both parts.
    new, rounds: tokens per reply and timed rounds, for the first part.
    trace: None without a replay.
    requests: how many to take from the trace, the first ones with at most `longest` tokens.
    """

    contexts: tuple[int, ...]
    batch: int
    new: int
    rounds: int
    trace: Path | None
    requests: int
    longest: int


def serve(
    name: str,
    wanted: Sequence[str],
    workload: Workload,
    folder: Path,
    device: str,
    gguf_file: str | None = None,
) -> dict[str, Any]:
    """Run the suite on a model; what an earlier run stored in `folder` is not measured again.

    Raises:
        ValueError: a simulated method, an unknown shape, a trace that cannot be read, or a folder of another run.
    """
    simulated = [method for method in wanted if is_simulated(method)]
    if simulated:
        raise ValueError(f"{', '.join(simulated)} is simulated, for accuracy only: it has no speed to measure.")
    taken: list[Request] = []
    passed_by = 0
    if workload.trace is not None:
        taken, passed_by = chosen(read_trace(workload.trace), workload.requests, workload.longest)
    model = _model(name, device, gguf_file)
    options = {
        **asdict(workload),
        "trace": workload.trace and workload.trace.name,
        "suite": "serve",
        "limit": None,
        "seed": SEED,
    }
    options |= {"lengths": [[r.context, r.generated] for r in taken], CONFIGS: options_of_files(wanted)}
    with only_run(folder, identity(model, None, {}, options)) as meta:
        return _measure(model, wanted, workload, taken, passed_by, folder, meta)


def _measure(
    model: Any,
    wanted: Sequence[str],
    workload: Workload,
    taken: list[Request],
    passed_by: int,
    folder: Path,
    meta: dict[str, Any],
) -> dict[str, Any]:
    """taken, passed_by: requests of the trace. meta: from `open_run`."""
    runs = {BASELINE: BASELINE, AGAIN: BASELINE, **{method: method for method in wanted}}
    levels = _levels(model, runs, workload, folder)
    replays = {}
    for label, method in runs.items():
        require_options(method, meta["identity"][CONFIGS])
        if taken:
            replays[label] = _replay(model, label, method, taken, workload.batch, folder)
    notes = ["Prompts are random tokens; each reply is as long as asked, whatever the model says."]
    if model.device.type == "cuda":
        notes.append(NO_PLANS)
    if workload.trace is not None:
        notes.append(
            f"Replay: the first {len(taken)} requests of {workload.trace.name} of {workload.longest} tokens or fewer, "
            f"prompt and reply; {passed_by} longer or empty ones before the last of them were passed by. Batches of "
            f"{workload.batch} in order of arrival; latency counts the wait for the batch, by the trace's clock."
        )
    missing = {row["method"]: 0 for row in levels if row["tokens_s"] is None}
    missing |= {label: 0 for label, own in replays.items() if not own}
    if missing:
        notes.append(f"Does not fit the memory somewhere: {', '.join(missing)}.")
    result = {"meta": meta, "notes": notes, "levels": levels, "replay": replays}
    write_whole(folder / "serve.json", as_json(result, indent=1) + "\n")
    _write(folder, result)
    return result


def _model(name: str, device: str, gguf_file: str | None) -> Any:
    if not name.startswith(RANDOM):
        model, _ = load(name, device, gguf_file=gguf_file)
        return model
    if gguf_file is not None:
        raise ValueError(f"{name} has random weights: leave out --gguf-file.")
    shape, _, size = name.removeprefix(RANDOM).partition(":")
    if shape not in KINDS or size not in ("", "tiny"):
        raise ValueError(f"unknown shape {name}; write {RANDOM}NAME with a name of {', '.join(KINDS)}.")
    torch.manual_seed(SEED)
    model = random_model(shape, None, find_device(device), tiny=size == "tiny")
    model.config._name_or_path = f"{shape}, random weights{', tiny' if size else ''}"
    return model


def _levels(model: Any, runs: dict[str, str], workload: Workload, folder: Path) -> list[dict[str, Any]]:
    log = folder / "levels.jsonl"
    rows = read_lines(log, REMEDY, growing=True)
    try:
        require(rows, Each(LEVEL), "")
    except ValueError as error:
        raise ValueError(f"{str(log)!r} was changed: {error}. {REMEDY}") from error
    done = {(row["method"], row["context"]) for row in rows}
    for context in workload.contexts:
        for label, method in runs.items():
            if (label, context) in done:
                continue
            with err.status(f"{label}: {context} tokens x {workload.batch}"):
                measured = level(
                    model, method_named(method), context, workload.batch, workload.new, workload.rounds, SEED
                )
            rows.append({**asdict(measured), "method": label})
            append_line(log, rows[-1])
            free_memory()
    return rows


def _replay(model: Any, label: str, method: str, taken: list[Request], batch: int, folder: Path) -> dict[str, Any]:
    """The summary; {} if a batch does not fit. Every request's times are stored beside it."""
    kept = folder / f"replay_{folder_of(label)}.json"
    if not kept.is_file():
        with counting(f"replay: {label}", len(taken)) as advance:
            found = replay(model, method_named(method), taken, batch, SEED, advance)
        free_memory()
        own = {} if found is None else summary(*found)
        requests = [] if found is None else [asdict(one) for one in found[0]]
        write_whole(kept, json.dumps({"summary": own, "requests": requests}, indent=1))
    stored = read_object(kept, REMEDY)
    try:
        require(stored, {"summary": OneOf(({}, SUMMARY)), "requests": list}, "")
    except ValueError as error:
        raise ValueError(f"{str(kept)!r} was changed: {error}. {REMEDY}") from error
    summed: dict[str, Any] = stored["summary"]
    return summed


def tables(result: dict[str, Any]) -> list[Table]:
    """Both parts, for the terminal, Markdown and HTML alike."""
    bases = {row["context"]: row["tokens_s"] for row in result["levels"] if row["method"] == BASELINE}
    rows = [
        [
            row["method"],
            f"{row['context']:,} x {row['batch']}",
            figure(row["tokens_s"], ".1f"),
            _ratio(row["tokens_s"], bases[row["context"]]),
            *(figure(row[name], ".1f") for name in ("first_ms", "step_ms")),
            *(figure(row[name] and row[name] / 1e6, ",.1f") for name in ("peak_bytes", "steady_bytes", "kv_bytes")),
        ]
        for row in result["levels"]
    ]
    headings = ["method", "tokens x rows", "tokens/s", "x fp16", "first ms", "step ms", "peak MB", "steady MB", "KV MB"]
    shown = [Table("memory and speed of generate", headings, rows)]
    if result["replay"]:
        base = result["replay"][BASELINE].get("tokens_s")
        shown.append(
            Table(
                "length trace, static batches: p50 / p90 / p99 in ms",
                ["method", "tokens/s", "x fp16", "requests/s", "first token", "own last token", "with the wait"],
                [
                    [
                        label,
                        figure(own.get("tokens_s"), ".1f"),
                        _ratio(own.get("tokens_s"), base),
                        figure(own.get("requests_s"), ".2f"),
                        *(_percents(own.get(name)) for name in ("first_ms", "done_ms", "latency_ms")),
                    ]
                    for label, own in result["replay"].items()
                ],
            )
        )
    return [without_dashes(table) for table in shown]


def _ratio(value: float | None, base: float | None) -> str:
    return "-" if not value or not base else f"{value / base:.2f}"


def _percents(own: dict[str, float] | None) -> str:
    return "-" if own is None else " / ".join(f"{value:.0f}" for value in own.values())


def _write(folder: Path, result: dict[str, Any]) -> None:
    about = result["meta"]["identity"]
    versions = about["versions"]
    title = f"turbo-hf eval: {about['model']}, suite serve"
    lines = [
        f"{about['model']} ({about['model_fingerprint']}), {about['dtype']} on {about['device']}; {about['new']} new "
        f"tokens, {about['rounds']} rounds; transformers {versions['transformers']}, torch {versions['torch']}."
    ]
    memory: dict[str, list[dict[str, float]]] = {}
    for row in result["levels"]:
        if row["kv_bytes"] is not None and row["method"] != AGAIN:
            point = {"tokens": row["context"] + row["new"], "bytes": row["kv_bytes"] / row["batch"]}
            memory.setdefault(row["method"], []).append(point)
    drawn = {"memory": memory, "serving": {label: {"simulated": False} for label in memory}}
    picture = folder / "memory.png"
    pictures = [picture] if memory and memory_plot(drawn, title, picture) else []
    whole = EvalReport(title, lines, tables(result), result["notes"], result["meta"], pictures)
    show(whole)
    write_report(folder, whole)
