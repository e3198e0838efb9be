"""What goes between host and device: lists without a wait, and the flags of all layers in one read."""

from collections.abc import Mapping, Sequence

import torch
from transformers import PreTrainedModel


def send(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64 [n] on `device`. The host does not wait for what the device is doing, as it does in `torch.tensor`."""
    if not any(numbers):
        return torch.zeros(len(numbers), dtype=torch.int64, device=device)
    return torch.tensor(numbers, dtype=torch.int64).to(device, non_blocking=True)


def require_finite(flags: Mapping[int, torch.Tensor]) -> None:
    """ValueError naming the first layer whose flag, of one element, is not 0. One read from each device."""
    found: list[int] = []
    for device in {flag.device for flag in flags.values()}:
        here = {index: flag for index, flag in flags.items() if flag.device == device}
        told = torch.stack([flag.view(()) for flag in here.values()]).tolist()
        found += [index for index, broken in zip(here, told, strict=True) if broken]
    if found:
        raise ValueError(
            f"layer {min(found)}: keys or values hold NaN or Inf, which no quantized cache can store. Look for the "
            "cause in the model (overflow in float16 is the usual one: load it in bfloat16), and take a new cache, or "
            "reset() this one."
        )


def input_device(model: PreTrainedModel) -> torch.device:
    """Where a model takes its tokens: weights that accelerate holds elsewhere are on no device, and it moves tokens."""
    return torch.device("cpu") if model.device.type == "meta" else model.device
