"""The compressed cache laid out as one run of tokens per row, for the reference attention."""

import torch

from turbo_hf.layout import UNQUANTIZED, KVStore, PagedHeads, half_merge, in_time_order
from turbo_hf.ops.maths import ratio


def expand(store: KVStore) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values of every cached token in units of their token's scale, and those scales.

    Returns k float32 [B, Hkv, T, D], k_scale float32 [B, Hkv, T], the same for v, and index int64 [B, T]: the token's
    place in its row, -1 where the row has no token. T is a multiple of the block size. Scales there are 0.
    """
    batch, heads, cap, dim = store.k_open.shape
    block, blocks = store.block, store.table.shape[1]
    total = blocks * block + -(-cap // block) * block
    k_scale, v_scale = (store.k_scale.new_zeros(batch, heads, total) for _ in range(2))
    k, v = (k_scale.new_zeros(batch, heads, total, n) for n in (dim, store.v_open.shape[2]))
    for x, sealed in zip((k, k_scale, v, v_scale), sealed_tokens(store), strict=True):
        x[:, :, : blocks * block] = sealed
    if cap:
        place = store.sealed[:, None] * block + torch.arange(cap, device=k.device)
        wide = place[:, None, :, None].expand(batch, heads, cap, 1)
        k.scatter_(2, wide.expand(-1, -1, -1, dim), store.k_open.float())
        v.scatter_(2, wide.expand(-1, -1, -1, v.shape[3]), store.v_open.mT.float())
        k_scale.scatter_(2, wide[..., 0], store.k_scale)
        v_scale.scatter_(2, wide[..., 0], store.v_scale)
    length = store.sealed * block + store.open_len
    index = torch.arange(total, device=k.device).expand(batch, total)
    valid = index < length[:, None]
    # pages beyond a row's end are another row's or uninitialized: their scales must not reach a product
    k_scale = torch.where(valid[:, None], k_scale, 0.0)
    v_scale = torch.where(valid[:, None], v_scale, 0.0)
    # unquantized numbers may be NaN there
    k, v = (x.masked_fill(~valid[:, None, :, None], 0) for x in (k, v))
    return k, k_scale, v, v_scale, torch.where(valid, index, -1)


def sealed_tokens(store: KVStore) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sealed blocks of every row, heads in the model's order: k, v float32 [B, Hkv, T, D] in units of k_scale,
    v_scale float32 [B, Hkv, T].

    Returned as k, k_scale, v, v_scale. Blocks past a row's end have the content of page 0.
    """
    page = store.table.flatten()
    paged = [PagedHeads(pages.bits, *(x.index_select(0, page) for x in pages[1:])) for pages in store.paged]
    keys, values = zip(*map(reference_unpack_blocks, paged), strict=True)
    # [B x blocks, slots, ...] -> [B, Hkv, blocks, ...]
    of_head = index_of_slots(store.order).argsort()
    k, v, size = (
        by_index(torch.cat(parts, 1).unflatten(0, store.table.shape).transpose(1, 2), of_head)
        for parts in (keys, values, [token_sizes(pages) for pages in paged])
    )
    k_scale, v_scale = size.transpose(2, 3).flatten(3).unbind(2)
    return k.float().flatten(2, 3), k_scale, v.float().flatten(2, 3), v_scale


def token_sizes(pages: PagedHeads) -> torch.Tensor:
    """float32 [P, S, 2, b]: sizes of keys and values; ones at 16 bit."""
    if pages.bits == UNQUANTIZED:
        return torch.ones(*pages.k.shape[:2], 2, pages.k.shape[2], device=pages.k.device)
    return pages.size.float()


def index_of_slots(order: torch.Tensor) -> torch.Tensor:
    """int64 [B x Hkv]: the head in each slot of each row, for `by_index`. Its argsort is the slot of each head."""
    row = torch.arange(len(order), device=order.device)[:, None]
    return (order + row * order.shape[1]).flatten()


def by_index(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """x [B, H, ...] by index [B x H] into both dimensions."""
    chosen: torch.Tensor = x.flatten(0, 1).index_select(0, index).unflatten(0, x.shape[:2])
    return chosen


def reference_unpack_blocks(pages: PagedHeads) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of each page in units of their token's size, tokens in time order: float32 [P, S, b, D] twice.

    At 16 bit, the stored numbers themselves. Inverse of `reference_seal_blocks`."""
    if pages.bits == UNQUANTIZED:
        return pages.k, pages.v.mT
    k, v = _numbers(pages.k, pages.meta[..., :2, :], pages.bits, -2), pages.v
    v = _numbers(v, pages.meta[..., -2:, :], pages.value_bits, -1)
    return k, in_time_order(v).mT


def _numbers(packed: torch.Tensor, lines: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """What packed codes stand for, in units of their token's size. dim: where zeros and spans are repeated."""
    if bits == 8:
        return packed.float()
    zero, span = lines[..., 0, :].float(), lines[..., 1, :].view(torch.uint8).float()
    levels = 2**bits - 1
    # a quotient of integers: rounded once
    return ratio((zero * levels).unsqueeze(dim) + half_merge(packed, bits) * span.unsqueeze(dim), levels)
