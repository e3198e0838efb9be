"""Attention of the newest tokens over the compressed cache that holds them, in plain torch (TurboAttention alg. 2)."""

import torch

from turbo_hf.layout import QUERY_MAX, UNQUANTIZED, AttentionOutput, KVStore, Scoring
from turbo_hf.ops.maths import counted, ratio, scaled
from turbo_hf.ops.reference_flash import FlashOptions, Operand, Run, flash
from turbo_hf.ops.store.reference_pages import expand


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
    how = FlashOptions(scoring, window, None if mode == "native" else torch.int8)
    found = _attend(q, store, how, starts, chosen)
    if how.p_type is not None and store.k_open.dtype != torch.int8:
        # heads of 16 bit are computed as they are stored
        as_stored = _attend(q, store, how._replace(p_type=None), starts, chosen)
        as_is = _unquantized_heads(store).repeat_interleave(q.shape[1] // store.order.shape[1], 1)[:, :, None]
        found = AttentionOutput(
            torch.where(as_is[..., None], as_stored.out, found.out), torch.where(as_is, as_stored.lse, found.lse)
        )
    return found


def _attend(
    q: torch.Tensor,
    store: KVStore,
    how: FlashOptions,
    starts: torch.Tensor | None,
    chosen: torch.Tensor | None,
) -> AttentionOutput:
    """All heads in the same way: codes of q, P and keys, unless P is not rounded or keys are unquantized."""
    acc = torch.promote_types(q.dtype, torch.float32)
    batch, _, tokens, _ = q.shape
    # the queries are the row's last tokens, so they end where the row ends
    column = torch.arange(tokens, device=q.device).expand(batch, tokens)
    query = column + (store.sealed * store.block + store.open_len)[:, None] - tokens
    padding = query < 0 if starts is None else (query < 0) | (column < starts[:, None])
    query = query.masked_fill(padding, -1)
    plain = Operand(q.to(acc), q.new_ones(q.shape[:3], dtype=acc), query)
    rounded = plain
    if how.p_type == torch.int8:
        x = q.float()
        largest = counted(x.abs().amax(-1))
        codes = torch.round(scaled(x, largest, QUERY_MAX))
        rounded = Operand(codes.to(acc), ratio(largest, QUERY_MAX).to(acc), query)
    out, lse = flash(_runs(store, rounded, plain, chosen), how)
    out = out.masked_fill(padding[:, None, :, None], 0.0)
    return AttentionOutput(out.to(q.dtype), lse.masked_fill(padding[:, None], -torch.inf).float())


def _runs(store: KVStore, q: Operand, plain: Operand, chosen: torch.Tensor | None) -> list[Run]:
    """All tokens; of a layer with 16-bit heads, whose open tokens are no codes, sealed and open ones apart.

    q: in codes, if P is. plain: not rounded."""
    acc = q.x.dtype
    k, k_scale, v, v_scale, place = expand(store)
    if chosen is not None:
        chosen = chosen.gather(3, place.clamp(min=0)[:, None, None].expand(*chosen.shape[:3], -1))
    keys, values = Operand(k.to(acc), k_scale.to(acc), place), Operand(v.to(acc), v_scale.to(acc), place)
    run = Run(q, keys, values, store.block, chosen=chosen)
    if q is plain or store.k_open.dtype == torch.int8:
        return [run]
    opened = (place >= store.sealed[:, None] * store.block) & (place >= 0)
    return [
        one._replace(k=one.k._replace(place=place.masked_fill(hidden, -1)))
        for one, hidden in ((run, opened), (run._replace(q=plain, exact=True), ~opened))
    ]


def _unquantized_heads(store: KVStore) -> torch.Tensor:
    """bool [B, Hkv]: which heads are stored unquantized."""
    widths = [pages.bits == UNQUANTIZED for pages in store.paged for _ in range(pages.k.shape[1])]
    by_slot = torch.tensor(widths, device=store.order.device).expand(store.order.shape)
    return torch.zeros_like(by_slot).scatter(1, store.order, by_slot)
