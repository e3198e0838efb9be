"""Attention of the newest tokens over the compressed cache that holds them, in plain torch (TurboAttention alg. 2)."""

import torch

from turbo_hf.layout import QUERY_MAX, AttentionOutput, KVStore, Scoring
from turbo_hf.ops.maths import counted, ratio, scaled
from turbo_hf.ops.reference_flash import FlashOptions, Operand, Run, flash
from turbo_hf.ops.store.reference import expand


def reference_decode(
    q: torch.Tensor,
    store: KVStore,
    scoring: Scoring,
    starts: torch.Tensor | None = None,
    window: int | None = None,
    mode: str = "turbo",
    chosen: torch.Tensor | None = None,
) -> AttentionOutput:
    """chosen: bool [B, Hkv, M, places], the keys that are attended to, by place in the row; None: all."""
    acc = torch.promote_types(q.dtype, torch.float32)
    batch, _, tokens, _ = q.shape
    # the queries are the row's last tokens, so they end where the row ends
    column = torch.arange(tokens, device=q.device).expand(batch, tokens)
    place = column + (store.sealed * store.block + store.open_len)[:, None] - tokens
    padding = place < 0 if starts is None else (place < 0) | (column < starts[:, None])
    query = Operand(q.to(acc), q.new_ones(q.shape[:3], dtype=acc), place.masked_fill(padding, -1))
    # what is stored in 16 bit is computed as it is
    p_type = None if mode == "native" or store.k_open.dtype != torch.int8 else torch.int8
    if p_type is not None:
        x = q.float()
        largest = counted(x.abs().amax(-1))
        codes = torch.round(scaled(x, largest, QUERY_MAX))
        query = query._replace(x=codes.to(acc), scale=ratio(largest, QUERY_MAX).to(acc))
    k, k_scale, v, v_scale, at = expand(store)
    if chosen is not None:
        chosen = chosen.gather(3, at.clamp(min=0)[:, None, None].expand(*chosen.shape[:3], -1))
    keys, values = Operand(k.to(acc), k_scale.to(acc), at), Operand(v.to(acc), v_scale.to(acc), at)
    out, lse = flash([Run(query, keys, values, store.block, chosen=chosen)], FlashOptions(scoring, window, p_type))
    out = out.masked_fill(padding[:, None, :, None], 0.0)
    return AttentionOutput(out.to(q.dtype), lse.masked_fill(padding[:, None], -torch.inf).float())
