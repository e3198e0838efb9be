"""Tiles of decode that were fastest on this GPU, in a file that `turbo-hf doctor --measure` writes."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from turbo_hf._version import __version__
from turbo_hf.config.expected import OneOf, require
from turbo_hf.config.whole_files import read_object, write_whole
from turbo_hf.models.versions import version_of
from turbo_hf.ops.tuning import DecodeTiles

ALLOWED = [OneOf((1, 2, 4)), OneOf((1, 2, 3, 4)), OneOf((1, 2, 3, 4)), OneOf((1, 2, 4, 8))]
"""What a file may choose for each field of `DecodeTiles`."""

_of: dict[torch.device, Mapping[str, DecodeTiles]] = {}


def tiles_file(gpu: str) -> Path:
    """Where the tiles of a GPU of this name are, for the versions of Triton and of this package that are installed."""
    words = ("tiles", gpu, f"triton {version_of('triton')}", __version__)
    return (
        Path.home() / ".cache" / "turbo_hf" / f"{'-'.join(re.sub(r'[^A-Za-z0-9.]+', '-', word) for word in words)}.json"
    )


def measured_tiles(device: torch.device) -> Mapping[str, DecodeTiles]:
    """Tiles by `tuning.tile_kind`, read once per process; empty if nothing was measured there.

    Raises:
        ValueError: the file holds anything else.
    """
    if device not in _of:
        _of[device] = read_tiles(tiles_file(torch.cuda.get_device_name(device))) if device.type == "cuda" else {}
    return _of[device]


@contextmanager
def using(device: torch.device, tiles: Mapping[str, DecodeTiles]) -> Iterator[None]:
    """Inside, these are the tiles of a device."""
    before = measured_tiles(device)
    _of[device] = tiles
    try:
        yield
    finally:
        _of[device] = before


def read_tiles(path: Path) -> dict[str, DecodeTiles]:
    """The tiles of a file; none if it is missing. ValueError as of `measured_tiles`."""
    if not path.exists():
        return {}
    remedy = "Delete it, or measure again: turbo-hf doctor --measure."
    found = read_object(path, remedy)
    try:
        require(found, {"tiles": dict}, "")
        for kind, numbers in found["tiles"].items():
            require(numbers, ALLOWED, f"tiles[{kind!r}]")
    except ValueError as error:
        raise ValueError(f"{str(path)!r}: {error} {remedy}") from error
    return {kind: DecodeTiles(*numbers) for kind, numbers in found["tiles"].items()}


def keep_tiles(path: Path, tiles: Mapping[str, DecodeTiles]) -> None:
    """Write them for the processes to come. OSError: the file cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps({"tiles": tiles}, indent=1) + "\n")


def describe_tiles(device: torch.device) -> str:
    """For reports; "" if nothing was measured on this GPU."""
    if not measured_tiles(device):
        return ""
    return f"tiles of decode as measured here: {tiles_file(torch.cuda.get_device_name(device))}"
