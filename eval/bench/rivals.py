"""Existing attention kernels: cuDNN and FlashAttention-2 through torch's SDPA."""

import warnings
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from turbo_hf.eval.bench.timing import Call

CUDNN, FLASH, MATH = "cuDNN", "FA2", "SDPA math"

LATENT_16, PRODUCTS = "latent 16 bit", "torch products"
"""Over latents (MLA): our own kernel at 16 bit, and torch's matrix products."""

BASELINES = (CUDNN, FLASH, MATH, LATENT_16, PRODUCTS)
"""The baselines of speedups, if they run."""


class Rival(NamedTuple):
    """Another implementation, ready to be called; `call` None where it cannot run, and `note` says why."""

    name: str
    call: Call | None
    note: str = ""


def sdpa_rivals(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scaling: float, causal: bool) -> list[Rival]:
    """Those for this device. q: [B, Hq, M, D]; k, v: [B, Hkv, M, D]; each returns out [B, Hq, M, D]."""
    kernels = {MATH: SDPBackend.MATH}
    if q.device.type == "cuda":
        kernels = {CUDNN: SDPBackend.CUDNN_ATTENTION, FLASH: SDPBackend.FLASH_ATTENTION}
    return [_sdpa(name, kernel, q, k, v, scaling, causal) for name, kernel in kernels.items()]


def _sdpa(
    name: str, backend: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, causal: bool
) -> Rival:
    def with_keys(k: torch.Tensor, v: torch.Tensor, gqa: bool) -> Call:
        def call() -> torch.Tensor:
            only: AbstractContextManager[Any] = sdpa_kernel(backend)
            with only:
                return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scaling, enable_gqa=gqa)

        return call

    grouped = with_keys(k, v, True)
    problem = _problem(grouped)
    if problem is None:
        return Rival(name, grouped)
    group = q.shape[1] // k.shape[1]
    # expanded outside the clock: the rival is not charged for the copies
    expanded = with_keys(k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), False)
    if _problem(expanded) is None:
        return Rival(name, expanded, f"K and V expanded beforehand; with grouped heads: {problem}")
    return Rival(name, None, f"cannot run: {problem}")


def _problem(call: Call) -> str | None:
    """Why a call fails, in one line; None if it does not."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SDPA warns of every backend that it leaves out
            call()
    except Exception as error:  # of libraries that raise what they like
        return (str(error) or type(error).__name__).strip().splitlines()[0]
    return None
