"""Attention of a prompt, or of a chunk of one over a compressed past, in plain torch (TurboAttention alg. 1)."""

import torch

from turbo_hf.layout import AttentionOutput, KVStore
from turbo_hf.reference.quantize import quantize_blocks
from turbo_hf.reference.softmax import Operand, flash
from turbo_hf.reference.store import expand


def prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scaling: float,
    past: KVStore | None = None,
    starts: torch.Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    mode: str = "turbo",
    sas_threshold: float | None = None,
    block: int = 64,
) -> AttentionOutput:
    acc = torch.promote_types(q.dtype, torch.float32)
    batch, _, tokens, _ = q.shape
    column = torch.arange(tokens, device=q.device).expand(batch, tokens)
    if starts is None:
        starts = column.new_zeros(batch)
    # rows begin at their first real token, so that blocks and scales are the same alone and in any batch
    to_left = (column + starts[:, None]).clamp(max=tokens - 1)
    valid = column < tokens - starts[:, None]
    q, k, v = (_take(x, to_left).masked_fill(~valid[:, None, :, None], 0.0) for x in (q, k, v))
    index = torch.where(valid, column, -1)

    past_len = index.new_zeros(batch)
    if past is not None:
        past_len = past.sealed * past.block + past.open_len
        index = torch.where(valid, column + past_len[:, None], -1)
    queries = _operand(q, index, mode, block, acc)
    keys = _pad(_operand(k, index, mode, block, acc), block)
    values = _pad(_operand(v, index, mode, block, acc), block)
    if past is not None:
        keys, values = _join_past(past, keys, values, block)
    out, lse = flash(
        queries,
        keys,
        values,
        scaling=scaling,
        causal=causal,
        window=window,
        softcap=softcap,
        sinks=sinks,
        mode=mode,
        sas_threshold=sas_threshold,
        block=block,
        chunk_start=keys.x.shape[2] - -(-tokens // block) * block,
    )
    back = (column - starts[:, None]).clamp(min=0)
    padding = (column < starts[:, None])[:, None]
    out = _take(out, back).masked_fill(padding[..., None], 0.0)
    lse = torch.gather(lse, 2, back[:, None].expand_as(lse)).masked_fill(padding, -torch.inf)
    return AttentionOutput(out.to(q.dtype), lse.float())


def _take(x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Tokens of x [B, H, M, D] by column index [B, M]."""
    return torch.take_along_dim(x, tokens[:, None, :, None], 2)


def _operand(x: torch.Tensor, index: torch.Tensor, mode: str, block: int, acc: torch.dtype) -> Operand:
    if mode == "fp16":
        return Operand(x.to(acc), x.new_ones(x.shape[:3], dtype=acc), index)
    codes, scale = quantize_blocks(x, block)
    return Operand(codes.to(acc), scale.to(acc).repeat_interleave(block, -1)[..., : x.shape[2]], index)


def _pad(x: Operand, block: int) -> Operand:
    """Whole blocks: missing tokens are zeros with place -1."""
    tail = -x.place.shape[1] % block
    pad = torch.nn.functional.pad
    return Operand(pad(x.x, (0, 0, 0, tail)), pad(x.scale, (0, tail)), pad(x.place, (0, tail), value=-1))


def _join_past(past: KVStore, keys: Operand, values: Operand, block: int) -> tuple[Operand, Operand]:
    k, k_scale, v, v_scale, index = expand(past)
    acc = keys.x.dtype
    before = (
        _pad(Operand(k.to(acc), k_scale.to(acc), index), block),
        _pad(Operand(v.to(acc), v_scale.to(acc), index), block),
    )
    k_all, v_all = (
        Operand(*(torch.cat(pair, 1 if pair[0].dim() == 2 else 2) for pair in zip(old, new, strict=True)))
        for old, new in zip(before, (keys, values), strict=True)
    )
    return k_all, v_all
