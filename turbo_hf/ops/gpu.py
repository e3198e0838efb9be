"""Properties of a GPU that launches depend on."""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch

TRITON_FOUND = importlib.util.find_spec("triton") is not None

H200_SHARED = 227 << 10
"""Bytes of shared memory available to one program on an H200, and on other GPUs of capability 9.0 and 10.0."""

HOPPER_TRITON = "3.6."
"""Versions of Triton the prompt kernel for Hopper was tested with. 3.7 renames `thread_barrier`, 3.9 its copies."""

OLDEST = (8, 0)
"""Compute capability of Ampere: INT8 products and asynchronous copies."""

FMA = {"enable_fp_fusion": True}
"""Option of launches that may use fused multiply-add; explicit, because Triton 3.10 changes the default."""


@lru_cache(maxsize=8)
def sms(device: torch.device) -> int:
    """Streaming multiprocessors; without a GPU the number by which tests cut their small cases."""
    return int(_properties(device).multi_processor_count) if device.type == "cuda" else 2


def stream(device: torch.device) -> int:
    """The number of a device's current stream, whose launches run one after another and may share a workspace."""
    if device.type != "cuda":
        return 0
    return raw_stream(torch.cuda.current_device() if device.index is None else device.index)


def raw_stream(index: int) -> int:
    """`stream` of the CUDA device with this index; 0 for -1, a CPU."""
    return 0 if index < 0 else _stream_number()(index)


@lru_cache(maxsize=1)
def _stream_number() -> Callable[[int], int]:
    """As Triton asks: torch's own `Stream` object takes longer to make."""
    if not TRITON_FOUND:
        return lambda index: int(torch.cuda.current_stream(index).cuda_stream)
    from triton.runtime.driver import driver  # noqa: PLC0415 - may be missing

    number: Callable[[int], int] = driver.active.get_current_stream
    return number


@lru_cache(maxsize=8)
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory available to one program; without a GPU those of an H200, for which tiles are chosen."""
    return int(_properties(device).shared_memory_per_block_optin) if device.type == "cuda" else H200_SHARED


@lru_cache(maxsize=8)
def hopper(device: torch.device) -> bool:
    """Whether the prompt kernel for Hopper runs. Gluon is new: only tested versions count."""
    if device.type != "cuda" or why_no_kernels_on(device) is not None:
        return False
    import triton  # noqa: PLC0415 - may be missing

    return torch.cuda.get_device_capability(device) == (9, 0) and triton.__version__.startswith(HOPPER_TRITON)


@lru_cache(maxsize=8)
def pdl(device: torch.device) -> dict[str, Any]:
    """Options of programmatic dependent launch, which begins a launch before the one ahead of it ends: Hopper on."""
    able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if able else {"PDL": False}


@lru_cache(maxsize=8)
def why_no_kernels_on(device: torch.device) -> str | None:
    """Why no kernel runs on this device, as the end of a sentence; None if they do, or if it is not a GPU."""
    if device.type != "cuda":
        return None
    if not TRITON_FOUND:
        return "the package triton is not installed"
    if torch.version.hip is not None:
        return "the kernels are written for NVIDIA GPUs, and this torch is built for ROCm"
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST:
        found, least = (".".join(map(str, x)) for x in (capability, OLDEST))
        return f"{_properties(device).name} has compute capability {found}, and the kernels need {least}"
    return None


@contextmanager
def explain_out_of_resources(x: torch.Tensor) -> Iterator[None]:
    """ValueError that says what to do if a kernel for tensors like x needs more than this GPU has."""
    try:
        yield
    except Exception as error:
        from triton.runtime.errors import OutOfResources  # noqa: PLC0415 - needs Triton

        if not isinstance(error, OutOfResources):
            raise
        raise ValueError(
            f"The kernel for head dim {x.shape[-1]} in {x.dtype} does not fit this GPU: {error} Take a smaller "
            'Expert.block_size, another TurboConfig.attention, or backend="reference" (plain torch, slow).'
        ) from error


def _properties(device: torch.device) -> Any:
    return torch.cuda.get_device_properties(device)
