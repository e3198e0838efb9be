"""`prefill`: what it refuses, and in which words."""

from typing import Any

import pytest
import torch
from op_calls import prefill
from stores import make_store

X = torch.zeros(1, 2, 4, 16)
FLOAT = "must be float16, bfloat16, float32 or float64; got torch.int8"
RANK = r"must be \[B, H, M, D\]; got shape \(2, 4, 16\)"
QUERY = r"q must be \[B, Hq, M, 16\] with Hq a multiple of 2; got \(1, "
LIKE_Q = r"must be \[B, Hkv, M, D\] with B, M and D of q \(1, 2, 4, 16\); got"
PAST = r"past must hold B, Hkv and D of k \(1, 2, 4, 16\) on cpu; it holds "


def past(*shape: int) -> dict[str, Any]:
    return {"past": make_store(torch.zeros(shape), torch.zeros(shape), [4] * shape[0])}


REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({name: X.to(torch.int8)}, f"{name} {FLOAT}") for name in "qkv"),
    *(({name: X[0]}, f"{name} {RANK}") for name in "qkv"),
    (dict.fromkeys("qkv", torch.zeros(1, 2, 4, 24)), "k has head dim 24; packed blocks need a multiple of 16"),
    ({"q": torch.zeros(1, 3, 4, 16)}, QUERY),
    ({"q": torch.zeros(1, 2, 4, 32)}, QUERY),
    ({"k": torch.zeros(2, 2, 4, 16)}, f"k {LIKE_Q}"),
    ({"k": torch.zeros(1, 2, 5, 16)}, f"k {LIKE_Q}"),
    ({"v": torch.zeros(1, 1, 4, 16)}, f"v {LIKE_Q}"),
    ({"v": torch.zeros(1, 2, 4, 32)}, f"v {LIKE_Q}"),
    *(({name: X.half()}, f"{name} must be torch.float32 on cpu like q; got torch.float16 on cpu") for name in "kv"),
    *(
        ({name: X.to("meta")}, f"{name} must be torch.float32 on cpu like q; got torch.float32 on meta")
        for name in "kv"
    ),
    (past(2, 2, 4, 16), PAST),
    (past(1, 1, 4, 16), PAST),
    (past(1, 2, 4, 32), PAST),
    ({"mode": "fast"}, "mode must be one of turbo, int8, half, fp8, fp16; got 'fast'"),
    ({"block": 16}, "block must be one of 32, 64, 128 tokens; got 16"),
    ({"starts": torch.zeros(2, dtype=torch.int64)}, r"starts must be \[B\] = \[1\]; got \(2,\)"),
    ({"sinks": torch.zeros(3)}, r"sinks must be \[Hq\] = \[2\]; got \(3,\)"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_refuses(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prefill(**{"q": X, "k": X, "v": X, "scaling": 1.0, **given})
