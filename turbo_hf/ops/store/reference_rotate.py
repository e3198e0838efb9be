"""Hadamard rotation in plain torch."""

import torch


def reference_rotate(x: torch.Tensor, shift: int, dtype: torch.dtype) -> torch.Tensor:
    """x [..., D] times Sylvester's matrix with entries +-2^-shift, in runs of the largest power of two that divides D.

    By sums and differences, in float32 at least: each sum has a fixed order, whatever else is in the batch.
    """
    dim = x.shape[-1]
    size = dim & -dim
    y = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (dim // size, size))
    half = size // 2
    while half:
        a, b = y.unflatten(-1, (-1, 2, half)).unbind(-2)
        y = torch.stack((a + b, a - b), -2).flatten(-3)
        half //= 2
    turned: torch.Tensor = y * 2.0**-shift
    return turned.flatten(-2).to(dtype)
