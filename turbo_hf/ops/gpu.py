"""What launches depend on: properties of a GPU, and what a decode step repeats of the one before."""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from threading import get_ident
from typing import Any

import torch

from turbo_hf.layout import Scoring

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


class Repeat:
    """What `append_tokens` and `decode` keep for the next step over the very same store. A copy of it is empty.

    Launches are made again with other addresses of new tokens, and nothing else new. Checks, the choice of a kernel,
    its plan and its workspace depend on what a `Repeat` is made for: the tensors of a cache (whoever owns it takes a
    new one once these change) and its `repeat_key`.

    append: of new keys, values and queries to be balanced; returns the balanced ones, in memory that it writes again.
    decode: of queries and a SAS threshold; returns the output.
    """

    __slots__ = ("append", "decode")

    def __init__(self) -> None:
        self.append: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor | None] | None = None
        self.decode: Callable[[torch.Tensor, float | None], torch.Tensor] | None = None

    def __reduce__(self) -> Any:
        # addresses are those of the original
        return Repeat, ()


def repeat_key(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor | None, scoring: Scoring
) -> tuple[Any, ...]:
    """All that a launch for q, k and v depends on, but for addresses, the cache and a threshold."""
    device = q.get_device()
    if scoring.sas_threshold is not None:
        # a context's own falls with each token
        scoring = scoring._replace(sas_threshold=0.0)
    return (
        (q.dtype, q.shape, q.stride(), q.data_ptr() % 16),
        (k.dtype, k.shape, k.stride(), k.data_ptr() % 16, k.get_device() == device),
        (v.dtype, v.shape, v.stride(), v.data_ptr() % 16, v.get_device() == device),
        starts,
        scoring,
        # a workspace is of one thread and stream
        get_ident(),
        raw_stream(device),
    )
