"""Append new tokens to the open buffer and seal whole blocks of them, in plain torch."""

import torch

from turbo_hf.layout import KVStore
from turbo_hf.ops.store.reference_quantize import (
    reference_quantize_tokens,
    reference_seal_blocks,
)

SEAL_ELEMENTS = 1 << 22
"""INT8 elements sealed at a time: bounds the float temporaries of sealing a long prompt."""


def reference_append_tokens(
    k: torch.Tensor,
    v: torch.Tensor,
    store: KVStore,
    *,
    starts: torch.Tensor | None = None,
    nonfinite: torch.Tensor,
) -> None:
    tokens = k.shape[2]
    begin = [0] * len(k) if starts is None else starts.tolist()
    opened = store.open_len.tolist()
    # rows of equal lengths are copied at once
    alike = len({*zip(begin, opened, strict=True)}) == 1
    rows = [slice(None)] if alike else [slice(row, row + 1) for row in range(len(k))]
    places = [
        (row, start, slice(held, held + tokens - start)) for row, start, held in zip(rows, begin, opened, strict=False)
    ]
    scales = []
    padding = None if starts is None else (torch.arange(tokens, device=k.device) < starts[:, None])[:, None]
    for i, (x, codes_to, scale_to) in enumerate(((k, store.k_open, store.k_scale), (v, store.v_open, store.v_scale))):
        # the contents of padding are arbitrary, and must not be noted
        new = x if padding is None else x.masked_fill(padding[..., None], 0.0)
        if codes_to.dtype == torch.int8:
            codes, scale = reference_quantize_tokens(new)
        else:
            codes = new.to(codes_to.dtype)
            # 1, or NaN where a token cannot be stored
            scale = 1 + (codes.float() * 0).sum(-1)
        scales.append(scale)
        for row, start, place in places:
            (codes_to[row, :, place] if i == 0 else codes_to[row, :, :, place].mT).copy_(codes[row, :, start:])
            scale_to[row, :, place] = scale[row, :, start:]
    nonfinite |= ~torch.isfinite(torch.stack(scales)).all()
    store.open_len.add_(tokens if starts is None else tokens - starts)


def reference_append_step(
    k: torch.Tensor,
    v: torch.Tensor,
    store: KVStore,
    *,
    noted: tuple[torch.Tensor, torch.Tensor] | None = None,
    nonfinite: torch.Tensor,
) -> None:
    if noted is not None:
        index, buckets = noted
        place = store.sealed * store.block + store.open_len
        index.scatter_(2, place[:, None, None].expand_as(buckets), buckets)
    full = store.open_len == store.first + store.recent + store.block
    store.sealed.add_(full)
    reference_seal_open(store, 1, moves=True)
    store.open_len.sub_(full * store.block)
    reference_append_tokens(k, v, store, nonfinite=nonfinite)


def reference_seal_open(store: KVStore, blocks: int, moves: bool = False) -> None:
    block, (_, heads, _, dim) = store.block, store.k_open.shape
    whole = ((store.open_len - store.first - store.recent) // block)[:, None]
    n = torch.arange(blocks, device=store.k_open.device)
    entry = store.sealed[:, None] - whole + n
    # blocks that a row does not have, or that have left its window
    row, n = ((n < whole) & (entry >= 0)).nonzero().unbind(-1)
    page = store.table[row, entry[row, n]]
    token = store.first + n[:, None] * block + torch.arange(block, device=n.device)
    step = max(1, SEAL_ELEMENTS // (heads * block * dim))
    for begin in range(0, len(row), step):
        part, slot = slice(begin, begin + step), 0
        for pages in store.paged:
            own = store.order[row[part], slot : slot + pages.k.shape[1]]
            at = (row[part, None, None], own[:, :, None], token[part, None])
            tokens = (store.k_open[at], store.k_scale[at], store.v_open.mT[at], store.v_scale[at])
            sealed = reference_seal_blocks(*tokens, pages.width)
            for target, source in zip(pages[1:], sealed[1:], strict=True):
                target[page[part]] = source
            slot += own.shape[1]
    if moves:
        for x in (store.k_open.mT, store.v_open, store.k_scale, store.v_scale):
            x[row, ..., store.first : -block] = x[row, ..., store.first + block :]
