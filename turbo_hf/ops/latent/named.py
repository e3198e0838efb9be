"""Absorbed attention over named latents in plain torch."""

import torch

from turbo_hf.layout import UNQUANTIZED, KVStore, Scoring, half_merge, in_time_order
from turbo_hf.ops.store.quantize import dequantize
from turbo_hf.ops.store.reference import numbers_of

LINE_BITS = (2, 4)
"""Widths at which a page has each token's codes in a line of its own."""


def named_latents(store: KVStore, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The latents float32 [B, N, rank], and rotary parts [B, N, R], of these tokens of each row.

    places: int64 [B, N], by position in the row. Those past a row's end give any number, NaN included.
    """
    (pages,), block = store.paged, store.block
    if pages.bits not in (*LINE_BITS, 8, UNQUANTIZED):
        # lines are packed together
        latent, rotary = (x[:, 0] for x in dequantize(store, torch.float32))
        at = places.clamp(max=latent.shape[1] - 1)[..., None]
        return latent.take_along_dim(at, 1), rotary.take_along_dim(at, 1)
    sealed = store.sealed[:, None] * block
    row = torch.arange(len(places), device=places.device)[:, None]
    at = (places - sealed).clamp(0, store.k_open.shape[2] - 1)
    latent = store.k_open[row, 0, at].float() * store.k_scale[row, 0, at][..., None]
    rotary = store.v_open[row, 0, :, at].float() * store.v_scale[row, 0, at][..., None]
    if not store.table.shape[1] or not len(pages.k):
        return latent, rotary
    page = store.table.take_along_dim((places // block).clamp(max=store.table.shape[1] - 1), 1)
    line = places % block
    codes = pages.k[page, 0, line]
    if pages.bits == UNQUANTIZED:
        old, turned = codes.float(), pages.v[page, 0, :, line].float()
    else:
        codes = codes if pages.bits == 8 else half_merge(codes, pages.bits)
        size = pages.size[page, 0, :, line].float()
        old = numbers_of(codes[..., None, :], pages.meta[page, 0, :2], pages.bits)[..., 0, :] * size[..., :1]
        stored = in_time_order(torch.arange(block, device=places.device))[line]
        turned = pages.v[page, 0, :, stored].float() * size[..., 1:]
    inside = (places < sealed)[..., None]
    return torch.where(inside, old, latent), torch.where(inside, turned, rotary)


def reference_named_decode(
    q_latent: torch.Tensor,
    q_rotary: torch.Tensor,
    store: KVStore,
    places: torch.Tensor,
    seen: torch.Tensor,
    scoring: Scoring,
) -> torch.Tensor:
    acc = torch.promote_types(q_latent.dtype, torch.float32)
    hidden = ~seen[..., None]
    latent, rotary = (
        # of a token that is not there, 0 times NaN would be NaN
        x.unflatten(1, places.shape[1:]).masked_fill(hidden, 0.0).to(acc)
        for x in named_latents(store, places.flatten(1))
    )
    # of each query, head and named token
    scores = q_latent.transpose(1, 2).to(acc) @ latent.mT + q_rotary.transpose(1, 2).to(acc) @ rotary.mT
    read = seen | ~seen.any(-1, keepdim=True)
    scores = (scores * scoring.scaling).masked_fill(~read[:, :, None], -torch.inf)
    total = scores.logsumexp(-1, keepdim=True)
    if scoring.sinks is not None:
        total = torch.logaddexp(total, scoring.sinks.to(acc)[:, None])
    out: torch.Tensor = (scores - total).exp() @ latent
    return out.transpose(1, 2).to(q_latent.dtype)
