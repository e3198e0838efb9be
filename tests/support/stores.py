"""Random tokens, and compressed caches: built of tokens, and read token by token."""

from collections.abc import Sequence
from typing import Any

import torch
from op_calls import quantize_tokens, seal_blocks
from oracle import Codes
from torch import Tensor

from turbo_hf.layout import UNQUANTIZED, VALUE_ORDER, HeadGroups, KVStore, PagedHeads, empty_pages, type_16bit

CODE_MAX = 127
"""Largest INT8 code (TurboAttention sec. 3), said again so that a change of it in the package shows."""


def tokens(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
    """Random tokens as models have them: channels of different size, some off centre."""
    size = torch.rand(shape[-1]) * 2 + 0.1
    return (torch.randn(shape) * size + torch.randn(shape[-1]) / 2).to(device, dtype)


def make_store(
    k: Tensor, v: Tensor, lengths: Sequence[int], *, groups: HeadGroups | None = None, order: Tensor | None = None,
    block: int = 64, sealed: Sequence[int] | None = None,
) -> KVStore:  # fmt: skip
    """A cache whose row r holds the first `lengths[r]` tokens of k, v [B, Hkv, N, D].

    groups: (width, heads) of each width, default 4 bit for all. order: int64 [B, Hkv], the head in each slot; default
    the model's order. sealed: sealed blocks of each row, default all whole ones. With heads of 16 bit the open tokens
    are in 16 bit. Pages lie in the pool in reverse,
    between pages that no row owns, and open places without a token stay uninitialised.
    """
    batch, heads, _, dim = k.shape
    device = k.device
    groups = groups or ((4, heads),)
    order = torch.arange(heads, device=device).expand(batch, heads) if order is None else order.to(device)
    sealed = [n // block for n in lengths] if sealed is None else list(sealed)
    open_len = [n - s * block for n, s in zip(lengths, sealed, strict=True)]
    cap = -(-max(open_len) // 16) * 16

    full = type_16bit(k.dtype)
    opened = full if UNQUANTIZED in dict(groups) else torch.int8
    pool = [empty_pages(width, sum(sealed) + 2, n, dim, block, device, full) for width, n in groups]
    table = torch.zeros(batch, max(sealed), dtype=torch.int64)
    k_open = torch.empty(batch, heads, cap, dim, dtype=opened, device=device)
    v_open = torch.empty(batch, heads, dim, cap, dtype=opened, device=device)
    k_scale, v_scale = (torch.empty(batch, heads, cap, dtype=torch.float32, device=device) for _ in range(2))
    page = sum(sealed)
    for row in range(batch):
        own_k, own_v = k[row : row + 1], v[row : row + 1]
        codes_k, scale_k, codes_v, scale_v = (x[0] for x in (*quantize_tokens(own_k), *quantize_tokens(own_v)))
        if opened != torch.int8:
            codes_k, codes_v = own_k[0].to(full), own_v[0].to(full)
            scale_k, scale_v = torch.ones_like(scale_k), torch.ones_like(scale_v)
        for n in range(sealed[row]):
            at, slot = slice(n * block, (n + 1) * block), 0
            for pages, (width, count) in zip(pool, groups, strict=True):
                own = order[row, slot : slot + count]
                key, key_scale, value, value_scale = (x[own, at][None] for x in (codes_k, scale_k, codes_v, scale_v))
                page_of = seal_blocks(key, key_scale, value, value_scale, width)
                for target, source in zip(pages[1:], page_of[1:], strict=True):
                    target[page] = source[0]
                slot += count
            table[row, n] = page
            page -= 1
        rest, count = slice(sealed[row] * block, lengths[row]), open_len[row]
        k_open[row, :, :count], k_scale[row, :, :count] = codes_k[:, rest], scale_k[:, rest]
        v_open[row, :, :, :count], v_scale[row, :, :count] = codes_v[:, rest].mT, scale_v[:, rest]
    counts = (torch.tensor(x, dtype=torch.int64, device=device) for x in (sealed, open_len))
    sealed_count, open_count = counts
    return KVStore(
        tuple(pool), order, table.to(device), sealed_count, k_open, v_open, k_scale, v_scale, open_count, block
    )


def random_store(
    lengths: Sequence[int], heads: int, dim: int, device: torch.device, *, dtype: torch.dtype = torch.float32,
    **how: Any,
) -> KVStore:  # fmt: skip
    """A cache of random tokens, of rows of these lengths."""
    shape = (len(lengths), heads, max(1, *lengths), dim)
    k, v = (tokens(*shape, dtype=dtype, device=device) for _ in range(2))
    return make_store(k, v, lengths, **how)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Codes of the lines of a page, one after the other as `turbo_hf.layout` draws them; int64."""
    packed = packed.cpu().long()
    if bits == 8:
        return packed
    lines, n = packed.shape[0], packed.shape[1] * 8 // bits
    line, size, codes = torch.arange(lines), lines * n // 8, []
    odd = line // 8 % 2
    for c in range(n):
        if bits == 3:
            at = (line // 16 * 8 + line % 8) * (n // 4) + c % (n // 4)
            bytes_of = packed.flatten()[torch.stack((at + odd * size, at + 2 * size))]
            lane = c // (n // 4)
            if lane == 2:
                codes.append(bytes_of[1] >> 3 * odd & 7)
            elif lane == 3:
                codes.append((bytes_of[0] >> 6) + 4 * (bytes_of[1] >> 6 + odd & 1))
            else:
                codes.append(bytes_of[0] >> 3 * lane & 7)
        else:
            lane = n * bits // 8
            codes.append(packed[:, c % lane] >> bits * (c // lane) & (2**bits - 1))
    return torch.stack(codes, -1)


def page_codes(pages: PagedHeads, page: int, slot: int) -> tuple[Tensor, Tensor]:
    """Keys and values of one page and slot, float64 [b, D] each, in units of their token's size and in time order, as
    float32 holds them; at 16 bit what they hold."""
    if pages.bits == UNQUANTIZED:
        return pages.k[page, slot].cpu(), pages.v[page, slot].cpu().T
    k, v = unpack(pages.k[page, slot], pages.bits), unpack(pages.v[page, slot], pages.value_bits).T
    k, v, lines = k.double(), v.double(), list(pages.meta[page, slot].cpu().long())
    if pages.bits != 8:
        k = (lines.pop(0) + k * (lines.pop(0) % 256) / (2**pages.bits - 1)).float().double()
    if pages.value_bits != 8:
        v = (lines.pop(0) + v * (lines.pop(0) % 256) / (2**pages.value_bits - 1)).float().double()
    tokens = torch.empty_like(v)
    for position in range(v.shape[0]):
        tokens[position // 16 * 16 + VALUE_ORDER[position % 16]] = v[position]
    return k, tokens


def page_fold(pages: PagedHeads, page: int, slot: int) -> Tensor:
    """`Codes.fold` of one page and slot: each product, and that of the zeros, is rounded to multiples of 256."""
    if pages.bits >= 8:
        return torch.zeros(1, 2, dtype=torch.float64)
    codes = unpack(pages.k[page, slot], pages.bits).double()
    steps = torch.stack(((codes.sum(1) + 1) / 2, ((codes.square().sum(1) + 1) / 12).sqrt()), 1)
    unit: Tensor = pages.size[page, slot, 0].double().cpu() * 256 / (2**pages.bits - 1)
    return unit[:, None] * steps


def store_codes(store: KVStore) -> list[Codes]:
    """What each row of a cache holds, read token by token; P's tiles are its blocks, counted from the row's start."""
    rows = []
    for row, (sealed, count) in enumerate(zip(store.sealed.tolist(), store.open_len.tolist(), strict=True)):
        heads, dim, split = store.k_open.shape[1], store.k_open.shape[3], sealed * store.block
        k, v = (torch.zeros(heads, split + count, dim, dtype=torch.float64) for _ in range(2))
        k_scale, v_scale = (torch.zeros(heads, split + count, dtype=torch.float64) for _ in range(2))
        fold = torch.zeros(heads, split + count, 2, dtype=torch.float64)
        slots = [(pages, slot) for pages in store.paged for slot in range(pages.k.shape[1])]
        for (pages, slot), head in zip(slots, store.order[row].tolist(), strict=True):
            for n, page in enumerate(store.table[row, :sealed].tolist()):
                at = slice(n * store.block, (n + 1) * store.block)
                key, value = page_codes(pages, page, slot)
                k[head, at], v[head, at] = key.double(), value.double()
                fold[head, at] = page_fold(pages, page, slot)
                size = pages.size[page, slot].double().cpu()
                k_scale[head, at], v_scale[head, at] = size if len(size) else (1.0, 1.0)
        k[:, split:], k_scale[:, split:] = store.k_open[row, :, :count].cpu(), store.k_scale[row, :, :count].cpu()
        v[:, split:], v_scale[:, split:] = store.v_open[row, :, :, :count].mT.cpu(), store.v_scale[row, :, :count].cpu()
        rows.append(Codes(k, k_scale, v, v_scale, torch.arange(split + count) // store.block, fold))
    return rows


def no_past(heads: int, dim: int) -> Codes:
    """The past of a prompt."""
    empty, scale = torch.zeros(heads, 0, dim, dtype=torch.float64), torch.zeros(heads, 0, dtype=torch.float64)
    return Codes(empty, scale, empty, scale, torch.zeros(0, dtype=torch.int64))
