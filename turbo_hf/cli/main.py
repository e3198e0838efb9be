"""The command line: `turbo-hf doctor`, `plan`, `demo`, `generate`, `serve`, `calibrate`, `eval`, `bench`.

Torch and Transformers take seconds to import, and are imported where they are used: the help does not wait for them.
"""

import importlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.table import Table
from typer.core import TyperCommand, TyperGroup

from turbo_hf._version import __version__
from turbo_hf.cli.generate import generate_command
from turbo_hf.cli.serve import serve_command
from turbo_hf.console import (
    Device,
    GgufFile,
    Json,
    choose_device,
    counting,
    fail,
    leave_to_the_first,
    load,
    load_config,
    load_model,
    mistakes_end_the_command,
    out,
    remark,
    show_table,
)

if TYPE_CHECKING:
    from turbo_hf.cli.plan import PlanRow
    from turbo_hf.eval.demo import DemoRow
    from turbo_hf.eval.needle import Needle
    from turbo_hf.patching.doctor import Diagnosis, Machine


class Later(NamedTuple):
    """A command whose own options need Torch: where it is, and its line in the help."""

    module: str
    name: str
    help: str


LATER = {
    "calibrate": Later(
        "turbo_hf.cli.calibrate",
        "calibrate_command",
        "Learn from a model's own keys and queries which heads need their bits, and build an index for sparse "
        "decoding.",
    ),
    "fidelity": Later(
        "turbo_hf.eval.fidelity_command",
        "fidelity_command",
        "How far each preset moves a model's next-token distributions from 16 bit, and what to do with that.",
    ),
    "eval": Later(
        "turbo_hf.eval.eval_command",
        "eval_command",
        "Accuracy, perplexity, KV bytes and speed of each method, paired item by item with the unpatched model.",
    ),
    "bench": Later("turbo_hf.eval.bench.commands", "bench", "Speed and error of attention, on shapes of real models."),
}


ORDER = ("doctor", "plan", "demo", "generate", "serve", *LATER)
"""Commands in the order of the help: what a newcomer runs first."""


def load_command(name: str) -> Any:
    """Import one of `LATER`: a command, or a group of commands."""
    found = getattr(importlib.import_module(LATER[name].module), LATER[name].name)
    if isinstance(found, typer.Typer):
        return typer.main.get_command(found)
    alone = typer.Typer(add_completion=False)
    alone.command(name)(found)
    return typer.main.get_command(alone)


class Commands(TyperGroup):
    """The commands of this module, and those of `LATER`, which are imported once they are called."""

    def list_commands(self, ctx: Any) -> list[str]:
        """All names."""
        return list(ORDER)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """What the help shows of a command."""
        return TyperCommand(cmd_name, help=LATER[cmd_name].help) if cmd_name in LATER else self.commands.get(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that is called, and what is left of its arguments."""
        name, command, rest = super().resolve_command(ctx, args)
        # before the import of what shows progress
        leave_to_the_first(name or "")
        return name, load_command(name) if name in LATER else command, rest


app = typer.Typer(no_args_is_help=True, cls=Commands)
app.command("generate")(generate_command)
app.command("serve")(serve_command)


def _print_version(wanted: bool) -> None:
    if wanted:
        out.print(f"turbo_hf {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Attention on a compressed KV cache for Hugging Face Transformers."""


CARRIED = Path(__file__).resolve().parents[2] / "examples" / "lab-llama-4m"


@app.command("demo")
def demo_command(
    model: Annotated[str | None, typer.Option(help="A folder or a Hub id; default: the included model.")] = None,
    prompts: Annotated[
        int | None, typer.Option(min=1, help="Number of needles to look for; default: 40 on a GPU, else 8.")
    ] = None,
    longest: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum tokens of the longest prompt; default: 2048 on a GPU, else 1024."),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method", "--config", help="A preset, or a JSON or YAML file of options; may be repeated. Default: all."
        ),
    ] = None,
    gguf_file: GgufFile = None,
    device: Device = "auto",
    json_line: Json = False,
) -> None:
    """Find needles with the unpatched model and with each preset: answers, tokens, bytes and speed side by side."""
    if model is None and not CARRIED.is_dir():
        raise fail("the included model is not beside this installation; pass --model, a folder or a Hub id.")
    from turbo_hf.config.turbo_config import PRESETS, resolve_config  # noqa: PLC0415
    from turbo_hf.eval.demo import demo  # noqa: PLC0415
    from turbo_hf.eval.needle import needles  # noqa: PLC0415

    # a sparse preset needs a calibration
    dense = [name for name, config in PRESETS.items() if config.sparse is None]
    methods = list(dict.fromkeys(method or [])) or dense
    with mistakes_end_the_command():
        for name in methods:
            resolve_config(name)
    usual_count, usual_longest = (40, 2048) if choose_device(device).startswith("cuda") else (8, 1024)
    most = longest or usual_longest
    folder = model or str(CARRIED)
    loaded, tokenizer = load(folder, device, gguf_file=gguf_file)
    with mistakes_end_the_command():
        asked = needles(tokenizer, prompts or usual_count, min(256, most), most)
        with counting("prompts", len(asked) * (1 + len(methods))) as advance:
            runs = list(demo(loaded, tokenizer, asked, methods, advance=lambda name, done: advance(done, name)))
    rows, example = [row for row, _ in runs], {row.method: replies[0] for row, replies in runs}
    _print_example(asked[0], example)
    _print_demo(rows, Path(folder).name, asked)
    if json_line:
        facts = {"model": Path(folder).name, "device": str(loaded.device), "dtype": str(loaded.dtype)}
        print(json.dumps({"rows": [asdict(row) for row in rows], **facts}))  # noqa: T201


