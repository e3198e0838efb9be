"""The oracle of attention (`turbo_hf.eval.bench.oracle`) row by row of a batch, with probabilities, in any dtype."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from turbo_hf.eval.bench.oracle import by_kv_head, weights

KeyValue = tuple[Tensor, Tensor]
"""Keys and values of one row, [Hkv, T, D] each."""


class Exact(NamedTuple):
    """out: [B, Hq, M, D], 0 at padding; lse: [B, Hq, M], -inf at padding; probs: a row's [Hq, m, T], sinks included."""

    out: Tensor
    lse: Tensor
    probs: list[Tensor]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    """One row: q [Hq, M, D] are the last M of the T tokens whose k, v [Hkv, T, D] are given. Returns out, lse, probs.

    In a half-precision `dtype` it is eager attention as models write it: products in that type, softmax in float32.
    """
    q, k, v = (x.detach().to("cpu", dtype) for x in (q, k, v))
    places = torch.arange(k.shape[1] - q.shape[1], k.shape[1])
    how: dict[str, Any] = {"scaling": scaling, "causal": True, "window": window, "softcap": softcap, "sinks": sinks}
    p, total, lse = weights(q, k, places, **how)
    probs = p / total
    return by_kv_head(probs.to(dtype), v), lse, probs


def oracle(
    q: Tensor,
    rows: Sequence[KeyValue],
    *,
    starts: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> Exact:
    """`attend` of each row: q [B, Hq, M, D], whose columns before `starts[row]` are padding; rows: all keys, values."""
    batch, heads, m, dim = q.shape
    wide = torch.promote_types(dtype, torch.float32)
    out = torch.zeros(batch, heads, m, dim, dtype=dtype)
    lse = torch.full((batch, heads, m), -torch.inf, dtype=wide)
    probs = []
    for row, (k, v) in enumerate(rows):
        start = 0 if starts is None else starts[row]
        if start == m:
            probs.append(torch.zeros(heads, 0, k.shape[1], dtype=wide))
            continue
        out[row, :, start:], lse[row, :, start:], p = attend(q[row, :, start:], k, v, dtype=dtype, **options)
        probs.append(p)
    return Exact(out, lse, probs)


class Codes(NamedTuple):
    """INT8 tokens of one row, float64: k, v [Hkv, T, D] integer-valued; k_scale, v_scale [Hkv, T].

    tile: int64 [T], which tokens share one scale of P.
    fold: [Hkv, T, 2], how far a step's rounding of queries times spans moves q . k, in units of the query's codes: at
        most, and in the root mean square; None: not at all.
    """

    k: Tensor
    k_scale: Tensor
    v: Tensor
    v_scale: Tensor
    tile: Tensor
    fold: Tensor | None = None

    def values(self) -> KeyValue:
        """What the codes stand for."""
        return self.k * self.k_scale[..., None], self.v * self.v_scale[..., None]
