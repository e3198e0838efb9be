"""Choice of an op's implementation: the Triton kernel or the reference in plain torch."""

import torch

from turbo_hf.config.turbo_config import BACKENDS
from turbo_hf.layout import MODES
from turbo_hf.ops import gpu

LATENT_BLOCK = 64
"""Tokens per block for which the kernels of latent attention have run on a GPU."""

WIDE_HALF = 150 << 10
"""Bytes of shared memory that mode "half" takes for values in float32 of more than 128 channels."""


def _interpreted() -> bool:
    """Whether Triton's interpreter is on: its kernels then run on CPU tensors, slowly, for tests."""
    if not gpu.TRITON_FOUND:
        return False
    from triton import knobs  # noqa: PLC0415 - needs Triton

    return bool(knobs.runtime.interpret)


def uses_triton(backend: str, device: torch.device, reason: str | None = None) -> bool:
    """Whether the Triton kernel runs.

    "auto" uses it on CUDA unless something prevents it; "triton" and "reference" are never replaced.

    Args:
        backend: "auto", "triton" or "reference".
        device: the tensors' device.
        reason: why the kernel cannot serve this call, as the end of a sentence; None if it can.

    Returns:
        True for the kernel, False for the reference.

    Raises:
        ValueError: an unknown backend, or "triton" if the kernel cannot run.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}; got {backend!r}.")
    if backend == "reference":
        return False
    if device.type != "cuda" and (backend == "auto" or not _interpreted()):
        reason = f"tensors are on {device}, and Triton kernels run on CUDA"
    if reason is None:
        return True
    if backend == "triton":
        raise ValueError(f'backend "triton" cannot run here: {reason}. Choose backend "auto" or "reference".')
    return False


def why_no_kernel(x: torch.Tensor, mode: str = "fp16") -> str | None:
    """Why no kernel serves tensors like x in this mode; None if one does."""
    if x.dtype == torch.float64:
        return "float64 has no kernel"
    if x.shape[-1] > 256:
        return f"head dim {x.shape[-1]} is above 256"
    reason: str | None = gpu.why_no_kernels_on(x.device)
    if reason is not None:
        return reason
    fp8 = MODES[mode].v_type == torch.float8_e4m3fn
    if fp8 and x.device.type == "cuda" and torch.cuda.get_device_capability(x.device) < (8, 9):
        return f"{torch.cuda.get_device_name(x.device)} has no FP8; modes turbo, int8, half and fp16 run"
    if mode == "half" and x.dtype == torch.float32 and x.shape[-1] > 128 and gpu.shared_memory(x.device) < WIDE_HALF:
        return (
            f'mode "half" takes {WIDE_HALF >> 10} KiB of shared memory in float32 above head dim 128, and this GPU has '
            f"{gpu.shared_memory(x.device) >> 10}; modes turbo, int8 and fp16 run"
        )
    return None


def why_no_latent_kernel(latent: torch.Tensor, rotary_dim: int, bits: int, block: int) -> str | None:
    """Why no kernel serves latents like `latent` [..., rank], new ones or open ones, beside rotary parts of so many
    channels; None if one does.

    bits, block: width and tokens of the blocks that hold them.
    """
    rank = latent.shape[-1]
    reason: str | None = gpu.why_no_kernels_on(latent.device)
    if reason is not None:
        return reason
    known = torch.float16, torch.bfloat16, torch.int8
    if latent.dtype not in known and (latent.is_cuda or latent.dtype == torch.float64):
        return f"latent attention has kernels for 16-bit models, and this is {latent.dtype}"
    if block != LATENT_BLOCK:
        return f"latents in blocks of {block} tokens have no kernel; blocks of {LATENT_BLOCK} have"
    if bits not in (16, 8, 4):
        return f"latents of {bits} bit have no kernel; 4, 8 and 16 have"
    for name, size, least in (("latent", rank, 32), ("rotary part", rotary_dim, 16)):
        if size & (size - 1) or not least <= size <= 512:
            return f"a {name} of {size} channels has no kernel, which needs a power of two from {least} to 512"
    return None
