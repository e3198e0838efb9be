"""What the commands share: output, common options, refusals, and loading of models.

Torch and Transformers take seconds to import, and are imported where they are used: the help does not wait for them.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

out = Console()
err = Console(stderr=True)

Json = Annotated[bool, typer.Option("--json", help="Print one line of JSON last.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...; auto uses the first GPU, if there is one.")]


def print_error(message: str) -> None:
    """The message in red on stderr."""
    err.print(f"error: {message}", style="bold red", markup=False, highlight=False, soft_wrap=True)


def fail(message: str) -> typer.Exit:
    """Print the message as an error; raise the returned exception to end the command with status 1."""
    print_error(message)
    return typer.Exit(1)


def choose_device(device: str) -> str:
    """`device`; for "auto" the first GPU, or the CPU if there is none."""
    import torch  # noqa: PLC0415

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def require_folder(model: str) -> None:
    """Exit with a sentence if `model` can only be a folder, and is none."""
    from turbo_hf.calibration.checkpoint import names_a_folder  # noqa: PLC0415

    if names_a_folder(model) and not Path(model).exists():
        raise fail(f"there is no folder {model!r}, and no repository of the Hub can have this name.")


def load_config(model: str, revision: str | None = None) -> "PreTrainedConfig":
    """The config of a folder, a config.json or a Hub id; Exit with a sentence if there is none."""
    from turbo_hf.patching.meta_model import read_config  # noqa: PLC0415

    require_folder(model)
    try:
        return read_config(model, revision)
    except ValueError as error:
        raise fail(str(error)) from error


def load_model(model: str, device: str, revision: str | None = None, dtype: str = "auto") -> Any:
    """A model in eval mode; Exit with a sentence if it cannot be loaded. dtype: by name; "auto": the checkpoint's."""
    from safetensors import SafetensorError  # noqa: PLC0415

    from turbo_hf.errors import Unsupported  # noqa: PLC0415
    from turbo_hf.patching.meta_model import auto_class, shortened  # noqa: PLC0415

    device = choose_device(device)
    if device == "meta":
        raise fail("--device meta holds no weights to run; choose cpu or cuda.")
    config = load_config(model, revision)
    try:
        loaded: Any = auto_class(config).from_pretrained(model, revision=revision, dtype=dtype)
        return loaded.to(device).eval()
    except Unsupported as error:
        raise fail(str(error)) from error
    except (OSError, ValueError, RuntimeError, AssertionError, SafetensorError) as error:
        raise fail(f"cannot load {model!r} on {device}: {shortened(error)}") from error


def load_tokenizer(model: str, revision: str | None = None) -> Any:
    """A left-padding tokenizer; Exit with a sentence if it cannot be loaded."""
    from transformers import AutoTokenizer  # noqa: PLC0415

    require_folder(model)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(model, revision=revision, padding_side="left")
    except (OSError, ValueError, RuntimeError, AssertionError) as error:
        raise fail(f"cannot load {model!r} (its tokenizer): {error}") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load(model: str, device: str, revision: str | None = None) -> tuple[Any, Any]:
    """Model and left-padding tokenizer; Exit with a sentence if they cannot be loaded."""
    # before the weights, which take minutes
    tokenizer = load_tokenizer(model, revision)
    return load_model(model, device, revision), tokenizer
