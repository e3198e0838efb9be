"""What was measured on GPUs, as tables, so that no user's first call waits for a search."""

from typing import NamedTuple

import torch


class PrefillTiles(NamedTuple):
    """block_m: queries of a tile. warps: of a program. stages: of the load pipeline."""

    block_m: int
    warps: int
    stages: int


def prefill_tiles(mode: str, dim: int) -> PrefillTiles:
    """Tiles of the general prefill kernel (H200: `eval/results`)."""
    if mode == "fp16":
        return PrefillTiles(128, 8, 3) if dim <= 128 else PrefillTiles(64, 8, 2)
    if dim > 128:
        return PrefillTiles(64, 8, 2)
    return PrefillTiles(64, 4, 2 if mode == "half" else 3)


AUTO_PREFILL = {(9, 0): {64: 8192, 128: 4096}}
"""Tokens from which INT8 Q K and FP8 P V beat cuDNN in 16 bit, by compute capability and head dim, measured.

Other GPUs and head dims are not measured: there "auto" keeps to the model's own precision.
"""


def fast_from(device: torch.device, dim: int) -> int | None:
    """Tokens of a prompt from which "auto" computes in 8 bit on this device; None: never; 0 where no GPU is."""
    if device.type != "cuda":
        return 0
    return AUTO_PREFILL.get(torch.cuda.get_device_capability(device), {}).get(dim)


def prefill_mode(attention: str, q: torch.Tensor) -> str:
    """The mode of `ops.prefill` for `TurboConfig.attention`: itself, or what "auto" means for queries [B, Hq, M, D]."""
    if attention != "auto":
        return attention
    if q.device.type != "cuda":
        return "turbo"
    first = fast_from(q.device, q.shape[3])
    narrow = q.dtype in (torch.float16, torch.bfloat16)
    return "fp8" if narrow and first is not None and q.shape[2] >= first else "fp16"


def describe_prefill(attention: str, device: torch.device, dims: set[int]) -> str:
    """One line on how prompts are computed by layers of these head dims, for reports."""
    if attention != "auto":
        return f"prompts: {attention}"
    if device.type != "cuda":
        return "prompts: turbo (auto, without a GPU)"
    parts = []
    for dim in sorted(dims):
        first = fast_from(device, dim)
        how = "fp16 (8 bit was not measured faster here)" if first is None else f"fp16, from {first} tokens up fp8"
        parts.append(f"head dim {dim}: {how}")
    return "prompts (auto): " + "; ".join(parts)


class DecodeTiles(NamedTuple):
    """blocks: of a tile, one a warp. occupancy: CTAs of an SM. stages: tiles on their way, the one at work included."""

    blocks: int
    occupancy: int
    stages: int


SHARED_MEMORY = 220 << 10
"""Bytes of an H200's SM that tiles may fill."""


def decode_tiles(block_bytes: int, turbo: bool) -> DecodeTiles:
    """Tiles of the decode kernel for blocks of so many bytes, K and V (H200: `eval/results/decode-log.md`).

    Mode "fp16" unpacks to the query's type, which takes room: one block at a time.
    """
    if not turbo:
        return DecodeTiles(1, 2, 1)
    for tiles in (DecodeTiles(4, 2, 3), DecodeTiles(4, 1, 3), DecodeTiles(4, 1, 2)):
        if tiles.blocks * tiles.occupancy * (tiles.stages - 1) * block_bytes <= SHARED_MEMORY:
            return tiles
    return DecodeTiles(2, 1, 2)


TILE_COST = {8: 2.3, 4: 1.3, 3: 1.6, 2: 1.1}
"""Microseconds of a tile of 4 blocks of each width on one SM of an H200, d = 128, 16 rows of 32k tokens."""

TILE_SETUP = 2.6
"""What it takes to begin an output of decode, in the same unit."""
