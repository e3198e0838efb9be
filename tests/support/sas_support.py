"""What SAS may change of attention: the error of its cubic, and what its threshold drops."""

import math
from typing import Any

import torch
from budgets import SLACK, check, largest, p_budget
from oracle import Codes, Exact, oracle

from turbo_hf.layout import AttentionOutput

CUBIC = (-0.1025, 0.4626, -0.9922, 0.9996)
"""TurboAttention sec. 4, eq. 15: e^-f for f in [0, 1)."""
FINE = torch.linspace(0, 1, 100_001, dtype=torch.float64)
EPS = torch.finfo(torch.float32).eps


def cubic_error() -> float:
    """Largest relative error of the published cubic, found on a dense grid."""
    a, b, c, d = CUBIC
    cubic = a * FINE**3 + b * FINE**2 + c * FINE + d
    return float((cubic * FINE.exp() - 1).abs().max())


def sas_share(exact: Exact, threshold: float) -> float:
    """By how much the weights may differ from the softmax's, as a share of their sum.

    The cubic's error on those that are kept, and all of those further than the threshold below the maximum. SAS
    compares with the running maximum, which is no larger, so it drops no more than these.
    """
    dropped = 0.0
    for probs in exact.probs:
        if probs.numel():
            top = probs.amax(-1, keepdim=True)
            mass = torch.where(probs < top * math.exp(threshold) * (1 + SLACK * EPS), probs, 0.0).sum(-1)
            # TurboAttention drops N keys at most, each worth e^threshold of the largest
            assert bool((mass <= probs.shape[-1] * math.exp(threshold) * top[..., 0] * (1 + SLACK * EPS)).all())
            dropped = max(dropped, float(mass.max()))
    return cubic_error() + dropped


def check_sas(
    got: AttentionOutput, q: torch.Tensor, rows: list[Codes], threshold: float, *, rounds_p: bool, **options: Any
) -> None:
    """Assert that attention with SAS differs from the softmax's by what the cubic and the threshold allow."""
    values = [row.values() for row in rows]
    want = oracle(q, values, **options)
    share = sas_share(want, threshold)
    assert share < 1, "everything may be dropped: the test shows nothing"
    size = max(largest(v) for _, v in values)
    bound = torch.full_like(want.out, 2 * share / (1 - share) * size)
    if rounds_p:
        # P's steps, of weights that are larger by what is missing in their sum
        for i, (probs, row) in enumerate(zip(want.probs, rows, strict=True)):
            bound[i] += p_budget(probs, row)[0] * (1 + share) / (1 - share)
    noise = SLACK * EPS * size * (1 + largest(want.lse))
    check("out", got.out, want.out, bound + noise)
    check("lse", got.lse, want.lse, -math.log1p(-share) + SLACK * EPS * (1 + largest(want.lse)))
