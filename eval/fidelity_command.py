"""`turbo-hf fidelity`: what each preset does to a model's next-token distributions, in one table."""

import importlib.util
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.box import SIMPLE

from turbo_hf.calibration.artifacts import Calibration
from turbo_hf.calibration.choice import uses_calibration
from turbo_hf.calibration.texts import token_windows
from turbo_hf.config.whole_files import require_writable, write_whole
from turbo_hf.console import (
    Device,
    GgufFile,
    Json,
    counting,
    err,
    fail,
    load,
    mistakes_end_the_command,
    out,
    remark,
    show_table,
)
from turbo_hf.errors import out_of_memory
from turbo_hf.eval.bench.runner import as_json
from turbo_hf.eval.bench.shapes import parse_tokens, tokens_label
from turbo_hf.eval.fidelity import STEP, Case, Fidelity, grid, layer_map, measure, named, suggestion, unsteady
from turbo_hf.eval.methods import BACKENDS, installed, known_methods, without_plans
from turbo_hf.eval.output import EvalReport, Table, write_report
from turbo_hf.layout import BITS
from turbo_hf.models.model_layers import layer_windows
from turbo_hf.models.versions import version_of
from turbo_hf.patches.generic import is_latent
from turbo_hf.patches.layers import attention_layers
from turbo_hf.patching.divergence import BOUNDS, NEVER, UNSTEADY

DEFAULT = ("int8", "turbo4")
"""Methods that are read if none is named, with those of `RIVALS` that are installed."""

RIVALS = ("hqq8", "hqq4", "quanto4")

COUNT, TAIL = 8, 128
"""Texts, and tokens of each whose distributions are compared."""

FEW = 4
"""Texts of --grid and --map, which have many methods."""

QUICK = ("512", 2, 64)
"""Length, texts and tail of a short run, where they are not given."""

FULL = (
    "method", "bytes/token", "KL", "± error", "median", "99 %", "99.9 %", "max", "RMS of change of p", "99 % of it",
    "same top", "perplexity", "ratio", "± error", "verdict",
)  # fmt: skip

WHAT = (
    "KL: of the next token's distribution, the unpatched model's against the method's, in nats. p: probability of the "
    "right token. Errors are standard errors of the means of texts.",
    f"steps: read in passes of {STEP} tokens over the cache, as decode steps are; chunk: in one pass over it; answer: "
    "the model's own continuation, in steps.",
    "Verdicts by mean KL: "
    + ", ".join(f"up to {bound:g} {words}" for bound, words in BOUNDS)
    + f", above {NEVER}; up to twice a noise of {UNSTEADY:g} or less is like 16 bit, too.",
)


