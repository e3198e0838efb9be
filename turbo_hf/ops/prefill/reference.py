"""Attention of a prompt, or of a chunk of one over a compressed past, in plain torch."""

import torch

from turbo_hf.layout import (
    INT8_MAX,
    MODES,
    SAS_TILE,
    SCORE_LIMIT,
    AttentionMode,
    AttentionOutput,
    KVStore,
    Operands,
    Rounding,
    Scoring,
    half_type,
    narrowed,
    value_order,
)
from turbo_hf.ops.maths import align, counted, ratio, scaled
from turbo_hf.ops.reference_flash import FlashOptions, Operand, Run, flash
from turbo_hf.ops.store.reference import sealed_tokens


def reference_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scoring: Scoring,
    rounding: Rounding,
    past: KVStore | None = None,
    starts: torch.Tensor | None = None,
    window: int | None = None,
) -> AttentionOutput:
    batch, _, tokens, _ = q.shape
    column = torch.arange(tokens, device=q.device).expand(batch, tokens)
    # rows begin at their first real token, so that blocks and scales are the same alone and in any batch
    queries = align(q, starts)
    count = torch.full((batch, 1), tokens, device=q.device) if starts is None else tokens - starts[:, None]
    length = 0 if past is None else (past.sealed * past.block + past.open_len)[:, None]
    place = torch.where(column < count, column + length, -1)
    mode, precise, block = MODES[rounding.mode], rounding.mode == "native", rounding.block
    asking = _queries(queries, place, precise)

    sas_tile = SAS_TILE if precise and scoring.sas_threshold is not None else None
    runs = [] if past is None else _past(past, asking, mode, q.dtype, sas_tile or past.block)
    if precise:
        block = sas_tile or block
        keys, values = (_raw(align(x, starts), place, block) for x in (k, v))
    else:
        parts = reference_quantize_operands(k, v, rounding, starts)
        keys, values = _chunk(parts, align(v, starts), place, block)
    runs.append(Run(asking, keys, values, block, own=True))

    out, lse = flash(runs, FlashOptions(scoring, window, mode.p_type(q.dtype)))
    too_large = ((lse.abs() > SCORE_LIMIT) & lse.isfinite()).any(-1)
    if starts is not None:
        back = (column - starts[:, None]).clamp(min=0)
        padding = (column < starts[:, None])[:, None]
        out = torch.take_along_dim(out, back[:, None, :, None], 2).masked_fill(padding[..., None], 0.0)
        lse = torch.gather(lse, 2, back[:, None].expand_as(lse)).masked_fill(padding, -torch.inf)
    out, lse = out.to(q.dtype), lse.float()
    if not precise and bool(too_large.any()):
        exact = reference_prefill(q, k, v, scoring, Rounding("native"), past, starts, window)
        out = torch.where(too_large[..., None, None], exact.out, out)
        lse = torch.where(too_large[..., None], exact.lse, lse)
    return AttentionOutput(out, lse)


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _queries(q: torch.Tensor, place: torch.Tensor, precise: bool) -> Operand:
    """Queries unchanged, or in INT8 with one scale per token and head (INT-FlashAttention alg. 1)."""
    if precise:
        return Operand(q.to(_wide(q)), q.new_ones(q.shape[:3], dtype=_wide(q)), place)
    largest = counted(q.float().abs().amax(-1))
    codes = torch.round(scaled(q.float(), largest, INT8_MAX))
    return Operand(codes.to(_wide(q)), ratio(largest, INT8_MAX).to(_wide(q)), place)


def _raw(x: torch.Tensor, place: torch.Tensor, block: int) -> Operand:
    return _whole(Operand(x.to(_wide(x)), x.new_ones(x.shape[:3], dtype=_wide(x)), place), block)


def _whole(x: Operand, tile: int) -> Operand:
    """Whole tiles: missing tokens are zeros with scale 0 and place -1."""
    tail, pad = -x.place.shape[1] % tile, torch.nn.functional.pad
    return Operand(pad(x.x, (0, 0, 0, tail)), pad(x.scale, (0, tail)), pad(x.place, (0, tail), value=-1))


