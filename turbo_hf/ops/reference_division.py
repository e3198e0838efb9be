"""Divisions whose rounding is the same on every device, in plain torch."""

import torch


def ratio(a: torch.Tensor | float, b: torch.Tensor | float) -> torch.Tensor:
    """a / b by one IEEE division in float32. torch multiplies by a rounded reciprocal where one of them is a number."""
    like = a if isinstance(a, torch.Tensor) else b
    assert isinstance(like, torch.Tensor)
    full = [x if isinstance(x, torch.Tensor) else torch.full_like(like, x) for x in (a, b)]
    return full[0] / full[1]


def scaled(x: torch.Tensor, largest: torch.Tensor, top: float) -> torch.Tensor:
    """x * (top / largest) in float64, and 0 where largest is 0; largest is float32 with x's leading dimensions.

    The quotient is rounded to float32 and the product is not, which is what a fused multiply-add rounds to a code.
    """
    inverse = ratio(top, torch.where(largest > 0, largest, 1.0))
    return x.double() * inverse.double()[(...,) + (None,) * (x.dim() - largest.dim())]
