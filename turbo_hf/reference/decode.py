"""Attention of the newest tokens over the compressed cache that holds them, in plain torch (TurboAttention alg. 2)."""

import torch

from turbo_hf.layout import INT8_MAX, AttentionOutput, KVStore
from turbo_hf.reference.flash import Operand, Run, Scoring, flash
from turbo_hf.reference.operands import ratio, scaled
from turbo_hf.reference.store import expand


def decode(
    q: torch.Tensor,
    store: KVStore,
    *,
    scaling: float,
    starts: torch.Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    mode: str = "turbo",
    sas_threshold: float | None = None,
) -> AttentionOutput:
    acc = torch.promote_types(q.dtype, torch.float32)
    batch, _, tokens, _ = q.shape
    k, k_scale, v, v_scale, index = expand(store)
    length = store.sealed * store.block + store.open_len
    # the queries are the row's last tokens, so they end where the row ends
    column = torch.arange(tokens, device=q.device).expand(batch, tokens)
    query = column + length[:, None] - tokens
    padding = query < 0 if starts is None else (query < 0) | (column < starts[:, None])
    query = query.masked_fill(padding, -1)
    if mode == "fp16":
        codes, q_scale = q, q.new_ones(q.shape[:3], dtype=acc)
    else:
        x = q.masked_fill(padding[:, None, :, None], 0.0).float()
        largest = x.abs().amax(-1)
        codes, q_scale = torch.round(scaled(x, largest, INT8_MAX)), ratio(largest, INT8_MAX)
    keys, values = Operand(k.to(acc), k_scale.to(acc), index), Operand(v.to(acc), v_scale.to(acc), index)
    run = Run(Operand(codes.to(acc), q_scale.to(acc), query), keys, values, store.block)
    how = Scoring(scaling, True, window, softcap, sas_threshold, "none" if mode == "fp16" else "int8")
    out, lse = flash([run], how, sinks)
    out = out.masked_fill(padding[:, None, :, None], 0.0)
    return AttentionOutput(out.to(q.dtype), lse.masked_fill(padding[:, None], -torch.inf).float())
