"""A thousand random caches against the float64 oracle on a GPU: few kernels, many lengths, paddings and widths."""

import random
from typing import Any

import pytest
import torch
from budgets import check_exact, check_turbo
from op_calls import decode
from prefill_support import int8_queries
from stores import make_store, store_codes, tokens

from turbo_hf.layout import UNQUANTIZED, HeadGroups

pytestmark = [pytest.mark.usefixtures("poison"), pytest.mark.gpu]

DRAWS = 50
"""Caches of each kind."""

Kind = tuple[int, int, int, int, HeadGroups, torch.dtype, dict[str, Any]]
KINDS: list[Kind] = [
    # head dim, query heads a KV head, new tokens, block, (width, heads) of each width, type, options
    (128, 4, 1, 64, ((4, 2),), torch.float16, {}),
    (64, 7, 1, 64, ((4, 2),), torch.bfloat16, {}),
    (128, 1, 16, 64, ((4, 1), (2, 1)), torch.float16, {}),
    (64, 3, 5, 32, ((3, 2),), torch.float16, {"window": 90}),
    (128, 8, 2, 128, ((8, 1), (2, 1)), torch.float16, {"softcap": 4.0}),
    (80, 4, 1, 64, ((8, 1), (4, 1), (3, 1), (2, 1)), torch.float16, {"sinks": True}),
    (64, 2, 3, 64, ((2, 2),), torch.float32, {"window": 130, "softcap": 9.0, "sinks": True}),
    (256, 2, 1, 64, ((4, 1),), torch.float16, {}),
    (128, 4, 1, 64, (((4, 2), 2),), torch.float16, {}),
    (80, 3, 2, 64, (((4, 3), 1), ((8, 2), 1), ((2, 8), 1)), torch.bfloat16, {"window": 90}),
    (128, 4, 1, 64, ((UNQUANTIZED, 2),), torch.float16, {}),
    (64, 7, 2, 32, ((UNQUANTIZED, 1),), torch.bfloat16, {"window": 90, "sinks": True}),
]


@pytest.mark.parametrize("mode", ["turbo", "fp16"])
@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_random_caches(kind: int, mode: str) -> None:
    """Rows of 0 to 700 tokens, some without new ones, whole blocks that stay open: all within the oracle's budget."""
    dim, group, m, block, groups, dtype, options = KINDS[kind]
    heads, device, draw = sum(n for _, n in groups), torch.device("cuda"), random.Random(kind)
    for number in range(DRAWS):
        torch.manual_seed(1000 * kind + number)
        lengths = [draw.choice((draw.randint(1, 40), draw.randint(1, 700))) for _ in range(draw.randint(1, 3))]
        starts = [max(0, m - n) if draw.random() < 0.7 else draw.randint(max(0, m - n), m) for n in lengths]
        sealed = [n // block if draw.random() < 0.8 else draw.randint(0, n // block) for n in lengths]
        k, v = (tokens(len(lengths), heads, max(lengths), dim, dtype=dtype, device=device) for _ in range(2))
        order = torch.stack([torch.randperm(heads) for _ in lengths])
        store = make_store(k, v, lengths, groups=groups, order=order, block=block, sealed=sealed)
        q = tokens(len(lengths), group * heads, m, dim, dtype=dtype, device=device)
        own = dict(options)
        if own.get("sinks"):
            own["sinks"] = torch.randn(q.shape[1], device=device) * 3
        own["scaling"] = dim**-0.5
        got = decode(q, store, starts=torch.tensor(starts, device=device), mode=mode, backend="triton", **own)
        rows = store_codes(store)
        if mode == "fp16" or groups[0][0] == UNQUANTIZED:
            check_exact(got, q, [row.values() for row in rows], starts=starts, **own)
        else:
            check_turbo(got, int8_queries(q, starts), q.dtype, rows, starts=starts, **own)
