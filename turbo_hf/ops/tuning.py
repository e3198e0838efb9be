"""GPU measurements as tables, so that no user's first call waits for a search; and tiles of decode that were fastest on
this GPU, in a file that `turbo-hf doctor --measure` writes."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from turbo_hf._version import __version__
from turbo_hf.config.expected import OneOf, require
from turbo_hf.config.whole_files import read_object, write_whole
from turbo_hf.layout import PROMPT_TILE, UNQUANTIZED, KVStore
from turbo_hf.models.versions import version_of
from turbo_hf.ops import gpu
from turbo_hf.ops.gpu import H200_SHARED


class PrefillTiles(NamedTuple):
    """Tiles of a prefill kernel.

    block_m, block_n: queries and keys per tile.
    warps: warps per program.
    stages: stages of the load pipeline.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int


def prefill_tiles(
    mode: str, dim: int, itemsize: int, block: int, shared: int = H200_SHARED, *, past: bool = False
) -> PrefillTiles:
    """Tiles of the general prefill kernel (H200: `eval/results/prefill-log.md`; others were compiled only).

    Args:
        dim: channels, padded. itemsize: bytes of one of the model's own numbers. block: keys that share a scale of P;
            without such scales ("native") a tile is as long as shared memory allows. shared: bytes of it per program.
            past: whether there is a compressed past.
    """
    if shared < H200_SHARED and (mode == "native" or (mode, itemsize) == ("half", 2)):
        return _small_tiles(mode, dim, itemsize, block, past)
    if mode == "native":
        if itemsize > 2:
            # products in float32 are unrolled: taller tiles take minutes to compile
            return PrefillTiles(64 if dim <= 64 else 32, min(block, 32), 8, 1 if dim > 128 else 2)
        return PrefillTiles(128, block, 8, 3) if dim <= 128 else PrefillTiles(64, min(block, 64), 8, 2)
    if mode == "half" and itemsize > 2:
        return PrefillTiles(64, block, 4 if dim <= 128 else 8, 1)
    if dim > 128:
        return PrefillTiles(64, block, 8, 1 if mode == "half" else 2)
    return PrefillTiles(64, block, 4, 2 if mode == "half" else 3)


def _small_tiles(mode: str, dim: int, itemsize: int, block: int, past: bool) -> PrefillTiles:
    """Tiles in the model's own numbers that fit the 99 KiB of consumer GPUs, and the registers before Hopper."""
    if mode == "half":
        return PrefillTiles(64, block, 8, 2 if dim <= 128 else 1)
    if itemsize > 2:
        return PrefillTiles(16, min(block, 32), 8, 1) if dim > 128 else PrefillTiles(32, min(block, 32), 8, 2)
    if dim > 128:
        # codes of a past are widened in shared memory
        return PrefillTiles(64, min(block, 32), 8, 1 if past else 2)
    return PrefillTiles(64, min(block, 64), 4, 2) if dim > 64 else PrefillTiles(128, min(block, 64), 8, 3)


AUTO_PREFILL = {128: (4096, "turbo")}
"""(tokens, mode) by head dim: from so many tokens of a prompt on, the kernel for Hopper was measured faster than cuDNN
in 16 bit, quantization included. On GPUs where it does not run, "auto" keeps to the model's own precision.

"fp8" is faster still (`eval/results/prefill-log.md`) and has twice the error of "turbo": a user's choice.
"""


def _fast_from(device: torch.device, dim: int) -> tuple[int, str] | None:
    return AUTO_PREFILL.get(dim) if gpu.hopper(device) else None


MOST_PARTS = 16
"""Maximum number of programs that share the past of a tile of queries."""

LEAST_SHARE = 512
"""Tokens of the past that such a program reads at least, if the table is full."""

LEAST_ITEMS = 0.45
"""Programs per SM from which the kernel for Hopper reads a past faster than the general one, of smaller tiles."""