def _print_example(needle: "Needle", replies: dict[str, str]) -> None:
    text = needle.prompt
    at = text.index(needle.answer)
    shown = (text[:70], text[max(70, at - 130) : at + 60], text[-130:])
    out.print(f"One of the prompts ({needle.tokens} tokens, the needle at {needle.depth:.0%}):", style="bold")
    out.print(" [...] ".join(part.replace("\n", " ") for part in shown), markup=False, highlight=False)
    for method, reply in replies.items():
        out.print(f"  {method:12} ->{reply}", markup=False, highlight=False)
    out.print(f"  right: {needle.answer}\n", highlight=False)


def _print_demo(rows: "list[DemoRow]", name: str, asked: "list[Needle]") -> None:
    lengths = [needle.tokens for needle in asked]
    title = f"{name}: {len(asked)} needles in {min(lengths)} to {max(lengths)} tokens"
    cells = []
    for row in rows:
        right, equal = f"{row.needle_right}/{row.needle_total}", f"{row.tokens_equal_pct:.1f} %"
        of_cache = f"{row.kv_bytes_per_token:.0f}", f"{row.compression:.2f} x"
        cells.append((row.method, right, equal, *of_cache, f"{row.tokens_per_s:.1f}"))
    show_table(title, ("method", "right", "tokens equal", "KV bytes/token", "ratio", "tokens/s"), cells)
    remark(
        "Bytes are read off the caches; padding is not held against the baseline. Time includes the prompts; on a GPU "
        "not what is compiled at first use, and SDPA runs without cuDNN."
    )


@app.command("plan")
def plan_command(
    model: Annotated[str, typer.Argument(help="A folder, a config.json or a Hub id; weights are not loaded.")],
    context: Annotated[str, typer.Option(help="Tokens per row, such as 128k or 131072.")] = "128k",
    batch: Annotated[int, typer.Option(min=1, help="Rows in a batch.")] = 1,
    gpu_memory: Annotated[str, typer.Option(help="Memory of the GPU, such as 80GB or 24GiB.")] = "80GB",
    tensor_parallel: Annotated[
        int, typer.Option("--tp", min=1, help="GPUs that share the model by tensor parallel; the table is of one.")
    ] = 1,
    gguf_file: GgufFile = None,
    json_line: Json = False,
) -> None:
    """Cache memory before and after, from the config alone: bytes per token, longest context, largest batch."""
    from turbo_hf.cli.plan import (  # noqa: PLC0415
        parse_bytes,
        plan,
        share_of_weights,
        weigh,
    )
    from turbo_hf.eval.bench.shapes import parse_tokens  # noqa: PLC0415
    from turbo_hf.patching.meta_model import meta_model  # noqa: PLC0415

    config = load_config(model, gguf_file=gguf_file)
    with mistakes_end_the_command():
        gpu_bytes, tokens = parse_bytes(gpu_memory), parse_tokens(context)
        unloaded = meta_model(config)
        weights = weigh(unloaded, model)
        if gguf_file is not None:
            weights = weights._replace(note="Transformers dequantizes the weights of a GGUF file, here to float32.")
        of_gpu: dict[str, Any] = {"gpu_bytes": gpu_bytes, "weights": weights.nbytes, "ranks": tensor_parallel}
        rows, notes = plan(unloaded, context=tokens, batch=batch, **of_gpu)
    gpus = f"each of {tensor_parallel} GPUs of {gpu_memory}" if tensor_parallel > 1 else gpu_memory
    own = round(weights.nbytes * share_of_weights(unloaded, tensor_parallel))
    _print_plan(rows, f"{Path(model).name}: {tokens} tokens x {batch} on {gpus}", tokens, batch)
    remark(f"Weights take {own / 1e9:.2f} GB; a tenth of the GPU is left for activations.")
    for text in filter(None, (weights.note, *notes)):
        remark(text)
    if json_line:
        facts = {"weight_bytes": own, "weight_note": weights.note, "ranks": tensor_parallel}
        print(json.dumps({"rows": [asdict(row) for row in rows], "notes": notes, **facts}))  # noqa: T201


