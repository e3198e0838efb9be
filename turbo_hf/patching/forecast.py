"""Notices about what will run in plain torch on a GPU, issued in advance."""

from collections.abc import Iterable

import torch

from turbo_hf.config.turbo_config import TurboConfig
from turbo_hf.errors import Notices, Unsupported
from turbo_hf.layout import UNQUANTIZED
from turbo_hf.ops import gpu
from turbo_hf.ops.backend import kernel_obstacle
from turbo_hf.ops.decode.contract import step_obstacle


def forecast(
    config: TurboConfig, devices: Iterable[torch.device], dtype: torch.dtype, dims: set[int], notices: Notices
) -> None:
    """Note each part of a model's attention that no kernel serves.

    Args:
        devices: of the weights. dtype: of keys. dims: head dims.

    Raises:
        Unsupported: backend "triton", which plain torch may not replace.
    """
    if config.backend == "reference":
        return
    found = [line for device in devices if device.type == "cuda" for line in _lines(config, device, dtype, dims)]
    for line in dict.fromkeys(found):
        if config.backend == "triton":
            raise Unsupported(f'backend "triton": {line} Choose backend "auto" or "reference", or another attention.')
        notices.note(line)


def _lines(config: TurboConfig, device: torch.device, dtype: torch.dtype, dims: set[int]) -> Iterable[str]:
    stands = gpu.obstacle(device)
    if stands is not None:
        yield f"attention runs in plain torch, which is slow: {stands}."
        return
    mode = "fp16" if config.bits == UNQUANTIZED else config.decode_attention
    for dim in sorted(dims):
        x = _example(dim, dtype, device)
        prompts = None if config.prompt_attention == "auto" else kernel_obstacle(x, config.prompt_attention)
        steps = step_obstacle(x, config.block_size, mode)
        for part, why in (("prompts", prompts), ("decode steps", steps)):
            if why is not None:
                yield f"{part} run in plain torch, which is slow: {why}."


def _example(dim: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(0, 0, 0, dim, dtype=dtype, device=device)
