"""Undoing rotary embedding: queries and keys as they were before it."""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch

from turbo_hf.layout import Rotary
from turbo_hf.ops.maths import undo_rotary_halves


def undo_rotary(module: Any, x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """x [B, H, L, D] as float32 before rotary embedding: the family's own rotation with -sin, over its scale squared.

    rotary: this call's (cos, sin), [1 or B, L, rotary channels], for frequencies may change with the length. Raises
    AttributeError, TypeError or RuntimeError where the family rotates in a way of its own; `probe` finds out.
    """
    cos, sin = (part.to(x.device).float() for part in rotary)
    turned, size = x.float(), getattr(module, "rotary_ndims", None)
    part = turned if size is None else turned[..., :size]
    plain = rotate(module, part, cos, -sin)
    # the attention factor of yarn and longrope scales cos and sin alike
    factor = (cos * cos + sin * sin).mean()
    # without cos and sin a rotation leaves 0, but of the channels that it passes through
    rotated = rotate(module, torch.ones_like(part[:, :, :1]), cos[:, :1] * 0, sin[:, :1] * 0) == 0
    plain = torch.where(rotated, plain / factor, plain)
    return plain if size is None else torch.cat((plain, turned[..., size:]), -1)


def rotate(module: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [B, H, L, D] rotated as the family does, by cos and sin [1 or B, L, channels]; errors as of `undo_rotary`."""
    rotate: Any = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb")  # noqa: B009 - any module
    if _takes_one(rotate):
        return torch.as_tensor(rotate(x, cos, sin, unsqueeze_dim=1))
    return torch.as_tensor(rotate(x, x, cos, sin)[0])


@functools.cache
def _takes_one(rotate: Callable[..., Any]) -> bool:
    """Whether a family rotates queries and keys in separate calls."""
    return list(inspect.signature(rotate).parameters)[1] == "cos"


def turns_by_halves(module: Any, dim: int, channels: int) -> bool:
    """Whether a module's rotary embedding of `channels` of `dim` channels is the half layout that kernels undo.

    Determined once for each family and shape, with random numbers on the CPU.
    """
    family = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
    key = (family, getattr(module, "rotary_ndims", None), dim, channels)
    if key not in _HALVES:
        seeded = torch.Generator().manual_seed(0)
        x = torch.randn(1, 2, 3, dim, generator=seeded, device="cpu")
        angle = torch.rand(1, 3, channels // 2, generator=seeded, device="cpu").repeat(1, 1, 2)
        turn = (1.5 * angle.cos(), 1.5 * angle.sin())
        try:
            _HALVES[key] = bool(
                torch.allclose(undo_rotary(module, x, turn), undo_rotary_halves(x, turn), rtol=1e-3, atol=1e-4)
            )
        except (AttributeError, TypeError, RuntimeError, IndexError):
            _HALVES[key] = False
    return _HALVES[key]


_HALVES: dict[Any, bool] = {}
