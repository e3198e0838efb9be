"""Hadamard rotation of keys, and of the queries that meet them: scores are unchanged.

Rotation spreads a few outlier channels over all channels, so that the few levels of a narrow code are used better.
"""

import torch

from turbo_hf.layout import narrowed
from turbo_hf.ops.backend import uses_triton, why_no_kernel
from turbo_hf.ops.maths import key_shift, query_shift
from turbo_hf.ops.store.quantize import check_float
from turbo_hf.ops.store.reference_rotate import reference_rotate


def rotate_keys(k: torch.Tensor, backend: str = "auto", *, narrow: bool = False) -> torch.Tensor:
    """Rotate keys, as a cache with rotated keys stores them.

    Args:
        k: float [B, Hkv, M, D]. Runs of the largest power of two that divides D are rotated.
        backend: "auto", "triton" or "reference".
        narrow: return them in k's dtype, clamped to its range.

    Returns:
        float32 (float64 for float64, k's dtype with `narrow`) [B, Hkv, M, D]. The matrix's norm is split into powers of
        two between keys and queries, so that no entry of it is rounded.

    Raises:
        ValueError: not a float tensor of four dimensions, or an odd D.

    Source: QuaRot (arXiv:2404.00456), sec. 4.2; Sylvester's matrix.
    """
    dtype = k.dtype if narrow else torch.promote_types(k.dtype, torch.float32)
    return _rotate(k, backend, key_shift(k.shape[-1]), dtype, clamp=narrow)


def rotate_queries(q: torch.Tensor, backend: str = "auto") -> torch.Tensor:
    """Queries such that rotate_queries(q) . rotate_keys(k) = q . k.

    Args:
        q: float [B, Hq, M, D].
        backend: "auto", "triton" or "reference".

    Returns:
        [B, Hq, M, D] in q's dtype.

    Raises:
        ValueError: as for `rotate_keys`.

    Source: as for `rotate_keys`.
    """
    return _rotate(q, backend, query_shift(q.shape[-1]), q.dtype)


def unrotate_keys(k: torch.Tensor, backend: str = "auto") -> torch.Tensor:
    """Undo `rotate_keys`.

    Args:
        k: float [B, Hkv, M, D], rotated.
        backend: "auto", "triton" or "reference".

    Returns:
        float32 (float64 for float64) [B, Hkv, M, D].

    Raises:
        ValueError: as for `rotate_keys`.

    Source: as for `rotate_keys`; the matrix is its own transpose.
    """
    return _rotate(k, backend, query_shift(k.shape[-1]), torch.promote_types(k.dtype, torch.float32))


def _rotate(x: torch.Tensor, backend: str, shift: int, dtype: torch.dtype, *, clamp: bool = False) -> torch.Tensor:
    check_float("x", x)
    if x.numel() and uses_triton(backend, x.device, why_no_kernel(x)):
        from turbo_hf.ops.store.launch import launch_rotate  # noqa: PLC0415 - needs Triton

        return launch_rotate(x, shift, dtype, clamp)
    if clamp:
        return narrowed(reference_rotate(x, shift, torch.promote_types(dtype, torch.float32)), dtype)
    return reference_rotate(x, shift, dtype)