def _chunk(parts: Operands, v: torch.Tensor, place: torch.Tensor, block: int) -> tuple[Operand, Operand]:
    """Keys and values of the chunk in the form that the products use."""
    wide, padded = _wide(v), parts.k.shape[2]
    place = torch.nn.functional.pad(place, (0, padded - place.shape[1]), value=-1)
    k_scale = parts.k_scale.repeat_interleave(padded // parts.k_scale.shape[2], -1)
    keys = Operand(parts.k.to(wide), k_scale.to(wide), place)
    if parts.v is None or parts.v_scale is None:
        narrow = v if v.dtype == torch.float64 else v.to(half_type(v.dtype))
        return keys, _raw(narrow.to(v.dtype), place[:, : v.shape[2]], block)
    values = torch.empty(parts.v.mT.shape, dtype=wide, device=v.device)
    values[:, :, value_order(padded, v.device)] = parts.v.mT.to(wide)
    return keys, Operand(values, parts.v_scale.repeat_interleave(block, -1).to(wide), place)


def _past(store: KVStore, q: Operand, mode: AttentionMode, dtype: torch.dtype, tile: int) -> list[Run]:
    """The sealed blocks and the open tokens, as their products take them. dtype: of the model's queries."""
    batch, _, cap, _ = store.k_open.shape
    wide, sealed = q.x.dtype, store.sealed[:, None] * store.block
    at = torch.arange(store.table.shape[1] * store.block, device=q.x.device).expand(batch, -1)
    opened = torch.arange(cap, device=q.x.device).expand(batch, -1)
    found = [
        (*past_operands(store, mode, dtype), torch.where(at < sealed, at, -1)),
        (
            store.k_open,
            store.k_scale,
            store.v_open.mT,
            store.v_scale,
            torch.where(opened < store.open_len[:, None], opened + sealed, -1),
        ),
    ]
    runs = []
    for k, k_scale, v, v_scale, place in found:
        # pages that the row does not own are another row's or uninitialized: their scales must not reach a product
        k_step, v_step = (x.to(wide).masked_fill((place < 0)[:, None], 0.0) for x in (k_scale, v_scale))
        k_own, v_own = (x.masked_fill((place < 0)[:, None, :, None], 0) for x in (k, v))
        values = v_own.float().to(torch.float8_e4m3fn) if mode.v_type == torch.float8_e4m3fn else v_own
        keys, items = Operand(k_own.to(wide), k_step, place), Operand(values.to(wide), v_step, place)
        runs.append(Run(q, _whole(keys, tile), _whole(items, tile), tile))
    return runs


def past_operands(
    store: KVStore, mode: AttentionMode, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The sealed blocks as products of this mode take them: k [B, Hkv, T, D], k_scale [B, Hkv, T], v, v_scale.

    Keys are INT8 codes with one scale for each block of them, and so are values of modes with an 8-bit type of values.
    Other values are the numbers in `half_type(dtype)`. Where nothing is rounded, both are in units of token sizes. In
    blocks that a row does not own, any number.
    """
    k, k_size, v, v_size = sealed_tokens(store.paged, store.order, store.table)
    if mode.k_scale is None:
        return k, k_size, v, v_size
    k, v = k * k_size[..., None], v * v_size[..., None]
    k, k_scale = _block_codes(k, store.block)
    if mode.v_type is None:
        return k, k_scale, narrowed(v, half_type(dtype)).float(), torch.ones_like(v_size)
    return k, k_scale, *_block_codes(v, store.block)


def _block_codes(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """INT8 codes of x [B, Hkv, T, D] as float32, and their scales [B, Hkv, T], the same for each block."""
    blocks = x.unflatten(2, (-1, block))
    most = counted(blocks.abs().amax((-1, -2)))
    codes = torch.round(scaled(blocks, most, INT8_MAX)).float()
    return codes.flatten(2, 3), ratio(most, INT8_MAX).repeat_interleave(block, -1)


def reference_quantize_operands(
    k: torch.Tensor, v: torch.Tensor, rounding: Rounding, starts: torch.Tensor | None
) -> Operands:
    """Keys and values of a chunk as the flash loop reads them: INT8 or FP8 codes and their scales."""
    mode, block = MODES[rounding.mode], rounding.block
    k, v = (align(x, starts) for x in (k, v))
    k, v = (_blocks(x.float(), block) for x in (k, v))
    k_range = counted(k.abs().amax(-1 if mode.k_scale == "token" else (-1, -2)))
    k_codes = torch.round(scaled(k, k_range, INT8_MAX)).to(torch.int8).flatten(2, 3)
    k_scale = ratio(k_range, INT8_MAX).flatten(2)
    if mode.v_type is None:
        return Operands(k_codes, k_scale)

    v_range = counted(v.abs().amax((-1, -2)))
    v = scaled(v, v_range, mode.v_top)
    codes = torch.round(v).to(torch.int8) if mode.v_type == torch.int8 else v.float().to(mode.v_type)
    # FP8 tensors cannot be indexed: reorder their bytes
    stored = codes.view(torch.int8).flatten(2, 3)[:, :, value_order(k_codes.shape[2], v.device)].mT.contiguous()
    return Operands(k_codes, k_scale, stored.view(codes.dtype), ratio(v_range, mode.v_top))


def _blocks(x: torch.Tensor, block: int) -> torch.Tensor:
    """x [B, H, M, D] -> [B, H, blocks, block, D], zeros past the end."""
    whole = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % block))
    return whole.reshape(*x.shape[:2], -1, block, x.shape[3])
