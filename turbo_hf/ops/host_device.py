"""Transfers between host and device: lists without a wait, and the flags of all layers in one read."""

from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from transformers import PreTrainedModel

from turbo_hf.ops import gpu
from turbo_hf.ranks import ALONE, Ranks


def send(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64 [n] on `device`, to write to. The host does not wait for the device, as it does in `torch.tensor`."""
    if not any(numbers):
        return torch.zeros(len(numbers), dtype=torch.int64, device=device)
    return shared(numbers, device).clone()


def shared(numbers: Sequence[int] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """As `send`, but read-only: layers of a pass that ask for the same numbers get the same tensor.

    numbers: or an int64 tensor on the host, in any shape.
    """
    plain = numbers.numpy() if isinstance(numbers, torch.Tensor) else array("q", numbers)
    return _sent(plain.tobytes(), device, gpu.stream(device))


@lru_cache(maxsize=16)
def _sent(numbers: bytes, device: torch.device, stream: int) -> torch.Tensor:
    """The copy for one stream, as another would not wait for it; no inference tensor, as it may outlive the mode."""
    with torch.inference_mode(False):
        if not any(numbers):
            return torch.zeros(len(numbers) // 8, dtype=torch.int64, device=device)
        return torch.frombuffer(bytearray(numbers), dtype=torch.int64).to(device, non_blocking=True)


@lru_cache(maxsize=64)
def nothing(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor without elements, shared by all new layers."""
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, device=device)


def require_finite(flags: Mapping[int, torch.Tensor], ranks: Ranks = ALONE) -> None:
    """ValueError naming the first layer whose flag, of one element, is not 0. One read from each device.

    ranks: those that ask the same at this moment; all of them raise the error, if one of them does.
    """
    found: list[int] = []
    for device in {flag.device for flag in flags.values()}:
        here = {index: flag for index, flag in flags.items() if flag.device == device}
        values = ranks.most(torch.stack([flag.view(()) for flag in here.values()])).tolist()
        found += [index for index, nonfinite in zip(here, values, strict=True) if nonfinite]
    if found:
        raise ValueError(
            f"layer {min(found)}: keys or values hold NaN or Inf, which no quantized cache can store. Look for the "
            "cause in the model (overflow in float16 is the usual one: load it in bfloat16), and take a new cache, or "
            "reset() this one."
        )


def input_device(model: PreTrainedModel) -> torch.device:
    """Where a model takes its tokens: weights that accelerate holds elsewhere are on no device, and it moves tokens."""
    return torch.device("cpu") if model.device.type == "meta" else model.device
