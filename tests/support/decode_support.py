"""What tests of `decode` share: the check against the oracle over what they hold."""

from collections.abc import Sequence
from typing import Any

import torch
from budgets import check_exact, check_turbo
from op_calls import decode
from prefill_support import int8_queries
from stores import store_codes

from turbo_hf.layout import AttentionOutput, KVStore


def check_decode(
    q: torch.Tensor, store: KVStore, mode: str, backend: str, *, starts: Sequence[int] | None = None, **options: Any
) -> AttentionOutput:
    """Assert that `decode` is right in `mode`, and return it. sinks=True stands for random ones."""
    if options.get("sinks") is True:
        options["sinks"] = torch.randn(q.shape[1], device=q.device) * 3
    options.setdefault("scaling", q.shape[-1] ** -0.5)
    first = None if starts is None else torch.tensor(starts, device=q.device)
    got = decode(q, store, starts=first, mode=mode, backend=backend, **options)
    rows = store_codes(store)
    if mode == "fp16":
        check_exact(got, q, [row.values() for row in rows], starts=starts, **options)
    else:
        check_turbo(got, int8_queries(q, starts or [0] * len(q)), q.dtype, rows, starts=starts, **options)
    return got
