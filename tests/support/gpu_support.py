"""What tests of GPUs share, on machines that may have none."""

from collections.abc import Iterator
from typing import Any

import torch


class OnGpu:
    """What is looked at of a tensor on a GPU: queries [1, 8, tokens, dim]."""

    def __init__(self, dim: int, dtype: torch.dtype = torch.bfloat16, tokens: int = 1):
        self.device, self.shape, self.dtype = torch.device("cuda", 0), (1, 8, tokens, dim), dtype
        self.is_cuda = True


NO_FP8 = "FP8 needs a GPU from Ada on: the interpreter loses the carry when it rounds to e4m3"


def has_fp8(device: torch.device) -> bool:
    """Whether FP8 can be tried."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def tensors_in(arguments: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    """Those of a launch, at any depth."""
    for x in arguments:
        if isinstance(x, torch.Tensor):
            yield x
        elif isinstance(x, tuple):
            yield from tensors_in(x)
