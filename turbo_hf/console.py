"""What the commands share: output, common options, refusals, and loading of models.

Torch and Transformers take seconds to import, and are imported where they are used: the help does not wait for them.
"""

import atexit
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import HEAVY_HEAD, Box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

out = Console()
err = Console(stderr=True)

_kept: list[Any] = []

TOGETHER = ("doctor", "generate", "calibrate", "eval", "bench", "plan")
"""Commands that several processes may run together: under torchrun they share the model, and the first one speaks."""

Json = Annotated[bool, typer.Option("--json", help="Print one line of JSON last.")]
GgufFile = Annotated[
    str | None,
    typer.Option("--gguf-file", help="A GGUF file in that folder or repository, whose weights are dequantized."),
]
ConfigName = Annotated[
    str | None,
    typer.Option("--preset", "--config", help="A preset, or a JSON or YAML file of options; default: turbo4."),
]
Calibration = Annotated[
    str, typer.Option(help="A folder or Hub id, for its widths or for --preset; auto: beside the checkpoint.")
]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...; auto uses the first GPU, if there is one.")]


def processes() -> tuple[int, int]:
    """The number of this process, from 0 on, and how many torchrun has started; (0, 1) without it."""
    number, count = (os.environ.get(name) for name in ("RANK", "WORLD_SIZE"))
    # WORLD_SIZE alone is set by schedulers, too
    return (0, 1) if number is None or count is None else (int(number), int(count))


def leave_to_the_first(command: str) -> None:
    """Under torchrun: refuse commands that are for one process, and silence all but the first of its processes.

    What is not caught is still shown: a traceback, wherever it comes from.
    """
    number, count = processes()
    if count == 1:
        return
    if number:
        # whoever holds the former stream finds it open
        _kept.append(sys.stdout)
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the process ends
        out.quiet = err.quiet = True
        # progress bars, warnings of all packages
        os.environ["TQDM_DISABLE"] = "1"
        warnings.simplefilter("ignore")
    if command not in TOGETHER:
        raise fail(f"{command} runs in one process: start it without torchrun, which is for {', '.join(TOGETHER)}.")


def print_error(message: str) -> None:
    """The message in red on stderr."""
    err.print(f"error: {message}", style="bold red", markup=False, highlight=False, soft_wrap=True)


def fail(message: str) -> typer.Exit:
    """Print the message as an error; raise the returned exception to end the command with status 1."""
    print_error(message)
    return typer.Exit(1)


@contextmanager
def mistakes_end_the_command() -> Iterator[None]:
    """A ValueError or OSError inside is printed as one sentence, and the command ends with status 1."""
    try:
        yield
    except BrokenPipeError:
        # the reader of stdout has closed it (`| head`); click ends the command silently
        raise
    except (ValueError, OSError) as mistake:
        raise fail(str(mistake)) from mistake


def show_table(
    title: str,
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    words: int = 1,
    whole: int = 1,
    box: Box = HEAVY_HEAD,
) -> None:
    """Print a table. words: how many columns hold words, before those of figures, which stand at the right. whole: how
    many columns are never wrapped."""
    table = Table(title=title, box=box)
    for n, heading in enumerate(headings):
        table.add_column(heading, justify="left" if n < words else "right", overflow="fold", no_wrap=n < whole)
    for row in rows:
        table.add_row(*row)
    out.print(table)


def remark(text: str) -> None:
    """Print a remark below a table."""
    out.print(text, style="dim", markup=False, highlight=False)