def fidelity_command(
    model: Annotated[str, typer.Argument(help="A folder or a Hub id.")],
    methods: Annotated[
        list[str] | None,
        typer.Option(help=f"Comma-separated or repeated, as for eval; default: {', '.join((*DEFAULT, *RIVALS))}."),
    ] = None,
    lengths: Annotated[
        str | None, typer.Option(help="Tokens of the prompt, comma-separated, such as 2k,16k; default: 1k.")
    ] = None,
    texts: Annotated[str | None, typer.Option(help="A .txt file, or a folder of them; default: four books.")] = None,
    count: Annotated[int | None, typer.Option(min=2, help=f"Maximum number of texts; default: {COUNT}.")] = None,
    tail: Annotated[
        int | None, typer.Option(min=STEP + 1, help=f"Tokens after the prompt that are compared; default: {TAIL}.")
    ] = None,
    generate: Annotated[
        int, typer.Option(min=0, help="Also read the model's own greedy answer of so many tokens to each prompt.")
    ] = 0,
    with_grid: Annotated[bool, typer.Option("--grid", help="Also widths of keys by widths of values.")] = False,
    with_map: Annotated[bool, typer.Option("--map", help="Also each layer's keys and values alone, at 4 bit.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Two texts of 512 tokens by default, in seconds on a GPU.")
    ] = False,
    calibration: Annotated[
        str, typer.Option(help="For methods that need one: a folder or Hub id; auto: beside the checkpoint.")
    ] = "auto",
    folder: Annotated[Path | None, typer.Option("--out", help="Folder for JSON, Markdown, HTML and plots.")] = None,
    device: Device = "auto",
    gguf_file: GgufFile = None,
    json_line: Json = False,
) -> None:
    """How far each preset moves a model's next-token distributions from 16 bit, and what to do with that.

    The figures are those of llama.cpp's --kl-divergence, read through the real cache.
    """
    if folder is not None and importlib.util.find_spec("matplotlib") is None:
        raise fail('--out draws pictures with matplotlib: pip install "turbo_hf[eval]".')
    usual = QUICK if quick else ("1k", COUNT, TAIL)
    lengths = usual[0] if lengths is None else lengths
    count, tail = count or usual[1], tail or usual[2]
    try:
        sizes = sorted({parse_tokens(text.strip()) for text in lengths.split(",")})
        wanted = [name.strip() for words in methods or [",".join(_default())] for name in words.split(",") if name]
        chosen = named(wanted)
        if not chosen:
            raise ValueError(f"--methods names none; {known_methods()}.")
        if folder is not None:
            require_writable(folder)
        loaded, tokenizer = load(model, device, gguf_file=gguf_file)
        loaded = _widened(loaded)
        windows = _windows(loaded, tokenizer, texts, sizes[-1] + max(tail, generate) + 1, count)
        made: Calibration | str = calibration
        if calibration != "auto":
            made = Calibration.from_pretrained(calibration)
            if not any(method.config is not None and uses_calibration(method.config) for method in chosen):
                raise ValueError(f"--calibration {calibration}: none of these methods takes anything from it.")
        cases = [Case(size, path) for size in sizes for path in ("steps", "chunk")]
        answers = [Case(size, "answer") for size in sizes] if generate else []
        first, bare = [Case(sizes[0], "steps")], {"noise": False, "tail": tail}
        served = [at for at in attention_layers(loaded) if not at.reason]
        layers, latent = [at.index for at in served], any(is_latent(at.module) for at in served)
        parts = {
            "table": (cases, chosen, {"tail": tail}),
            "answers": (answers, chosen, {"tail": generate}),
            "grid": (first if with_grid else [], grid(sorted(BITS, reverse=True), latent), bare),
            "map": (first if with_map else [], layer_map(layers, 4, latent), bare),
        }
        rows = {
            name: _measured(name, loaded, windows[: FEW if name in ("grid", "map") else None], *part, made)
            for name, part in parts.items()
            if part[0]
        }
    except (ValueError, OSError) as mistake:
        raise fail(str(mistake)) from mistake
    own = [row for row in rows["table"] if row.method in wanted]
    if all(row.figures is None for row in own):
        raise fail("; ".join(dict.fromkeys(f"{row.method}: {row.verdict}" for row in own)))
    told = suggestion([row for row in rows["table"] if row.method in {at.name for at in chosen if at.config}])
    told = " ".join(filter(None, (unsteady(rows["table"]), told)))
    facts = _facts(loaded, gguf_file or model, windows, texts, tail)
    _show(rows, told, facts)
    found = {**facts, "suggestion": told, **{name: [row.to_dict() for row in part] for name, part in rows.items()}}
    if folder is not None:
        with mistakes_end_the_command():
            _write(folder, rows, told, facts, found)
    if json_line:
        print(as_json(found))  # noqa: T201


def _widened(model: Any) -> Any:
    """In float32 on a CPU with AVX2 alone, where 16-bit products take up to 90 times as long. Quantized weights stay
    as they are: Transformers refuses to convert them."""
    slow = model.device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2"
    narrow = model.dtype in (torch.bfloat16, torch.float16) and not getattr(model, "is_quantized", False)
    if not (slow and narrow):
        return model
    err.print(f"This CPU multiplies {str(model.dtype)[6:]} slowly: the model is read in float32.", highlight=False)
    return model.float()


def _default() -> list[str]:
    packages = {name: package for name, (package, _, _) in BACKENDS.items()}
    return [*DEFAULT, *(name for name in RIVALS if installed(packages[name.rstrip("0123456789")]))]


def _windows(model: Any, tokenizer: Any, texts: str | None, window: int, count: int) -> torch.Tensor:
    """Windows of the texts, none longer than the model's positions."""
    text = model.config.get_text_config(decoder=True)
    room = getattr(text, "max_position_embeddings", None) or window
    if window > room:
        raise ValueError(
            f"the longest prompt and what follows it take {window} tokens; this model has positions for {room}. Pass "
            "shorter --lengths."
        )
    with resources.as_file(resources.files("turbo_hf").joinpath("texts")) as carried:
        try:
            return token_windows(carried if texts is None else texts, tokenizer, window, count)
        except ValueError as error:
            if "too few" not in str(error):
                raise
            raise ValueError(
                f"the {'carried texts' if texts is None else 'texts'} are too short for two windows of {window} tokens."
                " Pass --texts with longer ones, or shorter --lengths."
            ) from error


