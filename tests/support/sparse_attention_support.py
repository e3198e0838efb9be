"""Attention over kept keys, one query and head at a time in float64, and random buckets and visits to test it with."""

from collections.abc import Sequence
from typing import Any

import torch
from budgets import check, float_budget, largest, score_size
from op_calls import sparse_decode
from stores import random_store, store_codes
from torch import Tensor

from turbo_hf.layout import AttentionOutput, KVStore

CHOICE: dict[str, Any] = {"scaling": 0.125, "sink_tokens": 1, "window_tokens": 20}


def sparse_store(lengths: Sequence[int], heads: int, dim: int, device: torch.device, **how: Any) -> KVStore:
    """A cache of random tokens; heads of several widths stand in any order."""
    if "groups" in how:
        how["order"] = torch.rand(len(lengths), heads).argsort(-1)
    return random_store(lengths, heads, dim, device, **how)


def random_index(store: KVStore, queries: int, buckets: int, share: float) -> tuple[Tensor, Tensor]:
    """Buckets of every token, some of them unknown, and visits of a share of them."""
    rows, heads = store.order.shape
    cap = int((store.sealed * store.block + store.open_len).max())
    device = store.order.device
    index = torch.randint(-1, buckets, (rows, heads, cap + 7), device=device).to(torch.int16)
    # the first row's tokens in the order of their buckets, as those of a prompt stand
    index[0] = index[0].sort(-1).values
    return index, torch.rand(rows, heads, queries, buckets, device=device) < share


def spans_of(store: KVStore, index: Tensor | None) -> Tensor | None:
    """The smallest and the largest bucket of sealed blocks; of one of them none is known."""
    blocks = store.table.shape[1]
    if index is None or not blocks:
        return None
    own = index[:, :, : blocks * store.block]
    own = torch.nn.functional.pad(own, (0, blocks * store.block - own.shape[-1]), value=-1).unflatten(-1, (blocks, -1))
    spans = torch.stack((own.amin(-1), own.amax(-1)), -1)
    spans[:, :, blocks // 2] = -1
    return spans


def kept_keys(place: int, bucket: list[int], visited: list[bool], sink: int, window: int) -> list[int]:
    """Places that a query reads. bucket: by place, [] without an index; visited: by bucket."""

    def met(t: int) -> bool:
        return bool(bucket) and (bucket[t] < 0 or visited[bucket[t]])

    return [t for t in range(place + 1) if t < sink or t > place - window or met(t)]


def check_sparse(
    q: Tensor, store: KVStore, index: Tensor | None, visited: Tensor | None, backend: str, *,
    starts: Sequence[int] | None = None, **options: Any,
) -> AttentionOutput:  # fmt: skip
    """Assert that `sparse_decode` is attention in float64 over the kept keys, and counts them."""
    choice = CHOICE | {"spans": spans_of(store, index), "mode": "native"} | options
    if choice.get("sinks") is True:
        choice["sinks"] = torch.randn(q.shape[1], device=q.device) * 3
    read = torch.full((1,), 5, dtype=torch.int64, device=q.device)
    first = None if starts is None else torch.tensor(starts, device=q.device)
    got = sparse_decode(q, store, index, visited, starts=first, read=read, backend=backend, **choice)
    assert got.out.dtype == q.dtype
    assert got.lse.dtype == torch.float32
    exact, eager = (naive(q, store, index, visited, starts, choice, dtype) for dtype in (torch.float64, q.dtype))
    rows = [row.values() for row in store_codes(store)]
    values = max(largest(v) for _, v in rows)
    check("out", got.out, exact[0], float_budget(exact[0], eager[0], values, q.dtype))
    scores = score_size(q, rows, choice["scaling"]) + largest(exact[1])
    check("lse", got.lse, exact[1], float_budget(exact[1], eager[1], scores, q.dtype))
    assert not got.out.cpu()[exact[1].isneginf()].any()
    assert int(read) == 5 + exact[2]
    return got


def naive(
    q: Tensor, store: KVStore, index: Tensor | None, visited: Tensor | None, starts: Sequence[int] | None,
    choice: dict[str, Any], dtype: torch.dtype,
) -> tuple[Tensor, Tensor, int]:  # fmt: skip
    """out, lse and the number of keys read, one query and head at a time; in `dtype`, softmax in float32 at least."""
    batch, heads, m, _ = q.shape
    wide = torch.promote_types(dtype, torch.float32)
    out, lse = torch.zeros(q.shape, dtype=dtype), torch.full((batch, heads, m), -torch.inf, dtype=wide)
    group, read = heads // store.order.shape[1], 0
    for row, codes in enumerate(store_codes(store)):
        keys, values = (x.to(dtype) for x in codes.values())
        for column in range(m):
            place = keys.shape[1] - m + column
            if place < 0 or column < (0 if starts is None else starts[row]):
                continue
            loaded: set[tuple[int, int]] = set()
            for head in range(heads):
                kv = head // group
                bucket = [] if index is None else index[row, kv].tolist()
                seen = [] if visited is None else visited[row, kv, column].tolist()
                kept = kept_keys(place, bucket, seen, choice["sink_tokens"], choice["window_tokens"])
                loaded |= {(kv, t) for t in kept}
                score = (keys[kv, kept] @ q[row, head, column].cpu().to(dtype)).to(wide) * choice["scaling"]
                if choice.get("softcap"):
                    score = choice["softcap"] * torch.tanh(score / choice["softcap"])
                if choice.get("sinks") is not None:
                    score = torch.cat((score, choice["sinks"][head : head + 1].cpu().to(wide)))
                p = score.softmax(0)[: len(kept)].to(dtype)
                out[row, head, column] = p @ values[kv, kept]
                lse[row, head, column] = score.logsumexp(0)
            read += len(loaded)
    return out, lse, read
