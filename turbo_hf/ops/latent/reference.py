"""Absorbed attention over a cache of latents in plain torch."""

import torch

from turbo_hf.layout import AttentionOutput, KVStore
from turbo_hf.ops.store.reference import expand


def reference_latent_decode(
    q_latent: torch.Tensor,
    q_rotary: torch.Tensor,
    store: KVStore,
    scaling: float,
    starts: torch.Tensor | None = None,
) -> AttentionOutput:
    acc = torch.promote_types(q_latent.dtype, torch.float32)
    latent, latent_scale, rotary, rotary_scale, place = expand(store)
    keys = (latent * latent_scale[..., None]).to(acc)
    turned = (rotary * rotary_scale[..., None]).to(acc)
    scores = (q_latent.to(acc) @ keys.mT + q_rotary.to(acc) @ turned.mT) * scaling
    batch, _, tokens, _ = q_latent.shape
    # the queries are the row's last tokens
    column = torch.arange(tokens, device=place.device).expand(batch, tokens)
    query = column + (store.sealed * store.block + store.open_len)[:, None] - tokens
    padding = query < 0 if starts is None else (query < 0) | (column < starts[:, None])
    seen = (place >= 0)[:, None] & (place[:, None] <= query[..., None])
    # a row of padding sees all places rather than none, which would be NaN
    scores = scores.masked_fill(~(seen | padding[..., None])[:, None], -torch.inf)
    lse = scores.logsumexp(-1)
    out = (scores - lse[..., None]).exp() @ keys
    hidden = padding[:, None]
    out = out.masked_fill(hidden[..., None], 0.0).to(q_latent.dtype)
    return AttentionOutput(out, lse.masked_fill(hidden, -torch.inf).float())