def _print_plan(rows: "list[PlanRow]", title: str, context: int, batch: int) -> None:
    cells = []
    for row in rows:
        sizes = f"{row.bytes_per_token:,.0f}", f"{row.compression:.2f} x", f"{row.cache_bytes / 1e9:.2f} GB"
        longest = "no limit" if row.longest_context < 0 else f"{row.longest_context:,}"
        cells.append((row.method, *sizes, "yes" if row.fits else "no", longest, f"{row.largest_batch:,}"))
    headings = ("method", "bytes/token", "ratio", "cache", "fits", f"longest, {batch} rows", f"rows at {context}")
    show_table(title, headings, cells)


@app.command("doctor")
def doctor_command(
    model: Annotated[str | None, typer.Argument(help="A folder or a Hub id to check; none: the machine only.")] = None,
    gguf_file: GgufFile = None,
    device: Device = "auto",
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Check and time the kernels on this GPU, and keep what is fastest, in minutes."),
    ] = False,
    folder: Annotated[
        Path | None, typer.Option("--out", help="With --measure: a folder for its figures; default: this one.")
    ] = None,
    json_line: Json = False,
) -> None:
    """What this machine and model can do, why not otherwise, and whether the logits agree. Exits with 1 on a
    problem."""
    from turbo_hf.patching.doctor import machine  # noqa: PLC0415

    if gguf_file is not None and model is None:
        raise fail("--gguf-file is of a model: write its folder before it.")
    if folder is not None and not measure:
        raise fail("--out is for the figures of --measure: add that.")
    if measure:
        if model is not None or json_line:
            raise fail("--measure is of the machine alone: leave out the model and --json.")
        from turbo_hf.eval.bench import measure as measured  # noqa: PLC0415
        from turbo_hf.eval.bench import runner  # noqa: PLC0415

        with mistakes_end_the_command():
            measured.measure(runner.find_device(device), folder)
        return
    found = machine()
    _print_machine(found)
    diagnosis = None if model is None else _diagnose(model, device, gguf_file)
    if diagnosis is not None:
        _print_diagnosis(diagnosis)
    if json_line:
        facts: dict[str, Any] = {"machine": asdict(found)}
        if diagnosis is not None:
            facts["model"] = {
                "refusal": diagnosis.refusal,
                "checks": {name: asdict(check) for name, check in diagnosis.checks.items()},
                "unknown": diagnosis.unknown,
            }
        from turbo_hf.eval.bench.runner import as_json  # noqa: PLC0415

        print(as_json(facts))  # noqa: T201
    # a preset of fewer bits than the default may be too coarse for a model; the default is then refused
    if found.problems or (diagnosis is not None and diagnosis.refusal):
        raise typer.Exit(1)


def _diagnose(model: str, device: str, gguf_file: str | None) -> "Diagnosis":
    """The diagnosis by the config alone, if that refuses the model or there are no weights; else by the model."""
    from turbo_hf.cli.plan import has_weights  # noqa: PLC0415
    from turbo_hf.patching.doctor import diagnose, diagnose_config  # noqa: PLC0415

    of_config = diagnose_config(load_config(model, gguf_file=gguf_file))
    with mistakes_end_the_command():
        if of_config.refusal is not None or not (gguf_file or has_weights(model)):
            return of_config
    return diagnose(load_model(model, device, gguf_file=gguf_file))


def _print_machine(found: "Machine") -> None:
    from turbo_hf.models.versions import NEWEST, OLDEST  # noqa: PLC0415

    table = Table(title="machine", show_header=False)
    for name, value in found.versions.items():
        table.add_row(name, f"{value} (tested: {OLDEST} to {NEWEST})" if name == "transformers" else value)
    table.add_row("GPU", "\n".join(found.gpus) or "none")
    out.print(table)
    for problem in found.problems:
        out.print(f"problem: {problem}", style="bold red", markup=False)


def _print_diagnosis(diagnosis: "Diagnosis") -> None:
    from turbo_hf.patching.divergence import verdict  # noqa: PLC0415

    if diagnosis.refusal is not None:
        out.print(f"problem: {diagnosis.refusal}", style="bold red", markup=False)
    if diagnosis.report is None:
        return
    out.print(str(diagnosis.report), markup=False, highlight=False)
    for unknown in diagnosis.unknown:
        out.print(unknown, style="bold", markup=False, highlight=False)
    if not diagnosis.checks:
        return
    cells = []
    for preset, check in diagnosis.checks.items():
        of_check = f"{check.kl:.4f}", f"{check.same_top:.0%} of {check.positions}", verdict(check.kl)
        cells.append((preset, *of_check))
    headings = ("preset", "KL to 16 bit, nats", "same top token", "verdict")
    show_table(f"self-check on {diagnosis.text}", headings, cells)
    remark("A short text: turbo-hf fidelity MODEL measures more, and answers are measured on your tasks.")