@contextmanager
def counting(what: str, total: int) -> Iterator[Callable[..., None]]:
    """A progress bar on stderr. Inside, the function that it gives takes what was done, and what comes next."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done, word=None: progress.update(task, advance=done, description=word)


def choose_device(device: str) -> str:
    """`device`; for "auto" the first GPU, or the CPU if there is none."""
    import torch  # noqa: PLC0415

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def require_place(model: str, gguf_file: str | None = None) -> None:
    """Exit with a sentence if `model` can only be a folder, and is none, or if GGUF files are not named as needed."""
    from turbo_hf.calibration.checkpoint import CONFIG, names_a_folder  # noqa: PLC0415

    place = Path(model)
    if names_a_folder(model) and not place.exists():
        raise fail(f"there is no folder {model!r}, and no repository of the Hub can have this name.")
    if gguf_file is None:
        found = [place] if place.is_file() else [] if (place / CONFIG).exists() else sorted(place.glob("*.gguf"))
        if found and found[0].suffix == ".gguf":
            raise fail(f"{found[0]} is a GGUF file: pass its folder, and name it by --gguf-file {found[0].name}.")
        return
    if importlib.util.find_spec("gguf") is None:
        raise fail("--gguf-file needs the package gguf: pip install gguf.")
    if processes()[1] > 1:
        raise fail("a GGUF file is loaded by one process: start the command without torchrun.")
    if place.exists() and not (place / gguf_file).is_file():
        raise fail(f"there is no file {gguf_file!r} in the folder {model!r}.")


def load_config(model: str, gguf_file: str | None = None) -> "PreTrainedConfig":
    """The config of a folder, a config.json or a Hub id, or of a GGUF file there; Exit with a sentence if there is
    none."""
    from turbo_hf.patching.meta_model import read_config  # noqa: PLC0415

    require_place(model, gguf_file)
    with mistakes_end_the_command():
        return read_config(model, gguf_file)


def load_model(model: str, device: str, gguf_file: str | None = None) -> Any:
    """A model in eval mode, in the checkpoint's dtype (of a GGUF file float32); Exit with a sentence if it cannot be
    loaded. Under torchrun its processes share the model, by Transformers' own plan."""
    from safetensors import SafetensorError  # noqa: PLC0415

    from turbo_hf.errors import Unsupported, shortened  # noqa: PLC0415
    from turbo_hf.patching.meta_model import auto_class, gguf_options  # noqa: PLC0415

    device = choose_device(device)
    if device == "meta":
        raise fail("--device meta holds no weights to run; choose cpu or cuda.")
    config = load_config(model, gguf_file)
    try:
        count = processes()[1]
        split = {} if count == 1 else {"distributed_config": _over(count, device)}
        named = gguf_options(gguf_file)
        loaded: Any = auto_class(config).from_pretrained(model, dtype="auto", **split, **named)
        return (loaded if split else loaded.to(device)).eval()
    except Unsupported as error:
        raise fail(str(error)) from error
    except (OSError, ValueError, RuntimeError, AssertionError, SafetensorError) as error:
        raise fail(f"cannot load {gguf_file or model!r} on {device}: {shortened(error)}") from error


def _over(count: int, device: str) -> Any:
    """How `count` processes share a model. ValueError: on a device that they cannot share it on."""
    import torch  # noqa: PLC0415
    from torch import distributed  # noqa: PLC0415
    from transformers.distributed.configuration_utils import DistributedConfig  # noqa: PLC0415

    # where Transformers puts it
    there = "cuda" if torch.cuda.is_available() else "cpu"
    if device != there:
        raise ValueError(f"under torchrun each process takes its own device of kind {there}. Omit --device")
    if there == "cuda" and torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", count)):
        raise ValueError(f"torchrun has started more processes than there are GPUs, {torch.cuda.device_count()}")
    # else torch warns that nobody has
    atexit.register(lambda: distributed.destroy_process_group() if distributed.is_initialized() else None)
    return DistributedConfig(tp_size=count)


def load_tokenizer(model: str, gguf_file: str | None = None) -> Any:
    """A left-padding tokenizer; Exit with a sentence if it cannot be loaded."""
    from transformers import AutoTokenizer  # noqa: PLC0415

    from turbo_hf.patching.meta_model import gguf_options  # noqa: PLC0415

    require_place(model, gguf_file)
    try:
        named = gguf_options(gguf_file)
        tokenizer: Any = AutoTokenizer.from_pretrained(model, padding_side="left", **named)
    except Exception as error:  # the library behind it raises that
        raise fail(f"cannot load {gguf_file or model!r} (its tokenizer): {error}") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load(model: str, device: str, gguf_file: str | None = None) -> tuple[Any, Any]:
    """Model and left-padding tokenizer; Exit with a sentence if they cannot be loaded."""
    # before the weights, which take minutes
    tokenizer = load_tokenizer(model, gguf_file)
    return load_model(model, device, gguf_file=gguf_file), tokenizer