def _measured(
    name: str,
    model: Any,
    windows: torch.Tensor,
    cases: list[Case],
    methods: list[Any],
    options: dict[str, Any],
    calibration: Calibration | str,
) -> list[Fidelity]:
    extra = 3 if options.get("noise", True) else 0
    with counting(name, len(windows) * len(cases) * (len(methods) + extra)) as advance, without_plans():
        try:
            return measure(
                model, windows, cases, methods, **options, calibration=calibration,
                advance=lambda method: advance(1, f"{name}: {method}"),
            )  # fmt: skip
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            longest = max(case.tokens for case in cases)
            raise ValueError(
                f"the unpatched model itself has no memory for prompts of {longest} tokens on {model.device}. Pass "
                "shorter --lengths, or a larger GPU."
            ) from error


def _facts(model: Any, name: str, windows: torch.Tensor, texts: str | None, tail: int) -> dict[str, Any]:
    gpu = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else "cpu"
    packages = ("turbo_hf", "torch", "transformers")
    return {
        "model": Path(name).name,
        "device": gpu,
        "dtype": str(model.dtype).removeprefix("torch."),
        "texts": len(windows),
        "source": "the carried books" if texts is None else texts,
        "tail": tail,
        "layers": len(layer_windows(model.config.get_text_config(decoder=True))),
        "versions": {package: version_of(package) for package in packages},
    }


def _name(case: Case) -> str:
    return f"{tokens_label(case.tokens)} tokens, {case.path}"


def _tables(rows: dict[str, list[Fidelity]]) -> list[Table]:
    """All figures, a table for each case."""
    tables = []
    for part, own in rows.items():
        for case in dict.fromkeys(row.case for row in own):
            cells = [_cells(row) for row in own if row.case == case]
            tables.append(Table(f"{_name(case)}{'' if part in ('table', 'answers') else f', {part}'}", [*FULL], cells))
    return tables


def _cells(row: Fidelity) -> list[str]:
    it = row.figures
    if it is None:
        return [row.method, *[""] * (len(FULL) - 2), row.verdict]
    size = "" if row.bytes_per_token is None else f"{row.bytes_per_token:,.0f}"
    kl = [f"{x:.5f}" for x in (it.kl, it.kl_error, it.kl_median, it.kl_99, it.kl_999, it.kl_max)]
    moved = [f"{x:.2%}" for x in (it.moved_rms, it.moved_99, it.same_top)]
    return [
        row.method, size, *kl, *moved, f"{it.perplexity:.3f}", f"{it.ratio:.4f}", f"{it.ratio_error:.4f}", row.verdict
    ]  # fmt: skip


def _show(rows: dict[str, list[Fidelity]], told: str, facts: dict[str, Any]) -> None:
    """The figures that fit a terminal."""
    for table in _tables(rows):
        short = [
            [cells[0], f"{cells[2]:.6} ± {cells[3]:.6}", cells[10], cells[1], cells[14]]
            if cells[2]
            else [cells[0], "", "", "", cells[14]]
            for cells in table.rows
        ]
        headings = ("method", "KL, nats", "same top", "B/token", "verdict")
        show_table(f"{facts['model']}, {facts['texts']} texts, {table.title}", headings, short, whole=4, box=SIMPLE)
    out.print(told, style="bold", markup=False, highlight=False)
    for text in WHAT:
        remark(text)


def _write(
    folder: Path, rows: dict[str, list[Fidelity]], told: str, facts: dict[str, Any], found: dict[str, Any]
) -> None:
    from turbo_hf.eval.plots import draw  # noqa: PLC0415  matplotlib is an extra

    write_whole(folder / "fidelity.json", as_json(found, indent=1) + "\n")
    title = f"{facts['model']} ({facts['dtype']}, {facts['device']}): distance to 16 bit"
    pictures = draw(rows, title, folder)
    write_report(folder, EvalReport(title, [told], _tables(rows), WHAT, facts, pictures))
    remark(f"Kept in {folder}: fidelity.json, report.html, report.md, pictures.")