def past_parts(programs: int, room: int, device: torch.device) -> int:
    """How many programs share the past of a tile of queries, where there are fewer tiles than SMs. room: tokens of the
    past that are shared.

    What the host knows alone decides: a captured launch is replayed over other lengths.
    """
    return max(1, min(gpu.sms(device) // programs, room // LEAST_SHARE, MOST_PARTS)) if room and programs else 1


def in_tiles(past: KVStore) -> bool:
    """Whether the kernel for Hopper has tiles of a past like this one."""
    return past.block == 64 and past.k_open.dtype == torch.int8


def fills_sms(q: torch.Tensor, room: int) -> bool:
    """Whether queries [B, Hq, M, D] make programs enough of the kernel for Hopper. room: as of `past_parts`."""
    batch, heads, tokens, _ = q.shape
    items = batch * heads * -(-tokens // PROMPT_TILE)
    return items * past_parts(items, room, q.device) >= LEAST_ITEMS * gpu.sms(q.device)


def prefill_mode(attention: str, q: torch.Tensor, past: int = 0) -> str:
    """The mode of `prefill` for `TurboConfig.attention`: itself, or what "auto" means for queries [B, Hq, M, D].

    past: tokens before them that the kernel for Hopper could read, as far as the host knows. A chunk over a past pays
    off from twice as many query-key pairs on as the shortest prompt of `AUTO_PREFILL` has.
    """
    if attention != "auto":
        return attention
    if q.device.type != "cuda":
        return "native"
    fast = _fast_from(q.device, q.shape[3])
    narrow = q.dtype in (torch.float16, torch.bfloat16)
    if not narrow or fast is None:
        return "native"
    tokens, (least, mode) = q.shape[2], fast
    enough = tokens >= least or (tokens * (past + tokens // 2) >= least**2 and fills_sms(q, past))
    return mode if enough else "native"


def describe_prefill(attention: str, device: torch.device, dims: set[int]) -> str:
    """One line on how prompts are computed by layers of these head dims, for reports."""
    if attention != "auto":
        return f"prompts: {attention}"
    reason = gpu.why_no_kernels_on(device)
    if reason is not None:
        return f"prompts: native (auto; {reason})"
    if device.type != "cuda":
        return "prompts: native (auto, without a GPU)"
    why_slow = "8 bit was not measured faster here"
    if torch.cuda.get_device_capability(device) == (9, 0) and not gpu.hopper(device):
        why_slow = f"the 8-bit kernel for Hopper needs triton {gpu.HOPPER_TRITON}x"
    parts = []
    for dim in sorted(dims):
        fast = _fast_from(device, dim)
        if fast is None:
            how = f"native ({why_slow})"
        else:
            how = f"native, from {fast[0]} tokens up {fast[1]}, fewer over a long past"
        parts.append(f"head dim {dim}: {how}")
    return "prompts (auto): " + "; ".join(parts)


class DecodeTiles(NamedTuple):
    """Tiles of a decode kernel.

    blocks: blocks per tile, one per warp; if it is one, all warps share it.
    occupancy: CTAs per SM.
    stages: stages of the load pipeline.
    warps: warps per CTA.
    """

    blocks: int
    occupancy: int
    stages: int
    warps: int


RESERVED = 7 << 10
"""Bytes of shared memory that tiles leave to the rest of the program."""


def decode_tiles(
    codes: int,
    bits: tuple[int, int],
    unpacks: bool,
    *,
    many: bool = False,
    itemsize: int = 2,
    shared: int = H200_SHARED,
    measured: Mapping[str, DecodeTiles] | None = None,
) -> DecodeTiles:
    """Tiles of the decode kernel (H200: `eval/results/decode-log.md`; others were compiled only).

    Args:
        codes: numbers of K per block, padding included.
        bits: bits per number of K, and of V.
        unpacks: whether codes are converted to the query's type, as in "native"; memory then suffices for one block.
        many: whether there are at least twice as many outputs as SMs: small CTAs compute whole outputs, few are merged;
            of wide heads, a quarter as many.
        itemsize: bytes per number of the queries.
        shared: bytes of shared memory per program; an SM has 1 KiB more.
        measured: tiles by `tile_kind` that were fastest on this GPU, in the place of the table's.
    """
    if unpacks:
        return DecodeTiles(1, 2, 1, 1)
    unquantized = UNQUANTIZED in bits
    chosen: tuple[DecodeTiles, ...]
    if unquantized:
        chosen = ONE_WARP_TILES
    elif codes > WIDE:
        chosen = WIDEST_TILES
    elif codes == WIDE and sum(bits) > 8:
        chosen = WIDE_TILES if many else WIDE_8BIT_TILES
    elif codes == WIDE:
        chosen = MANY_WIDE_TILES + WIDE_TILES if many else WIDE_TILES
    else:
        chosen = MANY_TILES + FEW_TILES if many else FEW_TILES
    kind = tile_kind(codes, bits, many=many)
    if measured and kind in measured:
        chosen = (measured[kind], *chosen)
    return next((tiles for tiles in chosen if fits(tiles, codes, bits, itemsize, shared)), chosen[-1])


def tile_kind(codes: int, bits: tuple[int, int], *, many: bool) -> str:
    """The kind of steps that share tiles which were measured; "" if none are. Arguments as of `decode_tiles`."""
    if UNQUANTIZED in bits or codes > WIDE:
        return ""
    return f"{'many' if many else 'few'} {'wide' if codes == WIDE else 'narrow'} {sum(bits)}"


def fits(tiles: DecodeTiles, codes: int, bits: tuple[int, int], itemsize: int, shared: int) -> bool:
    """Whether a program with these tiles has room in shared memory. Arguments as of `decode_tiles`."""
    waiting = tiles.blocks * (tiles.stages - 1) * codes * sum(bits) // 8
    # unpacked K and V pass through shared memory; at 3 bit, and from 16 bit to float32, beside the loads in flight
    unpacked = sum(tiles.blocks * codes for n in bits if n < 8)
    beside = unpacked if 3 in bits else codes * 5 if UNQUANTIZED in bits and itemsize > 2 else 0
    return max(tiles.occupancy * waiting, unpacked) <= shared - RESERVED and waiting + beside <= shared


def tiles_16bit(numbers: int, shared: int = H200_SHARED) -> DecodeTiles | None:
    """Tiles of `attend_16bit`, which decodes over pages, open tokens and queries of one 16-bit type: one block each.

    numbers: numbers of K per block, padding included. shared: as in `decode_tiles`. None: no such tile fits. From
    Triton 3.8 on all stages take shared memory, not all but one.
    """
    for tiles in (DecodeTiles(1, 2, 3, 4), DecodeTiles(1, 1, 3, 4), DecodeTiles(1, 1, 2, 4)):
        if tiles.occupancy * tiles.stages * numbers * 4 <= shared - RESERVED:
            return tiles
    return None


FEW_TILES = (
    DecodeTiles(4, 2, 3, 4),
    DecodeTiles(4, 1, 3, 4),
    DecodeTiles(4, 1, 2, 4),
    DecodeTiles(2, 1, 2, 2),
    DecodeTiles(1, 1, 2, 1),
)
"""Tiles of decode, the first that fits. H200, 2026-11-21: the table of short contexts in the log."""

MANY_TILES = (DecodeTiles(2, 4, 3, 2),)
"""The same where there are twice as many outputs as SMs, or more."""

WIDE = 1 << 14
"""Numbers of K per block, 256 channels of 64 tokens, which do not fit the registers of one warp."""

WIDE_TILES = (DecodeTiles(1, 2, 3, 4), DecodeTiles(1, 1, 3, 4), DecodeTiles(1, 1, 2, 4))
"""Tiles of such blocks (H200, 2026-11-28)."""

WIDE_8BIT_TILES = (DecodeTiles(1, 2, 2, 4), DecodeTiles(1, 1, 2, 4))
"""The same where K and V have more than 8 bit together, and outputs are few."""

MANY_WIDE_TILES = (DecodeTiles(1, 4, 3, 2),)
"""Tried before `WIDE_TILES` where K and V have 8 bit together, or less, and there are at least a quarter as many
outputs as SMs: measured slower with 1 to 4 outputs and faster with 64 and more, the limit between was not measured."""

WIDEST_TILES = (DecodeTiles(1, 1, 2, 8), DecodeTiles(1, 1, 1, 8))
"""Tiles of 256 channels of 128 tokens: compiled and checked, not timed."""

ONE_WARP_TILES = (
    DecodeTiles(1, 3, 3, 1),
    DecodeTiles(1, 2, 3, 1),
    DecodeTiles(1, 1, 3, 1),
    DecodeTiles(1, 1, 2, 1),
    DecodeTiles(1, 1, 1, 1),
)
"""The same for 16 bit where `tiles_16bit` does not apply: other query types, SAS, sparse."""


TILE_COST = {16: 4.0, 8: 2.3, 4: 1.3, 3: 1.3, 2: 1.2}
"""Microseconds of a tile of 4 blocks of each width on one SM of an H200, d = 128, 16 rows of 32k tokens. 2 bit:
tuned, by the fastest plans beside 4 bit; 3 bit: taken from 4 bit, as it has about as many instructions."""

TILE_SETUP = 2.6
"""Cost of starting an output of decode, in the same unit."""


ALLOWED = [OneOf((1, 2, 4)), OneOf((1, 2, 3, 4)), OneOf((1, 2, 3, 4)), OneOf((1, 2, 4, 8))]
"""What a file may choose for each field of `DecodeTiles`."""

_measured: dict[torch.device, Mapping[str, DecodeTiles]] = {}


def tiles_file(name: str) -> Path:
    """Where the tiles of a GPU of this name are, for the versions of Triton and of this package that are installed."""
    words = ("tiles", name, f"triton {version_of('triton')}", __version__)
    # which does not fail where nobody has a home
    folder = os.path.expanduser("~/.cache/turbo_hf")
    return Path(folder, "-".join(re.sub(r"[^A-Za-z0-9.]+", "-", word) for word in words) + ".json")


def measured_tiles(device: torch.device) -> Mapping[str, DecodeTiles]:
    """Tiles by `tuning.tile_kind`, read once per process; empty if nothing was measured there.

    Raises:
        ValueError: the file holds anything else, or cannot be read.
    """
    if device not in _measured:
        _measured[device] = read_tiles(tiles_file(torch.cuda.get_device_name(device))) if device.type == "cuda" else {}
    return _measured[device]


@contextmanager
def using(device: torch.device, tiles: Mapping[str, DecodeTiles]) -> Iterator[None]:
    """Inside, these are the tiles of a device."""
    before = measured_tiles(device)
    _measured[device] = tiles
    try:
        yield
    finally:
        _measured[device] = before


def read_tiles(path: Path) -> dict[str, DecodeTiles]:
    """The tiles of a file; none if it cannot be seen. ValueError as of `measured_tiles`."""
    # false, and no error, in a folder that may not be read
    if not os.path.isfile(path):
        return {}
    remedy = "Delete it, or measure again: turbo-hf doctor --measure."
    try:
        found = read_object(path, remedy)
    except OSError as error:
        # another user's, for example
        raise ValueError(f"{str(path)!r} cannot be read: {error.strerror}. {remedy}") from error
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
