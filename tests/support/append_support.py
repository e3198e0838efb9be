"""Caches for tests of what joins the open buffer, and what the quantizer makes of it."""

from collections.abc import Sequence

import pytest
import torch
from op_calls import quantize_tokens
from stores import make_store, tokens
from torch import Tensor

from turbo_hf.layout import HeadGroups, KVStore, PagedHeads

GROUPS = [
    *(pytest.param(((bits, 2),), id=f"{bits}bit") for bits in (8, 4, 3, 2)),
    pytest.param(((4, 1), (2, 1)), id="mixed"),
    pytest.param((((4, 2), 1), ((8, 3), 1)), id="pairs"),
    pytest.param((((3, 8), 1), ((2, 4), 1)), id="wide-values"),
]


def cache(lengths: Sequence[int], dim: int, device: torch.device, dtype: torch.dtype, room: int = 0) -> KVStore:
    k, v = (tokens(len(lengths), 2, max(lengths), dim, dtype=dtype, device=device) for _ in range(2))
    store = make_store(k, v, lengths)
    pad = torch.nn.functional.pad
    k_scale, v_scale = pad(store.k_scale, (0, room)), pad(store.v_scale, (0, room))
    k_open, v_open = pad(store.k_open, (0, 0, 0, room)), pad(store.v_open, (0, room))
    return store._replace(k_open=k_open, v_open=v_open, k_scale=k_scale, v_scale=v_scale)


def copy(store: KVStore) -> KVStore:
    return store._replace(**{name: getattr(store, name).clone() for name in store._fields[4:9]})


def expected(x: Tensor, given: Tensor | None) -> tuple[Tensor, Tensor]:
    codes, scale = quantize_tokens(x, backend="reference")
    if given is not None:
        codes, scale = quantize_tokens(x, torch.where(given[..., None] > 0, given[..., None], scale), "reference")
    return codes[0], scale[0]


def full_store(dim: int, groups: HeadGroups, device: torch.device) -> KVStore:
    """Four rows, of which the first and the third have a full open block and a page for it, and cannot say more."""
    lengths, sealed = [128, 70, 64, 3], [1, 1, 0, 0]
    k, v = (tokens(4, 2, 128, dim, device=device) for _ in range(2))
    order = torch.tensor([[1, 0], [0, 1], [1, 0], [0, 1]])
    store = make_store(k, v, lengths, groups=groups, order=order, sealed=sealed)
    table = torch.zeros(4, 3, dtype=torch.int64, device=device)
    table[:, : store.table.shape[1]] = store.table
    # pages that no row has
    table[0, 1], table[2, 0] = 0, 3
    return store._replace(table=table)


def snapshot(store: KVStore) -> KVStore:
    """A copy that shares no memory."""
    paged = tuple(PagedHeads(pages.bits, *(x.clone() for x in pages[1:])) for pages in store.paged)
    return copy(store)._replace(paged=paged, sealed=store.sealed.clone())
