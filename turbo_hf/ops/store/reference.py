"""Storing tokens in plain torch: FlashQ (TurboAttention sec. 3), INT8 codes of new tokens, and sealed blocks of 4, 3 or
2 bit; and the compressed cache laid out as one run of tokens per row, for the reference attention.

Unlike the paper's, a block has no scale: each of its tokens keeps a size of its own.
"""

from collections.abc import Callable, Sequence

import torch

from turbo_hf.layout import (
    CODE_MAX,
    EDGE,
    INSET,
    UNQUANTIZED,
    KVStore,
    PagedHeads,
    Width,
    half_merge,
    half_split,
    in_time_order,
    value_order,
    widths_of,
)
from turbo_hf.ops.maths import counted, ratio


def reference_quantize_tokens(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """INT8 codes of x [B, H, M, D] in [-127, 127], and one scale for each token and head, float32 [B, H, M]: the format
    of open tokens (INT-FlashAttention alg. 1): its max|x| / 127, rounded up to bfloat16.
    """
    scale = rounded_up(ratio(counted(x.abs().amax(-1).float()), CODE_MAX))
    codes = torch.round(x.float() / torch.where(scale > 0, scale, 1.0)[..., None])
    return codes.clamp(-CODE_MAX, CODE_MAX).to(torch.int8), scale


def rounded_up(x: torch.Tensor) -> torch.Tensor:
    """float32 x >= 0 as float32 that bfloat16 can hold, not below x; NaN where x is not finite."""
    # the bits of a NaN may overflow
    return ((x.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32) + x * 0


def _nearest(x: torch.Tensor) -> torch.Tensor:
    """float32 x >= 0 to the nearest number that bfloat16 can hold, up from the middle; NaN where x is not finite."""
    return ((x.view(torch.int32) + 0x8000) & -0x10000).view(torch.float32) + x * 0


def reference_seal_blocks(
    k: torch.Tensor,
    k_scale: torch.Tensor,
    v: torch.Tensor,
    v_scale: torch.Tensor,
    width: Width,
) -> PagedHeads:
    """Whole blocks of open tokens as pages of one width (`turbo_hf.layout`; TurboAttention eq. 5, 6, alg. 1).

    k, v: int8 [P, S, b, D], one block for each page and head, tokens in time order; in 16 bit at width 16, a copy.
    k_scale, v_scale: float32 [P, S, b].
    """
    if width == UNQUANTIZED:
        none = torch.empty(*k.shape[:2], 0, k.shape[-1], dtype=torch.int8, device=k.device)
        no_size = torch.empty(*k.shape[:2], 0, k.shape[-2], dtype=torch.bfloat16, device=k.device)
        return PagedHeads(UNQUANTIZED, k.contiguous(), v.mT.contiguous(), none, no_size)
    order = value_order(v.shape[-2], v.device)
    bits, value_bits = widths_of(width)
    packed_k, k_lines, k_size = _packed(k, k_scale, bits, lambda codes: codes)
    packed_v, v_lines, v_size = _packed(v, v_scale, value_bits, lambda codes: codes[..., order, :].mT.contiguous())
    lines = [*k_lines, *v_lines]
    meta = torch.stack(lines, -2) if lines else k.new_empty(*k.shape[:-2], 0, k.shape[-1])
    return PagedHeads(bits, packed_k, packed_v, meta, torch.stack((k_size, v_size), -2).bfloat16())


def _packed(
    codes: torch.Tensor, scale: torch.Tensor, bits: int, placed: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """INT8 tokens [..., b, D] as a page holds them, its lines of `meta`, and the sizes of tokens [..., b]."""
    if bits == 8:
        return placed(codes), [], scale
    size, share = _sizes(codes, scale)
    code, zero, span = _by_channel(codes.float() * share[..., None], bits)
    size = _fitted(codes.int(), share, size, zero * (2**bits - 1) + code * span, bits)
    lines = [zero.squeeze(-2).to(torch.int8), span.squeeze(-2).to(torch.uint8).view(torch.int8)]
    return half_split(placed(code.to(torch.uint8)), bits), lines, size


def _sizes(codes: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sizes of INT8 tokens [..., b, D] with scales [..., b]: their root mean squares, in the unit of the block; and
    what one of a token's codes is in that size."""
    wide = codes.float()
    # sums of squares of codes are exact; on a CPU, torch's root of float32 is not always the nearest
    root = ((wide * wide).sum(-1) * (1 / codes.shape[-1])).double().sqrt().float()
    divisor = torch.where(root > 0, root, 1.0)
    unit = ratio((wide.abs().amax(-1) / divisor).amax(-1, keepdim=True), EDGE)
    size = rounded_up(scale * (root * unit))
    return size, scale / torch.where(size > 0, size, 1.0)


def _by_channel(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """int32 codes of numbers x [..., b, D] from -127 to 127, and each channel's zero and span, which leave out `INSET`
    at both ends (TurboAttention eq. 5, 6)."""
    levels = 2**bits - 1
    low, high = x.amin(-2, keepdim=True), x.amax(-2, keepdim=True)
    inset = (high - low) * INSET[bits]
    zero, top = (low + inset).floor(), (high - inset).ceil()
    span = top - zero
    code = torch.round((x - zero) * levels / span.clamp(min=1)).clamp(0, levels)
    return code.int(), zero.int(), span.int()


def _fitted(
    codes: torch.Tensor, share: torch.Tensor, size: torch.Tensor, stored: torch.Tensor, bits: int
) -> torch.Tensor:
    """The sizes by which sealed tokens are as long in their own direction as before, at most twice as large as `size`.

    codes, stored: int32 [..., b, D], what tokens were and are, in units of their scales and of 1 / levels of `size`.
    """
    # integers, so that the order of sums does not matter
    own = (codes * codes).sum(-1).float() * (2**bits - 1) * share
    factor = own / torch.maximum((codes * stored).sum(-1).float(), own / 2).clamp(min=torch.finfo(torch.float32).tiny)
    return _nearest(size * factor)


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


def expand(store: KVStore) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values of every cached token in units of their token's scale, and those scales: the sealed blocks of
    the longest row at least, then the open tokens, in whole blocks.

    Returns k float32 [B, Hkv, T, D], k_scale float32 [B, Hkv, T], the same for v, and place int64 [B, T]: the token's
    place in its row, -1 where there is none. Scales there are 0.
    """
    # a GPU is not waited for, so that this can be captured
    block, blocks = store.block, store.table.shape[1] if store.table.is_cuda else int(store.sealed.max())
    sealed = sealed_tokens(store.paged, store.order, store.table[:, :blocks])
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


def sealed_tokens(
    paged: Sequence[PagedHeads], order: torch.Tensor, table: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sealed blocks of every row, heads in the model's order: k, v float32 [B, Hkv, T, D] in units of k_scale,
    v_scale float32 [B, Hkv, T]. paged, order, table: of a `KVStore`.

    Returned as k, k_scale, v, v_scale. Blocks past a row's end have the content of page 0.
    """
    page, (batch, heads) = table.flatten(), order.shape
    chosen = [PagedHeads(pages.bits, *(x.index_select(0, page) for x in pages[1:])) for pages in paged]
    parts = [(*reference_unpack_blocks(pages), token_sizes(pages)) for pages in chosen]
    # [B x blocks, slots, ...] -> [B, Hkv, blocks, ...]
    k, v, size = (
        (x[0] if len(x) == 1 else torch.cat(x, 1)).unflatten(0, table.shape).transpose(1, 2)
        for x in zip(*parts, strict=True)
    )
    if heads > 1 and (page.is_cuda or order.tolist() != [[*range(heads)]] * batch):
        row, slot = torch.arange(batch, device=page.device)[:, None], order.argsort()
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
