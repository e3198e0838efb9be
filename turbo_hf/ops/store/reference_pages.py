"""The compressed cache laid out as one run of tokens per row, for the reference attention."""

import torch

from turbo_hf.layout import UNQUANTIZED, KVStore, PagedHeads, half_merge, in_time_order
from turbo_hf.ops.maths import ratio


def expand(store: KVStore) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values of every cached token in units of their token's scale, and those scales: the sealed blocks of
    the longest row at least, then the open tokens, in whole blocks.

    Returns k float32 [B, Hkv, T, D], k_scale float32 [B, Hkv, T], the same for v, and place int64 [B, T]: the token's
    place in its row, -1 where there is none. Scales there are 0.
    """
    # a GPU is not waited for, so that this can be captured
    block, blocks = store.block, store.table.shape[1] if store.table.is_cuda else int(store.sealed.max())
    sealed = sealed_tokens(store._replace(table=store.table[:, :blocks]))
    tail, pad = -store.k_open.shape[2] % block, torch.nn.functional.pad
    opened = (store.k_open, store.k_scale, store.v_open.mT, store.v_scale)
    k, k_scale, v, v_scale = (
        torch.cat((x, pad(y.float(), (0, 0, 0, tail) if y.dim() == 4 else (0, tail))), 2)
        for x, y in zip(sealed, opened, strict=True)
    )
    at, first, held = torch.arange(k.shape[2], device=k.device), blocks * block, store.sealed[:, None] * block
    here = torch.where(at < first, at < held, at < first + store.open_len[:, None])
    none = ~here[:, None]
    # pages beyond a row's end are another row's or uninitialized: their scales must not reach a product
    k_scale, v_scale = k_scale.masked_fill(none, 0.0), v_scale.masked_fill(none, 0.0)
    if store.k_open.is_floating_point():
        # unquantized numbers may be NaN there
        k, v = k.masked_fill(none[..., None], 0.0), v.masked_fill(none[..., None], 0.0)
    return k, k_scale, v, v_scale, torch.where(here, torch.where(at < first, at, at - first + held), -1)


def sealed_tokens(store: KVStore) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sealed blocks of every row, heads in the model's order: k, v float32 [B, Hkv, T, D] in units of k_scale,
    v_scale float32 [B, Hkv, T].

    Returned as k, k_scale, v, v_scale. Blocks past a row's end have the content of page 0.
    """
    page, (batch, heads) = store.table.flatten(), store.order.shape
    paged = [PagedHeads(pages.bits, *(x.index_select(0, page) for x in pages[1:])) for pages in store.paged]
    parts = [(*reference_unpack_blocks(pages), token_sizes(pages)) for pages in paged]
    # [B x blocks, slots, ...] -> [B, Hkv, blocks, ...]
    k, v, size = (
        (x[0] if len(x) == 1 else torch.cat(x, 1)).unflatten(0, store.table.shape).transpose(1, 2)
        for x in zip(*parts, strict=True)
    )
    if heads > 1 and (page.is_cuda or store.order.tolist() != [[*range(heads)]] * batch):
        row, slot = torch.arange(batch, device=page.device)[:, None], store.order.argsort()
        k, v, size = (x[row, slot] for x in (k, v, size))
    k_scale, v_scale = size.transpose(2, 3).flatten(3).unbind(2)
    return k.float().flatten(2, 3), k_scale, v.float().flatten(2, 3), v_scale


def token_sizes(pages: PagedHeads) -> torch.Tensor:
    """float32 [P, S, 2, b]: sizes of keys and values; ones at 16 bit."""
    if pages.bits == UNQUANTIZED:
        return torch.ones(*pages.k.shape[:2], 2, pages.k.shape[2], device=pages.k.device)
    return pages.size.float()


def reference_unpack_blocks(pages: PagedHeads) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of each page in units of their token's size, tokens in time order: float32 [P, S, b, D] twice.

    At 16 bit, the stored numbers themselves. Inverse of `reference_seal_blocks`."""
    if pages.bits == UNQUANTIZED:
        return pages.k, pages.v.mT
    k, v = _codes(pages.k, pages.bits), in_time_order(_codes(pages.v, pages.value_bits)).mT
    return numbers_of(k, pages.meta[..., :2, :], pages.bits), numbers_of(v, pages.meta[..., -2:, :], pages.value_bits)


def _codes(packed: torch.Tensor, bits: int) -> torch.Tensor:
    return packed if bits == 8 else half_merge(packed, bits)


def numbers_of(codes: torch.Tensor, lines: torch.Tensor, bits: int) -> torch.Tensor:
    """What codes [..., b, D] stand for, in units of their token's size. lines: zeros and spans [..., 2, D]."""
    if bits == 8:
        return codes.float()
    zero, span = lines[..., :1, :].float(), lines[..., 1:, :].view(torch.uint8).float()
    levels = 2**bits - 1
    # a quotient of integers: rounded once
    return ratio(zero * levels + codes * span, levels)
