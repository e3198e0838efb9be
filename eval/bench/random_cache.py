"""Compressed caches of random tokens, made on the device piece by piece, so that no full-precision copy ever exists."""

import torch

from turbo_hf.cache.page_pool import Tokens
from turbo_hf.eval.bench.shapes import BLOCK, Case
from turbo_hf.layout import UNQUANTIZED, HeadGroups, KVStore, PagedHeads, Width, empty_pages
from turbo_hf.ops.store.reference import reference_quantize_tokens, reference_seal_blocks

PIECE = 1 << 24
"""Random numbers quantized at a time: bounds the memory beside the cache at any length."""


def packed_stores(case: Case, groups: HeadGroups, count: int, device: torch.device, seed: int) -> list[KVStore]:
    """`count` caches that share no page, of seeded N(0, 1) keys and values, quantized as a model's are.

    Args:
        case: lengths and heads; each row's whole blocks are sealed, the rest of it is open.
        groups: (width, heads) of each width. Which head has which width differs from row to row.
        count: caches; a step over one finds nothing of it in L2 once enough others were read.
        device: where they lie. seed: of the tokens.
    """
    heads, rows = case.heads, len(case.lengths)
    generator = torch.Generator(device).manual_seed(seed)
    sealed = [n // BLOCK for n in case.lengths]
    # page 0 exists also where no row has a whole block: empty tables point to it
    pool = tuple(_pages(width, max(1, count * sum(sealed)), slots, heads.dim, generator) for width, slots in groups)
    table, page = torch.zeros(count, rows, max(sealed), dtype=torch.int64), 0
    for cache in range(count):
        for row, blocks in enumerate(sealed):
            table[cache, row, :blocks] = torch.arange(page, page + blocks)
            page += blocks
    loose = [n % BLOCK for n in case.lengths]
    cap = max(16, -(-max(loose) // 16) * 16)
    opened = torch.float16 if UNQUANTIZED in dict(groups) else torch.int8
    k, k_scale, v, v_scale = _tokens(generator, (count * rows, heads.kv, cap, heads.dim), opened)
    values = v.mT.contiguous()
    tables, sealed_len, open_len = (
        x.to(device) for x in (table, torch.tensor(sealed, dtype=torch.int64), torch.tensor(loose, dtype=torch.int64))
    )
    stores = []
    for cache in range(count):
        own = slice(cache * rows, (cache + 1) * rows)
        stores.append(
            KVStore(
                paged=pool,
                order=torch.rand(rows, heads.kv, generator=generator, device=device).argsort(-1),
                table=tables[cache],
                sealed=sealed_len,
                k_open=k[own],
                v_open=values[own],
                k_scale=k_scale[own],
                v_scale=v_scale[own],
                open_len=open_len,
                block=BLOCK,
                sealed_host=tuple(sealed),
            )
        )
    return stores


def one_head(store: KVStore, row: int, head: int) -> KVStore:
    """The cache of one row and KV head alone, its pages copied."""
    slots = [(pages, slot) for pages in store.paged for slot in range(pages.k.shape[1])]
    pages, slot = slots[int((store.order[row] == head).nonzero())]
    own, at, kv = store.table[row, : int(store.sealed[row])], slice(row, row + 1), slice(head, head + 1)
    part = PagedHeads(pages.bits, *(x[own, slot : slot + 1] for x in (pages.k, pages.v, pages.meta, pages.size)))
    return store._replace(
        paged=(part,),
        order=torch.zeros_like(store.order[at, :1]),
        table=torch.arange(len(own), device=own.device)[None],
        sealed=store.sealed[at],
        k_open=store.k_open[at, kv],
        v_open=store.v_open[at, kv],
        k_scale=store.k_scale[at, kv],
        v_scale=store.v_scale[at, kv],
        open_len=store.open_len[at],
        sealed_host=(len(own),),
    )


def draw(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """N(0, 1), on the generator's device."""
    return torch.randn(*shape, generator=generator, device=generator.device, dtype=dtype)


def _tokens(generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> Tokens:
    k, v = draw(generator, *shape), draw(generator, *shape)
    if dtype == torch.int8:
        return Tokens(*reference_quantize_tokens(k), *reference_quantize_tokens(v))
    one = torch.ones(shape[:-1], device=k.device)
    return Tokens(k, one, v, one)


def _pages(width: Width, pages: int, slots: int, dim: int, generator: torch.Generator) -> PagedHeads:
    whole = empty_pages(width, pages, slots, dim, BLOCK, generator.device)
    step = max(1, PIECE // (slots * BLOCK * dim))
    for start in range(0, pages, step):
        shape = (min(step, pages - start), slots, BLOCK, dim)
        tokens = _tokens(generator, shape, torch.float16 if width == UNQUANTIZED else torch.int8)
        for target, source in zip(whole[1:], reference_seal_blocks(*tokens, width)[1:], strict=True):
            target[start : start + shape[0]] = source
    return whole
