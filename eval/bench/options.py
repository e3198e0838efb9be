"""Options shared by several commands, and helpers for parsing them and printing results."""

import importlib.util
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from turbo_hf.config.turbo_config import ATTENTION_MODES, BACKENDS
from turbo_hf.console import choose_device

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}

Modes = Annotated[list[str] | None, typer.Option("--mode", help=f"{', '.join(ATTENTION_MODES)}; may be repeated.")]
Block = Annotated[int, typer.Option(help="Tokens in a block of keys and values: 32, 64 or 128.")]
SmoothK = Annotated[bool, typer.Option("--smooth-k", help="Subtract the keys' channel means before rounding.")]
Backend = Annotated[str, typer.Option(help=f"One of {', '.join(BACKENDS)}.")]
Dtype = Annotated[str, typer.Option(help=f"Dtype of random inputs: {', '.join(DTYPES)}.")]
Seed = Annotated[int, typer.Option(help="Random seed of the inputs.")]
ModelPlace = Annotated[
    str | None, typer.Option("--model", help="A folder or a Hub id, with its own weights, instead of --shape.")
]
Tiny = Annotated[bool, typer.Option("--tiny", help="Tiny models: tests the command, measures nothing.")]
Folder = Annotated[Path | None, typer.Option("--out", help="A folder for the JSON (and the plot); created if missing.")]


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


def prepare_folder(folder: Path | None, *, plot: bool = False) -> None:
    """Make the folder of --out. ValueError if a plot would need matplotlib, which is not installed."""
    if folder is None:
        return
    if plot and importlib.util.find_spec("matplotlib") is None:
        raise ValueError('the plot needs matplotlib: pip install "turbo_hf[bench]", or omit --out.')
    folder.mkdir(parents=True, exist_ok=True)


def as_json(result: Any, indent: int | None = None) -> str:
    """JSON of dicts, lists and numbers; non-finite numbers, which JSON cannot represent, become null."""

    def finite(x: Any) -> Any:
        if isinstance(x, dict):
            return {key: finite(value) for key, value in x.items()}
        if isinstance(x, list):
            return [finite(value) for value in x]
        return None if isinstance(x, float) and not abs(x) < float("inf") else x

    return json.dumps(finite(result), indent=indent)
