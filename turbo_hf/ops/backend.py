"""Which ops of a layer run as Triton kernels, and which in plain torch."""

from dataclasses import dataclass
from functools import cached_property

import torch

from turbo_hf.config.turbo_config import BACKENDS
from turbo_hf.layout import MODES, UNQUANTIZED, power_of_two
from turbo_hf.ops import gpu

LATENT_BLOCK = 64
"""Tokens per block for which the kernels of latent attention have run on a GPU."""

MOST_DIM, MOST_EXACT_DIM = 512, 256
"""Most channels of a head for the kernels; for those of prompts, of sparse steps, and of steps in 16 bit."""

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


@dataclass(frozen=True)
class Choice:
    """What the ops of one layer run as. The properties choose once, when they are first read.

    Args:
        backend: as in `uses_triton`.
        device, dtype: of new keys, or latents. dim: their channels.
        rotary_dim: channels of the rotary parts beside latents; None: the layer holds keys and values.
        block: tokens per block.
        bits: the widest bits of its pages.
        mode: of decode steps: "turbo" computes on the INT8 values with queries in INT8, one scale per token and head;
            "native" on the dequantized ones. What is stored in 16 bit is computed in 16 bit in both.
    """

    backend: str
    device: torch.device
    dtype: torch.dtype
    dim: int
    rotary_dim: int | None = None
    block: int = 64
    bits: int = 4
    mode: str = "turbo"

    @cached_property
    def store_kernels(self) -> bool:
        """Whether kernels store new tokens, and seal blocks. ValueError as in `uses_triton`."""
        reason = self.why_no_kernel() if self.rotary_dim is None else self.why_no_latent_kernel()
        return uses_triton(self.backend, self.device, reason)

    @cached_property
    def bucket_kernels(self) -> bool:
        """Whether kernels find and visit buckets. ValueError as in `uses_triton`."""
        return self.prompt_kernels("native")

    @cached_property
    def step_kernels(self) -> bool:
        """Whether a kernel attends to keys and values in decode steps. ValueError as in `uses_triton`."""
        return uses_triton(self.backend, self.device, self.why_no_step_kernel())

    @cached_property
    def latent_kernels(self) -> bool:
        """Whether kernels attend to latents in decode steps, all or named ones. ValueError as in `uses_triton`."""
        return uses_triton(self.backend, self.device, self.why_no_latent_kernel())

    def prompt_kernels(self, mode: str) -> bool:
        """Whether kernels attend in prompts of this mode. ValueError as in `uses_triton`."""
        return uses_triton(self.backend, self.device, self.why_no_kernel(mode))

    def why_no_kernel(self, mode: str | None = None) -> str | None:
        """Why no kernel stores such keys and values, or serves prompts of this mode; None if one does."""
        if self.dtype == torch.float64:
            return "float64 has no kernel"
        most = MOST_DIM if mode is None else MOST_EXACT_DIM
        if self.dim > most:
            return f"head dim {self.dim} is above {most}"
        device = self.device
        reason: str | None = gpu.why_no_kernels_on(device)
        if reason is not None or mode is None:
            return reason
        fp8 = MODES[mode].v_type == torch.float8_e4m3fn
        if fp8 and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
            return f"{torch.cuda.get_device_name(device)} has no FP8; modes turbo, int8, half and native run"
        if mode == "half" and self.dtype == torch.float32 and self.dim > 128 and gpu.shared_memory(device) < WIDE_HALF:
            return (
                f'mode "half" takes {WIDE_HALF >> 10} KiB of shared memory in float32 above head dim 128, and this '
                f"GPU has {gpu.shared_memory(device) >> 10}; modes turbo, int8 and native run"
            )
        return None

    def why_no_step_kernel(self, sparse: bool = False) -> str | None:
        """Why no kernel serves decode steps, or sparse ones, over such keys and values; None if one does."""
        reason = self.why_no_kernel("native" if sparse else None)
        if reason is not None:
            return reason
        numbers, shared = power_of_two(self.dim) * self.block, gpu.shared_memory(self.device)
        exact = self.mode == "native" or self.bits == UNQUANTIZED
        if exact and self.dim > MOST_EXACT_DIM:
            return f"head dim {self.dim} is above {MOST_EXACT_DIM}, the most for steps in 16 bit"
        if exact and (numbers > 128 * 64 if self.dtype == torch.float32 else numbers * 4 > shared):
            return (
                f"blocks of {self.block} tokens of {self.dim} channels do not fit in {str(self.dtype)[6:]}; smaller "
                "ones do"
            )
        return None

    def why_no_latent_kernel(self) -> str | None:
        """Why no kernel serves such latents and their rotary parts; None if one does."""
        reason: str | None = gpu.why_no_kernels_on(self.device)
        if reason is not None:
            return reason
        narrow = self.dtype in (torch.float16, torch.bfloat16)
        if not narrow and (self.device.type == "cuda" or self.dtype == torch.float64):
            return f"latent attention has kernels for 16-bit models, and this is {self.dtype}"
        if self.block != LATENT_BLOCK:
            return f"latents in blocks of {self.block} tokens have no kernel; blocks of {LATENT_BLOCK} have"
        if self.bits not in (16, 8, 4):
            return f"latents of {self.bits} bit have no kernel; 4, 8 and 16 have"
        for name, size, least in (("latent", self.dim, 32), ("rotary part", self.rotary_dim or 0, 16)):
            if size & (size - 1) or not least <= size <= 512:
                return f"a {name} of {size} channels has no kernel, which needs a power of two from {least} to 512"
        return None
