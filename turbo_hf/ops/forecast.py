"""What will run in plain torch on a GPU, said before it does."""

import warnings
from collections.abc import Iterable

import torch

from turbo_hf.config import TurboConfig
from turbo_hf.errors import Strict, Unsupported, logger
from turbo_hf.layout import FULL
from turbo_hf.ops import gpu
from turbo_hf.ops.backend import kernel_obstacle
from turbo_hf.ops.decode import check_step


def forecast(
    config: TurboConfig, devices: Iterable[torch.device], dtype: torch.dtype, dims: set[int], strict: Strict
) -> list[str]:
    """Warn of each part of a model's attention that no kernel serves; returns the warnings.

    Args:
        devices: of the weights. dtype: of keys. dims: head dims.
        strict: "fallback" notes in the log and warns not.

    Raises:
        Unsupported: backend "triton", which plain torch may not replace.
    """
    if config.backend == "reference":
        return []
    found = [line for device in devices if device.type == "cuda" for line in _lines(config, device, dtype, dims)]
    said = list(dict.fromkeys(found))
    for line in said:
        if config.backend == "triton":
            raise Unsupported(f'backend "triton": {line} Choose backend "auto" or "reference", or another attention.')
        if strict == "fallback":
            logger.info(line)
        else:
            warnings.warn(line, stacklevel=3)
    return said


def _lines(config: TurboConfig, device: torch.device, dtype: torch.dtype, dims: set[int]) -> Iterable[str]:
    stands = gpu.obstacle(device)
    if stands is not None:
        yield f"attention runs in plain torch, which is slow: {stands}."
        return
    exact = config.attention == "fp16" or config.bits == FULL
    for dim in sorted(dims):
        x = _example(dim, dtype, device)
        prompts = None if config.prompt_attention == "auto" else kernel_obstacle(x, config.prompt_attention)
        steps = check_step(x, config.block_size, "fp16" if exact else "turbo")
        for part, why in (("prompts", prompts), ("decode steps", steps)):
            if why is not None:
                yield f"{part} run in plain torch, which is slow: {why}."


def _example(dim: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(0, 0, 0, dim, dtype=dtype, device=device)
