"""Hadamard rotation of latents, whose runs are too long for the kernel that rotates keys: by one product on a GPU."""

from functools import lru_cache

import torch

from turbo_hf.ops.maths import key_shift, query_shift
from turbo_hf.ops.store.reference_rotate import reference_rotate


@lru_cache(maxsize=16)
def _matrix(dim: int, shift: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[dim, dim] with entries +-2^-shift and 0, which every type holds exactly."""
    with torch.inference_mode(False):
        return reference_rotate(torch.eye(dim, device=device), shift, dtype)


def _turned(x: torch.Tensor, shift: int, dtype: torch.dtype) -> torch.Tensor:
    if not x.is_cuda:
        return reference_rotate(x, shift, dtype)
    return x.to(dtype) @ _matrix(x.shape[-1], shift, dtype, x.device)


def rotate_latents(x: torch.Tensor) -> torch.Tensor:
    """Latents [..., rank] as they are stored, in float32 or wider: `ops.store.rotate.rotate_keys`."""
    return _turned(x, key_shift(x.shape[-1]), torch.promote_types(x.dtype, torch.float32))


def rotate_latent_queries(q: torch.Tensor) -> torch.Tensor:
    """Queries that meet rotated latents, in their own dtype: `ops.store.rotate.rotate_queries`."""
    return _turned(q, query_shift(q.shape[-1]), q.dtype)


def unrotate_latents(x: torch.Tensor) -> torch.Tensor:
    """The inverse of `rotate_latents`, in x's dtype."""
    return _turned(x, query_shift(x.shape[-1]), x.dtype)
